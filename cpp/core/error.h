// The two exception types of the library and the macros that throw them.
#pragma once

#include <charconv>
#include <sstream>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>

namespace kdt {

// A fault of a device, a file, memory or a broken contract inside: RuntimeError in Python.
class Error : public std::runtime_error {
 public:
  explicit Error(std::string what) : std::runtime_error(without_nul(std::move(what))) {}

 private:
  // what() ends at a NUL, and an untrusted name may hold one.
  static std::string without_nul(std::string text) {
    for (size_t at; (at = text.find('\0')) != std::string::npos;) text.replace(at, 1, "\\u0000");
    return text;
  }
};

// A value in a message; floats so that they can be told from every other.
template <typename T>
void append_to_message(std::ostream& out, const T& part) {
  if constexpr (std::is_floating_point_v<T>) {
    char digits[64];
    const auto end =
        std::to_chars(digits, digits + sizeof(digits), part, std::chars_format::general);
    out.write(digits, end.ptr - digits);
  } else {
    out << part;
  }
}

template <typename... Parts>
std::string join(const Parts&... parts) {
  std::ostringstream out;
  (append_to_message(out, parts), ...);
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
