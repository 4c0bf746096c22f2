// Routing of tokens to experts and the sum over a token's experts.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

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

// out[t] += sum over k, in this order, of weights[t, k] * part[t, k], where ids[t, k] is an expert.
struct MoeSumParams {
  const float* part;     // [num_tokens, top_k, hidden_size]
  const int32_t* ids;    // [num_tokens, top_k]
  const float* weights;  // [num_tokens, top_k]
  float* out;            // [num_tokens, hidden_size]
  int64_t num_tokens, top_k, hidden_size, num_experts;
};
void launch_moe_sum(const MoeSumParams& params, cudaStream_t stream);

}  // namespace kdt::cuda
