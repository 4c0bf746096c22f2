// The GIL around the engine's work, for threads that Python may end in the midst of it.
//
// Before 3.14, Python ends a daemon thread that asks for the GIL while the interpreter finalises,
// by unwinding its stack, and in a destructor that is the end of the process by std::terminate. So
// once the interpreter begins to end, only the finalising thread asks for the GIL. Any other that
// comes back from the engine sleeps until the process is gone, which is what 3.14 makes it do.
#pragma once

#include <pthread.h>
#include <pybind11/pybind11.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "core/error.h"

namespace kdt {
namespace detail {

inline std::atomic<std::thread::id> finaliser;  // the finalising thread; none before
inline std::atomic<int> num_asking = 0;         // threads from their look at `finaliser` to the GIL

[[noreturn]] inline void sleep_for_ever() {
  for (;;) pause();
}

// Calls `acquire`, which waits for the GIL; false, without a call, for a thread that must not ask.
template <typename Acquire>
bool ask_for_gil(const Acquire& acquire) {
  ++num_asking;
  const std::thread::id ending = finaliser;
  const bool may_ask = ending == std::thread::id() || ending == std::this_thread::get_id();
  if (may_ask) acquire();
  --num_asking;
  return may_ask;
}

inline void at_exit() {
  finaliser = std::this_thread::get_id();
  // Those that looked before get the GIL now, while nothing happens to them.
  PyThreadState* thread = PyEval_SaveThread();
  while (num_asking > 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  PyEval_RestoreThread(thread);
}

}  // namespace detail

// For the module's start.
inline void watch_for_exit() {
  // A forked process has one thread, and it has the GIL.
  pthread_atfork(nullptr, nullptr, [] {
    detail::finaliser = std::thread::id();
    detail::num_asking = 0;
  });
  pybind11::module_::import("atexit").attr("register")(pybind11::cpp_function(&detail::at_exit));
}

// The GIL is free while this lives.
class GilRelease {
 public:
  GilRelease() : thread_(PyEval_SaveThread()) {}
  ~GilRelease() {
    if (!detail::ask_for_gil([this] { PyEval_RestoreThread(thread_); })) detail::sleep_for_ever();
  }
  GilRelease(const GilRelease&) = delete;

 private:
  PyThreadState* thread_;
};

// Takes the GIL back for a call of Python within a GilRelease. Throws Error when the interpreter
// has ended, so that what the engine holds is let go before the thread sleeps.
class GilAcquire {
 public:
  GilAcquire() {
    KDT_CHECK(detail::ask_for_gil([this] { state_ = PyGILState_Ensure(); }),
              "the interpreter has ended");
  }
  ~GilAcquire() {
    // Without the GIL: Python is ending the thread inside that call, and unwinds its stack.
    if (!PyGILState_Check()) detail::sleep_for_ever();
    PyGILState_Release(state_);
  }
  GilAcquire(const GilAcquire&) = delete;

 private:
  PyGILState_STATE state_;
};

}  // namespace kdt
