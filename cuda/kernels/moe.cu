#include "kernels/moe.h"

#include "launch.cuh"
#include "primitives.cuh"

namespace kdt::cuda {
namespace {

constexpr int kThreads = 256;

__global__ void moe_sum_kernel(const MoeSumParams p) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= p.hidden_size) return;
  for (int64_t token = blockIdx.y; token < p.num_tokens; token += gridDim.y) {
    float sum = p.out[token * p.hidden_size + i];
    for (int64_t slot = token * p.top_k; slot < (token + 1) * p.top_k; ++slot) {
      const int32_t id = p.ids[slot];
      if (id >= 0 && id < p.num_experts)
        sum = fmaf(p.weights[slot], p.part[slot * p.hidden_size + i], sum);
    }
    p.out[token * p.hidden_size + i] = sum;
  }
}

}  // namespace

void launch_moe_sum(const MoeSumParams& params, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(ceil_div(params.hidden_size, kThreads)),
                  static_cast<unsigned>(params.num_tokens < 65535 ? params.num_tokens : 65535));
  launch<moe_sum_kernel>(grid, kThreads, 0, stream, params);
}

}  // namespace kdt::cuda
