// Matrices in the order the kernels read them.
#pragma once

#include "cuda_backend.h"
#include "repack.h"

namespace kdt::cuda {

struct CudaLinear final : LinearWeight {
  std::vector<MatrixShape> shapes;  // of the stacked matrices
  DType dtype = DType::kBFloat16;
  // f32: the matrices as they are. int4, bf16: panels (repack.h) of packed_matrices matrices of
  // packed_rows rows each, which are the stacked ones, or all of them as one when their sizes
  // differ.
  std::shared_ptr<void> data;
  int64_t bytes = 0;
  int64_t packed_matrices = 0, packed_rows = 0;

  int64_t num_matrices() const { return static_cast<int64_t>(shapes.size()); }
  bool is_packed() const { return dtype != DType::kFloat32; }
  std::vector<Tensor> memory() const override {
    return {Tensor(data.get(), DType::kUInt8, {bytes})};
  }
};

}  // namespace kdt::cuda
