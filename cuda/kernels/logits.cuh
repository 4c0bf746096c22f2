// Reading rows of logits, and their order as unsigned integers.
#pragma once

#include "kernels/logits.h"
#include "primitives.cuh"

namespace kdt::cuda {

__device__ __forceinline__ float minus_infinity() { return __uint_as_float(0xFF800000u); }

// Greater numbers have greater bits, the two zeros the same; none has 0. x is not NaN.
__device__ __forceinline__ uint32_t ordered(float x) {
  const uint32_t bits = x == 0 ? 0 : __float_as_uint(x);
  return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float number_of(uint32_t ordered) {
  return __uint_as_float((ordered & 0x80000000u) != 0 ? ordered & 0x7FFFFFFFu : ~ordered);
}

// Of distinct positions, so that the greatest is the first of the greatest numbers.
__device__ __forceinline__ uint64_t key_of(uint32_t ordered, int64_t position) {
  return static_cast<uint64_t>(ordered) << 32 | static_cast<uint32_t>(~position);
}
__device__ __forceinline__ int32_t position_of(uint64_t key) {
  return static_cast<int32_t>(~static_cast<uint32_t>(key));
}

// Logits i to i + 3 of a row of n; NaN past its end. `aligned`: logits_aligned of the rows; i is a
// multiple of 4.
__device__ __forceinline__ void load_quad(const float* row, int64_t i, int64_t n, bool aligned,
                                          float (&x)[4]) {
  if (aligned && i < n) {
    const uint4 bits = load_16(row + i);
    x[0] = __uint_as_float(bits.x);
    x[1] = __uint_as_float(bits.y);
    x[2] = __uint_as_float(bits.z);
    x[3] = __uint_as_float(bits.w);
    return;
  }
#pragma unroll
  for (int j = 0; j < 4; ++j) x[j] = i + j < n ? row[i + j] : __uint_as_float(0x7FC00000u);
}

}  // namespace kdt::cuda
