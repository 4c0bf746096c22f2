// A drafter's attention: the rows of a block over their cached context and the block itself.
#pragma once

#include <cuda_runtime_api.h>

#include "sequences.h"

namespace kdt::cuda {

// Heads of 64 and 128 go through the tensor cores, 16 rows of one query head a warp, the keys of a
// key-value head shared by its query heads; other sizes through a plain kernel. Keys are cut into
// segments whose partial results are merged in order. Floor: the cache's rows are read once a
// key-value head and 16 rows; 4 * rows * heads * keys * head_dim operations.
struct GqaAttentionParams {
  const uint16_t* query;  // bf16 [num_rows, num_heads, head_dim], normalised, rotated, scaled by
                          // scale * log2(e)
  const uint16_t* layer;  // bf16 [num_blocks * block_size, row_stride]: keys, then values
  float* out;             // [num_rows, num_heads, head_dim]
  float* partial_out;     // [num_rows, num_heads, num_segments, head_dim], not divided by the sum
  float2* partial_lse;    // [num_rows, num_heads, num_segments]: greatest score, sum of weights
  Sequences sequences;
  int64_t num_heads, kv_heads, head_dim, row_stride, window;
  int32_t num_segments, segment_size;
  bool causal;
};
void launch_gqa_attention(const GqaAttentionParams& params, cudaStream_t stream);

}  // namespace kdt::cuda
