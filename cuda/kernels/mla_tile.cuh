// The steps of mla_attention that fill and use its registers.
#pragma once

#include "kernels/mla_config.cuh"

namespace kdt::cuda {

// Where a thread stands. Each step asks anew: what it derives from it must not stay in registers,
// which the query and the output fill.
struct MlaPlace {
  int lane, warp, group;
};
template <typename C>
__device__ __forceinline__ MlaPlace mla_place() {
  const unsigned thread = forget(threadIdx.x);
  return {static_cast<int>(thread % 32), static_cast<int>(thread / 32 % 4),
          C::kGroups == 1 ? 0 : static_cast<int>(thread / 128)};
}

// This warp's slice of the scores, handed to their owners; `own` is what it keeps. `pieces`: the
// tile's two.
template <typename C>
__device__ __forceinline__ void mla_scores(typename C::Shared& shared,
                                           const uint32_t (&q)[C::kTiles][C::kQuerySteps][4],
                                           const uint32_t (&pieces)[2], float (&own)[2][4]) {
  const auto [lane, warp, group] = mla_place<C>();
  float2* exchange = shared.exchange[group] + lane;
  // Key lane / 16 * 8 + lane % 8, half lane / 8 % 2 of the warp's 16 dimensions.
  const uint32_t offset =
      (lane / 16 * 8 + lane % 8) * C::kRowBytes + (((2 * warp + lane / 8 % 2) ^ lane % 8) << 4);
  constexpr int kM = C::kTiles;
  // Independent chains of mma: two pieces at once where registers allow it.
  constexpr int kAtOnce = kM * C::kGroups == 1 ? 2 : 1;
#pragma unroll
  for (int base = 0; base < 2; base += kAtOnce) {
    float c[kAtOnce][kM][2][4] = {};
#pragma unroll
    for (int step = 0; step < C::kQuerySteps; ++step) {
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        uint32_t k[4];
        ldmatrix_x4(k, pieces[base + i] + offset + step * 128);
#pragma unroll
        for (int m = 0; m < kM; ++m) {
          mma_bf16(c[i][m][0], q[m][step], k[0], k[1]);
          mma_bf16(c[i][m][1], q[m][step], k[2], k[3]);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
#pragma unroll
      for (int owner = 0; owner < 2 * kM; ++owner) {
        const int slot = owner * 3 + warp - (warp > owner);
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          const float* slice = c[i][owner / 2][n] + owner % 2 * 2;
          if (owner == 0 || owner == warp) {  // a warp that owns no pairs does not use it
            own[base + i][2 * n] = slice[0];
            own[base + i][2 * n + 1] = slice[1];
          }
          if (owner != warp)
            exchange[((slot * 2 + base + i) * 2 + n) * 32] = make_float2(slice[0], slice[1]);
        }
      }
    }
  }
}

// By an owner warp for its 8 pairs: pair lane / 4 with keys 16 i + 8 n + 2 (lane % 4), + 1 of the
// tile at v[i][2 n], + 1.
template <typename C>
__device__ __forceinline__ void mla_softmax(typename C::Shared& shared, float (&v)[2][4],
                                            int tile) {
  const auto [lane, warp, group] = mla_place<C>();
  const int pair = 16 * C::kTiles * group + 8 * warp + lane / 4;
  const int32_t limit = shared.limits[pair] - tile * kMlaTileKeys;
  float2* mine = shared.exchange[group] + warp * 3 * 4 * 32 + lane;
#pragma unroll
  for (int j = 0; j < 4; ++j) {  // 2 i + n
    float2 total = make_float2(0, 0);
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const float2 slice = w == warp ? make_float2(v[j / 2][j % 2 * 2], v[j / 2][j % 2 * 2 + 1])
                                     : mine[((w - (w > warp)) * 4 + j) * 32];
      total = w == 0 ? slice : make_float2(total.x + slice.x, total.y + slice.y);
    }
    v[j / 2][j % 2 * 2] = total.x;
    v[j / 2][j % 2 * 2 + 1] = total.y;
  }
  if (limit < kMlaTileKeys) {
#pragma unroll
    for (int j = 0; j < 8; ++j)
      if (16 * (j / 4) + 8 * (j % 4 / 2) + 2 * (lane % 4) + j % 2 >= limit)
        v[j / 4][j % 4] = -INFINITY;
  }
  const float2 before = shared.sums[pair];
  float top = -INFINITY;
#pragma unroll
  for (int j = 0; j < 8; ++j) top = fmaxf(top, v[j / 4][j % 4]);
  top = fmaxf(top, __shfl_xor_sync(0xFFFFFFFFu, top, 1));
  top = fmaxf(top, __shfl_xor_sync(0xFFFFFFFFu, top, 2));
  // Weights are relative to a score that need not be the greatest: only when one is 2^8 times as
  // heavy is what was summed scaled down, which few tiles need.
  constexpr float kSlack = 8;
  if (!(top > before.x + kSlack)) top = before.x;
  const float shift = top == -INFINITY ? 0.0f : top;  // nothing seen yet: all weights 0
  const float scale = exp2_approx(before.x - shift);
  uint32_t weights[4];
  float part[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    weights[j] = pack_bf16(exp2_approx(v[j / 2][j % 2 * 2] - shift),
                           exp2_approx(v[j / 2][j % 2 * 2 + 1] - shift));
    part[j] = bf16_low(weights[j]) + bf16_high(weights[j]);
  }
  __syncwarp();  // all lanes have read what the weights overwrite
  auto* given = reinterpret_cast<uint32_t*>(mine - lane) + lane;
#pragma unroll
  for (int j = 0; j < 4; ++j) given[j * 32] = weights[j];
  float sum = (part[0] + part[1]) + (part[2] + part[3]);
  sum += __shfl_xor_sync(0xFFFFFFFFu, sum, 1);
  sum += __shfl_xor_sync(0xFFFFFFFFu, sum, 2);
  if (lane % 4 == 0) {
    shared.sums[pair] = make_float2(top, fmaf(before.y, scale, sum));
    shared.scales[pair] = scale;
  }
}

