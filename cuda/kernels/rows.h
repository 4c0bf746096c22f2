// Kernels that work on each row alone. Their time is that of a launch at decode sizes; what they
// move is each array once.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "fault.h"

namespace kdt::cuda {

// Zeros for an id of the vocabulary that the table has no row of.
struct EmbedParams {
  const void* table;         // [table_rows, hidden_size] f32 or bf16; row 0 is first_id's
  const int32_t* token_ids;  // [num_rows]
  float* out;                // [num_rows, hidden_size]
  Fault* fault;
  int64_t num_rows, table_rows, hidden_size, first_id, vocab_size;
  bool is_bf16;
};
void launch_embed(const EmbedParams& params, cudaStream_t stream);

// residual += delta when there is a residual; out = RMSNorm of the sum, or of x.
struct RmsNormParams {
  const float* x;      // [num_rows, x_stride], normalised from the pointer on; null with a residual
  float* residual;     // [num_rows, n], or null
  const float* delta;  // [num_rows, n], with a residual
  const float* weight;  // [n]
  float* out;           // [num_rows, n]
  int64_t num_rows, n, x_stride;
  float eps;
  bool aligned;  // all rows to 16 bytes, and n to 4
};
void launch_rms_norm(const RmsNormParams& params, cudaStream_t stream);

struct SiluMulParams {
  const float* gate_up;  // [num_rows, 2 n]
  float* out;            // [num_rows, n]
  int64_t num_rows, n;
};
void launch_silu_mul(const SiluMulParams& params, cudaStream_t stream);

// to[i] = from[rows ? rows[i] : i], `width` columns from where the pointers are.
struct CopyRowsParams {
  const float* from;    // [num_from, from_stride], from the first column to copy on
  const int32_t* rows;  // [num_rows], or null
  float* to;            // [num_rows, to_stride], likewise
  Fault* fault;
  int64_t num_rows, num_from, from_stride, to_stride, width;
};
void launch_copy_rows(const CopyRowsParams& params, cudaStream_t stream);

}  // namespace kdt::cuda
