// Which work a block of mla_attention takes.
#pragma once

#include "kernels/mla_config.cuh"

namespace kdt::cuda {

// Of one sequence: (tile, segment) items, segments from the last, which is the longest; then each
// row's path.
struct MlaPlan {
  MlaSequence sequence;
  int32_t first, rows;  // that this launch takes
  int32_t tiles, segments, path_tiles;

  __device__ int32_t items() const { return tiles * segments + rows * path_tiles; }
};

template <int kPairs>
__device__ MlaPlan mla_plan_of(const MlaAttentionParams& p, int index) {
  MlaPlan plan;
  plan.sequence = mla_sequence(p.sequences, index);
  plan.first = max(plan.sequence.begin, p.first_row);
  const int32_t end = min(plan.sequence.end, p.end_row);
  plan.rows = max(end - plan.first, 0);
  plan.tiles = (plan.rows * p.num_heads + kPairs - 1) / kPairs;
  // No row lies deeper than its slot.
  const int32_t furthest = plan.sequence.prefix_len + end - 1 - plan.sequence.begin;
  plan.segments =
      plan.rows == 0 ? 0 : min(mla_segment_count(mla_prefix_keys(furthest)), p.num_segments);
  plan.path_tiles = (p.num_heads + kPairs - 1) / kPairs;
  return plan;
}

// The same in every thread; false behind the last item.
template <int kPairs>
__device__ bool mla_find_item(const MlaAttentionParams& p, int32_t index, MlaItem& item) {
  const int lane = threadIdx.x % 32;
  for (int base = 0; base < p.sequences.num_sequences; base += 32) {
    const bool exists = base + lane < p.sequences.num_sequences;
    const int32_t own = exists ? mla_plan_of<kPairs>(p, base + lane).items() : 0;
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
    const MlaPlan plan = mla_plan_of<kPairs>(p, base + winner);
    item.sequence = plan.sequence;
    const int32_t segment_items = plan.tiles * plan.segments;
    if (index < segment_items) {
      item.segment = plan.segments - 1 - index / plan.tiles;
      const int32_t pair = index % plan.tiles * kPairs;
      item.row = plan.first + pair / p.num_heads;
      item.head = pair % p.num_heads;
      item.count = min(kPairs, plan.rows * p.num_heads - pair);
    } else {
      item.segment = -1;
      item.row = plan.first + (index - segment_items) / plan.path_tiles;
      item.head = (index - segment_items) % plan.path_tiles * kPairs;
      item.count = min(kPairs, p.num_heads - item.head);
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
  MlaItem item;
  if (!mla_find_item<C::kPairs>(p, index, item)) return -1;
  item.index = index;
  __syncthreads();  // the item before is done with the shared memory
  if (threadIdx.x == 0) shared.item = item;
  const bool is_path = item.segment < 0;
  const int32_t start = is_path ? 0 : mla_segment_begin(item.segment);
  const int32_t length = is_path ? kMlaPathKeys : mla_segment_begin(item.segment + 1) - start;
  if (threadIdx.x < C::kPairs) {
    const int pair = threadIdx.x;
    int32_t limit = -1;
    if (pair < item.count) {
      const int32_t row = item.row + (item.head + pair) / p.num_heads;
      const int32_t position = mla_position(p, item.sequence, row);
      const int32_t prefix_keys = mla_prefix_keys(position);
      limit = is_path ? position - prefix_keys + 1 : min(max(prefix_keys - start, 0), length);
    }
    shared.limits[pair] = limit;
    shared.sums[pair] = make_float2(-INFINITY, 0);
  }
  if (is_path) {
    mla_path<C::kThreads>(p, item.sequence, item.row, mla_position(p, item.sequence, item.row),
                          *reinterpret_cast<MlaPathScratch*>(shared.exchange), shared.keys);
  }
  __syncthreads();
  int32_t most = 0;
#pragma unroll
  for (int pair = threadIdx.x % 32; pair < C::kPairs; pair += 32)
    most = max(most, shared.limits[pair]);
  for (int by = 16; by > 0; by /= 2) most = max(most, __shfl_xor_sync(0xFFFFFFFFu, most, by));
  const int num_tiles = (most + kMlaTileKeys - 1) / kMlaTileKeys;
  if (threadIdx.x == 0) shared.item.num_tiles = num_tiles;
  if (!is_path) {
    for (int i = threadIdx.x; i < 2 * num_tiles; i += C::kThreads)
      shared.keys[i] = cache_row(p.sequences, item.sequence.index, start + i * kMlaPieceKeys);
  }
  __syncthreads();
  return num_tiles;
}

}  // namespace kdt::cuda
