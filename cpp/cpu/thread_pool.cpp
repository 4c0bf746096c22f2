#include "cpu/thread_pool.h"

#include <chrono>

namespace kdt::cpu {
namespace {

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  std::this_thread::yield();
#endif
}

// Spins before a thread gives its core away (about 50 us) or goes to sleep (about 2 ms).
constexpr int kSpins = 1000;
constexpr int kYields = 200;

}  // namespace

ThreadPool::ThreadPool(int num_threads) {
  for (int i = 1; i < num_threads; ++i) threads_.emplace_back([this, i] { work(i); });
}

ThreadPool::~ThreadPool() {
  stop_.store(true);
  epoch_.fetch_add(1);
  epoch_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void ThreadPool::take_tasks(int thread) {
  while (true) {
    const int64_t task = next_task_.fetch_add(1, std::memory_order_relaxed);
    if (task >= num_tasks_) return;
    call_(context_, task, thread);
  }
}

void ThreadPool::run_shared(int64_t num_tasks, const void* context, Call call) {
  context_ = context;
  call_ = call;
  num_tasks_ = num_tasks;
  next_task_.store(0, std::memory_order_relaxed);
  busy_.store(static_cast<int>(threads_.size()), std::memory_order_relaxed);
  epoch_.fetch_add(1, std::memory_order_release);
  epoch_.notify_all();
  take_tasks(0);
  for (int spins = 0; busy_.load(std::memory_order_acquire) != 0; ++spins) {
    spins < kSpins ? pause() : std::this_thread::yield();
  }
}

void ThreadPool::work(int thread) {
  uint32_t seen = 0;
  while (true) {
    int spins = 0;
    while (epoch_.load(std::memory_order_acquire) == seen) {
      if (++spins < kSpins) {
        pause();
      } else if (spins < kSpins + kYields) {
        std::this_thread::yield();
      } else {
        epoch_.wait(seen, std::memory_order_acquire);
      }
    }
    ++seen;
    if (stop_.load()) return;
    take_tasks(thread);
    busy_.fetch_sub(1, std::memory_order_release);
  }
}

}  // namespace kdt::cpu
