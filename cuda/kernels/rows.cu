#include "kernels/rows.h"

#include "fault.cuh"
#include "kernels/block_sum.cuh"
#include "launch.cuh"
#include "primitives.cuh"

namespace kdt::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;

__global__ void embed_kernel(const EmbedParams p) {
  const int64_t row = blockIdx.x;
  const int32_t id = p.token_ids[row];
  float* out = p.out + row * p.hidden_size;
  if ((id < 0 || id >= p.vocab_size) && threadIdx.x == 0)
    report(p.fault, FaultKind::kTokenId, row, id);
  const int64_t at = id - p.first_id;
  const bool here = id >= 0 && id < p.vocab_size && at >= 0 && at < p.table_rows;
  const int64_t from = here ? at * p.hidden_size : 0;
  for (int64_t i = threadIdx.x; i < p.hidden_size; i += kThreads) {
    float value = 0;
    if (here) {
      value = p.is_bf16 ? bf16_value(static_cast<const uint16_t*>(p.table)[from + i])
                        : static_cast<const float*>(p.table)[from + i];
    }
    out[i] = value;
  }
}

// A block a row, so the order of the sum depends on n alone.
__global__ void rms_norm_kernel(const RmsNormParams p) {
  auto* shared = reinterpret_cast<float*>(shared_memory());
  const int64_t row = blockIdx.x;
  float squares = 0;
  for (int64_t i = threadIdx.x; i < p.n; i += kThreads) {
    float value;
    if (p.residual != nullptr) {
      value = p.residual[row * p.n + i] + p.delta[row * p.n + i];
      p.residual[row * p.n + i] = value;
    } else {
      value = p.x[row * p.x_stride + i];
    }
    squares = fmaf(value, value, squares);
  }
  const float mean = block_sum<kWarps>(squares, shared) / static_cast<float>(p.n);
  const float scale = 1.0f / sqrtf(mean + p.eps);
  const float* from = p.residual != nullptr ? p.residual + row * p.n : p.x + row * p.x_stride;
  // Each thread reads what it wrote.
  for (int64_t i = threadIdx.x; i < p.n; i += kThreads)
    p.out[row * p.n + i] = from[i] * scale * p.weight[i];
}

__global__ void silu_mul_kernel(const SiluMulParams p) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t row = blockIdx.y;
  if (i >= p.n) return;
  const float gate = p.gate_up[row * 2 * p.n + i];
  p.out[row * p.n + i] = gate / (1.0f + expf(-gate)) * p.gate_up[row * 2 * p.n + p.n + i];
}

__global__ void copy_rows_kernel(const CopyRowsParams p) {
  const int64_t row = blockIdx.x;
  const int64_t from = p.rows != nullptr ? p.rows[row] : row;
  if (from < 0 || from >= p.num_from) {
    if (threadIdx.x == 0) report(p.fault, FaultKind::kRow, row, from);
    return;
  }
  for (int64_t i = threadIdx.x; i < p.width; i += kThreads)
    p.to[row * p.to_stride + i] = p.from[from * p.from_stride + i];
}

dim3 grid_of(int64_t x, int64_t y = 1) {
  return dim3(static_cast<unsigned>(x), static_cast<unsigned>(y));
}

}  // namespace

void launch_embed(const EmbedParams& params, cudaStream_t stream) {
  launch<embed_kernel>(grid_of(params.num_rows), kThreads, 0, stream, params);
}

void launch_rms_norm(const RmsNormParams& params, cudaStream_t stream) {
  launch<rms_norm_kernel>(grid_of(params.num_rows), kThreads, kWarps * sizeof(float), stream,
                          params);
}

void launch_silu_mul(const SiluMulParams& params, cudaStream_t stream) {
  launch<silu_mul_kernel>(grid_of(ceil_div(params.n, kThreads), params.num_rows), kThreads, 0,
                          stream, params);
}

void launch_copy_rows(const CopyRowsParams& params, cudaStream_t stream) {
  if (params.width == 0) return;
  launch<copy_rows_kernel>(grid_of(params.num_rows), kThreads, 0, stream, params);
}

}  // namespace kdt::cuda
