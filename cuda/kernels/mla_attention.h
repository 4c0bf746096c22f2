// Attention over latent rows: a head's key is the whole row, its value the row's first `rank`
// numbers, and all heads share them.
//
// A row at position p takes the keys below mla_prefix_keys(p) by position, in segments that end at
// absolute positions, and the keys from there to p along its own path (docs/adr/0010). A segment
// or path of a row gives a partial result; mla_merge adds them in order.
#pragma once

#include <cuda_runtime_api.h>

#include "sequences.h"

namespace kdt::cuda {

inline constexpr int32_t kMlaTreeDepth = 64;                // kMaxTreeDepth of backend/checks.h
inline constexpr int32_t kMlaPathKeys = 2 * kMlaTreeDepth;  // at most, the row itself included

// A multiple of 64 at least kMlaTreeDepth positions back: below it every tree's keys are committed
// or, in a chain, lie in the cache in the order of their positions.
__host__ __device__ inline int32_t mla_prefix_keys(int32_t position) {
  return position < 2 * kMlaTreeDepth ? 0 : (position - kMlaTreeDepth) / 64 * 64;
}

// Segments of 128 keys up to position 1024, of 256 up to 4096, of 512 up to 16384, of 1024 up to
// 65536, then of 2048. One token is one row tile, so it wants many segments; a tree of 65 nodes
// fills the chip anyway and pays 2 MB of traffic for each (520 rows of 512 f32, written and read),
// but shares the blocks out better when the last ones are short.
inline constexpr int32_t kMlaSegmentMost = 2048;
__host__ __device__ inline int32_t mla_segment_begin(int32_t index) {
  return index < 8    ? index * 128
         : index < 20 ? 1024 + (index - 8) * 256
         : index < 44 ? 4096 + (index - 20) * 512
         : index < 92 ? 16384 + (index - 44) * 1024
                      : 65536 + (index - 92) * 2048;
}
// Segments that begin before a position.
__host__ __device__ inline int32_t mla_segment_count(int32_t keys) {
  return keys <= 1024    ? (keys + 127) / 128
         : keys <= 4096  ? 8 + (keys - 1024 + 255) / 256
         : keys <= 16384 ? 20 + (keys - 4096 + 511) / 512
         : keys <= 65536 ? 44 + (keys - 16384 + 1023) / 1024
                         : 92 + (keys - 65536 + 2047) / 2048;
}

struct MlaAttentionParams {
  const float* query;        // [num_rows, num_heads, rank + rope], scaled
  const uint16_t* layer;     // bf16 [num_blocks * block_size, row_stride]
  const int32_t* positions;  // [num_rows]
  float* out;                // [num_rows, num_heads, rank]
  // Of rows [first_row, end_row), for each of their heads; the path's comes last.
  float* partial_out;    // [end_row - first_row, num_heads, num_segments + 1, rank], not divided
  float2* partial_sums;  // [.., num_segments + 1]: score weights are relative to, their sum
  Sequences sequences;
  int64_t row_stride;
  int32_t num_heads, rank, rope;
  int32_t first_row, end_row;
  int32_t num_segments;
};

struct MlaChip {
  int num_multiprocessors;
  int64_t shared_bytes;  // of a multiprocessor
};

// True when the tensor cores have a kernel for these sizes: rank 512 or 128, rope 64.
bool mla_runs_on_tensor_cores(int64_t rank, int64_t rope, int64_t block_size);

// The partial results of rows [first_row, end_row). Products of bf16 with f32 sums; the query is
// rounded to bf16, and so are the weights, whose sum is taken after rounding. Floor: 2 * rows *
// heads * keys * (2 * rank + rope) operations, and each key's row once for a block's 16 to 64
// (row, head) pairs.
void launch_mla_attention(const MlaAttentionParams& params, const MlaChip& chip,
                          cudaStream_t stream);
void launch_mla_merge(const MlaAttentionParams& params, cudaStream_t stream);

// All rows at any sizes, in f32 but for the cache: for models whose speed does not matter. No
// partial results.
void launch_mla_attention_plain(const MlaAttentionParams& params, cudaStream_t stream);

}  // namespace kdt::cuda
