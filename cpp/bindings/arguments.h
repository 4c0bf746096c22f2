// Arguments from Python. Whatever is wrong with one is a ValueError that names it and its value.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "core/error.h"

namespace kdt {

// `value` as a message shows it: in ASCII, and a long one cut.
inline std::string shown(pybind11::handle value) {
  constexpr size_t kLongest = 80;
  const auto text = pybind11::reinterpret_steal<pybind11::object>(PyObject_ASCII(value.ptr()));
  if (!text) {
    // An integer of thousands of digits, or an object that cannot be shown.
    PyErr_Clear();
    return join("of type ", Py_TYPE(value.ptr())->tp_name);
  }
  auto shown = text.cast<std::string>();
  if (shown.size() > kLongest) shown = shown.substr(0, kLongest - 3) + "...";
  return shown;
}

namespace detail {

// A failed conversion: a TypeError is the caller's to name, any other error goes on.
inline void clear_type_error() {
  if (!PyErr_ExceptionMatches(PyExc_TypeError)) throw pybind11::error_already_set();
  PyErr_Clear();
}

// Python's integer of `value`, null when it is none. A bool or a float hides a mistake.
inline pybind11::object index_of(pybind11::handle value) {
  if (PyBool_Check(value.ptr()) || !PyIndex_Check(value.ptr())) return {};
  PyObject* index = PyNumber_Index(value.ptr());
  if (index == nullptr) clear_type_error();
  return pybind11::reinterpret_steal<pybind11::object>(index);
}

template <typename T, typename... Name>
T integer_of(pybind11::handle value, const Name&... name) {
  const pybind11::object index = index_of(value);
  KDT_CHECK_ARGUMENT(index, name..., " is ", shown(value), "; want an integer");
  int overflow = 0;
  const long long number = PyLong_AsLongLongAndOverflow(index.ptr(), &overflow);
  KDT_CHECK_ARGUMENT(overflow == 0 && number >= std::numeric_limits<T>::min() &&
                         number <= std::numeric_limits<T>::max(),
                     name..., " is ", shown(index), "; want an integer of ", 8 * sizeof(T),
                     " bits");
  return static_cast<T>(number);
}

}  // namespace detail

template <typename T = int64_t>
T integer(const char* name, pybind11::handle value) {
  return detail::integer_of<T>(value, name);
}

inline std::vector<int64_t> integers(const char* name, pybind11::handle values) {
  PyObject* list = values.ptr();
  KDT_CHECK_ARGUMENT(PySequence_Check(list) && !PyUnicode_Check(list) && !PyBytes_Check(list), name,
                     " is ", shown(values), "; want a sequence of integers");
  // A copy, as an element's __index__ may change the list.
  const auto items = pybind11::reinterpret_steal<pybind11::tuple>(PySequence_Tuple(list));
  if (!items) {
    detail::clear_type_error();
    throw std::invalid_argument(join(name, " is ", shown(values), "; want a sequence of integers"));
  }
  std::vector<int64_t> numbers;
  numbers.reserve(items.size());
  for (const pybind11::handle item : items) {
    numbers.push_back(detail::integer_of<int64_t>(item, name, "[", numbers.size(), "]"));
  }
  return numbers;
}

inline double number(const char* name, pybind11::handle value) {
  // numpy's flags and complex numbers would be taken for floats.
  const pybind11::object dtype = pybind11::getattr(value, "dtype", pybind11::none());
  const std::string kind = pybind11::str(pybind11::getattr(dtype, "kind", pybind11::str("f")));
  KDT_CHECK_ARGUMENT(kind == "f" || kind == "i" || kind == "u", name, " is ", shown(value),
                     "; want a number");
  const double number = PyBool_Check(value.ptr()) ? -1.0 : PyFloat_AsDouble(value.ptr());
  if (number == -1.0 && PyErr_Occurred()) {
    // An integer beyond every float.
    if (PyErr_ExceptionMatches(PyExc_OverflowError)) {
      PyErr_Clear();
    } else {
      detail::clear_type_error();
    }
    throw std::invalid_argument(join(name, " is ", shown(value), "; want a number"));
  }
  KDT_CHECK_ARGUMENT(!PyBool_Check(value.ptr()), name, " is ", shown(value), "; want a number");
  return number;
}

inline bool boolean(const char* name, pybind11::handle value) {
  pybind11::detail::make_caster<bool> caster;  // knows numpy's too
  KDT_CHECK_ARGUMENT(caster.load(value, false), name, " is ", shown(value), "; want True or False");
  return static_cast<bool>(caster);
}

inline std::string text(const char* name, pybind11::handle value) {
  KDT_CHECK_ARGUMENT(PyUnicode_Check(value.ptr()), name, " is ", shown(value), "; want a string");
  Py_ssize_t size = 0;
  const char* bytes = PyUnicode_AsUTF8AndSize(value.ptr(), &size);
  if (bytes == nullptr) PyErr_Clear();  // half of a surrogate pair
  KDT_CHECK_ARGUMENT(bytes != nullptr, name, " is ", shown(value),
                     "; want text that UTF-8 can hold");
  std::string text(bytes, size);
  KDT_CHECK_ARGUMENT(text.find('\0') == std::string::npos, name, " is ", shown(value),
                     "; want no NUL character");
  return text;
}

}  // namespace kdt
