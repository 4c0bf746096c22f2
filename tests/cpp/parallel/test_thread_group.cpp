// Ranks that are threads: what they exchange, and how a group ends.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <limits>
#include <optional>
#include <thread>

#include "check.h"
#include "core/clock.h"
#include "parallel/ranks.h"

namespace kdt::test {
namespace {

constexpr double kLong = 60;  // a time-out that no test waits for

KDT_TEST(exchanges_of_all_sizes) {
  for (int size : {1, 2, 3, 4, 8}) {
    const Ranks ranks = make_thread_group(size, kLong);
    EXPECT_EQ(ranks.size(), static_cast<size_t>(size));
    std::vector<std::string> wrong(size);
    const auto errors = run_ranks(ranks, [&](RankGroup& group) {
      wrong[group.rank()] = exercise(group, 20, 300);
      const std::string more = exercise(group, 100, 0);
      if (!more.empty()) wrong[group.rank()] = more;
    });
    for (int rank = 0; rank < size; ++rank) {
      EXPECT_EQ(wrong[rank], "");
      EXPECT_EQ(errors[rank], "");
      EXPECT_EQ(ranks[rank]->aborted(), "");
      EXPECT_EQ(ranks[rank]->rank(), rank);
    }
  }
}

KDT_TEST(large_exchange) {
  const Ranks ranks = make_thread_group(3, kLong);
  constexpr int64_t kBytes = 5'000'001;
  std::atomic<int> wrong{0};
  run_ranks(ranks, [&](RankGroup& group) {
    const std::string mine(kBytes, static_cast<char>('a' + group.rank()));
    std::string all(3 * kBytes, ' ');
    group.all_gather(mine.data(), kBytes, all.data());
    if (all != std::string(kBytes, 'a') + std::string(kBytes, 'b') + std::string(kBytes, 'c')) {
      ++wrong;
    }
  });
  EXPECT_EQ(wrong.load(), 0);
}

// The exchange through all_gather that a RankGroup without a broadcast of its own has.
class Gatherer final : public RankGroup {
 public:
  explicit Gatherer(RankGroup& group) : group_(group) {}
  int rank() const override { return group_.rank(); }
  int size() const override { return group_.size(); }
  void all_gather(const void* mine, int64_t bytes, void* out) override {
    group_.all_gather(mine, bytes, out);
  }
  void abort(const std::string& reason) noexcept override { group_.abort(reason); }
  std::string aborted() const override { return group_.aborted(); }
  double timeout_s() const override { return group_.timeout_s(); }

