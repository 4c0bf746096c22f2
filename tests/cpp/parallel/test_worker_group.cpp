// Threads of ranks: whose error is thrown, and that nothing hangs.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <memory>
#include <new>
#include <stdexcept>

#include "check.h"
#include "core/clock.h"
#include "core/error.h"
#include "parallel/ranks.h"
#include "parallel/worker_group.h"

namespace kdt::test {
namespace {

constexpr double kLong = 60;  // a time-out that no test waits for

KDT_TEST(body_runs_once_on_each_rank) {
  for (int size : {1, 2, 3, 4, 8}) {
    WorkerGroup workers(size, kLong);
    EXPECT_EQ(workers.size(), size);
    std::vector<int64_t> sums(size, 0);  // plain memory: run() orders its bodies
    std::vector<std::thread::id> threads(size);
    for (int job = 0; job < 200; ++job) {
      workers.run([&](int rank) {
        sums[rank] += job;
        if (job == 0) threads[rank] = std::this_thread::get_id();
        if (threads[rank] != std::this_thread::get_id()) sums[rank] = -1000000;
        if (job % 3 == 0) workers.rank(rank).barrier();
      });
    }
    for (int64_t sum : sums) EXPECT_EQ(sum, 199 * 200 / 2);
  }
}

KDT_TEST(arguments_that_all_refuse_leave_the_group_usable) {
  WorkerGroup workers(4, kLong);
  for (int repeat = 0; repeat < 50; ++repeat) {
    bool thrown = false;
    try {
      workers.run([](int) { throw std::invalid_argument("top_k is -1"); });
    } catch (const std::invalid_argument& error) {
      thrown = std::string(error.what()) == "top_k is -1";
    }
    EXPECT(thrown);
    std::atomic<int> ran{0};
    workers.run([&](int rank) {
      workers.rank(rank).barrier();
      ++ran;
    });
    EXPECT_EQ(ran.load(), 4);
  }
  EXPECT_EQ(workers.rank(0).aborted(), "");
}

// What the first run and a later one throw, which must be the same.
std::string fault(WorkerGroup& workers, const std::function<void(int)>& body) {
  std::string texts[2] = {"nothing", "nothing"};
  for (int i = 0; i < 2; ++i) {
    try {
      workers.run(i == 0 ? body : [](int) {});
    } catch (const Error& error) {
      texts[i] = error.what();
    }
  }
  EXPECT_EQ(texts[0], texts[1]);
  return texts[0];
}

KDT_TEST(one_rank_throws) {
  for (int size : {2, 3, 8}) {
    for (int at : {0, 1, size - 1}) {
      WorkerGroup workers(size, kLong);
      Clock clock;
      const std::string error = fault(workers, [&](int rank) {
        workers.rank(rank).barrier();
        if (rank == at) throw Error("no memory left");
        workers.rank(rank).barrier();
      });
      EXPECT_EQ(error, join("rank ", at, ": no memory left"));
      EXPECT_EQ(workers.rank(0).aborted(), error);
      EXPECT(clock.ms() < 10000);
    }
  }
}

KDT_TEST(one_rank_refuses_an_argument) {
  Clock clock;
  {
    WorkerGroup workers(3, kLong);  // the others wait for it
    EXPECT_EQ(fault(workers,
                    [&](int rank) {
                      if (rank == 1) throw std::invalid_argument("top_k is -1");
                      workers.rank(rank).barrier();
                    }),
              "rank 1: top_k is -1");
  }
  {
    WorkerGroup workers(3, kLong);  // the others do their part
    EXPECT_EQ(fault(workers,
                    [&](int rank) {
                      if (rank == 1) throw std::invalid_argument("top_k is -1");
                    }),
              "rank 1: top_k is -1");
  }
  WorkerGroup workers(2, kLong);  // they do not agree why
  EXPECT(
      holds(fault(workers, [](int rank) { throw std::invalid_argument(join("top_k of ", rank)); }),
            ": top_k of "));
  EXPECT(clock.ms() < 10000);
}

KDT_TEST(all_throw) {
  WorkerGroup workers(4, kLong);
  EXPECT(holds(fault(workers, [](int) { throw Error("device lost"); }), ": device lost"));
  WorkerGroup others(2, kLong);
  EXPECT_EQ(fault(others,
                  [](int rank) {
                    if (rank == 1) throw 7;
                  }),
            "rank 1: unknown exception");
}

KDT_TEST(group_of_one_throws_what_its_body_throws) {
  WorkerGroup workers(1, kLong);
  for (int repeat = 0; repeat < 3; ++repeat) {
    bool thrown = false;
    try {
      workers.run([](int) { throw std::bad_alloc(); });
    } catch (const std::bad_alloc&) {
      thrown = true;
    }
    EXPECT(thrown);
  }
  workers.run([](int) {});
}

KDT_TEST(rank_that_is_done_early) {
  WorkerGroup workers(3, kLong);
  Clock clock;
  EXPECT_EQ(fault(workers,
                  [&](int rank) {
                    if (rank != 2) workers.rank(rank).barrier();
                  }),
            "rank 2 was done while another rank waited for it");
  EXPECT(clock.ms() < 10000);
}

KDT_TEST(sizes_that_differ) {
  WorkerGroup workers(2, kLong);
  EXPECT(holds(fault(workers,
                     [&](int rank) {
                       int64_t word = 0;
                       workers.rank(rank).broadcast(&word, 4 + rank);
                     }),
               "rank 0 came to broadcast with 4 bytes, rank 1 came to broadcast with 5 bytes"));
}

// A rank that hangs until the end of the test, and then comes back to a group that may be gone.
class Hang {
 public:
  std::function<void()> body() const {
    return [stop = stop_, back = back_] {
      while (!*stop) sleep_ms(1);
      *back = true;
    };
  }
  void end() const {
    *stop_ = true;
    while (!*back_) sleep_ms(1);
    sleep_ms(20);  // its thread works on in the group's memory
  }

