// The machine of all products with packed weights (repack.h): weights are matrix A of mma m16n8k16,
// rows of activations the columns of B.
//
// A block works on units: a few stripes of weights times a tile of up to 8 * kTiles rows. Its eight
// warps cut the k dimension into `k_warps` slices, and share the unit's stripes beyond that.
// Weights come through a ring in shared memory that is private to each warp and keeps running
// across units, so the main loop has no block barrier; activations come straight from memory into
// registers, one step ahead. A slice is added up in order of k, the slices in their order: an
// output's bits depend on its row, its weights and the weights' shape, never on tiles, units or
// blocks.
#pragma once

#include "primitives.cuh"

namespace kdt::cuda {

inline constexpr int kStreamThreads = 256;
inline constexpr int kStreamWarps = kStreamThreads / 32;

struct StreamParams {
  const unsigned char* weights;  // panels
  int32_t num_chunks;            // of a stripe, at least k_warps
  int32_t k_warps;               // 1, 2, 4 or 8
};

// How a warp takes a chunk of one stripe and multiplies it with `kTiles` tiles of eight rows.

struct Int4Format {
  static constexpr int kChunkBytes = 576;
  static constexpr int kGroups = 2;  // of 32 k
  struct Stripe {
    uint4 words;
    uint2 scales;
  };

  __device__ static Stripe load(const unsigned char* chunk, int lane) {
    return {*reinterpret_cast<const uint4*>(chunk + lane * 16),
            *reinterpret_cast<const uint2*>(chunk + 512 + lane / 4 * 8)};
  }

  // Exact: a nibble in the mantissa of 128 is 128 + nibble, and the value is nibble - 8.
  __device__ static void unpack(uint32_t word, uint32_t (&a)[4]) {
#pragma unroll
    for (int s = 0; s < 4; ++s)
      a[s] = sub_bf16x2((word >> (4 * s) & 0x000F000Fu) | 0x43004300u, 0x43084308u);
  }

  // The group's scale is applied in f32 to the group's sum.
  template <int kTiles>
  __device__ static void multiply(const Stripe& stripe, int group, const uint4 (&b)[kTiles],
                                  float (&sum)[kTiles][4]) {
    uint32_t first[4], second[4];
    unpack(group == 0 ? stripe.words.x : stripe.words.z, first);
    unpack(group == 0 ? stripe.words.y : stripe.words.w, second);
    const float upper = group == 0 ? bf16_low(stripe.scales.x) : bf16_high(stripe.scales.x);
    const float lower = group == 0 ? bf16_low(stripe.scales.y) : bf16_high(stripe.scales.y);
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      float part[4] = {0, 0, 0, 0};
      mma_bf16(part, first, b[n].x, b[n].y);
      mma_bf16(part, second, b[n].z, b[n].w);
      sum[n][0] = fmaf(upper, part[0], sum[n][0]);
      sum[n][1] = fmaf(upper, part[1], sum[n][1]);
      sum[n][2] = fmaf(lower, part[2], sum[n][2]);
      sum[n][3] = fmaf(lower, part[3], sum[n][3]);
    }
  }
};

struct BFloat16Format {
  static constexpr int kChunkBytes = 1024;
  static constexpr int kGroups = 1;
  struct Stripe {
    uint4 first, second;
  };

  __device__ static Stripe load(const unsigned char* chunk, int lane) {
    const auto* fragments = reinterpret_cast<const uint4*>(chunk) + lane;
    return {fragments[0], fragments[32]};
  }

  template <int kTiles>
  __device__ static void multiply(const Stripe& stripe, int, const uint4 (&b)[kTiles],
                                  float (&sum)[kTiles][4]) {
    const uint4 &f = stripe.first, &s = stripe.second;
    const uint32_t first[4] = {f.x, f.y, f.z, f.w}, second[4] = {s.x, s.y, s.z, s.w};
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      mma_bf16(sum[n], first, b[n].x, b[n].y);
      mma_bf16(sum[n], second, b[n].z, b[n].w);
    }
  }
};

// How a lane takes eight consecutive activations of one row as four pairs of bf16.

struct BFloat16Source {
  using Value = uint16_t;
  using Raw = uint4;
  __device__ static Raw zero() { return make_uint4(0, 0, 0, 0); }
  __device__ static Raw load(const Value* from) { return load_16(from); }
  __device__ static uint4 pairs(const Raw& raw) { return raw; }
};

struct Float32Source {
  using Value = float;
  struct Raw {
    uint4 low, high;
  };
  __device__ static Raw zero() { return {make_uint4(0, 0, 0, 0), make_uint4(0, 0, 0, 0)}; }
  __device__ static Raw load(const Value* from) { return {load_16(from), load_16(from + 4)}; }
  __device__ static uint32_t pair(uint32_t a, uint32_t b) {
    return pack_bf16(__uint_as_float(a), __uint_as_float(b));
  }
  __device__ static uint4 pairs(const Raw& raw) {
    return make_uint4(pair(raw.low.x, raw.low.y), pair(raw.low.z, raw.low.w),
                      pair(raw.high.x, raw.high.y), pair(raw.high.z, raw.high.w));
  }
};

// Shared memory of a block: each warp's ring, then two buffers in which slices meet.
template <typename Format, int kStripes>
struct StreamLayout {
  static constexpr int kStageBytes = kStripes * Format::kChunkBytes;
  static constexpr int kStages = kStageBytes > 2000 ? 5 : kStageBytes > 1024 ? 6 : 8;
  static constexpr int kRingBytes = kStages * kStageBytes;
  static constexpr int kExchangeFloats = kStreamWarps * kStripes * 4 * 32;  // of one buffer
  static constexpr int kBytes = kStreamWarps * kRingBytes + 2 * kExchangeFloats * 4;
};

