// The rows of a call and where their keys are, as kernels see them (SequenceRows of the seam).
#pragma once

#include <cstdint>

#include "fault.h"

namespace kdt::cuda {

struct Sequences {
  const int32_t* row_begin;    // [num_sequences + 1]
  const int32_t* prefix_len;   // [num_sequences]
  const int32_t* block_table;  // [num_sequences, blocks_per_sequence]
  const int32_t* parents;      // [num_rows]
  int64_t num_rows, num_blocks;
  int32_t num_sequences, blocks_per_sequence, block_size;
  Fault* fault;
};

}  // namespace kdt::cuda
