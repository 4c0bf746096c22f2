// Matrices in the order the kernels read them.
#pragma once

#include "cuda_backend.h"
#include "repack.h"

namespace kdt::cuda {

struct CudaLinear final : LinearWeight {
  std::vector<int64_t> matrix_rows;  // out_features of each stacked matrix
  DType dtype = DType::kBFloat16;
  // f32: the matrices as they are. int4, bf16: panels (repack.h) of packed_matrices matrices of
  // packed_rows rows each, which are the stacked ones, or all of them as one when their sizes
  // differ.
  std::shared_ptr<void> memory;
  int64_t packed_matrices = 0, packed_rows = 0;

  int64_t num_matrices() const { return static_cast<int64_t>(matrix_rows.size()); }
  bool is_packed() const { return dtype != DType::kFloat32; }
};

// Throws what is wrong with a matrix of a checkpoint.
void check_matrix(const HostMatrix& matrix);

// Panels of rows, whose number is a multiple of kPanelRows, in the device's memory.
std::shared_ptr<void> upload_panels(const std::vector<PanelRow>& rows, DType dtype,
                                    int64_t in_features, cudaStream_t stream);

// Matrices of f32 one after another.
std::shared_ptr<void> upload_plain(const std::vector<HostMatrix>& matrices, cudaStream_t stream);

}  // namespace kdt::cuda
