// The sum over a block in a fixed order.
#pragma once

#include "primitives.cuh"

namespace kdt::cuda {

// Of the first kWarps warps; every thread of the block gets it. shared: [kWarps].
template <int kWarps>
__device__ __forceinline__ float block_sum(float x, float* shared) {
  x = warp_sum(x);
  const unsigned warp = threadIdx.x / 32;
  if (threadIdx.x % 32 == 0 && warp < kWarps) shared[warp] = x;
  __syncthreads();
  float sum = 0;
  for (int w = 0; w < kWarps; ++w) sum += shared[w];
  return sum;
}

}  // namespace kdt::cuda
