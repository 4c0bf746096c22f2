#include "kernels/moe.h"
#include "launch.cuh"
#include "primitives.cuh"

namespace kdt::cuda {
namespace {

constexpr int kWarp = 32;
constexpr unsigned kAll = 0xFFFFFFFFu;

__device__ float excluded() { return __uint_as_float(0xFF800000u); }  // -inf

// A candidate is better when its score is greater, or equal with a lower index.
struct Best {
  float score;
  int32_t index;  // -1: none

  __device__ void take(float other, int32_t at) {
    if (at >= 0 && (index < 0 || other > score || (other == score && at < index))) {
      score = other;
      index = at;
    }
  }
};

__device__ Best warp_best(Best best) {
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    const float score = __shfl_xor_sync(kAll, best.score, offset);
    best.take(score, __shfl_xor_sync(kAll, best.index, offset));
  }
  return best;
}

// Leaves the experts of the topk_group best groups, by the sum of a group's two best biased scores.
__device__ void exclude_groups(const MoeRouteParams& p, float* biased, float* group_score,
                               int lane) {
  const int64_t size = p.num_experts / p.n_group;
  for (int64_t g = lane; g < p.n_group; g += kWarp) {
    float best = excluded(), second = excluded();
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
      for (int64_t e = g * size; e < (g + 1) * size; ++e) biased[e] = excluded();
    }
  }
  __syncwarp();
}

// A warp a row. Shared: biased scores [num_experts], group scores [n_group].
__global__ void moe_route_kernel(const MoeRouteParams p) {
  auto* biased = reinterpret_cast<float*>(shared_memory());
  float* group_score = biased + p.num_experts;
  const int lane = static_cast<int>(threadIdx.x);
  const int64_t row = blockIdx.x;
  const float* logits = p.logits + row * p.num_experts;
  const auto score_of = [&](int64_t e) { return 1.0f / (1.0f + expf(-logits[e])); };

  for (int64_t e = lane; e < p.num_experts; e += kWarp) {
    // What is no number ranks behind every other.
    const float sum = score_of(e) + p.bias[e];
    biased[e] = isnan(sum) ? excluded() : sum;
  }
  __syncwarp();
  if (p.topk_group < p.n_group) exclude_groups(p, biased, group_score, lane);

  int32_t* ids = p.ids + row * p.top_k;
  float* weights = p.weights + row * p.top_k;
  float sum = 0;
  for (int64_t k = 0; k < p.top_k; ++k) {
    Best best{0, -1};
    for (int64_t e = lane; e < p.num_experts; e += kWarp) {
      if (biased[e] != excluded()) best.take(biased[e], static_cast<int32_t>(e));
    }
    best = warp_best(best);
    // Without a number left, the id stays invalid and adds nothing.
    const float weight = best.index < 0 ? 0.0f : score_of(best.index);
    sum += weight;
    if (lane == 0) {
      ids[k] = best.index;
      weights[k] = weight;
    }
    // A lane reads and writes its own scores only, so none waits for another.
    if (best.index % kWarp == lane) biased[best.index] = excluded();
  }
  const float factor =
      p.norm_topk_prob ? p.routed_scaling_factor / (sum + 1e-20f) : p.routed_scaling_factor;
  if (lane == 0) {
    for (int64_t k = 0; k < p.top_k; ++k) weights[k] *= factor;
  }
}

}  // namespace

void launch_moe_route(const MoeRouteParams& params, cudaStream_t stream) {
  const auto shared = static_cast<int64_t>(sizeof(float)) * (params.num_experts + params.n_group);
  launch<moe_route_kernel>(dim3(static_cast<unsigned>(params.num_rows)), kWarp, shared, stream,
                           params);
}

}  // namespace kdt::cuda
