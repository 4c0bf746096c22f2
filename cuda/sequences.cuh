#pragma once

#include "fault.cuh"
#include "sequences.h"

namespace kdt::cuda {

// The sequence that holds a row.
__device__ __forceinline__ int sequence_of(const Sequences& s, int64_t row) {
  int low = 0, high = s.num_sequences - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (s.row_begin[middle] <= row) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

// Index of a position's row among the rows of a layer; -1, reported, when it has none.
__device__ __forceinline__ int64_t cache_row(const Sequences& s, int sequence, int64_t position) {
  const int64_t index = position / s.block_size;
  if (position < 0 || index >= s.blocks_per_sequence) {
    report(s.fault, FaultKind::kSequence, sequence, position);
    return -1;
  }
  const int32_t block =
      s.block_table[static_cast<int64_t>(sequence) * s.blocks_per_sequence + index];
  if (block < 0 || block >= s.num_blocks) {
    report(s.fault, FaultKind::kBlock, sequence, block);
    return -1;
  }
  return static_cast<int64_t>(block) * s.block_size + position % s.block_size;
}

}  // namespace kdt::cuda
