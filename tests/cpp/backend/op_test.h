// What the tests of a back end's ops share: the back end, arrays on their way to it and back,
// matrices with their values, and comparisons.
//
// KDT_TEST_DEVICE names the device (default "cpu"). A program ends with KDT_OP_TEST_MAIN, which
// skips it where the processor lacks the instruction set that KDT_ISA asks for, or without a GPU;
// with KDT_REQUIRE_DEVICE=1 that is a failure.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "backend/backend.h"
#include "check.h"
#include "io/kdtr.h"

namespace kdt::test {

using Shape = std::vector<int64_t>;
using Floats = std::vector<float>;
using Ints = std::vector<int32_t>;

inline const float kNan = std::numeric_limits<float>::quiet_NaN();
inline const float kInfinity = std::numeric_limits<float>::infinity();

inline std::string device() {
  const char* name = std::getenv("KDT_TEST_DEVICE");
  return name == nullptr || *name == '\0' ? "cpu" : name;
}

inline bool on_cpu() { return device() == "cpu"; }

// Results are a GPU's, in bf16 arithmetic, and a value out of range is reported by the next
// synchronization. "check:cpu,cuda:0" gives the CPU's.
inline bool on_gpu() { return device().rfind("cuda", 0) == 0; }

inline bool is_set(const char* name) {
  const char* value = std::getenv(name);
  return value != nullptr && std::string(value) == "1";
}

// On a GPU there is time for sizes that would take minutes elsewhere.
inline bool large_cases() { return is_set("KDT_LARGE_CASES"); }

// A program's own back end, with two threads.
inline Backend& backend() {
  static const std::unique_ptr<Backend> instance = make_backend(device(), 2);
  return *instance;
}

// The instruction sets to compare on a CPU; null when this processor lacks the set.
inline std::unique_ptr<Backend> backend_with(const char* isa, int num_threads) {
  const char* before = std::getenv("KDT_ISA");
  const std::string saved = before == nullptr ? "" : before;
  setenv("KDT_ISA", isa, 1);
  std::unique_ptr<Backend> made;
  try {
    made = make_backend(device(), num_threads);
  } catch (const Error&) {
  }
  saved.empty() ? unsetenv("KDT_ISA") : setenv("KDT_ISA", saved.c_str(), 1);
  return made;
}

// 0: the program may run.
inline int skip_status() {
  try {
    backend();
  } catch (const Error& error) {
    const bool required = is_set("KDT_REQUIRE_DEVICE");
    std::printf("%s: %s\n", required ? "failed" : "skipped", error.what());
    return required ? 1 : 77;
  }
  return 0;
}

#define KDT_OP_TEST_MAIN                                                \
  int main(int argc, char** argv) {                                     \
    const int skipped = ::kdt::test::skip_status();                     \
    return skipped != 0 ? skipped : ::kdt::test::run_tests(argc, argv); \
  }

inline KdtrFile bundle(const std::string& name) {
  return KdtrFile(std::string(KDT_TEST_DATA) + "/" + name + ".kdtr");
}

template <typename T>
T scalar(const KdtrFile& file, const std::string& name) {
  return file.at(name).as<T>()[0];
}

template <typename T>
std::vector<T> values(const KdtrArray& array) {
  return std::vector<T>(array.as<T>(), array.as<T>() + array.numel());
}

// Arrays on the back end.

template <typename T>
constexpr DType dtype_of() {
  if constexpr (std::is_same_v<T, float>) return DType::kFloat32;
  if constexpr (std::is_same_v<T, double>) return DType::kFloat64;
  if constexpr (std::is_same_v<T, int32_t>) return DType::kInt32;
  if constexpr (std::is_same_v<T, uint16_t>) return DType::kBFloat16;
}

inline Buffer allocate(Backend& on, DType dtype, const Shape& s) {
  switch (s.size()) {
    case 1:
      return on.allocate(dtype, {s[0]});
    case 2:
      return on.allocate(dtype, {s[0], s[1]});
    case 3:
      return on.allocate(dtype, {s[0], s[1], s[2]});
    default:
      throw Error(join("test: ", s.size(), " dimensions"));
  }
}

template <typename T>
Buffer upload(Backend& on, const std::vector<T>& from, const Shape& shape) {
  Buffer buffer = allocate(on, dtype_of<T>(), shape);
  KDT_CHECK(buffer.tensor.numel() == static_cast<int64_t>(from.size()), "test: ", from.size(),
            " values for ", buffer.tensor.to_string());
  on.upload(buffer.tensor, from.data());
  return buffer;
}

template <typename T>
Buffer upload(Backend& on, const std::vector<T>& from) {
  return upload(on, from, {static_cast<int64_t>(from.size())});
}

inline Buffer upload(Backend& on, const KdtrArray& from) {
  Buffer buffer = allocate(on, from.dtype, from.shape);
  on.upload(buffer.tensor, from.data);
  return buffer;
}

// Output memory, filled with NaN (f32) or a value no op gives, so that what is not written shows.
inline Buffer output(Backend& on, const Shape& shape) {
  int64_t n = 1;
  for (int64_t size : shape) n *= size;
  return upload(on, Floats(n, kNan), shape);
}

inline Buffer int_output(Backend& on, const Shape& shape) {
  int64_t n = 1;
  for (int64_t size : shape) n *= size;
  return upload(on, Ints(n, -777), shape);
}

template <typename T = float>
std::vector<T> download(Backend& on, const Tensor& from) {
  std::vector<T> to(from.numel());
  on.download(to.data(), from);
  on.synchronize();
  return to;
}

// Inputs.

// splitmix64
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t next() {
    uint64_t z = state_ += 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
  }
  // In [-scale, scale).
  float uniform(float scale = 1) {
    return static_cast<float>(static_cast<int64_t>(next() >> 40) - (1 << 23)) * 0x1p-23f * scale;
  }
  int64_t below(int64_t n) { return static_cast<int64_t>(next() % static_cast<uint64_t>(n)); }
  Floats floats(int64_t n, float scale = 1) {
    Floats x(n);
    for (float& v : x) v = uniform(scale);
    return x;
  }

