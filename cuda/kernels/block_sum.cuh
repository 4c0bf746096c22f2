// The sum over a block in a fixed order.
#pragma once

#include "primitives.cuh"

namespace kdt::cuda {

// Of kWarps warps, for every thread. shared: [kWarps].
template <int kWarps>
__device__ __forceinline__ float block_sum(float x, float* shared) {
  x = warp_sum(x);
  const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  static_assert(kWarps <= 32);
  if (lane == 0) shared[warp] = x;
  __syncthreads();
  return warp_sum(lane < kWarps ? shared[lane] : 0.0f);
}

}  // namespace kdt::cuda
