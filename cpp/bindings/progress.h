// A function of Python that hears how far some work is.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <functional>

#include "bindings/arguments.h"
#include "bindings/gil.h"
#include "core/clock.h"

namespace kdt {

// Calls `progress`, a function or None that must live as long, ten times a second, and throws what
// it or a signal handler raises. For the thread that called from Python, without the GIL.
inline std::function<void(int64_t, int64_t)> seldom_progress(pybind11::handle progress) {
  KDT_CHECK_ARGUMENT(progress.is_none() || PyCallable_Check(progress.ptr()), "progress is ",
                     shown(progress), "; want a function or None");
  return [progress, since = Clock(), told = false](int64_t done, int64_t total) mutable {
    if (told && done < total && since.ms() < 100) return;
    told = true;
    since = Clock();
    const GilAcquire acquire;
    if (PyErr_CheckSignals() != 0) throw pybind11::error_already_set();
    if (progress.is_none()) return;
    PyObject* result = PyObject_CallFunction(progress.ptr(), "LL", static_cast<long long>(done),
                                             static_cast<long long>(total));
    if (result == nullptr) throw pybind11::error_already_set();
    Py_DECREF(result);
  };
}

}  // namespace kdt
