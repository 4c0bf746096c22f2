// Threads that share the tasks of one op at a time.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace kdt::cpu {

// The calling thread works too, so a pool of n has n - 1 threads. Between two ops a thread spins for a short while, because a
// decode step hands over more than a hundred ops a millisecond, then sleeps.
class ThreadPool {
 public:
  explicit ThreadPool(int num_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int num_threads() const { return static_cast<int>(threads_.size()) + 1; }

  // Calls body(task, thread) for each task in [0, num_tasks) and returns when all are done. Tasks are taken in
  // order by whichever thread is free; a task must not throw.
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

  void run_shared(int64_t num_tasks, const void* context, Call call);
  void work(int thread);
  void take_tasks(int thread);

  std::vector<std::thread> threads_;
  // The job of one op. A thread joins it while it is open; the caller closes it when no task is left, so a
  // thread that is late, or whose core is busy elsewhere, holds nobody up.
  const void* context_ = nullptr;
  Call call_ = nullptr;
  int64_t num_tasks_ = 0;
  alignas(64) std::atomic<uint64_t> state_{0};  // job number << 32 | open << 16 | threads that joined
  alignas(64) std::atomic<int64_t> next_task_{0};
  std::atomic<bool> stop_{false};
};

}  // namespace kdt::cpu
