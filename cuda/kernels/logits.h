// How kernels cut rows of logits into chunks, one a block. It depends on the row's length only.
#pragma once

#include <cstdint>

namespace kdt::cuda {

inline constexpr int64_t kLogitsChunk = 2048;

inline int64_t num_logits_chunks(int64_t vocab) {
  return (vocab + kLogitsChunk - 1) / kLogitsChunk;
}

// Whether every row begins at a multiple of 16 bytes and is whole pieces of 16 bytes.
inline bool logits_aligned(const float* logits, int64_t vocab) {
  return reinterpret_cast<uintptr_t>(logits) % 16 == 0 && vocab % 4 == 0;
}

}  // namespace kdt::cuda
