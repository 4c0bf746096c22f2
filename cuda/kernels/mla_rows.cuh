// Which keys a row sees, for the kernels of mla_attention.
#pragma once

#include "kernels/mla_attention.h"
#include "sequences.cuh"

namespace kdt::cuda {

// A sequence's rows and cached keys, forced into what the arrays hold.
struct MlaSequence {
  int32_t index;
  int32_t begin, end;  // rows of the call
  int32_t prefix_len;
};

__device__ __forceinline__ MlaSequence mla_sequence(const Sequences& s, int index) {
  const auto num_rows = static_cast<int32_t>(s.num_rows);
  const int32_t capacity = s.blocks_per_sequence * s.block_size;
  return {index, max(s.row_begin[index], 0), min(s.row_begin[index + 1], num_rows),
          min(max(s.prefix_len[index], 0), capacity)};
}

// The row's position; one that its slot cannot have is reported, and the nearest taken.
__device__ __forceinline__ int32_t mla_position(const MlaAttentionParams& p, const MlaSequence& s,
                                                int32_t row) {
  const int32_t given = p.positions[row];
  const int32_t position = min(max(given, s.prefix_len), s.prefix_len + row - s.begin);
  if (position != given) report(p.sequences.fault, FaultKind::kPosition, row, given);
  return position;
}

constexpr int kMlaWindow = 512;

// Shared memory of mla_path.
struct MlaPathScratch {
  int32_t window[kMlaWindow];   // parents of the slots up to the row's own, backwards
  int32_t slots[kMlaPathKeys];  // of the path's keys
  int32_t is_chain[32];         // a word a warp
};

// rows[i] = cache row of key i of the row's path, at position mla_prefix_keys(position) + i, for
// the path's keys; -1 for the rest of [0, kMlaPathKeys) and for keys that could not be found. The
// whole block calls it; a barrier must follow before `rows` is read or the scratch used again.
template <int kThreads>
__device__ void mla_path(const MlaAttentionParams& p, const MlaSequence& s, int32_t row,
                         int32_t position, MlaPathScratch& scratch, int64_t* rows) {
  const int thread = forget(threadIdx.x);
  const int32_t first = mla_prefix_keys(position);
  const int count = position - first + 1;
  const int cached = max(s.prefix_len - first, 0);  // keys before the tree's; less than count
  const bool from_root = first <= s.prefix_len;     // the path then holds the tree's root
  const int32_t slot = row - s.begin;
  const int32_t* parents = p.sequences.parents + s.begin;

  // Most paths are the end of a chain, whose slots need not be looked for.
  bool is_chain = true;
  for (int i = cached + thread; i < count; i += kThreads) {
    const int32_t own = slot - (count - 1 - i);
    if (i > cached || from_root) is_chain = is_chain && parents[own] == (i > cached ? own - 1 : -1);
    scratch.slots[i] = own;
  }
  is_chain = __all_sync(0xFFFFFFFFu, is_chain);
  if (thread % 32 == 0) scratch.is_chain[thread / 32] = is_chain;
  for (int i = thread; i < min(kMlaWindow, slot + 1); i += kThreads)
    scratch.window[i] = parents[slot - i];
  __syncthreads();
  for (int w = 0; w < kThreads / 32; ++w) is_chain = is_chain && scratch.is_chain[w] != 0;

  if (!is_chain && thread == 0) {
    int32_t at = slot;
    for (int i = count - 1; i >= cached; --i) {
      scratch.slots[i] = at;
      if (at < 0) continue;
      const int32_t parent = slot - at < kMlaWindow ? scratch.window[slot - at] : parents[at];
      // The root's is -1, and the position says where the root is.
      const bool is_link = parent >= -1 && parent < at;
      const bool fits = is_link && (i > cached ? parent >= 0 : !from_root || parent == -1);
      if (!is_link) report(p.sequences.fault, FaultKind::kParent, s.begin + at, parent);
      if (is_link && !fits) report(p.sequences.fault, FaultKind::kPosition, row, p.positions[row]);
      at = fits ? parent : -1;
    }
  }
  __syncthreads();
  for (int i = thread; i < kMlaPathKeys; i += kThreads) {
    int64_t found = -1;
    if (i < cached) {
      found = cache_row(p.sequences, s.index, first + i);
    } else if (i < count && scratch.slots[i] >= 0) {
      found =
          cache_row(p.sequences, s.index, static_cast<int64_t>(s.prefix_len) + scratch.slots[i]);
    }
    rows[i] = found;
  }
}

}  // namespace kdt::cuda
