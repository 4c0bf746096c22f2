// Experts in the order the kernels read them.
#pragma once

#include "cuda_backend.h"
#include "repack.h"

namespace kdt::cuda {

inline constexpr int64_t kMostChunkK = 64;  // of any stream

// One product of all experts: gate and up, or down.
struct ExpertsProduct {
  DType dtype = DType::kBFloat16;
  std::shared_ptr<void> memory;  // f32: matrices; int4, bf16: panels of each expert (repack.h)
  int64_t in_features = 0;
  int64_t num_stripes = 0;   // of an expert
  int64_t expert_bytes = 0;  // of `memory`

  bool is_packed() const { return dtype != DType::kFloat32; }
};

struct CudaExperts final : ExpertsWeight {
  ExpertsShape shape;
  ExpertsProduct gate_up, down;
  // Columns of an activated row: zeros follow its values, so that down can read whole chunks.
  int64_t activated_stride = 0;

  std::vector<Tensor> memory() const override;
};

}  // namespace kdt::cuda
