#include "model/synth_values.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>

#include "core/dtype.h"

namespace kdt {
namespace {

static_assert(std::endian::native == std::endian::little, "the files are little-endian");

constexpr int kIndexBits = 12, kEntries = 1 << kIndexBits;
// An int4 byte's two codes are picked apart, each with half of the index.
constexpr int kLevels = 1 << (kIndexBits / 2);
constexpr int kGroupBytes = 16, kMaxCode = 7;
// Of normal codes whose largest of 32 is about 7.
constexpr double kCodeDeviation = 3;
constexpr double kMaxE4m3 = 448;

// Word `index` of a splitmix64 stream (Steele, Lea and Flood 2014, section 4), by jumping to it.
inline uint64_t hashed(uint64_t key, uint64_t index) {
  uint64_t z = key + (index + 1) * 0x9E3779B97F4A7C15u;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

// The standard normal distribution's middle of the i-th of n equally likely parts.
double normal_part(int i, int n) {
  const double share = (i + 0.5) / n;
  double low = -10, high = 10;
  for (int step = 0; step < 60; ++step) {
    const double middle = (low + high) / 2;
    (0.5 * std::erfc(-middle / std::sqrt(2.0)) < share ? low : high) = middle;
  }
  return (low + high) / 2;
}

const std::vector<double>& normal_parts() {
  static const std::vector<double> parts = [] {
    std::vector<double> values;
    for (int i = 0; i < kEntries; ++i) values.push_back(normal_part(i, kEntries));
    return values;
  }();
  return parts;
}

std::vector<double> normal(double mean, double deviation) {
  std::vector<double> values = normal_parts();
  for (double& value : values) value = mean + deviation * value;
  return values;
}

std::vector<double> uniform(double size) {
  // 1 + 1/48 is the mean square of the uniform distribution from 3/4 to 5/4.
  const double middle = size / std::sqrt(1 + 1.0 / 48);
  std::vector<double> values;
  for (int i = 0; i < kEntries; ++i) values.push_back(middle * (0.75 + 0.5 * (i + 0.5) / kEntries));
  return values;
}

template <typename T, typename Convert>
SynthRecipe table(const std::vector<double>& values, const Convert& convert) {
  SynthRecipe recipe{SynthRecipe::Kind::kTable, sizeof(T), {}};
  recipe.bytes.resize(values.size() * sizeof(T));
  for (size_t i = 0; i < values.size(); ++i) {
    const T value = convert(values[i]);
    std::memcpy(recipe.bytes.data() + i * sizeof(T), &value, sizeof(T));
  }
  return recipe;
}

SynthRecipe table_bf16(const std::vector<double>& values) {
  return table<uint16_t>(values, [](double v) { return float_to_bf16(static_cast<float>(v)); });
}

SynthRecipe table_f32(const std::vector<double>& values) {
  return table<float>(values, [](double v) { return static_cast<float>(v); });
}

double e4m3_value(int bits) {
  const int exponent = bits >> 3 & 15, mantissa = bits & 7;
  return exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
}

// The nearest; |value| at most 448.
uint8_t to_e4m3(double value) {
  constexpr int kLargest = 0x7E;  // the next is NaN
  int nearest = 0;
  for (int bits = 1; bits <= kLargest; ++bits) {
    if (std::abs(e4m3_value(bits) - std::abs(value)) <
        std::abs(e4m3_value(nearest) - std::abs(value)))
      nearest = bits;
  }
  return static_cast<uint8_t>(nearest | (std::signbit(value) ? 0x80 : 0));
}

std::array<int, kLevels> code_levels() {
  std::array<int, kLevels> codes;
  for (int i = 0; i < kLevels; ++i) {
    const double code = std::round(kCodeDeviation * normal_part(i, kLevels));
    codes[i] = static_cast<int>(std::fmin(std::fmax(code, -kMaxCode), kMaxCode));
  }
  return codes;
}

// Calls make(index, out) for whole blocks; the ends of the range may lie inside of one.
template <uint64_t kBlock, typename Make>
void make_blocks(uint64_t begin, uint64_t end, uint8_t* out, const Make& make) {
  const auto part = [&](uint64_t to) {
    uint8_t block[kBlock];
    make(begin / kBlock, block);
    std::memcpy(out, block + begin % kBlock, to - begin);
    out += to - begin;
    begin = to;
  };
  if (begin < end && begin % kBlock != 0) part(std::min(end, (begin / kBlock + 1) * kBlock));
  const uint64_t last = end / kBlock;
  for (uint64_t index = begin / kBlock; begin < end && index < last; ++index) {
    make(index, out);
    out += kBlock;
    begin += kBlock;
  }
  if (begin < end) part(end);
}

// Four values from one hash.
template <typename T>
void make_values(const SynthRecipe& recipe, uint64_t key, uint64_t begin, uint64_t end,
                 uint8_t* out) {
  const uint8_t* values = recipe.bytes.data();
  make_blocks<4 * sizeof(T)>(begin, end, out, [=](uint64_t index, uint8_t* block) {
    const uint64_t hash = hashed(key, index);
    for (int i = 0; i < 4; ++i) {
      const uint64_t entry = hash >> (kIndexBits * i) & (kEntries - 1);
      std::memcpy(block + i * sizeof(T), values + entry * sizeof(T), sizeof(T));
    }
  });
}

void make_int4(const SynthRecipe& recipe, uint64_t key, uint64_t begin, uint64_t end,
               uint8_t* out) {
  const uint8_t* pairs = recipe.bytes.data();
  make_blocks<kGroupBytes>(begin, end, out, [=](uint64_t group, uint8_t* block) {
    uint64_t spare = 0;
    for (int word = 0; word < 4; ++word) {
      const uint64_t hash = hashed(key, 4 * group + word);
      for (int i = 0; i < 4; ++i)
        block[4 * word + i] = pairs[hash >> (kIndexBits * i) & (kEntries - 1)];
      spare = hash >> 48;
    }
    // One code of the group is made the largest there is: absmax / 7 is the scale.
    uint8_t& byte = block[spare & 15];
    const int shift = spare >> 4 & 1 ? 4 : 0;
    const int code = spare >> 5 & 1 ? 8 + kMaxCode : 8 - kMaxCode;
    byte = static_cast<uint8_t>((byte & (0xF0 >> shift)) | code << shift);
  });
}

}  // namespace

SynthRecipe normal_bf16(double mean, double deviation) {
  return table_bf16(normal(mean, deviation));
}
SynthRecipe normal_f32(double mean, double deviation) { return table_f32(normal(mean, deviation)); }
SynthRecipe scales_bf16(double size) { return table_bf16(uniform(size)); }
SynthRecipe scales_f32(double size) { return table_f32(uniform(size)); }

SynthRecipe int4_codes() {
  const auto codes = code_levels();
  SynthRecipe recipe{SynthRecipe::Kind::kInt4, 1, {}};
  for (int i = 0; i < kEntries; ++i) {
    const int low = codes[i % kLevels] + 8, high = codes[i / kLevels] + 8;
    recipe.bytes.push_back(static_cast<uint8_t>(low | high << 4));
  }
  return recipe;
}

double int4_unit() {
  static const double unit = [] {
    double square = 0;
    for (const int code : code_levels()) square += static_cast<double>(code * code) / kLevels;
    return 1 / std::sqrt((31 * square + kMaxCode * kMaxCode) / 32);
  }();
  return unit;
}

SynthRecipe fp8_codes() { return table<uint8_t>(normal(0, 1 / fp8_unit()), to_e4m3); }

double fp8_unit() { return normal_parts().back() / kMaxE4m3; }

void make_synth_bytes(const SynthRecipe& recipe, uint64_t key, uint64_t begin, uint64_t end,
                      uint8_t* out) {
  switch (recipe.kind) {
    case SynthRecipe::Kind::kInt4:
      return make_int4(recipe, key, begin, end, out);
    case SynthRecipe::Kind::kTable:
      if (recipe.value_bytes == 1) return make_values<uint8_t>(recipe, key, begin, end, out);
      if (recipe.value_bytes == 2) return make_values<uint16_t>(recipe, key, begin, end, out);
      return make_values<float>(recipe, key, begin, end, out);
    case SynthRecipe::Kind::kLiteral:
      std::memcpy(out, recipe.bytes.data() + begin, end - begin);
  }
}

}  // namespace kdt
