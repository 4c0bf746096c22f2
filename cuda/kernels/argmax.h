// The first greatest logit of each row: many blocks a row, then a warp a row.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/logits.h"

namespace kdt::cuda {

struct ArgmaxParams {
  const float* logits;  // [num_rows, vocab]
  int32_t* ids;         // [num_rows] from first_id on; -1: no number in the row
  float* values;        // [num_rows] -inf: the same; or null
  int32_t first_id;
  uint64_t* keys;  // scratch, [num_rows, num_chunks]
  int64_t num_rows, vocab;
  uint32_t num_chunks;  // num_logits_chunks(vocab)
  bool aligned;
};
void launch_argmax(const ArgmaxParams& params, cudaStream_t stream);

}  // namespace kdt::cuda
