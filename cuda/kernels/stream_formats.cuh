// How the products of stream.cuh read packed weights (repack.h) and activations.
#pragma once

#include "primitives.cuh"

namespace kdt::cuda {

// How a warp takes a chunk of one stripe and multiplies it with `kTiles` tiles of eight rows.

struct Int4Format {
  static constexpr int kChunkBytes = 576;
  static constexpr int kGroups = 2;  // of 32 k
  struct Stripe {
    uint4 words;
    uint2 scales;
  };

  __device__ static Stripe load(const unsigned char* chunk, int lane) {
    return {*reinterpret_cast<const uint4*>(chunk + lane * 16),
            *reinterpret_cast<const uint2*>(chunk + 512 + lane / 4 * 8)};
  }

  // Exact: a nibble in the mantissa of 128 is 128 + nibble, and the value is nibble - 8.
  __device__ static void unpack(uint32_t word, uint32_t (&a)[4]) {
#pragma unroll
    for (int s = 0; s < 4; ++s)
      a[s] = sub_bf16x2(and_or(word >> (4 * s), 0x000F000Fu, 0x43004300u), 0x43084308u);
  }

  // The group's scale is applied in f32 to the group's sum.
  template <int kTiles>
  __device__ static void multiply(const Stripe& stripe, int group, const uint4 (&b)[kTiles],
                                  float (&sum)[kTiles][4]) {
    uint32_t first[4], second[4];
    unpack(group == 0 ? stripe.words.x : stripe.words.z, first);
    unpack(group == 0 ? stripe.words.y : stripe.words.w, second);
    const float upper = group == 0 ? bf16_low(stripe.scales.x) : bf16_high(stripe.scales.x);
    const float lower = group == 0 ? bf16_low(stripe.scales.y) : bf16_high(stripe.scales.y);
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      float part[4] = {0, 0, 0, 0};
      mma_bf16(part, first, b[n].x, b[n].y);
      mma_bf16(part, second, b[n].z, b[n].w);
      sum[n][0] = fmaf(upper, part[0], sum[n][0]);
      sum[n][1] = fmaf(upper, part[1], sum[n][1]);
      sum[n][2] = fmaf(lower, part[2], sum[n][2]);
      sum[n][3] = fmaf(lower, part[3], sum[n][3]);
    }
  }
};

struct BFloat16Format {
  static constexpr int kChunkBytes = 1024;
  static constexpr int kGroups = 1;
  struct Stripe {
    uint4 first, second;
  };

  __device__ static Stripe load(const unsigned char* chunk, int lane) {
    const auto* fragments = reinterpret_cast<const uint4*>(chunk) + lane;
    return {fragments[0], fragments[32]};
  }

  template <int kTiles>
  __device__ static void multiply(const Stripe& stripe, int, const uint4 (&b)[kTiles],
                                  float (&sum)[kTiles][4]) {
    const uint4 &f = stripe.first, &s = stripe.second;
    const uint32_t first[4] = {f.x, f.y, f.z, f.w}, second[4] = {s.x, s.y, s.z, s.w};
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      mma_bf16(sum[n], first, b[n].x, b[n].y);
      mma_bf16(sum[n], second, b[n].z, b[n].w);
    }
  }
};

// How a lane takes eight consecutive activations of one row as four pairs of bf16.

struct BFloat16Source {
  using Value = uint16_t;
  using Raw = uint4;
  __device__ static Raw load(const Value* from) { return load_16(from); }
  __device__ static uint4 pairs(const Raw& raw) { return raw; }
};

struct Float32Source {
  using Value = float;
  struct Raw {
    uint4 low, high;
  };
  __device__ static Raw load(const Value* from) { return {load_16(from), load_16(from + 4)}; }
  __device__ static uint32_t pair(uint32_t a, uint32_t b) {
    return pack_bf16(__uint_as_float(a), __uint_as_float(b));
  }
  __device__ static uint4 pairs(const Raw& raw) {
    return make_uint4(pair(raw.low.x, raw.low.y), pair(raw.low.z, raw.low.w),
                      pair(raw.high.x, raw.high.y), pair(raw.high.z, raw.high.w));
  }
};

}  // namespace kdt::cuda
