// The two exception types of the library and the macros that throw them.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace kdt {

// A fault of a device, a file, memory or a broken contract inside: RuntimeError in Python.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

template <typename... Parts>
std::string join(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

}  // namespace kdt

// The parts of the message name the values. Checked in release builds too.
#define KDT_CHECK(condition, ...)                                   \
  do {                                                              \
    if (!(condition)) throw ::kdt::Error(::kdt::join(__VA_ARGS__)); \
  } while (false)

// For what a caller of the public interface passed: ValueError in Python.
#define KDT_CHECK_ARGUMENT(condition, ...)                                   \
  do {                                                                       \
    if (!(condition)) throw std::invalid_argument(::kdt::join(__VA_ARGS__)); \
  } while (false)
