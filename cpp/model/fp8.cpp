#include "model/fp8.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <vector>

#include "core/dtype.h"
#include "core/error.h"

namespace kdt {
namespace {

constexpr float kMax = 448;  // of e4m3

bool is_nan(uint8_t code) { return (code & 0x7f) == 0x7f; }

// Code times scale, rounded. A code is sign, 4 bits of exponent with bias 7, 3 of mantissa: moved
// to f32's places it is 2^-120 of its value, subnormal or not. Without a branch, so that loops
// become vectors.
uint16_t widen(uint8_t code, float scale) {
  const float value =
      std::bit_cast<float>((code & 0x80u) << 24 | (code & 0x7fu) << 20) * 0x1p120f * scale;
  const auto bits = std::bit_cast<uint32_t>(value);
  return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

}  // namespace

void widen_fp8(const Fp8Matrix& m, int64_t begin, int64_t end, uint16_t* out) {
  const int64_t across = (m.columns + kFp8Block - 1) / kFp8Block;
  std::vector<float> scales(across);  // of the blocks of a row
  for (int64_t row = begin; row < end; ++row) {
    if ((row - begin) % kFp8Block == 0) {
      const int64_t down = row / kFp8Block;
      std::memcpy(scales.data(), m.scale_inv + down * across * sizeof(float),
                  across * sizeof(float));
      for (int64_t i = 0; i < across; ++i) {
        KDT_CHECK(std::isfinite(bf16_to_float(float_to_bf16(scales[i] * kMax))),
                  "weight_scale_inv[", down, ", ", i, "] is ", scales[i]);
      }
    }
    for (int64_t column = 0; column < m.columns; column += kFp8Block) {
      const int64_t columns = std::min(kFp8Block, m.columns - column);
      const float scale = scales[column / kFp8Block];
      const uint8_t* from = m.codes + row * m.columns + column;
      unsigned found = 0;
      for (int64_t i = 0; i < columns; ++i) {
        found |= is_nan(from[i]) ? 1u : 0u;
        out[i] = widen(from[i], scale);
      }
      out += columns;
      if (found == 0) continue;
      const int64_t at = std::find_if(from, from + columns, is_nan) - from;
      throw Error(join("weight[", row, ", ", column + at, "] is NaN"));
    }
  }
}

}  // namespace kdt
