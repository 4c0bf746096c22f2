#include "kernels/ceilings.h"

#include "launch.cuh"
#include "primitives.cuh"

namespace kdt::cuda {
namespace {

constexpr int kReadThreads = 512;
constexpr int kReadsInFlight = 8;
constexpr int kMatrixThreads = 256;

__global__ void read_kernel(const ReadParams p) {
  const auto* from = static_cast<const uint4*>(p.from);
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kReadThreads;
  uint32_t bits = 0;
  int64_t i = static_cast<int64_t>(blockIdx.x) * kReadThreads + threadIdx.x;
  for (; i + (kReadsInFlight - 1) * stride < p.num_pieces; i += kReadsInFlight * stride) {
    uint4 pieces[kReadsInFlight];
#pragma unroll
    for (int j = 0; j < kReadsInFlight; ++j) pieces[j] = load_16(from + i + j * stride);
#pragma unroll
    for (int j = 0; j < kReadsInFlight; ++j)
      bits ^= pieces[j].x ^ pieces[j].y ^ pieces[j].z ^ pieces[j].w;
  }
  for (; i < p.num_pieces; i += stride) bits ^= load_16(from + i).x;
  if (bits == 0x12345678u) *p.out = bits;
}

__global__ void __launch_bounds__(kMatrixThreads) matrix_rate_kernel(const MatrixRateParams p) {
  float c[8][4] = {};
  const uint32_t one = 0x3F803F80u;
  const uint32_t a[4] = {one, one, one ^ threadIdx.x, one};
  for (int step = 0; step < p.num_steps; ++step) {
#pragma unroll
    for (int i = 0; i < 8; ++i) mma_bf16(c[i], a, one, one);
  }
  float sum = 0;
  for (int i = 0; i < 8; ++i) sum += c[i][0] + c[i][1] + c[i][2] + c[i][3];
  if (sum == -1.0f) *p.out = sum;
}

}  // namespace

void launch_read(const ReadParams& params, int num_blocks, cudaStream_t stream) {
  launch<read_kernel>(dim3(static_cast<unsigned>(num_blocks)), kReadThreads, 0, stream, params);
}

void launch_matrix_rate(const MatrixRateParams& params, int num_blocks, cudaStream_t stream) {
  launch<matrix_rate_kernel>(dim3(static_cast<unsigned>(num_blocks)), kMatrixThreads, 0, stream,
                             params);
}

}  // namespace kdt::cuda
