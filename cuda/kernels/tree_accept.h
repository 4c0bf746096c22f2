// The walk down a draft tree along the target's tokens. Links are read one after another, which
// takes one warp's patience of about 30 cycles each; a walk sees every slot at most once.
#pragma once

#include <cuda_runtime_api.h>

#include "fault.h"

namespace kdt::cuda {

inline constexpr int kMaxAcceptSlots = 4096;

struct TreeAcceptParams {
  const int32_t* tokens;  // [num_slots], as the next three
  const int32_t* first_child;
  const int32_t* next_sibling;
  const int32_t* target;
  int32_t* accepted;       // [num_slots], of which accept_length are written
  int32_t* accept_length;  // [1]
  int32_t* bonus_token;    // [1]
  Fault* fault;
  int num_slots;  // at most kMaxAcceptSlots
};
void launch_tree_accept(const TreeAcceptParams& params, cudaStream_t stream);

}  // namespace kdt::cuda
