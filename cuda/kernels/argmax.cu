#include "kernels/argmax.h"

#include "kernels/logits.cuh"
#include "launch.cuh"

namespace kdt::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / 32;
constexpr int kQuads = kLogitsChunk / (4 * kThreads);

__device__ uint64_t warp_max_key(uint64_t key) {
  for (int offset = 16; offset > 0; offset /= 2)
    key = max(key, __shfl_xor_sync(0xFFFFFFFFu, key, offset));
  return key;
}

// A block a chunk of a row.
__global__ void __launch_bounds__(kThreads) chunk_argmax_kernel(const ArgmaxParams p) {
  auto* keys = reinterpret_cast<uint64_t*>(shared_memory());
  follow_previous_kernel();
  const int64_t row = blockIdx.x / p.num_chunks, chunk = blockIdx.x % p.num_chunks;
  const float* logits = p.logits + row * p.vocab;
  const int64_t begin = chunk * kLogitsChunk + threadIdx.x * 4;

  float x[kQuads][4];
#pragma unroll
  for (int j = 0; j < kQuads; ++j)
    load_quad(logits, begin + j * 4 * kThreads, p.vocab, p.aligned, x[j]);
  uint32_t best = 0;  // of no number
  int64_t at = 0;
#pragma unroll
  for (int j = 0; j < kQuads; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t order = x[j][i] == x[j][i] ? ordered(x[j][i]) : 0;
      if (order > best) {
        best = order;
        at = begin + j * 4 * kThreads + i;
      }
    }
  }
  const uint64_t key = warp_max_key(best == 0 ? 0 : key_of(best, at));
  if (threadIdx.x % 32 == 0) keys[threadIdx.x / 32] = key;
  __syncthreads();
  if (threadIdx.x != 0) return;
  uint64_t greatest = 0;
  for (int w = 0; w < kWarps; ++w) greatest = max(greatest, keys[w]);
  p.keys[blockIdx.x] = greatest;
}

// A warp a row.
__global__ void __launch_bounds__(32) row_argmax_kernel(const ArgmaxParams p) {
  follow_previous_kernel();
  const int64_t row = blockIdx.x;
  uint64_t key = 0;
  for (uint32_t c = threadIdx.x; c < p.num_chunks; c += 32)
    key = max(key, p.keys[row * p.num_chunks + c]);
  key = warp_max_key(key);
  if (threadIdx.x != 0) return;
  p.ids[row] = key == 0 ? -1 : p.first_id + position_of(key);
  if (p.values != nullptr)
    p.values[row] = key == 0 ? minus_infinity() : p.logits[row * p.vocab + position_of(key)];
}

}  // namespace

void launch_argmax(const ArgmaxParams& params, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(params.num_rows * params.num_chunks);
  launch<chunk_argmax_kernel>(dim3(blocks), kThreads, kWarps * sizeof(uint64_t), stream, params,
                              /*early=*/true);
  launch<row_argmax_kernel>(dim3(static_cast<unsigned>(params.num_rows)), 32, 0, stream, params,
                            /*early=*/true);
}

}  // namespace kdt::cuda
