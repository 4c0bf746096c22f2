// Matrices of one shape in the order the kernels read them.
#pragma once

#include "cuda_backend.h"

namespace kdt::cuda {

struct CudaLinear final : LinearWeight {
  std::vector<int64_t> matrix_rows;  // out_features of each stacked matrix
  DType dtype = DType::kBFloat16;
  std::shared_ptr<void> values, scales;

  int64_t num_matrices() const { return static_cast<int64_t>(matrix_rows.size()); }
};

// Throws what is wrong with a matrix of a checkpoint.
void check_matrix(const HostMatrix& matrix);
// Bytes of its values; int4: of its nibbles.
int64_t matrix_bytes(const HostMatrix& matrix);

}  // namespace kdt::cuda
