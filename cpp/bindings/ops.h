// What the bindings of ops share: the back end, and checks of their arguments.
#pragma once

#include <cmath>
#include <initializer_list>
#include <vector>

#include "bindings/array.h"

namespace kdt {

// The CPU back end of this process, one for all ops.
Backend& cpu_backend();

using Argument = pybind11::handle;

inline Floats empty(std::vector<pybind11::ssize_t> shape) { return Floats(shape); }

inline float finite(const char* name, Argument value) {
  const auto number = static_cast<float>(kdt::number(name, value));
  KDT_CHECK_ARGUMENT(std::isfinite(number), name, " is ", shown(value), "; want a finite float32");
  return number;
}

// Of float32: what it rounds to zero is refused too.
inline float positive(const char* name, Argument value) {
  const float number = finite(name, value);
  KDT_CHECK_ARGUMENT(number > 0, name, " is ", shown(value), "; want more than 0");
  return number;
}

inline int64_t within(const char* name, Argument value, int64_t least, int64_t most) {
  const int64_t number = integer(name, value);
  KDT_CHECK_ARGUMENT(number >= least && number <= most, name, " is ", number, "; want ", least,
                     " to ", most);
  return number;
}

// No part of its shape is zero.
inline void check_not_empty(const char* name, const Floats& array) {
  KDT_CHECK_ARGUMENT(array.size() > 0, name, " is ", as_tensor(array).to_string(),
                     "; want at least 1 of each");
}

template <typename T>
void check_shape(const char* name, const Array<T>& array, std::initializer_list<int64_t> shape) {
  const Tensor tensor = as_tensor(array), want(nullptr, dtype_of<T>(), shape);
  bool same = true;
  for (int i = 0; i < tensor.ndim(); ++i) same = same && tensor.dim(i) == want.dim(i);
  KDT_CHECK_ARGUMENT(same, name, " is ", tensor.to_string(), "; want ", want.to_string());
}

}  // namespace kdt
