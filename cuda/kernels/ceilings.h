// What the card reaches when it does one thing only: the yardsticks of `kdtree bench ops`.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace kdt::cuda {

struct ReadParams {
  const void* from;  // [num_pieces] of 16 bytes
  uint32_t* out;     // [1], written so that the reads are not dropped
  int64_t num_pieces;
};
// Reads all pieces once, `num_blocks` blocks side by side.
void launch_read(const ReadParams& params, int num_blocks, cudaStream_t stream);

struct MatrixRateParams {
  float* out;  // [1]
  int32_t num_steps;
};
// mma m16n8k16 (bf16) from registers: num_blocks * 8 warps * num_steps * 8 products of 4096
// operations.
void launch_matrix_rate(const MatrixRateParams& params, int num_blocks, cudaStream_t stream);
inline constexpr double kMatrixRateOperations = 8.0 * 8.0 * 4096.0;  // of a block and step

}  // namespace kdt::cuda
