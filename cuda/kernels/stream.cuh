// The machine of all products with packed weights (repack.h): weights are matrix A of mma m16n8k16,
// rows of activations the columns of B.
//
// A block works on units: a few stripes of weights times a tile of up to 8 * kTiles rows. Its eight
// warps cut the k dimension into `k_warps` slices, every k_warps-th chunk, so that a block reads
// one piece of memory after another; beyond that they share the unit's stripes. Weights come
// through a ring in shared memory that is private to each warp and keeps running across units, so
// the main loop has no block barrier; activations come straight from memory into registers, one
// step ahead. A slice is added up in order of k, the slices in their order: an output's bits depend
// on its row, its weights and the weights' shape, never on tiles, units or blocks.
#pragma once

#include "kernels/stream_formats.cuh"

namespace kdt::cuda {

inline constexpr int kStreamThreads = 256;
inline constexpr int kStreamWarps = kStreamThreads / 32;

struct StreamParams {
  const unsigned char* weights;  // panels
  int32_t num_chunks;            // of a stripe, at least k_warps
  int32_t k_warps;               // 1, 2, 4 or 8
};

// Work of a launch: `count` units, unit `index` being (index / num_inner, index % num_inner). A
// block takes every gridDim.x-th.
struct Unit {
  int index, outer, inner;
};
struct Units {
  int count, num_inner;

  __device__ Unit first() const {
    const int index = static_cast<int>(blockIdx.x);
    return {index, index / num_inner, index % num_inner};
  }
  // What lies between two units of a block.
  __device__ Unit step() const {
    const int by = static_cast<int>(gridDim.x);
    return {by, by / num_inner, by % num_inner};
  }
  // Without a division: there may be little work between two units.
  __device__ void advance(Unit& unit, const Unit& by) const {
    unit.index += by.index;
    unit.outer += by.outer;
    unit.inner += by.inner;
    if (unit.inner >= num_inner) {
      unit.inner -= num_inner;
      ++unit.outer;
    }
  }
};

// Shared memory of a block: each warp's ring, then two buffers in which slices meet.
template <typename Format, int kStripes>
struct StreamLayout {
  static constexpr int kStageBytes = kStripes * Format::kChunkBytes;
  static constexpr int kStages = kStageBytes > 2000 ? 5 : 8;
  static constexpr int kRingBytes = kStages * kStageBytes;
  static constexpr int kExchangeFloats = kStreamWarps * kStripes * 4 * 32;  // of one buffer
  static constexpr int kBytes = kStreamWarps * kRingBytes + 2 * kExchangeFloats * 4;
};

// Asks for the chunks of a warp's slice, unit after unit, a few steps before they are used.
template <typename Format, int kStripes, typename Job>
class StreamProducer {
 public:
  using Layout = StreamLayout<Format, kStripes>;

  __device__ StreamProducer(const Job& job, const StreamParams& p, int slice)
      : job_(job),
        p_(p),
        slice_(slice),
        count_((p.num_chunks - slice + p.k_warps - 1) / p.k_warps),
        lane_(static_cast<int>(threadIdx.x) % 32),
        ring_(shared_address(shared_memory()) +
              static_cast<int>(threadIdx.x) / 32 * Layout::kRingBytes + lane_ * 16),
        unit_(job.units().first()),
        step_(job.units().step()) {
    if (exists()) next_stripe_ = job_.stripe(unit_);
  }

  // One step into the stage at `offset` of the ring, or nothing when all are asked for; always one
  // group of copies.
  __device__ void advance(int offset) {
    if (left_ == 0 && exists()) {
      const int64_t panel = next_stripe_ / 2;
      from_ = p_.weights + (panel * p_.num_chunks + slice_) * (2 * Format::kChunkBytes) +
              next_stripe_ % 2 * Format::kChunkBytes + lane_ * 16;
      left_ = count_;
      job_.units().advance(unit_, step_);
      // Known long before it is needed.
      if (exists()) next_stripe_ = job_.stripe(unit_);
    }
    if (left_ > 0) {
      const uint32_t to = ring_ + offset;
#pragma unroll
      for (int at = 0; at < Layout::kStageBytes; at += 512) {
        if (at + 512 <= Layout::kStageBytes || at + lane_ * 16 < Layout::kStageBytes)
          cp_async_16(to + at, from_ + at);
      }
      from_ += p_.k_warps * (2 * Format::kChunkBytes);
      --left_;
    }
    cp_async_commit();
  }

 private:
  __device__ bool exists() const { return unit_.index < job_.units().count; }