 private:
  std::shared_ptr<std::atomic<bool>> stop_ = std::make_shared<std::atomic<bool>>(false);
  std::shared_ptr<std::atomic<bool>> back_ = std::make_shared<std::atomic<bool>>(false);
};

KDT_TEST(stalled_rank) {
  Hang hang;
  Clock clock;
  {
    WorkerGroup workers(4, 0.2);  // while the others wait for it
    const std::string error = fault(workers, [&workers, body = hang.body()](int rank) {
      rank == 2 ? body() : workers.rank(rank).barrier();
    });
    EXPECT(holds(error, "rank 2 of 4 did not come within 0.2 s"));
    EXPECT(holds(error, "rank 2 of 4 did not come back within 0.2 s"));
  }
  EXPECT(clock.ms() > 390);
  EXPECT(clock.ms() < 5000);
  hang.end();
}

KDT_TEST(stalled_rank_when_the_others_are_done) {
  Hang hang;
  Clock clock;
  {
    WorkerGroup workers(3, 0.2);
    const std::string error = fault(workers, [body = hang.body()](int rank) {
      if (rank != 0) body();
    });
    EXPECT_EQ(error, "rank 1, rank 2 of 3 did not come back within 0.2 s");
  }
  EXPECT(clock.ms() > 190);
  EXPECT(clock.ms() < 5000);
  hang.end();
}

KDT_TEST(all_ranks_hang_in_a_group_that_has_ended) {
  Hang hang;
  {
    WorkerGroup workers(1, 0.1);
    workers.rank(0).abort("rank 5 (node:17) has gone");
    EXPECT_EQ(fault(workers, [body = hang.body()](int) { body(); }),
              "rank 5 (node:17) has gone; rank 0 of 1 did not come back within 0.1 s");
  }
  hang.end();
}

KDT_TEST(long_work_of_all_is_no_stall) {
  WorkerGroup workers(3, 0.1);
  workers.run([&](int rank) {
    sleep_ms(400);
    workers.rank(rank).barrier();
  });
}

KDT_TEST(callers_interrupt_ends_the_group_and_is_thrown) {
  WorkerGroup group(2, 60);
  const Clock clock;
  std::string caught;
  try {
    group.run(
        [&](int i) {
          std::this_thread::sleep_for(std::chrono::milliseconds(i == 0 ? 300 : 0));
          group.rank(i).barrier();
        },
        [] { throw std::out_of_range("enough"); });
  } catch (const std::out_of_range& error) {
    caught = error.what();
  }
  EXPECT_EQ(caught, "enough");
  EXPECT(clock.ms() < 10'000);
  EXPECT_THROWS("the group was interrupted", group.run([](int) {}));
}

KDT_TEST(run_from_a_rank) {
  WorkerGroup workers(2, kLong);
  EXPECT(holds(fault(workers, [&](int) { workers.run([](int) {}); }),
               "a rank cannot run anything on its own group"));
}

KDT_TEST(many_groups_with_all_faults) {
  for (int repeat = 0; repeat < 200; ++repeat) {
    const int size = 2 + repeat % 7, at = repeat % size;
    WorkerGroup workers(size, kLong);
    workers.run([&](int rank) { workers.rank(rank).barrier(); });
    if (repeat % 4 == 3) continue;  // no fault
    const std::string error = fault(workers, [&](int rank) {
      if (rank == at) {
        if (repeat % 4 == 0) throw Error("fault");
        if (repeat % 4 == 1) throw std::invalid_argument("fault");
        return;
      }
      while (true) workers.rank(rank).barrier();
    });
    EXPECT_EQ(error,
              join("rank ", at,
                   repeat % 4 == 2 ? " was done while another rank waited for it" : ": fault"));
  }
}

KDT_TEST(forked_process) {
  auto workers = std::make_unique<WorkerGroup>(4, kLong);
  workers->run([&](int rank) { workers->rank(rank).barrier(); });
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);
    int status = 1;
    try {
      workers->run([](int) {});
    } catch (const Error& error) {
      if (holds(error.what(), "from which this one was forked")) status = 0;
    }
    workers.reset();
    _exit(status);
  }
  int status = -1;
  waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  workers->run([&](int rank) { workers->rank(rank).barrier(); });
}

}  // namespace
}  // namespace kdt::test

KDT_TEST_MAIN
