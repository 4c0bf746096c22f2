// The engine as Python may use it: from any thread, finaliser and signal handler, and after a fork.
#pragma once

#include <unistd.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "bindings/gil.h"
#include "engine/engine_group.h"

namespace kdt {

// An engine for Python, where any thread may call and a finaliser may run in any: one call at a
// time, the GIL released while it waits and works. No Python object is made or released during a
// call, as that may run anything. Only generate() lets Python run between its rounds, for signals:
// what that asks of the engine finds it in a call of its own thread.
class SharedEngine {
 public:
  explicit SharedEngine(const EngineOptions& options)
      : engine_(std::make_unique<EngineGroup>(options)) {}
  // Ranks may have to be waited for, and they may call Python.
  ~SharedEngine() {
    const GilRelease release;
    engine_.reset();
  }

  // For what is the same since loading.
  const Engine& loaded() const { return engine_->first(); }
  bool is_leader() const { return engine_->is_leader(); }

  template <typename Call>
  auto use(const Call& call) {
    check_process();
    KDT_CHECK(!in_own_call(),
              "the engine is in a call of this thread: a signal handler or finaliser can use its "
              "stats, config, has_unfinished and abort alone");
    const GilRelease release;
    const std::lock_guard lock(mutex_);
    const Caller caller(caller_);
    for (const int64_t id : take_aborted()) engine_->abort(id);
    return call(*engine_);
  }

  // Reads the engine, in a call of this thread too.
  template <typename Call>
  auto look(const Call& call) {
    check_process();
    return in_own_call() ? call(*engine_) : use(call);
  }

  // Neither waits for a call nor throws: finalisers call it. While the engine is in a call, and
  // where other processes have to hear of it, the id is kept for the next one.
  bool abort(int64_t id) {
    if (process_ != getpid()) return false;
    if (!in_own_call() && !engine_->has_followers()) {
      const std::unique_lock lock(mutex_, std::try_to_lock);
      if (lock.owns_lock()) {
        try {
          return engine_->abort(id);
        } catch (const Error&) {  // the ranks' group has ended, and all requests with it
          return false;
        }
      }
    }
    const std::lock_guard lock(aborted_mutex_);
    aborted_.push_back(id);
    return true;
  }

 private:
  class Caller {
   public:
    explicit Caller(std::atomic<std::thread::id>& caller) : caller_(caller) {
      caller_ = std::this_thread::get_id();
    }
    ~Caller() { caller_ = std::thread::id(); }

   private:
    std::atomic<std::thread::id>& caller_;
  };

  bool in_own_call() const { return caller_ == std::this_thread::get_id(); }
  void check_process() const {
    KDT_CHECK(process_ == getpid(), "the engine was loaded by process ", process_,
              " and its threads are there: a forked process has to load its own");
  }
  std::vector<int64_t> take_aborted() {
    const std::lock_guard lock(aborted_mutex_);
    return std::exchange(aborted_, {});
  }

  std::unique_ptr<EngineGroup> engine_;
  const pid_t process_ = getpid();
  std::mutex mutex_;                     // of engine_
  std::atomic<std::thread::id> caller_;  // the thread in a call
  std::mutex aborted_mutex_;
  std::vector<int64_t> aborted_;
};

}  // namespace kdt
