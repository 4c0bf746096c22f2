// Threads that share the tasks of one op at a time.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>
#include <thread>
#include <vector>

namespace kdt {

// The calling thread works too, so a pool of n has n - 1 threads. A decode step hands over more
// than a hundred ops a millisecond, so a hand-over must cost little: a thread spins on one cache
// line for a while before it sleeps, and tasks as few as the threads go to them without a shared
// counter. A thread that is late holds nobody up: the caller takes its place. A forked process has
// none of the threads: it may destroy the pool, but not run anything on it.
class ThreadPool {
 public:
  explicit ThreadPool(int num_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int num_threads() const { return static_cast<int>(threads_.size()) + 1; }

  // Calls body(task, thread) for each task in [0, num_tasks) and returns when all are done. When
  // tasks throw, one of their exceptions is thrown again.
  template <typename Body>
  void run(int64_t num_tasks, const Body& body) {
    if (num_tasks <= 0) return;
    if (threads_.empty() || num_tasks == 1) {
      for (int64_t task = 0; task < num_tasks; ++task) body(task, 0);
      return;
    }
    run_shared(num_tasks, &body, [](const void* context, int64_t task, int thread) {
      (*static_cast<const Body*>(context))(task, thread);
    });
  }

 private:
  using Call = void (*)(const void*, int64_t, int);

  // A thread's part in job j is claimed once, by the thread or by the caller in its place:
  // `claimed` goes from j - 1 to j. The thread says `done` j when it was the one.
  struct alignas(64) Slot {
    std::atomic<uint32_t> claimed{0};
    alignas(64) std::atomic<uint32_t> done{0};
  };

  void run_shared(int64_t num_tasks, const void* context, Call call);
  void work(int thread);
  void stop();
  // Thread `slot`'s part of the job, worked on by `thread`.
  void do_part(int slot, int thread);
  void count_down(int thread);

  // The job; written while every slot of the one before is claimed and done, read after claiming a
  // slot of it.
  alignas(64) std::atomic<uint32_t> job_{0};
  const void* context_ = nullptr;
  Call call_ = nullptr;
  int64_t num_tasks_ = 0;
  std::atomic<bool> stop_{false};
  alignas(64) std::atomic<int64_t> next_task_{0};  // when there are more tasks than threads
  std::atomic<bool> failed_{false};
  std::exception_ptr error_;  // written by the thread that sets failed_
  std::unique_ptr<Slot[]> slots_;
  std::vector<std::thread> threads_;
  pid_t process_;  // where they are
};

}  // namespace kdt