// out = out * scale + weights * values.
template <typename C>
__device__ __forceinline__ void mla_add_values(typename C::Shared& shared,
                                               float (&out)[C::kTiles][C::kOutSteps][2][4],
                                               const uint32_t (&pieces)[2]) {
  const auto [lane, warp, group] = mla_place<C>();
  constexpr int kM = C::kTiles;
  const float* scales = shared.scales + 16 * C::kTiles * group + lane / 4;
  const auto* given = reinterpret_cast<const uint32_t*>(shared.exchange[group]) + lane;
  // Key lane / 8 % 2 * 8 + lane % 8, half lane / 16 of the warp's 16 columns.
  const uint32_t offset =
      (lane / 8 % 2 * 8 + lane % 8) * C::kRowBytes + (((2 * warp + lane / 16) ^ lane % 8) << 4);
  float scale[kM][2];
  bool moved = false;
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      scale[m][e] = scales[16 * m + 8 * e];
      moved = moved || scale[m][e] != 1.0f;
    }
  }
  if (__any_sync(0xFFFFFFFFu, moved)) {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int j = 0; j < C::kOutSteps * 8; ++j)
        out[m][j / 8][j / 4 % 2][j % 4] *= scale[m][j % 4 / 2];
    }
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    uint32_t a[kM][4];
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int j = 0; j < 4; ++j)  // word by word: a fragment wants its registers in a row
        a[m][j] = given[(2 * m + j % 2) * 3 * 4 * 64 + (2 * i + j / 2) * 32];
    }
#pragma unroll
    for (int step = 0; step < C::kOutSteps; ++step) {
      uint32_t v[4];
      ldmatrix_x4_trans(v, pieces[i] + offset + step * 128);
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        mma_bf16(out[m][step][0], a[m], v[0], v[1]);
        mma_bf16(out[m][step][1], a[m], v[2], v[3]);
      }
    }
  }
}

