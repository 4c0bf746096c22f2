#include "kernels/linear_plain.h"

#include <algorithm>

#include "launch.cuh"
#include "primitives.cuh"

namespace kdt::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;

__global__ void plain_linear_kernel(const PlainLinearParams p) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (column >= p.out_features) return;
  const int64_t head = blockIdx.z;
  for (int64_t row = blockIdx.y; row < p.num_rows; row += gridDim.y) {
    const bool gathered = p.matrix_of_row != nullptr;
    const int64_t matrix = gathered ? p.matrix_of_row[row] - p.first_matrix : head;
    if (matrix < 0 || matrix >= p.num_matrices) continue;
    const float* weight = p.weight + (matrix * p.out_features + column) * p.in_features;
    const float* x = gathered ? p.x + row / p.rows_per_x * p.x_row_stride
                              : p.x + row * p.x_row_stride + head * p.x_head_stride;
    float sum = 0;
    for (int64_t i = lane; i < p.in_features; i += 32) sum = fmaf(weight[i], x[i], sum);
    sum = warp_sum(sum);
    if (lane == 0)
      p.out[row * p.out_row_stride + head * p.out_head_stride + column] = p.alpha * sum;
  }
}

}  // namespace

void launch_plain_linear(const PlainLinearParams& params, cudaStream_t stream) {
  const auto rows = static_cast<unsigned>(std::min<int64_t>(params.num_rows, 65535));
  const auto heads =
      static_cast<unsigned>(params.matrix_of_row != nullptr ? 1 : params.num_matrices);
  const dim3 grid(static_cast<unsigned>(ceil_div(params.out_features, kWarps)), rows, heads);
  launch<plain_linear_kernel>(grid, kThreads, 0, stream, params);
}

}  // namespace kdt::cuda