  const Job& job_;
  const StreamParams& p_;
  int slice_, count_, lane_;
  uint32_t ring_;
  Unit unit_, step_;
  int next_stripe_ = 0;
  int left_ = 0;
  const unsigned char* from_ = nullptr;
};

// Runs all units of a block. A Job has
//   Source: how activations are read
//   units()
//   stripe(unit): the warp's first stripe of all weights, even when kStripes is 2
//   tag(unit, n): names row g of tile n for the functions below, -1: there is none; row 0 is there
//   row(unit, tag): where this lane's first activation of the row is
//   store(unit, s, tag, upper, lower): the sums of weight rows g and g + 8 of the warp's stripe s
//     for a row
template <typename Format, int kStripes, int kTiles, typename Job>
__device__ void stream_products(const Job& job, const StreamParams& p) {
  using Source = typename Job::Source;
  using Layout = StreamLayout<Format, kStripes>;
  constexpr int kGroups = Format::kGroups;
  constexpr int kChunkK = 32 * kGroups;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int slice = warp & (p.k_warps - 1);
  const unsigned char* ring = shared_memory() + warp * Layout::kRingBytes;
  auto* exchange = reinterpret_cast<float*>(shared_memory() + kStreamWarps * Layout::kRingBytes);
  const Units units = job.units();
  const Unit step = units.step();
  Unit unit = units.first();
  if (unit.index >= units.count) {
    wait_for_previous_kernel();
    return;
  }

  StreamProducer<Format, kStripes, Job> producer(job, p, slice);
#pragma unroll 1
  for (int i = 0; i + 1 < Layout::kStages; ++i) producer.advance(i * Layout::kStageBytes);
  // Weights and the list of units are there; activations may come from the kernel before.
  follow_previous_kernel();

  // A lane without a row reads row 0: its products stay in columns that are not stored, and a load
  // without a branch can be waited for where its value is used.
  const typename Source::Value* rows[kTiles];
  typename Source::Raw raw[kGroups][kTiles];
  int tags[kTiles], next_tags[kTiles];
  const auto set_rows = [&](const Unit& of, const int (&from)[kTiles]) {
    const int row_0 = __shfl_sync(0xFFFFFFFFu, from[0], 0);
#pragma unroll
    for (int n = 0; n < kTiles; ++n) rows[n] = job.row(of, from[n] < 0 ? row_0 : from[n]);
  };
  const auto load_rows = [&](int chunk, int group) {
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
      raw[group][n] = Source::load(rows[n] + (chunk * kChunkK + group * 32));
  };
#pragma unroll
  for (int n = 0; n < kTiles; ++n) tags[n] = job.tag(unit, n);
  set_rows(unit, tags);
#pragma unroll
  for (int group = 0; group < kGroups; ++group) load_rows(slice, group);

  // Offsets in the ring: of the stage to use, and of the one that is free.
  int stage = 0, free_stage = Layout::kRingBytes - Layout::kStageBytes, buffer = 0;
#pragma unroll 1
  while (unit.index < units.count) {
    Unit next = unit;
    units.advance(next, step);
    if (next.index >= units.count) next = unit;
#pragma unroll
    for (int n = 0; n < kTiles; ++n) next_tags[n] = job.tag(next, n);
    float sum[kStripes][kTiles][4];
#pragma unroll
    for (int s = 0; s < kStripes; ++s) {
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[s][n][i] = 0;
      }
    }
#pragma unroll 1
    for (int chunk = slice; chunk < p.num_chunks; chunk += p.k_warps) {
      cp_async_wait<Layout::kStages - 2>();
      __syncwarp();  // all lanes' copies have come, and all have read the stage filled next
      producer.advance(free_stage);
      const unsigned char* at = ring + stage;
      typename Format::Stripe stripe[kStripes];
#pragma unroll
      for (int s = 0; s < kStripes; ++s)
        stripe[s] = Format::load(at + s * Format::kChunkBytes, lane);
      free_stage = stage;
      stage += Layout::kStageBytes;
      if (stage == Layout::kRingBytes) stage = 0;
      int next_chunk = chunk + p.k_warps;
      if (next_chunk >= p.num_chunks) {
        set_rows(next, next_tags);
        next_chunk = slice;
      }
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        uint4 b[kTiles];
#pragma unroll
        for (int n = 0; n < kTiles; ++n) b[n] = Source::pairs(raw[group][n]);
#pragma unroll
        for (int s = 0; s < kStripes; ++s)
          Format::template multiply<kTiles>(stripe[s], group, b, sum[s]);
        // Behind the last use, so that the registers can be the same: a copy at the loop's end
        // would wait for the load.
        load_rows(next_chunk, group);
      }
    }
    // The slices meet a tile at a time; with two buffers one barrier for each is enough.
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const float* slices = nullptr;
      if (p.k_warps > 1) {
        float* mine = exchange + buffer * Layout::kExchangeFloats + lane;
#pragma unroll
        for (int s = 0; s < kStripes; ++s) {
#pragma unroll
          for (int i = 0; i < 4; ++i) mine[((warp * kStripes + s) * 4 + i) * 32] = sum[s][n][i];
        }
        __syncthreads();
        slices = mine + (warp - slice) * kStripes * 4 * 32;
        buffer ^= 1;
      }
#pragma unroll
      for (int item = 0; item < kStripes * 2; ++item) {
        const int s = item / 2, j = item % 2;
        const int tag = __shfl_sync(0xFFFFFFFFu, tags[n], (lane % 4 * 2 + j) * 4);
        if ((item & (p.k_warps - 1)) != slice) continue;
        float upper = sum[s][n][j], lower = sum[s][n][2 + j];
        if (p.k_warps > 1) {
          upper = slices[(s * 4 + j) * 32];
          lower = slices[(s * 4 + 2 + j) * 32];
          for (int w = 1; w < p.k_warps; ++w) {
            upper += slices[((w * kStripes + s) * 4 + j) * 32];
            lower += slices[((w * kStripes + s) * 4 + 2 + j) * 32];
          }
        }
        if (tag >= 0) job.store(unit, s, tag, upper, lower);
      }
    }
#pragma unroll
    for (int n = 0; n < kTiles; ++n) tags[n] = next_tags[n];
    units.advance(unit, step);
  }
  cp_async_wait<0>();
}

}  // namespace kdt::cuda
