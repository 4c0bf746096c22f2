// Between numpy arrays and tensors. Arrays are taken C-contiguous, converted when they are not.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <vector>

#include "backend/backend.h"

namespace kdt {

template <typename T>
using Array = pybind11::array_t<T, pybind11::array::c_style | pybind11::array::forcecast>;

template <typename T>
constexpr DType dtype_of() {
  if constexpr (std::is_same_v<T, float>) return DType::kFloat32;
  if constexpr (std::is_same_v<T, double>) return DType::kFloat64;
  if constexpr (std::is_same_v<T, int32_t>) return DType::kInt32;
  if constexpr (std::is_same_v<T, uint16_t>) return DType::kBFloat16;
}

// A view of the array's own memory; `name` is for the message when the number of dimensions is
// another.
template <typename T>
Tensor as_tensor(const char* name, const Array<T>& array, int ndim) {
  KDT_CHECK_ARGUMENT(array.ndim() == ndim, name, " has ", array.ndim(), " dimensions, want ", ndim);
  void* data = const_cast<T*>(array.data());
  switch (ndim) {
    case 1:
      return Tensor(data, dtype_of<T>(), {array.shape(0)});
    case 2:
      return Tensor(data, dtype_of<T>(), {array.shape(0), array.shape(1)});
    default:
      return Tensor(data, dtype_of<T>(), {array.shape(0), array.shape(1), array.shape(2)});
  }
}

template <typename T>
Array<T> to_array(const std::vector<T>& values, std::vector<pybind11::ssize_t> shape) {
  Array<T> array(shape);
  std::copy(values.begin(), values.end(), array.mutable_data());
  return array;
}

template <typename T>
Array<T> to_array(const std::vector<T>& values) {
  return to_array(values, {static_cast<pybind11::ssize_t>(values.size())});
}

// [n, n]: row i is true at i and its ancestors. parents [n], -1 for the root.
pybind11::array_t<bool> visibility(const std::vector<int32_t>& parents);

void register_engine(pybind11::module_& module);
void register_ops(pybind11::module_& module);

}  // namespace kdt
