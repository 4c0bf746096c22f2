// Filling and moving rows of the caches, and rotating queries. All are launches of a few
// microseconds; what they move is each row once.
#pragma once

#include <cuda_runtime_api.h>

#include "sequences.h"

namespace kdt::cuda {

struct RopeParams {
  const float* cos_sin;      // [num_positions, dim]: dim / 2 cosines, then as many sines
  const int32_t* positions;  // [num_rows]
  int64_t num_positions;
  int32_t dim;
  bool interleaved;
};

// Rotates the last rope.dim values of each head and scales them.
struct RotateQueryParams {
  const float* q;  // [num_rows, num_heads, q_stride], the rotated part at q_begin
  float* out;      // [num_rows, num_heads, out_stride], likewise at out_begin
  RopeParams rope;
  Fault* fault;
  int64_t num_rows, num_heads, q_stride, q_begin, out_stride, out_begin;
  float scale;
};
void launch_rotate_query(const RotateQueryParams& params, cudaStream_t stream);

// RMSNorm, rotation, scale and rounding to bf16 of whole heads, such as a drafter's queries.
struct PrepareHeadsParams {
  const float* x;       // [num_rows, num_heads, rope.dim]
  const float* weight;  // [rope.dim]
  uint16_t* out;        // [num_rows, num_heads, rope.dim] bf16
  RopeParams rope;
  Fault* fault;
  int64_t num_rows, num_heads;
  float eps, scale;
};
void launch_prepare_heads(const PrepareHeadsParams& params, cudaStream_t stream);

struct MlaStoreParams {
  const float* kv;           // [num_rows, kv_stride], the latent row from the pointer on
  const float* norm_weight;  // [rank]
  uint16_t* layer;           // bf16 [num_blocks * block_size, row_stride]
  RopeParams rope;
  Sequences sequences;
  int64_t kv_stride, rank, row_stride;
  float eps;
};
void launch_mla_store(const MlaStoreParams& params, cudaStream_t stream);

struct GqaStoreParams {
  const float*
      kv;  // [num_rows, kv_stride]: kv_heads keys of rope.dim from the pointer on, then values
  const float* k_norm;  // [rope.dim]
  uint16_t* layer;      // bf16 [num_blocks * block_size, row_stride]: keys, then values
  RopeParams rope;
  Sequences sequences;
  int64_t kv_stride, kv_heads, row_stride;
  float eps;
};
void launch_gqa_store(const GqaStoreParams& params, cudaStream_t stream);

struct KvCompactParams {
  uint16_t* memory;            // bf16 [num_layers, num_blocks * block_size, row_stride]
  const int32_t* block_table;  // [num_table_blocks]
  const int32_t* from;         // [num_moves] ascending
  const int32_t* to;           // [num_moves] ascending, to[i] <= from[i]
  Fault* fault;
  int64_t num_layers, num_blocks, row_stride, num_moves;
  int32_t num_table_blocks, block_size;
};
void launch_kv_compact(const KvCompactParams& params, cudaStream_t stream);

}  // namespace kdt::cuda
