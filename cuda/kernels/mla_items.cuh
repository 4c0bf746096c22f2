// Which work a block of mla_attention takes.
#pragma once

#include "kernels/mla_config.cuh"

namespace kdt::cuda {

// Of one sequence: (tile, segment) items, segments from the last, which is the longest; or each
// row's path.
template <typename C>
struct MlaPlan {
  MlaSequence sequence;
  int32_t first, rows;  // that this launch takes
  int32_t tiles;        // of all rows; of a path: of a row
  int32_t segments;

  __device__ int32_t items() const { return tiles * (C::kIsPath ? rows : segments); }
};

template <typename C>
__device__ MlaPlan<C> mla_plan_of(const MlaAttentionParams& p, int index) {
  MlaPlan<C> plan;
  plan.sequence = mla_sequence(p.sequences, index);
  plan.first = max(plan.sequence.begin, p.first_row);
  const int32_t end = min(plan.sequence.end, p.end_row);
  plan.rows = max(end - plan.first, 0);
  plan.tiles = ((C::kIsPath ? 1 : plan.rows) * p.num_heads + C::kPairs - 1) / C::kPairs;
  // No row lies deeper than its slot.
  const int32_t furthest = plan.sequence.prefix_len + end - 1 - plan.sequence.begin;
  plan.segments =
      plan.rows == 0 ? 0 : min(mla_segment_count(mla_prefix_keys(furthest)), p.num_segments);
  return plan;
}

// The same in every thread; false behind the last item.
template <typename C>
__device__ bool mla_find_item(const MlaAttentionParams& p, int32_t index, MlaItem& item) {
  const int lane = forget(threadIdx.x) % 32;
  for (int base = 0; base < p.sequences.num_sequences; base += 32) {
    const bool exists = base + lane < p.sequences.num_sequences;
    const int32_t own = exists ? mla_plan_of<C>(p, base + lane).items() : 0;
    int32_t end = own;
    for (int by = 1; by < 32; by *= 2) {
      const int32_t before = __shfl_up_sync(0xFFFFFFFFu, end, by);
      if (lane >= by) end += before;
    }
    const unsigned holders = __ballot_sync(0xFFFFFFFFu, index < end);
    if (holders == 0) {
      index -= __shfl_sync(0xFFFFFFFFu, end, 31);
      continue;
    }
    const int winner = __ffs(static_cast<int>(holders)) - 1;
    index -= __shfl_sync(0xFFFFFFFFu, end - own, winner);
    const MlaPlan<C> plan = mla_plan_of<C>(p, base + winner);
    item.sequence = plan.sequence;
    const int32_t tile = index % plan.tiles;
    if constexpr (C::kIsPath) {
      item.segment = -1;
      item.row = plan.first + index / plan.tiles;
      item.head = tile * C::kPairs;
      item.count = min(C::kPairs, p.num_heads - item.head);
    } else {
      item.segment = plan.segments - 1 - index / plan.tiles;
      item.row = plan.first + tile * C::kPairs / p.num_heads;
      item.head = tile * C::kPairs % p.num_heads;
      item.count = min(C::kPairs, plan.rows * p.num_heads - tile * C::kPairs);
    }
    return true;
  }
  return false;
}

// Finds the block's next item, what its pairs see and where the keys lie. Returns its tiles; -1
// when no item is left.
template <typename C>
__device__ int mla_begin_item(const MlaAttentionParams& p, int32_t index,
                              typename C::Shared& shared) {
  const int thread = forget(threadIdx.x);
  MlaItem item;
  if (!mla_find_item<C>(p, index, item)) return -1;
  item.index = index;
  __syncthreads();  // the item before is done with the shared memory
  if (thread == 0) shared.item = item;
  constexpr bool kIsPath = C::kIsPath;
  const int32_t start = kIsPath ? 0 : mla_segment_begin(item.segment);
  const int32_t length = kIsPath ? kMlaPathKeys : mla_segment_begin(item.segment + 1) - start;
  if (thread < C::kPairs) {
    int32_t limit = -1;
    if (thread < item.count) {
      const int32_t row = item.row + (item.head + thread) / p.num_heads;
      const int32_t position = mla_position(p, item.sequence, row);
      const int32_t prefix_keys = mla_prefix_keys(position);
      limit = kIsPath ? position - prefix_keys + 1 : min(max(prefix_keys - start, 0), length);
    }
    shared.limits[thread] = limit;
    shared.sums[thread] = make_float2(-INFINITY, 0);
  }
  if constexpr (kIsPath) {
    mla_path<C::kThreads>(p, item.sequence, item.row, mla_position(p, item.sequence, item.row),
                          *reinterpret_cast<MlaPathScratch*>(shared.exchange), shared.keys);
  }
  __syncthreads();
  int32_t most = 0;
#pragma unroll
  for (int pair = thread % 32; pair < C::kPairs; pair += 32) most = max(most, shared.limits[pair]);
  for (int by = 16; by > 0; by /= 2) most = max(most, __shfl_xor_sync(0xFFFFFFFFu, most, by));
  const int num_tiles = (most + kMlaTileKeys - 1) / kMlaTileKeys;
  if (thread == 0) shared.item.num_tiles = num_tiles;
  if constexpr (!kIsPath) {
    for (int i = thread; i < 2 * num_tiles; i += C::kThreads)
      shared.keys[i] = cache_row(p.sequences, item.sequence.index, start + i * kMlaPieceKeys);
  }
  __syncthreads();
  return num_tiles;
}

}  // namespace kdt::cuda