 private:
  RankGroup& group_;
};

KDT_TEST(broadcast_by_gathering) {
  const Ranks ranks = make_thread_group(3, kLong);
  std::vector<std::string> wrong(3);
  const auto errors = run_ranks(ranks, [&](RankGroup& group) {
    Gatherer gatherer(group);
    wrong[group.rank()] = exercise(gatherer, 50, 0);
  });
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_EQ(wrong[rank], "");
    EXPECT_EQ(errors[rank], "");
  }
}

KDT_TEST(rank_that_does_not_come) {
  const Ranks ranks = make_thread_group(8, 0.2);
  Clock clock;
  auto errors = run_ranks(ranks, [&](RankGroup& group) {
    group.barrier();
    if (group.rank() != 3) group.barrier();
  });
  EXPECT(clock.ms() >= 190);
  EXPECT(clock.ms() < 5000);
  for (int rank = 0; rank < 8; ++rank) {
    EXPECT_EQ(errors[rank], rank == 3 ? "" : "rank 3 of 8 did not come within 0.2 s");
  }
  // It stays so, for the late one too.
  errors = run_ranks(ranks, [](RankGroup& group) { group.barrier(); });
  for (const std::string& error : errors) EXPECT_EQ(error, "rank 3 of 8 did not come within 0.2 s");
}

KDT_TEST(ranks_that_do_not_come_are_all_named) {
  const Ranks ranks = make_thread_group(4, 0.1);
  const auto errors = run_ranks(ranks, [&](RankGroup& group) {
    if (group.rank() % 3 == 0) group.barrier();
  });
  EXPECT_EQ(errors[0], "ranks 1, 2 of 4 did not come within 0.1 s");
  EXPECT_EQ(errors[3], errors[0]);
}

KDT_TEST(leader_that_takes_long) {
  const Ranks ranks = make_thread_group(3, 0.1);
  std::atomic<int> right{0};
  const auto errors = run_ranks(ranks, [&](RankGroup& group) {
    int word = group.rank() == 0 ? 42 : 0;
    if (group.rank() == 0) sleep_ms(400);
    group.wait_for_leader(&word, sizeof(word));
    if (word == 42) ++right;
  });
  EXPECT_EQ(right.load(), 3);
  for (const std::string& error : errors) EXPECT_EQ(error, "");
}

KDT_TEST(follower_that_does_not_come_to_the_leader) {
  const Ranks ranks = make_thread_group(3, 0.1);
  const auto errors = run_ranks(ranks, [&](RankGroup& group) {
    int word = 0;
    if (group.rank() != 1) group.wait_for_leader(&word, sizeof(word));
  });
  EXPECT_EQ(errors[0], "rank 1 of 3 did not come within 0.1 s");
  EXPECT_EQ(errors[2], errors[0]);
}

KDT_TEST(sizes_that_differ) {
  const Ranks ranks = make_thread_group(3, kLong);
  const auto errors = run_ranks(ranks, [&](RankGroup& group) {
    char mine[16] = {}, all[48];
    group.all_gather(mine, group.rank() == 2 ? 16 : 8, all);
  });
  for (const std::string& error : errors) {
    EXPECT_EQ(error,
              "rank 0 came to all_gather with 8 bytes, rank 2 came to all_gather with 16 bytes");
  }
}

KDT_TEST(calls_that_differ) {
  const Ranks ranks = make_thread_group(2, kLong);
  const auto errors = run_ranks(ranks, [&](RankGroup& group) {
    int64_t word = 0;
    group.rank() == 0 ? group.broadcast(&word, 8) : group.barrier();
  });
  for (const std::string& error : errors) {
    EXPECT_EQ(error,
              "rank 0 came to broadcast with 8 bytes, rank 1 came to all_gather with 0 bytes");
  }
}

KDT_TEST(abort_wakes_all) {
  const Ranks ranks = make_thread_group(4, kLong);
  Clock clock;
  const auto errors = run_ranks(ranks, [&](RankGroup& group) {
    if (group.rank() == 2) {
      sleep_ms(30);
      group.abort("the disk is full");
      group.abort("and another reason");
    }
    group.barrier();
  });
  for (const std::string& error : errors) EXPECT_EQ(error, "the disk is full");
  EXPECT_EQ(ranks[0]->aborted(), "the disk is full");
  EXPECT(clock.ms() < 10000);
}

KDT_TEST(rank_whose_object_is_gone) {
  Ranks ranks = make_thread_group(3, kLong);
  Clock clock;
  const auto errors = run_ranks(ranks, [&](RankGroup& group) {
    group.barrier();
    if (group.rank() == 1) {
      sleep_ms(20);
      ranks[1].reset();
    } else {
      group.barrier();
    }
  });
  EXPECT_EQ(errors[0], "rank 1 of 3 has left the group");
  EXPECT_EQ(errors[2], "rank 1 of 3 has left the group");
  EXPECT(clock.ms() < 10000);
}

KDT_TEST(leaving_after_the_last_call_is_no_fault) {
  for (int repeat = 0; repeat < 100; ++repeat) {
    Ranks ranks = make_thread_group(4, kLong);
    const auto errors = run_ranks(ranks, [&](RankGroup& group) {
      const int rank = group.rank();
      group.barrier();
      ranks[rank].reset();
    });
    for (const std::string& error : errors) EXPECT_EQ(error, "");
  }
}

KDT_TEST(rank_that_is_away) {
  const Ranks ranks = make_thread_group(3, kLong);
  Clock clock;
  ranks[1]->set_away("rank 1 does something else");
  ranks[1]->set_away("");
  auto errors = run_ranks(ranks, [](RankGroup& group) { group.barrier(); });
  for (const std::string& error : errors) EXPECT_EQ(error, "");
  for (const bool others_wait : {false, true}) {
    const Ranks group_of_3 = make_thread_group(3, kLong);
    errors = run_ranks(group_of_3, [&](RankGroup& group) {
      if ((group.rank() == 1) == others_wait) sleep_ms(100);
      if (group.rank() == 1) group.set_away("rank 1 does something else");
      if (group.rank() != 1) group.barrier();
    });
    EXPECT_EQ(errors[0], "rank 1 does something else");
    EXPECT_EQ(errors[2], "rank 1 does something else");
  }
  EXPECT(clock.ms() < 10000);
}

KDT_TEST(many_groups_made_used_and_ended) {
  for (int repeat = 0; repeat < 200; ++repeat) {
    const int size = 1 + repeat % 8;
    Ranks ranks = make_thread_group(size, kLong);
    const int faulty = repeat % size;
    const auto errors = run_ranks(ranks, [&](RankGroup& group) {
      const std::string wrong = exercise(group, 2, 0);
      if (!wrong.empty()) throw std::runtime_error(wrong);
      if (group.rank() == faulty) {
        if (repeat % 3 == 0) group.abort("fault");
        if (repeat % 3 == 1) ranks[faulty].reset();
        if (repeat % 3 == 2) group.set_away("fault");
      } else {
        while (true) group.barrier();
      }
    });
    for (int rank = 0; rank < size; ++rank) {
      if (rank != faulty) EXPECT(holds(errors[rank], repeat % 3 == 1 ? "has left" : "fault"));
      if (rank == faulty) EXPECT_EQ(errors[rank], "");
    }
  }
}

KDT_TEST(forked_process) {
  std::optional<Ranks> ranks = make_thread_group(2, kLong);
  std::thread waiter([&] {
    try {
      (*ranks)[1]->barrier();
    } catch (const std::exception&) {
    }
  });
  sleep_ms(30);
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);
    int status = 1;
    try {
      (*ranks)[0]->barrier();
    } catch (const std::exception& error) {
      if (holds(error.what(), "belongs to process")) status = 0;
    }
    if ((*ranks)[0]->aborted().empty()) status = 2;
    (*ranks)[0]->abort("from the child");
    ranks.reset();  // with rank 1 inside a barrier that it will never leave
    _exit(status);
  }
  int status = -1;
  waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  (*ranks)[0]->barrier();
  waiter.join();
  EXPECT_EQ((*ranks)[0]->aborted(), "");
}

KDT_TEST(arguments_out_of_range) {
  EXPECT_THROWS("0 ranks", make_thread_group(0, 1));
  EXPECT_THROWS("1025 ranks", make_thread_group(1025, 1));
  EXPECT_THROWS("time-out of a group is 0 s", make_thread_group(2, 0));
  EXPECT_THROWS("time-out", make_thread_group(2, std::numeric_limits<double>::quiet_NaN()));
  EXPECT_THROWS("time-out", make_thread_group(2, std::numeric_limits<double>::infinity()));
  const Ranks ranks = make_thread_group(1, 1);
  EXPECT_THROWS("-1 bytes", ranks[0]->all_gather(nullptr, -1, nullptr));
}

}  // namespace
}  // namespace kdt::test

KDT_TEST_MAIN
