#include "kernels/linear_plain.h"

#include "launch.cuh"
#include "primitives.cuh"

namespace kdt::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;

struct Float32Row {
  const float* values;
  __device__ Float32Row(const PlainLinearParams& p, int64_t row)
      : values(static_cast<const float*>(p.weight) + row * p.in_features) {}
  __device__ float at(int64_t i) const { return values[i]; }
};

struct BFloat16Row {
  const uint16_t* values;
  __device__ BFloat16Row(const PlainLinearParams& p, int64_t row)
      : values(static_cast<const uint16_t*>(p.weight) + row * p.in_features) {}
  __device__ float at(int64_t i) const { return bf16_value(values[i]); }
};

struct Int4Row {
  const uint32_t* words;
  const uint16_t* scale;
  __device__ Int4Row(const PlainLinearParams& p, int64_t row)
      : words(static_cast<const uint32_t*>(p.weight) + row * (p.in_features / 8)),
        scale(p.scale + row * (p.in_features / 32)) {}
  __device__ float at(int64_t i) const {
    const int nibble = static_cast<int>(words[i / 8] >> (4 * (i % 8)) & 15u);
    return static_cast<float>(nibble - 8) * bf16_value(scale[i / 32]);
  }
};

template <typename Row>
__global__ void plain_linear_kernel(const PlainLinearParams p) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (column >= p.out_features) return;
  const int64_t head = blockIdx.z;
  for (int64_t row = blockIdx.y; row < p.num_rows; row += gridDim.y) {
    const bool gathered = p.matrix_of_row != nullptr;
    const int64_t matrix = gathered ? p.matrix_of_row[row] : head;
    if (matrix < 0 || matrix >= p.num_matrices) continue;
    const Row weight(p, matrix * p.out_features + column);
    const float* x = gathered ? p.x + row / p.rows_per_x * p.x_row_stride
                              : p.x + row * p.x_row_stride + head * p.x_head_stride;
    float sum = 0;
    for (int64_t i = lane; i < p.in_features; i += 32) sum = fmaf(weight.at(i), x[i], sum);
    sum = warp_sum(sum);
    if (lane == 0)
      p.out[row * p.out_row_stride + head * p.out_head_stride + column] = p.alpha * sum;
  }
}

template <typename Row>
void start(const PlainLinearParams& p, cudaStream_t stream) {
  const auto rows = static_cast<unsigned>(p.num_rows < 65535 ? p.num_rows : 65535);
  const auto heads = static_cast<unsigned>(p.matrix_of_row != nullptr ? 1 : p.num_matrices);
  const dim3 grid(static_cast<unsigned>(ceil_div(p.out_features, kWarps)), rows, heads);
  launch<plain_linear_kernel<Row>>(grid, kThreads, 0, stream, p);
}

}  // namespace

void launch_plain_linear(const PlainLinearParams& params, cudaStream_t stream) {
  switch (params.dtype) {
    case DType::kBFloat16:
      return start<BFloat16Row>(params, stream);
    case DType::kInt32:
      return start<Int4Row>(params, stream);
    default:
      return start<Float32Row>(params, stream);
  }
}

}  // namespace kdt::cuda
