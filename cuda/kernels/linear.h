// Products with packed weights (repack.h): int4 and bf16 weights, bf16 activations, f32 sums.
// Weights are read once for every 8, 32 or 72 rows; that is their time at decode sizes.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/dtype.h"

namespace kdt::cuda {

// to[row * heads + h] = bf16 of from[row, h], with zeros behind its values.
struct RoundRowsParams {
  const float* from;  // element (row, h, i) at row * row_stride + h * head_stride + i
  uint16_t* to;       // [num_rows * num_heads, to_stride]
  int64_t num_rows, num_heads, row_stride, head_stride, n, to_stride;
};
void launch_round_rows(const RoundRowsParams& params, cudaStream_t stream);

// out[r, m] = alpha * W_m x[r, m] for each of the stacked matrices m.
struct LinearParams {
  const unsigned char* weights;  // panels of every matrix, one matrix after another
  DType dtype;                   // of the weights: kBFloat16, kInt32 (int4)
  int32_t num_chunks, k_warps;
  int32_t num_matrices, matrix_rows;  // matrix_rows: outputs of each
  const void* x;    // element (r, m, i) at r * x_row_stride + m * x_head_stride + i
  bool x_is_float;  // f32, of at most 8 rows; else bf16. Aligned to 16 bytes, and whole chunks
  int64_t x_row_stride, x_head_stride;
  float* out;  // element (r, m, i) at r * out_row_stride + m * out_head_stride + i
  int64_t out_row_stride, out_head_stride, num_rows;
  float alpha;
  int32_t num_multiprocessors;
};
void launch_linear(const LinearParams& params, cudaStream_t stream);

}  // namespace kdt::cuda
