#include "kernels/sample.h"

#include "fault.cuh"
#include "kernels/logits.cuh"
#include "launch.cuh"

namespace kdt::cuda {
namespace {

constexpr int kThreads = kLogitsChunk / kLogitsGroup;  // a group each
constexpr int kWarps = kThreads / 32;
constexpr int kQuads = kLogitsGroup / 4;

struct Shared {
  double groups[kThreads];
  double terms[kLogitsGroup];
  double rest;
  float tops[kWarps];
  uint32_t found;
};

// The block's maximum, for every thread; -inf for NaN. `shared.tops` is free after the next
// barrier.
__device__ float block_max(float x, Shared& shared) {
  x = warp_max(x);
  if (threadIdx.x % 32 == 0) shared.tops[threadIdx.x / 32] = x;
  __syncthreads();
  float top = minus_infinity();
  for (int w = 0; w < kWarps; ++w) top = fmaxf(top, shared.tops[w]);
  return top;
}

// What NaN and a place past the end add is nothing.
__device__ __forceinline__ double term(float logit, float top, double inverse_temperature) {
  if (logit != logit) return 0;
  return exp(__dmul_rn(static_cast<double>(logit) - static_cast<double>(top), inverse_temperature));
}

// Sums of a chunk's groups to shared.groups; its greatest logit. By the whole block, which meets a
// barrier before it reads them.
__device__ float sum_groups(const SampleParams& p, const float* logits, int64_t chunk,
                            Shared& shared) {
  const int64_t begin = chunk * kLogitsChunk + threadIdx.x * kLogitsGroup;
  float x[kQuads][4];
  float top = minus_infinity();
#pragma unroll
  for (int j = 0; j < kQuads; ++j) load_quad(logits, begin + 4 * j, p.vocab, p.aligned, x[j]);
#pragma unroll
  for (int j = 0; j < kQuads; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) top = fmaxf(top, x[j][i]);
  }
  top = block_max(top, shared);
  double sum = 0;
  if (top != minus_infinity()) {
#pragma unroll
    for (int j = 0; j < kQuads; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sum = __dadd_rn(sum, term(x[j][i], top, p.inverse_temperature));
    }
  }
  shared.groups[threadIdx.x] = sum;
  return top;
}

// A block a chunk of a row.
__global__ void __launch_bounds__(kThreads) sum_kernel(const SampleParams p) {
  Shared& shared = *reinterpret_cast<Shared*>(shared_memory());
  const int64_t row = blockIdx.x / p.num_chunks, chunk = blockIdx.x % p.num_chunks;
  const float top = sum_groups(p, p.logits + row * p.vocab, chunk, shared);
  __syncthreads();
  if (threadIdx.x != 0) return;
  double sum = 0;
  for (int g = 0; g < kThreads; ++g) sum = __dadd_rn(sum, shared.groups[g]);
  p.sums[blockIdx.x] = sum;
  p.tops[blockIdx.x] = top;
}

// The first of n terms that takes the running sum above `target`, or the last that is not zero.
// `sum` goes from before the first term to before the one found.
__device__ uint32_t find_term(const double* terms, uint32_t n, double target, double& sum) {
  uint32_t found = 0;
  double before = sum;
  for (uint32_t i = 0; i < n; ++i) {
    const double value = terms[i];
    if (!(value > 0)) continue;
    found = i;
    before = sum;
    sum = __dadd_rn(sum, value);
    if (sum > target) break;
  }
  sum = before;
  return found;
}

// A block a row.
__global__ void __launch_bounds__(kThreads) search_kernel(const SampleParams p) {
  Shared& shared = *reinterpret_cast<Shared*>(shared_memory());
  auto* weights = reinterpret_cast<double*>(shared_memory() + sizeof(Shared));  // [num_chunks]
  const int64_t row = blockIdx.x;
  const float* logits = p.logits + row * p.vocab;
  const double uniform = p.uniforms[row];
  const bool valid = uniform >= 0 && uniform < 1;
  if (!valid && threadIdx.x == 0) report(p.fault, FaultKind::kUniform, row, uniform >= 1 ? 1 : -1);

  const float* tops = p.tops + row * p.num_chunks;
  float top = minus_infinity();
  for (uint32_t c = threadIdx.x; c < p.num_chunks; c += kThreads) top = fmaxf(top, tops[c]);
  top = block_max(top, shared);
  if (!valid || !isfinite(top)) {
    if (threadIdx.x == 0) p.ids[row] = -1;
    return;
  }
  for (uint32_t c = threadIdx.x; c < p.num_chunks; c += kThreads) {
    weights[c] =
        __dmul_rn(p.sums[row * p.num_chunks + c], term(tops[c], top, p.inverse_temperature));
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    double total = 0, before = 0;
    for (uint32_t c = 0; c < p.num_chunks; ++c) total = __dadd_rn(total, weights[c]);
    const double target = __dmul_rn(uniform, total);
    const uint32_t chunk = find_term(weights, p.num_chunks, target, before);
    shared.rest = (target - before) / term(tops[chunk], top, p.inverse_temperature);
    shared.found = chunk;
  }
  __syncthreads();

  const uint32_t chunk = shared.found;
  const float chunk_top = sum_groups(p, logits, chunk, shared);
  __syncthreads();
  if (threadIdx.x >= 32) return;
  double sum = 0;
  uint32_t group = 0;
  if (threadIdx.x == 0) group = find_term(shared.groups, kThreads, shared.rest, sum);
  group = __shfl_sync(0xFFFFFFFFu, group, 0);
  const int64_t begin = chunk * kLogitsChunk + group * kLogitsGroup;
  const int64_t mine = begin + threadIdx.x;
  shared.terms[threadIdx.x] =
      mine < p.vocab ? term(logits[mine], chunk_top, p.inverse_temperature) : 0;
  __syncwarp();
  if (threadIdx.x != 0) return;
  p.ids[row] =
      static_cast<int32_t>(begin + find_term(shared.terms, kLogitsGroup, shared.rest, sum));
}

}  // namespace

void launch_sample(const SampleParams& params, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(params.num_rows * params.num_chunks);
  launch<sum_kernel>(dim3(blocks), kThreads, sizeof(Shared), stream, params);
  launch<search_kernel>(dim3(static_cast<unsigned>(params.num_rows)), kThreads,
                        sizeof(Shared) + params.num_chunks * sizeof(double), stream, params);
}

}  // namespace kdt::cuda