// Asks for the chunks of a warp's slice, unit after unit, a few steps before they are used.
template <typename Format, int kStripes, typename Job>
class StreamProducer {
 public:
  using Layout = StreamLayout<Format, kStripes>;

  __device__ StreamProducer(const Job& job, const StreamParams& p, int first_chunk, int end_chunk)
      : job_(job), p_(p), first_(first_chunk), count_(end_chunk - first_chunk) {
    const int warp = static_cast<int>(threadIdx.x) / 32;
    lane_ = static_cast<int>(threadIdx.x) % 32;
    ring_ = shared_address(shared_memory()) + warp * Layout::kRingBytes + lane_ * 16;
    unit_ = blockIdx.x;
    next_stripe_ = unit_ < job_.num_units() ? job_.stripe(unit_) : 0;
  }

  // One step, or nothing when all are asked for; always one group of copies.
  __device__ void advance() {
    if (left_ == 0 && unit_ < job_.num_units()) {
      const int64_t panel = next_stripe_ / 2;
      from_ = p_.weights + (panel * p_.num_chunks + first_) * (2 * Format::kChunkBytes) +
              next_stripe_ % 2 * Format::kChunkBytes + lane_ * 16;
      left_ = count_;
      unit_ += static_cast<int>(gridDim.x);
      // Known long before it is needed.
      if (unit_ < job_.num_units()) next_stripe_ = job_.stripe(unit_);
    }
    if (left_ > 0) {
      const uint32_t to = ring_ + stage_ * Layout::kStageBytes;
#pragma unroll
      for (int at = 0; at < Layout::kStageBytes; at += 512) {
        if (at + 512 <= Layout::kStageBytes || at + lane_ * 16 < Layout::kStageBytes)
          cp_async_16(to + at, from_ + at);
      }
      from_ += 2 * Format::kChunkBytes;
      --left_;
    }
    cp_async_commit();
    stage_ = stage_ + 1 == Layout::kStages ? 0 : stage_ + 1;
  }

 private:
  const Job& job_;
  const StreamParams& p_;
  int first_, count_, lane_;
  uint32_t ring_;
  int unit_;
  int next_stripe_;
  int left_ = 0;
  int stage_ = 0;
  const unsigned char* from_ = nullptr;
};

// Runs all units of a block. A Job has
//   Source, and the type Rows with `const Source::Value* at(n)`: this lane's row of tile n, from
//   its
//     first activation on, or null where there is none
//   num_units(), stripe(unit): the warp's first stripe of all weights, even when kStripes is 2
//   rows(unit): Rows of the warp's stripe
//   store(unit, s, n, j, upper, lower): the sums of rows g and g + 8 of the warp's stripe s for row
//     2 t + j of tile n
template <typename Format, int kStripes, int kTiles, typename Job>
__device__ void stream_products(const Job& job, const StreamParams& p) {
  using Source = typename Job::Source;
  using Layout = StreamLayout<Format, kStripes>;
  constexpr int kGroups = Format::kGroups;
  constexpr int kChunkK = 32 * kGroups;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int slice = warp & (p.k_warps - 1);
  const int first_chunk = p.num_chunks * slice / p.k_warps;
  const int end_chunk = p.num_chunks * (slice + 1) / p.k_warps;
  const unsigned char* ring = shared_memory() + warp * Layout::kRingBytes;
  auto* exchange = reinterpret_cast<float*>(shared_memory() + kStreamWarps * Layout::kRingBytes);
  const int num_units = job.num_units(), step = static_cast<int>(gridDim.x);
  int unit = static_cast<int>(blockIdx.x);
  if (unit >= num_units) return;

  StreamProducer<Format, kStripes, Job> producer(job, p, first_chunk, end_chunk);
#pragma unroll 1
  for (int i = 0; i + 1 < Layout::kStages; ++i) producer.advance();

  typename Job::Rows rows = job.rows(unit);
  typename Source::Raw raw[kGroups][kTiles];
  const auto load_rows = [&](int chunk, int group) {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const typename Source::Value* from = rows.at(n);
      raw[group][n] =
          from == nullptr ? Source::zero() : Source::load(from + chunk * kChunkK + group * 32);
    }
  };
#pragma unroll
  for (int group = 0; group < kGroups; ++group) load_rows(first_chunk, group);

  int stage = 0, buffer = 0;
#pragma unroll 1
  for (; unit < num_units; unit += step) {
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
    for (int chunk = first_chunk; chunk < end_chunk; ++chunk) {
      cp_async_wait<Layout::kStages - 2>();
      __syncwarp();  // all lanes' copies have come, and all have read the stage filled next
      producer.advance();
      const unsigned char* at = ring + stage * Layout::kStageBytes;
      typename Format::Stripe stripe[kStripes];
#pragma unroll
      for (int s = 0; s < kStripes; ++s)
        stripe[s] = Format::load(at + s * Format::kChunkBytes, lane);
      stage = stage + 1 == Layout::kStages ? 0 : stage + 1;
      int next_chunk = chunk + 1;
      if (next_chunk == end_chunk && unit + step < num_units) rows = job.rows(unit + step);
      if (next_chunk == end_chunk) next_chunk = first_chunk;
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        uint4 b[kTiles];
#pragma unroll
        for (int n = 0; n < kTiles; ++n) b[n] = Source::pairs(raw[group][n]);
#pragma unroll
        for (int s = 0; s < kStripes; ++s)
          Format::template multiply<kTiles>(stripe[s], group, b, sum[s]);
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
        job.store(unit, s, n, j, upper, lower);
      }
    }
  }
  cp_async_wait<0>();
}

}  // namespace kdt::cuda
