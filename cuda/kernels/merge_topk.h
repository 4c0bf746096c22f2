// The top k of a vocabulary from those of its parts.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace kdt::cuda {

struct MergeTopkParams {
  // Of the first part; each part's lie part_stride after the one's before.
  const float* part_logprobs;  // [num_rows, part_k], each row descending
  const int32_t* part_ids;     // the same
  const float* log_sums;       // [num_rows]
  float* logprobs;             // [num_rows, k]
  int32_t* ids;                // the same
  int32_t part_stride, num_parts, num_rows, part_k, k;
};
void launch_merge_topk(const MergeTopkParams& params, cudaStream_t stream);

}  // namespace kdt::cuda
