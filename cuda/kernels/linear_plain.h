// Products with f32 weights, exact in f32: a warp an output value, its lanes share the inputs.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace kdt::cuda {

// out[r, m] = alpha * W_m x[r, m] for each matrix m; with `matrix_of_row`, out[r] = alpha *
// W_(matrix_of_row[r] - first_matrix) x[r / rows_per_x], and nothing for a row whose matrix does
// not exist.
struct PlainLinearParams {
  const float* weight;           // [num_matrices, out_features, in_features]
  const float* x;                // element (r, m, i) at r * x_row_stride + m * x_head_stride + i
  const int32_t* matrix_of_row;  // [num_rows], from first_matrix on, or null
  float* out;  // element (r, m, i) at r * out_row_stride + m * out_head_stride + i
  int64_t num_rows, num_matrices, out_features, in_features;
  int64_t x_row_stride, x_head_stride, out_row_stride, out_head_stride;
  int64_t rows_per_x;  // with matrix_of_row: consecutive rows that share one of x
  float alpha;
  int64_t first_matrix = 0;
};
void launch_plain_linear(const PlainLinearParams& params, cudaStream_t stream);

}  // namespace kdt::cuda
