#include "kernels/merge_topk.h"

#include "kernels/logits.cuh"
#include "launch.cuh"

namespace kdt::cuda {
namespace {

constexpr int kThreads = 256;

// The logarithm of the sum of exp(log_sums[part * stride]); not finite where there is no
// distribution. By one thread: its order is part of the result.
__device__ float merged_log_sum(const float* log_sums, int parts, int stride) {
  float top = minus_infinity();
  for (int part = 0; part < parts; ++part) {
    const float x = log_sums[part * stride];
    if (!(x < -minus_infinity())) return x;
    top = fmaxf(top, x);
  }
  if (top == minus_infinity()) return top;
  double sum = 0;
#pragma unroll 1  // a few exponentials at once spill on sm_90a, and only one thread waits for them
  for (int part = 0; part < parts; ++part)
    sum += exp(static_cast<double>(log_sums[part * stride]) - top);
  return static_cast<float>(top + log(sum));
}

__host__ __device__ int blocks_of_row(const MergeTopkParams& p) {
  return (p.num_parts * p.part_k + kThreads - 1) / kThreads;
}

// A thread a candidate: its rank is how many of each part come before it, found by bisection
// because a part's are in order. Equals go by part.
__global__ void __launch_bounds__(kThreads) merge_topk_kernel(const MergeTopkParams p) {
  auto& log_sum = *reinterpret_cast<float*>(shared_memory());
  const int row = static_cast<int>(blockIdx.x) / blocks_of_row(p);
  if (threadIdx.x == 0) log_sum = merged_log_sum(p.log_sums + row, p.num_parts, p.part_stride);
  __syncthreads();

  const int candidate =
      static_cast<int>(blockIdx.x) % blocks_of_row(p) * kThreads + static_cast<int>(threadIdx.x);
  const int own = candidate / p.part_k, column = candidate % p.part_k;
  if (own >= p.num_parts || column >= p.k) return;
  const auto at = [&](int part, int i) {
    return static_cast<int64_t>(part) * p.part_stride + row * p.part_k + i;
  };
  const auto order_at = [&](int part, int i) {
    const float x = p.part_logprobs[at(part, i)];
    return ordered(x == x ? x : minus_infinity());
  };
  const uint32_t order = order_at(own, column);
  int rank = column;
  for (int part = 0; part < p.num_parts && rank < p.k; ++part) {
    if (part == own) continue;
    const uint32_t least = part < own ? order : order + 1;
    int begin = 0, end = p.part_k;  // those before `begin` reach it, those from `end` on do not
    while (begin < end) {
      const int middle = (begin + end) / 2;
      if (order_at(part, middle) >= least) {
        begin = middle + 1;
      } else {
        end = middle;
      }
    }
    rank += begin;
  }
  if (rank >= p.k) return;
  const float value = number_of(order);
  const int64_t to = static_cast<int64_t>(row) * p.k + rank;
  p.ids[to] = p.part_ids[at(own, column)];
  p.logprobs[to] = isfinite(log_sum) && value != minus_infinity()
                       ? __fsub_rn(p.part_logprobs[at(own, column)], log_sum)
                       : minus_infinity();
}

}  // namespace

void launch_merge_topk(const MergeTopkParams& params, cudaStream_t stream) {
  const int blocks = params.num_rows * blocks_of_row(params);
  launch<merge_topk_kernel>(dim3(static_cast<unsigned>(blocks)), kThreads, sizeof(float), stream,
                            params);
}

}  // namespace kdt::cuda
