#include "kernels/rows.h"

#include "fault.cuh"
#include "kernels/block_sum.cuh"
#include "launch.cuh"
#include "primitives.cuh"

namespace kdt::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kEmbedValues = 4;  // of a thread

__global__ void embed_kernel(const EmbedParams p) {
  follow_previous_kernel();
  const int64_t row = blockIdx.x;
  const int32_t id = p.token_ids[row];
  float* out = p.out + row * p.hidden_size;
  if ((id < 0 || id >= p.vocab_size) && threadIdx.x == 0)
    report(p.fault, FaultKind::kTokenId, row, id);
  const int64_t at = id - p.first_id;
  const bool here = id >= 0 && id < p.vocab_size && at >= 0 && at < p.table_rows;
  const int64_t from = here ? at * p.hidden_size : 0;
  const int64_t first = static_cast<int64_t>(blockIdx.y) * kEmbedValues * kThreads + threadIdx.x;
#pragma unroll
  for (int j = 0; j < kEmbedValues; ++j) {
    const int64_t i = first + j * kThreads;
    if (i >= p.hidden_size) break;
    float value = 0;
    if (here) {
      value = p.is_bf16 ? bf16_value(static_cast<const uint16_t*>(p.table)[from + i])
                        : static_cast<const float*>(p.table)[from + i];
    }
    out[i] = value;
  }
}

// Values i to i + 3 of n; zeros past the end.
__device__ __forceinline__ float4 load_quad(const float* x, int64_t i, int64_t n, bool aligned) {
  if (aligned && i < n) return *reinterpret_cast<const float4*>(x + i);
  return make_float4(i < n ? x[i] : 0, i + 1 < n ? x[i + 1] : 0, i + 2 < n ? x[i + 2] : 0,
                     i + 3 < n ? x[i + 3] : 0);
}
__device__ __forceinline__ void store_quad(float* x, int64_t i, int64_t n, bool aligned,
                                           const float4& value) {
  if (aligned && i < n) {
    *reinterpret_cast<float4*>(x + i) = value;
    return;
  }
  const float values[4] = {value.x, value.y, value.z, value.w};
  for (int j = 0; j < 4 && i + j < n; ++j) x[i + j] = values[j];
}

constexpr int kNormQuads = 2;  // of a row that a thread holds
constexpr int kFewNormThreads = 256, kManyNormThreads = 1024;

// A block a row, so the order of the sum depends on n alone.
template <int kNormThreads>
__global__ void __launch_bounds__(kNormThreads) rms_norm_kernel(const RmsNormParams p) {
  constexpr int64_t kAtOnce = 4 * kNormQuads * kNormThreads;
  auto* shared = reinterpret_cast<float*>(shared_memory());
  const int64_t row = blockIdx.x;
  const auto at = [](int64_t base, int quad) {
    return base + 4 * (quad * kNormThreads + static_cast<int64_t>(threadIdx.x));
  };
  float4 value[kNormQuads], weight[kNormQuads];
#pragma unroll
  for (int q = 0; q < kNormQuads; ++q) weight[q] = load_quad(p.weight, at(0, q), p.n, p.aligned);
  follow_previous_kernel();
  float* const residual = p.residual + row * p.n;
  const float* const x = p.residual != nullptr ? residual : p.x + row * p.x_stride;
  float squares = 0;
  for (int64_t base = 0; base < p.n; base += kAtOnce) {
#pragma unroll
    for (int q = 0; q < kNormQuads; ++q) value[q] = load_quad(x, at(base, q), p.n, p.aligned);
    if (p.residual != nullptr) {
#pragma unroll
      for (int q = 0; q < kNormQuads; ++q) {
        const float4 delta = load_quad(p.delta + row * p.n, at(base, q), p.n, p.aligned);
        value[q] = make_float4(value[q].x + delta.x, value[q].y + delta.y, value[q].z + delta.z,
                               value[q].w + delta.w);
        store_quad(residual, at(base, q), p.n, p.aligned, value[q]);
      }
    }
#pragma unroll
    for (int q = 0; q < kNormQuads; ++q) {
      squares = fmaf(value[q].x, value[q].x, squares);
      squares = fmaf(value[q].y, value[q].y, squares);
      squares = fmaf(value[q].z, value[q].z, squares);
      squares = fmaf(value[q].w, value[q].w, squares);
    }
  }
  const float mean = block_sum<kNormThreads / 32>(squares, shared) / static_cast<float>(p.n);
  const float scale = 1.0f / sqrtf(mean + p.eps);
  for (int64_t base = 0; base < p.n; base += kAtOnce) {
#pragma unroll
    for (int q = 0; q < kNormQuads; ++q) {
      if (p.n > kAtOnce) {  // each thread reads what it wrote
        value[q] = load_quad(x, at(base, q), p.n, p.aligned);
        weight[q] = load_quad(p.weight, at(base, q), p.n, p.aligned);
      }
      store_quad(p.out + row * p.n, at(base, q), p.n, p.aligned,
                 make_float4(value[q].x * scale * weight[q].x, value[q].y * scale * weight[q].y,
                             value[q].z * scale * weight[q].z, value[q].w * scale * weight[q].w));
    }
  }
}

__global__ void silu_mul_kernel(const SiluMulParams p) {
  follow_previous_kernel();
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t row = blockIdx.y;
  if (i >= p.n) return;
  const float gate = p.gate_up[row * 2 * p.n + i];
  p.out[row * p.n + i] = gate / (1.0f + expf(-gate)) * p.gate_up[row * 2 * p.n + p.n + i];
}

__global__ void copy_rows_kernel(const CopyRowsParams p) {
  follow_previous_kernel();
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
  launch<embed_kernel>(
      grid_of(params.num_rows, ceil_div(params.hidden_size, kEmbedValues * kThreads)), kThreads, 0,
      stream, params, /*early=*/true);
}

void launch_rms_norm(const RmsNormParams& params, cudaStream_t stream) {
  const auto start = [&]<int kNormThreads>() {
    launch<rms_norm_kernel<kNormThreads>>(grid_of(params.num_rows), kNormThreads,
                                          kNormThreads / 32 * sizeof(float), stream, params,
                                          /*early=*/true);
  };
  params.n > 4 * kNormQuads* kFewNormThreads ? start.operator()<kManyNormThreads>()
                                             : start.operator()<kFewNormThreads>();
}

void launch_silu_mul(const SiluMulParams& params, cudaStream_t stream) {
  launch<silu_mul_kernel>(grid_of(ceil_div(params.n, kThreads), params.num_rows), kThreads, 0,
                          stream, params, /*early=*/true);
}

void launch_copy_rows(const CopyRowsParams& params, cudaStream_t stream) {
  if (params.width == 0) return;
  launch<copy_rows_kernel>(grid_of(params.num_rows), kThreads, 0, stream, params, /*early=*/true);
}

}  // namespace kdt::cuda
