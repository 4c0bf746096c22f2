#include "model/fp8.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "core/dtype.h"
#include "core/error.h"

namespace kdt {
namespace {

constexpr float kMax = 448;  // of e4m3

bool is_nan(uint8_t code) { return (code & 0x7f) == 0x7f; }

// Sign, 4 bits of exponent with bias 7, 3 of mantissa.
float e4m3_to_float(uint8_t code) {
  const int exponent = code >> 3 & 15, mantissa = code & 7;
  const float size = exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -9)
                                   : std::ldexp(static_cast<float>(8 + mantissa), exponent - 10);
  return (code & 0x80) != 0 ? -size : size;
}

}  // namespace

void widen_fp8(const Fp8Matrix& m, int64_t begin, int64_t end, uint16_t* out) {
  static const std::array<float, 256> kValues = [] {
    std::array<float, 256> values;
    for (int code = 0; code < 256; ++code) values[code] = e4m3_to_float(static_cast<uint8_t>(code));
    return values;
  }();
  const int64_t across = (m.columns + kFp8Block - 1) / kFp8Block;
  for (int64_t row = begin; row < end; row += kFp8Block) {
    const int64_t rows = std::min(kFp8Block, end - row);
    for (int64_t column = 0; column < m.columns; column += kFp8Block) {
      const int64_t columns = std::min(kFp8Block, m.columns - column);
      const int64_t block = row / kFp8Block * across + column / kFp8Block;
      float scale;
      std::memcpy(&scale, m.scale_inv + block * sizeof(float), sizeof(scale));
      KDT_CHECK(std::isfinite(bf16_to_float(float_to_bf16(scale * kMax))), "weight_scale_inv[",
                row / kFp8Block, ", ", column / kFp8Block, "] is ", scale);
      // A block has more values than there are codes.
      std::array<uint16_t, 256> widened;
      for (int code = 0; code < 256; ++code) widened[code] = float_to_bf16(kValues[code] * scale);
      for (int64_t r = row; r < row + rows; ++r) {
        const uint8_t* from = m.codes + r * m.columns + column;
        uint16_t* to = out + (r - begin) * m.columns + column;
        unsigned found = 0;
        for (int64_t c = 0; c < columns; ++c) {
          found |= is_nan(from[c]) ? 1u : 0u;
          to[c] = widened[from[c]];
        }
        if (found == 0) continue;
        const int64_t at = std::find_if(from, from + columns, is_nan) - from;
        throw Error(join("weight[", r, ", ", column + at, "] is NaN"));
      }
    }
  }
}

}  // namespace kdt
