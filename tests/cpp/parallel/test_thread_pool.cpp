// The pool: every task once, whatever the numbers of tasks and threads.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <stdexcept>
#include <vector>

#include "check.h"
#include "parallel/thread_pool.h"

namespace kdt {
namespace {

KDT_TEST(every_task_runs_once) {
  for (int threads = 1; threads <= 4; ++threads) {
    ThreadPool pool(threads);
    EXPECT_EQ(pool.num_threads(), threads);
    for (int64_t tasks : {0, 1, 2, 3, 4, 5, 7, 64, 1000}) {
      std::vector<std::atomic<int>> runs(tasks);
      std::atomic<bool> thread_in_range{true};
      pool.run(tasks, [&](int64_t task, int thread) {
        runs[task].fetch_add(1);
        if (thread < 0 || thread >= threads) thread_in_range = false;
      });
      // run() returned, so all of them are done.
      for (const auto& count : runs) EXPECT_EQ(count.load(), 1);
      EXPECT(thread_in_range.load());
    }
  }
}

KDT_TEST(many_small_jobs) {
  for (int threads = 1; threads <= 4; ++threads) {
    ThreadPool pool(threads);
    // Plain memory: a missing hand-over of a job or of its end loses writes.
    std::vector<int64_t> sums(6, 0);
    for (int64_t job = 0; job < 20000; ++job) {
      const int64_t tasks = 1 + job % 6;
      pool.run(tasks, [&](int64_t task, int) { sums[task] += job; });
    }
    for (int64_t task = 0; task < 6; ++task) {
      int64_t expected = 0;
      for (int64_t job = 0; job < 20000; ++job) expected += task < 1 + job % 6 ? job : 0;
      EXPECT_EQ(sums[task], expected);
    }
  }
}

KDT_TEST(no_two_tasks_at_once_on_one_thread_index) {
  // Scratch memory of the ops is chosen by it.
  for (int threads = 2; threads <= 4; ++threads) {
    ThreadPool pool(threads);
    std::vector<std::atomic<int>> busy(threads);
    std::atomic<int> clashes{0};
    for (int job = 0; job < 300; ++job) {
      pool.run(1 + job % 9, [&](int64_t, int thread) {
        if (busy[thread].fetch_add(1) != 0) clashes.fetch_add(1);
        for (int i = 0; i < 200; ++i) std::atomic_signal_fence(std::memory_order_seq_cst);
        busy[thread].fetch_sub(1);
      });
    }
    EXPECT_EQ(clashes.load(), 0);
  }
}

KDT_TEST(tasks_of_unequal_length) {
  ThreadPool pool(3);
  std::atomic<int64_t> sum{0};
  pool.run(40, [&](int64_t task, int) {
    if (task % 13 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(3));
    sum += task;
  });
  EXPECT_EQ(sum.load(), 780);
}

KDT_TEST(threads_that_sleep_wake_up) {
  ThreadPool pool(3);
  for (int i = 0; i < 5; ++i) {
    // Longer than the threads spin.
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    std::atomic<int64_t> sum{0};
    pool.run(100, [&](int64_t task, int) { sum += task; });
    EXPECT_EQ(sum.load(), 4950);
  }
}

KDT_TEST(several_threads_take_part) {
  ThreadPool pool(2);
  std::atomic<int> arrived{0};
  std::atomic<bool> both{true};
  // Each task waits for the other, so one thread alone cannot finish them. The other thread may be
  // late and the caller take its place, so several tries are given.
  for (int tries = 0; tries < 200; ++tries) {
    arrived = 0;
    both = true;
    pool.run(2, [&](int64_t, int) {
      arrived.fetch_add(1);
      const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(20);
      while (arrived.load() < 2 && std::chrono::steady_clock::now() < end) {
      }
      if (arrived.load() < 2) both = false;
    });
    if (both.load()) break;
  }
  EXPECT(both.load());
}

KDT_TEST(a_task_that_throws_reaches_the_caller) {
  for (int threads = 1; threads <= 4; ++threads) {
    ThreadPool pool(threads);
    for (int64_t tasks : {1, 2, 4, 50}) {
      for (int64_t culprit : {int64_t{0}, tasks - 1}) {
        EXPECT_THROWS("task failed", pool.run(tasks, [&](int64_t task, int) {
          if (task == culprit) throw std::runtime_error("task failed");
        }));
        // The pool works as before.
        std::atomic<int64_t> sum{0};
        pool.run(tasks, [&](int64_t task, int) { sum += task; });
        EXPECT_EQ(sum.load(), tasks * (tasks - 1) / 2);
      }
    }
  }
}

KDT_TEST(a_pool_ends_while_idle_or_unused) {
  for (int i = 0; i < 50; ++i) {
    ThreadPool unused(4);
    ThreadPool used(3);
    used.run(8, [](int64_t, int) {});
    if (i % 10 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(10));  // asleep by now
  }
  ThreadPool none(0);
  EXPECT_EQ(none.num_threads(), 1);
}

KDT_TEST(a_forked_process_may_destroy_a_pool) {
  auto pool = std::make_unique<ThreadPool>(3);
  pool->run(8, [](int64_t, int) {});
  const pid_t child = fork();
  if (child == 0) {
    pool.reset();
    _exit(0);
  }
  int status = -1;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  std::atomic<int64_t> sum{0};
  pool->run(8, [&](int64_t task, int) { sum += task; });
  EXPECT_EQ(sum.load(), 28);
}

}  // namespace
}  // namespace kdt

KDT_TEST_MAIN
