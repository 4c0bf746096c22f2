// A token a row from its softmax, in the order of summation that SampleTokensArgs defines: many
// blocks a row for the sums of its chunks, then a block a row that searches.
#pragma once

#include <cuda_runtime_api.h>

#include "fault.h"
#include "kernels/logits.h"

namespace kdt::cuda {

inline constexpr int64_t kLogitsGroup = 32;
// Most chunks of a row: the search holds their sums in shared memory.
inline constexpr int64_t kMaxSampleChunks = 8192;

struct SampleParams {
  const float* logits;     // [num_rows, vocab]
  const double* uniforms;  // [num_rows]
  int32_t* ids;            // [num_rows]
  Fault* fault;
  double* sums;  // scratch, [num_rows, num_chunks]
  float* tops;   // scratch, the same
  int64_t num_rows, vocab;
  uint32_t num_chunks;         // num_logits_chunks(vocab), at most kMaxSampleChunks
  double inverse_temperature;  // finite
  bool aligned;
};
void launch_sample(const SampleParams& params, cudaStream_t stream);

}  // namespace kdt::cuda
