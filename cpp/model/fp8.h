// FP8 weights in blocks of 128 x 128, as DeepSeek-V3 stores them (technical report, section 3.3).
#pragma once

#include <cstdint>

namespace kdt {

constexpr int64_t kFp8Block = 128;

// A matrix [rows, columns] of e4m3 codes (OCP 8-bit floating point, section 5.3: no infinity, 0x7f
// and 0xff are NaN), each block with its factor.
struct Fp8Matrix {
  const uint8_t* codes = nullptr;
  const uint8_t* scale_inv = nullptr;  // f32 [ceil(rows / 128), ceil(columns / 128)]; any alignment
  int64_t rows = 0;
  int64_t columns = 0;
};

// Rows [begin, end) as bf16, from `out` on: each code times its block's factor in f32, rounded to
// nearest, ties to even. `begin` is a multiple of 128. Throws Error naming the place of a NaN, or
// of a factor that bf16 cannot hold multiplied.
void widen_fp8(const Fp8Matrix& matrix, int64_t begin, int64_t end, uint16_t* out);

}  // namespace kdt