 private:
  uint64_t state_;
};

// A random matrix as a checkpoint stores it, with its values.
struct Matrix {
  DType dtype;
  int64_t out, in;
  std::vector<uint8_t> data, scale;
  std::vector<double> values;

  HostMatrix host() const {
    return {data.data(), scale.empty() ? nullptr : scale.data(), dtype, out, in};
  }
};

inline Matrix random_matrix(DType dtype, int64_t out, int64_t in, uint64_t seed) {
  Random random(seed);
  Matrix m{dtype, out, in, {}, {}, std::vector<double>(out * in)};
  const auto append = [](std::vector<uint8_t>& to, const auto& value) {
    const auto* bytes = reinterpret_cast<const uint8_t*>(&value);
    to.insert(to.end(), bytes, bytes + sizeof(value));
  };
  if (dtype == DType::kInt32) {
    for (int64_t n = 0; n < out; ++n) {
      for (int64_t group = 0; group < in / 32; ++group) {
        const uint16_t bits = float_to_bf16(0.05f + random.uniform(0.04f));
        append(m.scale, bits);
        for (int64_t word = 0; word < 4; ++word) {
          const auto nibbles = static_cast<uint32_t>(random.next());
          append(m.data, nibbles);
          for (int64_t i = 0; i < 8; ++i) {
            m.values[n * in + group * 32 + word * 8 + i] =
                (static_cast<int>(nibbles >> (4 * i) & 15) - 8) *
                static_cast<double>(bf16_to_float(bits));
          }
        }
      }
    }
    return m;
  }
  for (double& value : m.values) {
    const float x = random.uniform();
    if (dtype == DType::kBFloat16) {
      append(m.data, float_to_bf16(x));
      value = bf16_to_float(float_to_bf16(x));
    } else {
      append(m.data, x);
      value = x;
    }
  }
  return m;
}

// x [rows, in] times the matrix, [rows, out].
inline std::vector<double> product(const Floats& x, const Matrix& m) {
  const int64_t rows = static_cast<int64_t>(x.size()) / m.in;
  std::vector<double> result(rows * m.out);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t n = 0; n < m.out; ++n) {
      double sum = 0;
      for (int64_t k = 0; k < m.in; ++k) sum += x[r * m.in + k] * m.values[n * m.in + k];
      result[r * m.out + n] = sum;
    }
  }
  return result;
}

// What a back end with bf16 activations takes them for.
inline Floats to_bf16_values(Floats x) {
  for (float& v : x) v = bf16_to_float(float_to_bf16(v));
  return x;
}

// Comparisons.

// Of values to float64 ones, relative to the greatest of those, and in the norm; infinite where
// only one side is a number or the sizes differ.
struct RelativeError {
  double worst = std::numeric_limits<double>::infinity();
  double norm = std::numeric_limits<double>::infinity();
};
template <typename T>
RelativeError relative_error(const std::vector<T>& a, const std::vector<double>& reference) {
  if (a.size() != reference.size()) return {};
  double worst = 0, largest = 0, errors = 0, squares = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    const double error = std::fabs(a[i] - reference[i]);
    if (!std::isfinite(error)) return {};
    worst = std::max(worst, error);
    largest = std::max(largest, std::fabs(reference[i]));
    errors += error * error;
    squares += reference[i] * reference[i];
  }
  if (worst == 0) return {0, 0};
  return {worst / largest, std::sqrt(errors / squares)};
}

// The greatest difference; infinite where only one side is a number or the sizes differ.
template <typename A, typename B>
double max_error(const std::vector<A>& a, const std::vector<B>& b) {
  if (a.size() != b.size()) return std::numeric_limits<double>::infinity();
  double worst = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    const double x = a[i], y = b[i];
    if (x == y) continue;
    const double error = std::fabs(x - y);
    worst = std::isnan(error) ? std::numeric_limits<double>::infinity() : std::max(worst, error);
  }
  return worst;
}

template <typename T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

// f32 as they lie in memory.
inline Ints bits(const Floats& x) {
  Ints out(x.size());
  std::memcpy(out.data(), x.data(), x.size() * sizeof(float));
  return out;
}

template <typename T>
void append(std::vector<T>& to, const std::vector<T>& from) {
  to.insert(to.end(), from.begin(), from.end());
}

template <typename T>
std::vector<T> slice(const std::vector<T>& from, int64_t begin, int64_t count) {
  return std::vector<T>(from.begin() + begin, from.begin() + begin + count);
}

}  // namespace kdt::test
