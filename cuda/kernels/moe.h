// Routing of tokens to experts, and the experts' products with packed weights. The experts of a
// product are first_expert, of the routing's ids, and those that follow it.
//
// A slot is a pair (token, k) of the routing, number token * top_k + k. The slots of an expert are
// cut into tiles of up to `tile_rows`; a tile's products read the expert's weights once.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/dtype.h"

namespace kdt::cuda {

struct MoeRouteParams {
  const float* logits;  // [num_rows, num_experts]
  const float* bias;    // [num_experts]
  int32_t* ids;         // [num_rows, top_k]
  float* weights;       // [num_rows, top_k]
  int64_t num_rows, num_experts, top_k, n_group, topk_group;
  float routed_scaling_factor;
  bool norm_topk_prob;
};
void launch_moe_route(const MoeRouteParams& params, cudaStream_t stream);

// Whether a routing's id is one of `count` experts from `first` on.
__host__ __device__ inline bool is_expert(int32_t id, int32_t first, int32_t count) {
  return static_cast<uint32_t>(id) - static_cast<uint32_t>(first) < static_cast<uint32_t>(count);
}

// Tiles of a launch, made by launch_moe_prepare. For a few slots there is nothing to gain by
// sorting: with num_tiles null, tile i is slot i alone, max_tiles are all, and expert_of_tile are
// the routing's ids; one that is no expert has expert 0's weights, and its result is not used.
template <typename Int>
struct MoeTilesOf {
  Int* num_tiles;       // [1]
  Int* expert_of_tile;  // [max_tiles]
  Int* slots_of_tile;   // [max_tiles, tile_rows] in ascending order, -1 behind the last
};
using MoeTiles = MoeTilesOf<const int32_t>;
int64_t max_moe_tiles(int64_t num_slots, int64_t num_experts, int64_t tile_rows);

// Sorts the slots by expert, leaving out ids that are none, and rounds x to bf16, with zeros behind
// each row.
struct MoePrepareParams {
  const float* x;      // [num_tokens, hidden_size]
  const int32_t* ids;  // [num_tokens, top_k]
  uint16_t* x_bf16;    // [num_tokens, x_stride]
  MoeTilesOf<int32_t> tiles;
  int64_t num_tokens, hidden_size, x_stride;
  int32_t top_k, first_expert, num_experts, tile_rows;
};
inline constexpr int64_t kMaxExperts = 16384;
void launch_moe_prepare(const MoePrepareParams& params, cudaStream_t stream);

// One of the two products of all experts.
struct MoeProductParams {
  const unsigned char* weights;  // panels of every expert, one expert after another
  DType dtype;                   // of the weights: kBFloat16, kInt32 (int4)
  int32_t num_chunks, k_warps;
  int32_t num_stripes;  // of an expert, even
  MoeTiles tiles;
  int32_t tile_rows;  // 8, 16 or 32
  int32_t max_tiles;
  int32_t first_expert;  // what expert_of_tile counts from; 0 when prepared
  int32_t num_experts;
  const void* x;    // bf16 [.., x_stride]; a slot's row is slot / slots_per_x
  bool x_is_float;  // f32 instead, without zeros behind a row; of gate_up with slots as tiles only
  int64_t x_stride;
  int32_t slots_per_x;
  void* out;  // [slots, out_stride]
  int64_t out_stride;
  int32_t num_multiprocessors;
};
// A stripe holds rows 8 i .. 8 i + 7 of gate, then of up; out is bf16 silu(gate) * up.
void launch_moe_gate_up(const MoeProductParams& params, cudaStream_t stream);
// out is f32.
void launch_moe_down(const MoeProductParams& params, cudaStream_t stream);

// out[t] += sum over k, in this order, of weights[t, k] * part[t, k], where ids[t, k] is an expert.
struct MoeSumParams {
  const float* part;     // [num_tokens, top_k, hidden_size]
  const int32_t* ids;    // [num_tokens, top_k]
  const float* weights;  // [num_tokens, top_k]
  float* out;            // [num_tokens, hidden_size]
  int64_t num_tokens, top_k, hidden_size;
  int32_t first_expert, num_experts;
};
void launch_moe_sum(const MoeSumParams& params, cudaStream_t stream);

}  // namespace kdt::cuda
