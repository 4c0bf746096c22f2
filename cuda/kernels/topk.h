// The k greatest logits of each row with their log-probabilities.
//
// A scan with many blocks a row writes the greatest of every 32 logits, and each chunk's maximum
// and sum of exponentials. Then a block a row chooses. The k greatest lie in the k groups of 32
// that come first by (greatest, position): whatever lies elsewhere has k group maxima before it. So
// few logits are read again, and exactly k * 32 of them when all are equal.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/logits.h"

namespace kdt::cuda {

inline constexpr int64_t kTopkGroup = 32;

struct TopkParams {
  const float* logits;  // [num_rows, vocab]
  float* logprobs;      // [num_rows, k]; with log_sums: logit * scale
  int32_t* ids;         // [num_rows, k], from first_id on
  float* log_sums;      // [num_rows], or null: not for a part of a vocabulary
  int32_t first_id;
  int64_t num_rows, vocab, k;
  int64_t num_groups;   // ceil(vocab / kTopkGroup)
  uint32_t num_chunks;  // num_logits_chunks(vocab)
  float scale;          // of the logits
  bool aligned;

  // Scratch.
  uint32_t* maxima;  // [num_rows, num_groups], as `ordered`; 0: none
  float* tops;       // [num_rows, num_chunks]
  float* sums;       // the same
  uint64_t* bounds;  // [num_rows] key of the last logit chosen so far

  // Of the round: columns first to first + count - 1 are chosen.
  int64_t first;
  int count;
};

// Two launches for every 256 of k; `first` and `count` are set by it.
void launch_topk(TopkParams params, cudaStream_t stream);

}  // namespace kdt::cuda
