// Between numpy arrays and tensors. An array is taken as it is or copied to be C-contiguous and
// aligned; a value that its type cannot hold is a ValueError naming it, never another number.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cmath>
#include <vector>

#include "backend/backend.h"
#include "bindings/arguments.h"

namespace kdt {

template <typename T>
using Array = pybind11::array_t<T, pybind11::array::c_style | pybind11::array::forcecast |
                                       pybind11::detail::npy_api::NPY_ARRAY_ALIGNED_>;
using Floats = Array<float>;
using Ints = Array<int32_t>;

template <typename T>
constexpr DType dtype_of() {
  if constexpr (std::is_same_v<T, float>) return DType::kFloat32;
  if constexpr (std::is_same_v<T, int32_t>) return DType::kInt32;
}

// Any array, not yet converted. A scalar has 0 dimensions.
inline pybind11::array any_array(const char* name, pybind11::handle value, int ndim) {
  const auto array = pybind11::array::ensure(value);
  KDT_CHECK_ARGUMENT(array, name, " is ", shown(value), "; want an array");
  KDT_CHECK_ARGUMENT(array.ndim() == ndim, name, " has ", array.ndim(), " dimensions, want ", ndim);
  return array;
}

inline std::string dtype_text(const pybind11::array& array) {
  return pybind11::str(array.dtype()).cast<std::string>();
}

namespace detail {

template <typename To, typename From, typename Fits>
Array<To> converted(const char* name, const pybind11::array& from, const char* want,
                    const Fits& fits) {
  const Array<From> wide(from);
  Array<To> out(std::vector<pybind11::ssize_t>(from.shape(), from.shape() + from.ndim()));
  for (pybind11::ssize_t i = 0; i < wide.size(); ++i) {
    KDT_CHECK_ARGUMENT(fits(wide.data()[i]), name, " holds ", wide.data()[i], " at index ", i,
                       " of its values; want ", want);
    out.mutable_data()[i] = static_cast<To>(wide.data()[i]);
  }
  return out;
}

}  // namespace detail

// Takes floating-point arrays alone: an integer array is a mistake more often than a wish.
inline Floats floats(const char* name, pybind11::handle value, int ndim) {
  const pybind11::array array = any_array(name, value, ndim);
  KDT_CHECK_ARGUMENT(array.dtype().kind() == 'f' && array.itemsize() <= 8, name, " has dtype ",
                     dtype_text(array), "; want float32");
  if (array.itemsize() <= 4) return Floats(array);
  return detail::converted<float, double>(name, array, "values within float32", [](double v) {
    return !std::isfinite(v) || std::abs(v) <= std::numeric_limits<float>::max();
  });
}

inline Ints ints(const char* name, pybind11::handle value, int ndim) {
  const pybind11::array array = any_array(name, value, ndim);
  const char kind = array.dtype().kind();
  KDT_CHECK_ARGUMENT(kind == 'i' || kind == 'u', name, " has dtype ", dtype_text(array),
                     "; want int32");
  constexpr int64_t kMin = std::numeric_limits<int32_t>::min();
  constexpr int64_t kMax = std::numeric_limits<int32_t>::max();
  constexpr const char* kWant = "values within int32";
  if (kind == 'u') {
    return detail::converted<int32_t, uint64_t>(name, array, kWant,
                                                [](uint64_t v) { return v <= uint64_t{kMax}; });
  }
  if (array.itemsize() <= 4) return Ints(array);
  return detail::converted<int32_t, int64_t>(name, array, kWant,
                                             [](int64_t v) { return v >= kMin && v <= kMax; });
}

// A view of the array's own memory, of 1 to 3 dimensions.
template <typename T>
Tensor as_tensor(const Array<T>& array) {
  void* data = const_cast<T*>(array.data());
  switch (array.ndim()) {
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

void register_attention(pybind11::module_& module);
void register_bench(pybind11::module_& module);
void register_engine(pybind11::module_& module);
void register_ops(pybind11::module_& module);
void register_shard(pybind11::module_& module);
void register_synth(pybind11::module_& module);

}  // namespace kdt
