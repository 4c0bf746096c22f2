#include <algorithm>

#include "kernels/logits.cuh"
#include "kernels/moe.h"
#include "launch.cuh"
#include "primitives.cuh"

namespace kdt::cuda {
namespace {

constexpr int kWarp = 32, kMostWarps = 16;
constexpr unsigned kAll = 0xFFFFFFFFu;

// Leaves the experts of the topk_group best groups, by the sum of a group's two best biased scores.
__device__ void exclude_groups(const MoeRouteParams& p, float* biased, float* group_score,
                               int lane) {
  const int64_t size = p.num_experts / p.n_group;
  for (int64_t g = lane; g < p.n_group; g += kWarp) {
    float best = minus_infinity(), second = minus_infinity();
    for (int64_t e = g * size; e < (g + 1) * size; ++e) {
      if (biased[e] > best) {
        second = best;
        best = biased[e];
      } else if (biased[e] > second) {
        second = biased[e];
      }
    }
    group_score[g] = size > 1 ? best + second : best;
  }
  __syncwarp();
  for (int64_t g = lane; g < p.n_group; g += kWarp) {
    int64_t better = 0;
    for (int64_t other = 0; other < p.n_group; ++other) {
      better += group_score[other] > group_score[g] ||
                (group_score[other] == group_score[g] && other < g);
    }
    if (better >= p.topk_group) {
      for (int64_t e = g * size; e < (g + 1) * size; ++e) biased[e] = minus_infinity();
    }
  }
  __syncwarp();
}

// A block a row. A warp ranks experts 32 at a time and keeps their best, then those are ranked: a
// rank is how many keys are greater.
__global__ void moe_route_kernel(const MoeRouteParams p) {
  const int64_t groups = (p.num_experts + kWarp - 1) / kWarp;
  const int kept = static_cast<int>(min(p.top_k, static_cast<int64_t>(kWarp)));
  const auto candidates = static_cast<int>(groups * kept);
  auto* keys = reinterpret_cast<uint64_t*>(shared_memory());   // [groups, kept]; 0: no expert
  auto* biased = reinterpret_cast<float*>(keys + candidates);  // [num_experts] scores
  float* group_score = biased + p.num_experts;                 // [n_group]
  float* chosen = group_score + p.n_group;                     // [top_k]
  auto* ids = reinterpret_cast<int32_t*>(chosen + p.top_k);    // [top_k]
  follow_previous_kernel();
  const int64_t row = blockIdx.x;
  const auto threads = static_cast<int>(blockDim.x), thread = static_cast<int>(threadIdx.x);
  const int lane = thread % kWarp;
  const auto score_of = [&](int64_t e) {
    return 1.0f / (1.0f + expf(-p.logits[row * p.num_experts + e]));
  };
  for (int64_t e = thread; e < p.num_experts; e += threads) {
    // What is no number ranks behind every other.
    const float sum = score_of(e) + p.bias[e];
    biased[e] = isnan(sum) ? minus_infinity() : sum;
  }
  for (int64_t k = thread; k < p.top_k; k += threads) {
    chosen[k] = 0;  // without a number left, the id stays invalid and adds nothing
    ids[k] = -1;
  }
  __syncthreads();
  if (p.topk_group < p.n_group) {
    if (thread < kWarp) exclude_groups(p, biased, group_score, lane);
    __syncthreads();
  }

  for (int64_t group = thread / kWarp; group < groups; group += threads / kWarp) {
    const int64_t e = group * kWarp + lane;
    const bool exists = e < p.num_experts && biased[e] != minus_infinity();
    const uint64_t key = exists ? key_of(ordered(biased[e]), e) : 0;
    int rank = 0;
    for (int other = 0; other < kWarp; ++other) rank += __shfl_sync(kAll, key, other) > key;
    if (lane < kept) keys[group * kept + lane] = 0;
    __syncwarp();
    if (exists && rank < kept) keys[group * kept + rank] = key;
  }
  __syncthreads();
  for (int i = thread; i < candidates; i += threads) {
    const uint64_t key = keys[i];
    int64_t rank = 0;
    for (int other = 0; other < candidates; ++other) rank += keys[other] > key;
    if (key == 0 || rank >= p.top_k) continue;
    ids[rank] = position_of(key);
    chosen[rank] = score_of(position_of(key));
  }
  __syncthreads();
  float sum = 0;
  for (int64_t k = 0; k < p.top_k; ++k) sum += chosen[k];
  const float factor =
      p.norm_topk_prob ? p.routed_scaling_factor / (sum + 1e-20f) : p.routed_scaling_factor;
  for (int64_t k = thread; k < p.top_k; k += threads) {
    p.ids[row * p.top_k + k] = ids[k];
    p.weights[row * p.top_k + k] = chosen[k] * factor;
  }
}

}  // namespace

void launch_moe_route(const MoeRouteParams& params, cudaStream_t stream) {
  const int64_t groups = ceil_div(params.num_experts, kWarp);
  const int64_t shared = 8 * groups * std::min<int64_t>(params.top_k, kWarp) +
                         4 * (params.num_experts + params.n_group + 2 * params.top_k);
  KDT_CHECK(shared <= kMaxSharedBytes, "moe_route: ", params.num_experts, " experts in ",
            params.n_group, " groups are more than a block can rank");
  const auto threads = static_cast<int>(std::min<int64_t>(groups, kMostWarps) * kWarp);
  launch<moe_route_kernel>(dim3(static_cast<unsigned>(params.num_rows)), threads, shared, stream,
                           params, /*early=*/true);
}

}  // namespace kdt::cuda
