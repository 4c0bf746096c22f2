// Ranks in several processes: what they exchange, and how a group ends.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <new>

#include "check.h"
#include "core/clock.h"
#include "core/error.h"
#include "parallel/processes.h"
#include "parallel/tcp_group.h"
#include "parallel/worker_group.h"

// Allocations of this thread until one fails; -1: none does.
static thread_local int allocations_left = -1;

// Inlined, one of a pair would be malloc or free to the compiler, and a mismatch.
__attribute__((noinline)) void* operator new(size_t bytes) {
  if (allocations_left >= 0 && allocations_left-- == 0) throw std::bad_alloc();
  if (void* memory = std::malloc(std::max<size_t>(bytes, 1))) return memory;
  throw std::bad_alloc();
}
__attribute__((noinline)) void operator delete(void* memory) noexcept { std::free(memory); }
__attribute__((noinline)) void operator delete(void* memory, size_t) noexcept { std::free(memory); }

namespace kdt::test {
namespace {

constexpr double kLong = 40;  // a time-out that no test waits for

KDT_TEST(exchanges_of_all_sizes) {
  for (int size : {1, 2, 4}) {
    const int port = next_master_port();
    Processes processes(size, [&](int rank) {
      const auto group = make_tcp_group(launch_of(rank, size, port), kLong);
      if (group->rank() != rank || group->size() != size) return std::string("wrong rank");
      std::string wrong = exercise(*group, 20, 300);
      wrong += exercise(*group, 200, 0);
      // Larger than what sockets hold.
      const std::string mine(3'000'001, static_cast<char>('a' + rank));
      std::string all(mine.size() * size, ' '), expected;
      for (int i = 0; i < size; ++i) expected += std::string(mine.size(), 'a' + i);
      group->all_gather(mine.data(), mine.size(), all.data());
      return wrong + (all == expected ? "right" : "wrong large gather");
    });
    for (int rank = 0; rank < size; ++rank) EXPECT_EQ(processes.result(rank), "right");
  }
}

KDT_TEST(several_ranks_in_each_process) {
  const int port = next_master_port();
  Processes processes(2, [&](int process) {
    WorkerGroup workers(make_hybrid_group(3, launch_of(process, 2, port), kLong));
    std::vector<std::string> wrong(3);
    workers.run([&](int i) {
      RankGroup& group = workers.rank(i);
      if (group.rank() != process * 3 + i || group.size() != 6) wrong[i] = "wrong rank";
      wrong[i] += exercise(group, 60, 200);
    });
    return wrong[0] + wrong[1] + wrong[2] + "right";
  });
  EXPECT_EQ(processes.result(0), "right");
  EXPECT_EQ(processes.result(1), "right");
}

// Barriers until the group ends, which it does with the error returned.
std::string until_the_end(RankGroup& group) {
  try {
    while (true) group.barrier();
  } catch (const Error& error) {
    if (group.aborted() != error.what()) return "another reason";
    return error.what();
  }
}

KDT_TEST(killed_process) {
  for (int victim : {0, 2}) {
    const int port = next_master_port();
    Processes processes(4, [&](int rank) {
      const auto group = make_tcp_group(launch_of(rank, 4, port), kLong);
      group->barrier();
      if (rank == victim) sleep_ms(50000);
      return until_the_end(*group);
    });
    sleep_ms(700);
    Clock clock;
    processes.send_signal(victim, SIGKILL);
    const std::string name = join("rank ", victim, " (");
    for (int rank = 0; rank < 4; ++rank) {
      const std::string text = processes.result(rank);
      if (rank == victim) continue;
      EXPECT(holds(text, name));
      EXPECT(holds(text, join(":", processes.pid(victim), ") has gone")));
    }
    EXPECT(clock.ms() < 5000);
  }
}

// Whatever process 0 has no memory for, the group ends and can be left.
KDT_TEST(no_memory_in_the_midst_of_an_exchange) {
  int failed = 0, right = 0;
  for (int n = 0; n < 12; ++n) {
    const int port = next_master_port();
    Processes processes(2, [&](int rank) {
      auto group = make_tcp_group(launch_of(rank, 2, port), kLong);
      group->barrier();
      std::vector<char> word(1000, static_cast<char>(rank));
      std::string text = "right";
      allocations_left = rank == 0 ? n : -1;
      try {
        group->broadcast(word.data(), static_cast<int64_t>(word.size()));
      } catch (const std::exception&) {
        text = "failed";
      }
      allocations_left = -1;
      group->abort("over");
      group.reset();
      return text;
    });
    const std::string text = processes.result(0);
    failed += text == "failed" ? 1 : 0;
    right += text == "right" ? 1 : 0;
    EXPECT(!processes.result(1).empty());
  }
  EXPECT_EQ(failed + right, 12);
  EXPECT(failed > 1 && right > 0);
}

KDT_TEST(work_of_any_length_before_an_untimed_barrier) {
  for (int late : {0, 2}) {
    const int port = next_master_port();
    Processes processes(3, [&](int rank) {
      const auto group = make_tcp_group(launch_of(rank, 3, port), 1);
      group->barrier();
      if (rank == late) sleep_ms(2500);
      group->wait_for_all();
      group->barrier();
      return std::string("came back");
    });
    for (int rank = 0; rank < 3; ++rank) EXPECT_EQ(processes.result(rank), "came back");
  }
}

KDT_TEST(killed_while_all_are_idle) {
  const int port = next_master_port();
  Processes processes(3, [&](int rank) {
    const auto group = make_tcp_group(launch_of(rank, 3, port), 0.3);
    int word = 0;
    if (rank == 0) sleep_ms(50000);
    group->wait_for_leader(&word, sizeof(word));
    return std::string("came back");
  });
  sleep_ms(1500);  // several time-outs
  Clock clock;
  processes.send_signal(0, SIGKILL);
  for (int rank : {1, 2}) EXPECT(holds(processes.result(rank), ") has gone"));
  EXPECT(clock.ms() < 5000);
}

KDT_TEST(death_is_seen_outside_of_calls) {
  const int port = next_master_port();
  Processes processes(3, [&](int rank) {
    const auto group = make_tcp_group(launch_of(rank, 3, port), kLong);
    group->barrier();
    while (group->aborted().empty()) sleep_ms(5);
    return group->aborted();
  });
  sleep_ms(500);
  processes.send_signal(1, SIGKILL);
  for (int rank : {0, 2}) EXPECT(holds(processes.result(rank), "rank 1 ("));
}

KDT_TEST(leader_that_takes_long) {
  const int port = next_master_port();
  Processes processes(3, [&](int rank) {
    const auto group = make_tcp_group(launch_of(rank, 3, port), 0.3);
    for (int i = 0; i < 2; ++i) {
      int word = rank == 0 ? 42 + i : 0;
      if (rank == 0) sleep_ms(800);
      group->wait_for_leader(&word, sizeof(word));
      if (word != 42 + i) return std::string("wrong");
    }
    group->barrier();
    return std::string("right");
  });
  for (int rank = 0; rank < 3; ++rank) EXPECT_EQ(processes.result(rank), "right");
}

KDT_TEST(stopped_process) {
  for (int victim : {0, 2}) {
    const int port = next_master_port();
    Processes processes(4, [&](int rank) {
      const auto group = make_tcp_group(launch_of(rank, 4, port), 1);
      group->barrier();
      if (rank == victim) kill(getpid(), SIGSTOP);
      return until_the_end(*group);
    });
    Clock clock;
    for (int rank = 0; rank < 4; ++rank) {
      if (rank == victim) continue;
      const std::string text = processes.result(rank);
      if (victim == 0) {
        EXPECT(holds(text, join("rank 0 (")));
        EXPECT(holds(text, join(":", processes.pid(0), ") did not answer within 1 s")));
      } else {
        EXPECT_EQ(text, "rank 2 of 4 did not come within 1 s");
      }
    }
    EXPECT(clock.ms() < 8000);
    // Once it goes on, it learns of the end too.
    processes.send_signal(victim, SIGCONT);
    EXPECT(processes.result(victim) != "");
  }
}

KDT_TEST(rank_0_names_the_late_for_one_that_came_first) {
  const int port = next_master_port();
  Processes processes(3, [&](int rank) {
    const auto group = make_tcp_group(launch_of(rank, 3, port), 1);
    group->barrier();
    if (rank == 0) sleep_ms(700);
    if (rank == 2) sleep_ms(50000);
    Clock clock;
    const std::string error = until_the_end(*group);
    return error + (clock.ms() < (rank == 0 ? 800 : 1450) ? "" : ", late");
  });
  for (int rank : {0, 1}) EXPECT_EQ(processes.result(rank), "rank 2 of 3 did not come within 1 s");
}

KDT_TEST(ranks_stay_while_their_memory_is_being_sent) {
  const int port = next_master_port();
  Processes processes(2, [&](int process) {
    const Ranks ranks = make_hybrid_group(2, launch_of(process, 2, port), kLong);
    run_ranks(ranks, [](RankGroup& group) { group.barrier(); });
    if (process == 0) kill(getpid(), SIGSTOP);
    std::thread ender([&] {
      sleep_ms(1000);
      ranks[0]->abort("the disk is full");
    });
    double ends[2];
    Clock clock;
    const auto errors = run_ranks(ranks, [&](RankGroup& group) {
      std::vector<char> mine(20'000'000), all(4 * mine.size());
      if (group.rank() == 3) sleep_ms(400);
      try {
        group.all_gather(mine.data(), mine.size(), all.data());
      } catch (const Error&) {
        ends[group.rank() - 2] = clock.ms();
        throw;
      }
    });
    ender.join();
    if (errors[0] != "the disk is full" || errors[1] != errors[0]) return "wrong: " + errors[0];
    // The rank that came last sends for both, and gives up a second later.
    return std::string(std::abs(ends[0] - ends[1]) < 400 ? "right" : "one left early");
  });
  EXPECT_EQ(processes.result(1), "right");
}

KDT_TEST(stalled_rank_beside_others_of_its_process) {
  const int port = next_master_port();
  Processes processes(2, [&](int process) {
    WorkerGroup workers(make_hybrid_group(2, launch_of(process, 2, port), 0.5));
    try {
      workers.run([&](int i) {
        workers.rank(i).barrier();
        if (workers.rank(i).rank() == 3) sleep_ms(900);
        workers.rank(i).barrier();
      });
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string("came back");
  });
  for (int process : {0, 1}) {
    EXPECT_EQ(processes.result(process), "rank 3 of 4 did not come within 0.5 s");
  }
}

KDT_TEST(abort_and_leaving_reach_all) {
  for (int by : {0, 2}) {
    for (const bool leaves : {false, true}) {
      const int port = next_master_port();
      Processes processes(3, [&](int rank) {
        auto group = make_tcp_group(launch_of(rank, 3, port), kLong);
        group->barrier();
        if (rank == by && leaves) {
          group.reset();
          sleep_ms(1000);
          return std::string("left");
        }
        if (rank == by) {
          sleep_ms(100);
          group->abort("the disk is full");
        }
        return until_the_end(*group);
      });
      for (int rank = 0; rank < 3; ++rank) {
        const std::string expected = !leaves      ? std::string("the disk is full")
                                     : rank == by ? std::string("left")
                                                  : join("rank ", by, " of 3 has left the group");
        EXPECT_EQ(processes.result(rank), expected);
      }
    }
  }
}

KDT_TEST(leaving_after_the_last_call_is_no_fault) {
  for (int repeat = 0; repeat < 40; ++repeat) {
    const int port = next_master_port();
    Processes processes(4, [&](int rank) {
      const auto group = make_tcp_group(launch_of(rank, 4, port), kLong);
      for (int i = 0; i < 5; ++i) group->barrier();
      return std::string("right");
    });
    for (int rank = 0; rank < 4; ++rank) EXPECT_EQ(processes.result(rank), "right");
  }
}

KDT_TEST(sizes_and_calls_that_differ) {
  const int port = next_master_port();
  Processes processes(3, [&](int rank) {
    const auto group = make_tcp_group(launch_of(rank, 3, port), kLong);
    char mine[16] = {}, all[48];
    group->all_gather(mine, rank == 2 ? 16 : 8, all);
    return std::string("came back");
  });
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_EQ(processes.result(rank),
              "threw: rank 0 came to all_gather with 8 bytes, rank 2 came to all_gather with 16 "
              "bytes");
  }
  const int other = next_master_port();
  Processes too_large(2, [&](int rank) {
    const auto group = make_tcp_group(launch_of(rank, 2, other), kLong);
    group->all_gather(nullptr, int64_t{1} << 40, nullptr);
    return std::string("came back");
  });
  EXPECT(holds(too_large.result(0), "1099511627776 bytes, but the blocks of 2 ranks may have"));
  EXPECT(holds(too_large.result(1), "1099511627776 bytes, but the blocks of 2 ranks may have"));
}

KDT_TEST(group_of_a_forked_process) {
  const int port = next_master_port();
  Processes processes(2, [&](int rank) {
    auto group = make_tcp_group(launch_of(rank, 2, port), kLong);
    group->barrier();
    const pid_t child = fork();
    if (child == 0) {
      alarm(20);
      group->abort("from the child");
      group.reset();
      _exit(0);
    }
    int status = -1;
    waitpid(child, &status, 0);
    group->barrier();
    return std::string(status == 0 ? "right" : "wrong");
  });
  EXPECT_EQ(processes.result(0), "right");
  EXPECT_EQ(processes.result(1), "right");
}

KDT_TEST(many_groups_with_all_faults) {
  for (int repeat = 0; repeat < 40; ++repeat) {
    const int port = next_master_port(), by = repeat % 2;
    Processes processes(2, [&](int process) {
      WorkerGroup workers(make_hybrid_group(2, launch_of(process, 2, port), kLong));
      workers.run([&](int i) { workers.rank(i).barrier(); });
      workers.run([&](int i) {
        if (process == by && i == repeat / 2 % 2) {
          if (repeat % 8 < 4) throw Error("fault");
          kill(getpid(), SIGKILL);
        }
        while (true) workers.rank(i).barrier();
      });
      return std::string("came back");
    });
    const std::string text = processes.result(1 - by);
    EXPECT(holds(text, repeat % 8 < 4 ? ": fault" : ") has gone"));
  }
}

}  // namespace
}  // namespace kdt::test

KDT_TEST_MAIN
