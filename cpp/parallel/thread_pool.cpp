#include "parallel/thread_pool.h"

#include <unistd.h>

#include <system_error>
#include <utility>

#include "core/error.h"

namespace kdt {
namespace {

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  std::this_thread::yield();
#endif
}

// Spins before a thread offers its core to others (some 200 us), and offers before it sleeps (some
// 100 us).
constexpr int kSpins = 10000;
constexpr int kYields = 200;

}  // namespace

ThreadPool::ThreadPool(int num_threads)
    : slots_(new Slot[num_threads < 1 ? 1 : num_threads]), process_(getpid()) {
  try {
    for (int i = 1; i < num_threads; ++i) threads_.emplace_back([this, i] { work(i); });
  } catch (const std::system_error& error) {
    const size_t started = threads_.size() + 1;
    stop();
    throw Error(join("num_threads is ", num_threads, ", but only ", started,
                     " could be started: ", error.what()));
  }
}

ThreadPool::~ThreadPool() { stop(); }

void ThreadPool::stop() {
  if (process_ != getpid()) {
    // Threads of the process this one was forked from can be neither joined nor let go.
    new std::vector<std::thread>(std::move(threads_));
    return;
  }
  stop_.store(true);
  job_.fetch_add(1);
  job_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void ThreadPool::count_down(int thread) {
  while (true) {
    const int64_t task = next_task_.fetch_add(1, std::memory_order_relaxed);
    if (task >= num_tasks_) return;
    call_(context_, task, thread);
  }
}

void ThreadPool::do_part(int slot, int thread) {
  try {
    if (num_tasks_ > num_threads()) {
      count_down(thread);
    } else if (slot < num_tasks_) {
      call_(context_, slot, thread);
    }
  } catch (...) {
    if (!failed_.exchange(true)) error_ = std::current_exception();
  }
}

void ThreadPool::run_shared(int64_t num_tasks, const void* context, Call call) {
  context_ = context;
  call_ = call;
  num_tasks_ = num_tasks;
  next_task_.store(0, std::memory_order_relaxed);
  const uint32_t job = job_.load(std::memory_order_relaxed) + 1;
  job_.store(job, std::memory_order_release);
  job_.notify_all();
  do_part(0, 0);
  for (int slot = 1; slot < num_threads(); ++slot) {
    uint32_t before = job - 1;
    if (slots_[slot].claimed.compare_exchange_strong(before, job, std::memory_order_acq_rel)) {
      // With a shared counter no task is left by now.
      if (num_tasks <= num_threads()) do_part(slot, 0);
      slots_[slot].done.store(job, std::memory_order_relaxed);
    }
  }
  for (int slot = 1; slot < num_threads(); ++slot) {
    for (int spins = 0; slots_[slot].done.load(std::memory_order_acquire) != job; ++spins) {
      spins < kSpins ? pause() : std::this_thread::yield();
    }
  }
  if (failed_.load()) {
    failed_.store(false);
    std::rethrow_exception(std::exchange(error_, nullptr));
  }
}

void ThreadPool::work(int thread) {
  Slot& slot = slots_[thread];
  uint32_t seen = 0;
  int idle = 0;
  while (true) {
    const uint32_t job = job_.load(std::memory_order_acquire);
    if (stop_.load(std::memory_order_relaxed)) return;
    if (job == seen) {
      ++idle;
      if (idle < kSpins) {
        pause();
      } else if (idle < kSpins + kYields) {
        std::this_thread::yield();
      } else {
        job_.wait(seen, std::memory_order_acquire);
      }
      continue;
    }
    seen = job;
    idle = 0;
    // While this slot is not claimed the job cannot end, so what it says stays as it is.
    uint32_t before = job - 1;
    if (!slot.claimed.compare_exchange_strong(before, job, std::memory_order_acq_rel)) continue;
    do_part(thread, thread);
    slot.done.store(job, std::memory_order_release);
  }
}

}  // namespace kdt
