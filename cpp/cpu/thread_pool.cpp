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

// Spins before a thread offers its core to others (about 20 us), and offers before it sleeps (about 1 ms).
constexpr int kSpins = 500;
constexpr int kYields = 500;

constexpr uint64_t kOpen = 1u << 16;
constexpr uint64_t kJoined = kOpen - 1;

}  // namespace

ThreadPool::ThreadPool(int num_threads) {
  for (int i = 1; i < num_threads; ++i) threads_.emplace_back([this, i] { work(i); });
}

ThreadPool::~ThreadPool() {
  stop_.store(true);
  state_.fetch_add(uint64_t{1} << 32);
  state_.notify_all();
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
  // Nobody has joined a closed job, so nobody reads these while they change.
  context_ = context;
  call_ = call;
  num_tasks_ = num_tasks;
  next_task_.store(0, std::memory_order_relaxed);
  const uint64_t job = (state_.load(std::memory_order_relaxed) >> 32) + 1;
  state_.store(job << 32 | kOpen, std::memory_order_release);
  state_.notify_all();
  take_tasks(0);
  state_.fetch_and(~kOpen, std::memory_order_acq_rel);
  for (int spins = 0; (state_.load(std::memory_order_acquire) & kJoined) != 0; ++spins) {
    spins < kSpins ? pause() : std::this_thread::yield();
  }
}

void ThreadPool::work(int thread) {
  uint64_t seen = 0;
  int idle = 0;
  while (!stop_.load(std::memory_order_relaxed)) {
    uint64_t state = state_.load(std::memory_order_acquire);
    if (state >> 32 == seen >> 32 || (state & kOpen) == 0) {
      ++idle;
      if (idle < kSpins) {
        pause();
      } else if (idle < kSpins + kYields) {
        std::this_thread::yield();
      } else {
        state_.wait(state, std::memory_order_acquire);
      }
      continue;
    }
    if (!state_.compare_exchange_weak(state, state + 1, std::memory_order_acq_rel)) continue;
    seen = state;
    idle = 0;
    take_tasks(thread);
    state_.fetch_sub(1, std::memory_order_release);
  }
}

}  // namespace kdt::cpu
