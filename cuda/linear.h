// Matrices of one shape in the order the kernels read them.
#pragma once

#include "cuda_backend.h"

namespace kdt::cuda {

struct CudaLinear final : LinearWeight {
  std::vector<int64_t> matrix_rows;  // out_features of each stacked matrix

  int64_t num_matrices() const { return static_cast<int64_t>(matrix_rows.size()); }
};

}  // namespace kdt::cuda