// Starts the copy of a piece, by all threads: eight lanes copy a key's row, 128 bytes at a time. A
// row's 16-byte columns are swizzled by the key, so that eight keys' columns lie in different
// banks.
template <typename C>
__device__ __forceinline__ void mla_copy_piece(const MlaAttentionParams& p,
                                               typename C::Shared& shared, int piece) {
  if (piece < 2 * shared.item.num_tiles) {
    const unsigned thread = forget(threadIdx.x);
    const int key = thread / 8 % kMlaPieceKeys, column = thread % 8;
    const int group = C::kGroups == 1 ? 0 : thread / 128;  // takes every other 128 bytes
    const int64_t first = shared.keys[C::kIsPath ? piece * kMlaPieceKeys + key : piece];
    const int64_t row = C::kIsPath ? first : first + key;
    unsigned char* to = shared.ring[piece % C::kPieces] + key * C::kRowBytes +
                        ((column ^ key % 8) << 4) + group * 128;
    if (first >= 0) {
      const uint16_t* from = p.layer + row * p.row_stride + column * 8 + group * 64;
#pragma unroll
      for (int step = 0; step < C::kQuerySteps; step += C::kGroups) {
        if (step + C::kGroups <= C::kQuerySteps || step + group < C::kQuerySteps)
          cp_async_16(shared_address(to) + step * 128, from + step * 64);
      }
    } else {
#pragma unroll
      for (int step = 0; step < C::kQuerySteps; step += C::kGroups) {
        if (step + C::kGroups <= C::kQuerySteps || step + group < C::kQuerySteps)
          *reinterpret_cast<uint4*>(to + step * 128) = make_uint4(0, 0, 0, 0);
      }
    }
  }
  cp_async_commit();
}

// The warp's slice of the query of its group's pairs; pairs past `count` are 0.
template <typename C>
__device__ __forceinline__ void mla_load_query(const MlaAttentionParams& p,
                                               const typename C::Shared& shared, int count,
                                               uint32_t (&q)[C::kTiles][C::kQuerySteps][4]) {
  const auto [lane, warp, group] = mla_place<C>();
  const int64_t first = static_cast<int64_t>(shared.item.row) * p.num_heads + shared.item.head +
                        16 * C::kTiles * group + lane / 4;
  const float* from = p.query + first * C::kWidth + 16 * warp + 2 * (lane % 4);
  constexpr float kLog2E = 1.44269504f;  // weights are powers of two
#pragma unroll
  for (int m = 0; m < C::kTiles; ++m) {
#pragma unroll
    for (int step = 0; step < C::kQuerySteps; ++step) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int pair = 16 * m + i % 2 * 8;
        float2 value = make_float2(0, 0);
        if (pair + lane / 4 < count)
          value = *reinterpret_cast<const float2*>(from + pair * C::kWidth + 64 * step + i / 2 * 8);
        q[m][step][i] = pack_bf16(value.x * kLog2E, value.y * kLog2E);
      }
    }
  }
}

// The partial result of the item.
template <typename C>
__device__ __forceinline__ void mla_store_out(const MlaAttentionParams& p,
                                              typename C::Shared& shared,
                                              const float (&out)[C::kTiles][C::kOutSteps][2][4]) {
  const auto [lane, warp, group] = mla_place<C>();
  const int64_t slots = p.num_segments + 1;
  const int32_t slot = C::kIsPath ? p.num_segments : shared.item.segment;
  const int64_t first =
      static_cast<int64_t>(shared.item.row - p.first_row) * p.num_heads + shared.item.head;
#pragma unroll
  for (int m = 0; m < C::kTiles; ++m) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int pair = 16 * C::kTiles * group + 16 * m + 8 * e + lane / 4;
      if (shared.limits[pair] <= 0) continue;  // never read
      float* to =
          p.partial_out + ((first + pair) * slots + slot) * C::kRank + 16 * warp + 2 * (lane % 4);
#pragma unroll
      for (int j = 0; j < 2 * C::kOutSteps; ++j) {
        *reinterpret_cast<float2*>(to + j / 2 * 64 + j % 2 * 8) =
            make_float2(out[m][j / 2][j % 2][2 * e], out[m][j / 2][j % 2][2 * e + 1]);
      }
    }
  }
  const int pair = forget(threadIdx.x);
  if (pair < C::kPairs && shared.limits[pair] > 0)
    p.partial_sums[(first + pair) * slots + slot] = shared.sums[pair];
}

}  // namespace kdt::cuda
