#include "kernels/gqa_attention.h"

#include "launch.cuh"
#include "sequences.cuh"

namespace kdt::cuda {
namespace {

constexpr int kTileRows = 16;  // query rows of a block
constexpr int kTileKeys = 32;  // keys in shared memory at a time
constexpr int kMaxWarps = 8;
constexpr int kMaxPlainDim = 512;
constexpr float kMinusInfinity = -INFINITY;

// The keys a row sees: positions [begin, end).
struct Range {
  int64_t begin, end;
};

__device__ Range visible(const GqaAttentionParams& p, int64_t prefix_len, int64_t num_rows,
                         int64_t slot) {
  const int64_t end = p.causal ? prefix_len + slot + 1 : prefix_len + num_rows;
  const int64_t oldest = p.window == 0 ? 0 : prefix_len + slot - p.window + 1;
  return {oldest > 0 ? oldest : 0, end};
}

// A tile of a call: up to kTileRows rows of one sequence. False past the last one.
struct Tile {
  int sequence;
  int64_t first_slot, num_rows, prefix_len;
};

__device__ bool find_tile(const Sequences& s, int64_t index, Tile& tile) {
  for (int i = 0; i < s.num_sequences; ++i) {
    const int64_t rows = s.row_begin[i + 1] - s.row_begin[i];
    const int64_t tiles = (rows + kTileRows - 1) / kTileRows;
    if (index < tiles) {
      tile = {i, index * kTileRows, rows, s.prefix_len[i]};
      return true;
    }
    index -= tiles;
  }
  return false;
}

template <int kDim>
struct Shared {
  // Rows are padded by 16 bytes, so that the eight rows of a matrix lie in different banks.
  static constexpr int kStride = kDim + 8;
  uint16_t keys[2][kTileKeys][kStride];
  uint16_t values[2][kTileKeys][kStride];
};

template <int kDim>
__device__ void load_tile(const GqaAttentionParams& p, const Tile& tile, int64_t kv_head,
                          int64_t begin, int64_t end, int stage) {
  auto& shared = *reinterpret_cast<Shared<kDim>*>(shared_memory());
  constexpr int kPieces = kDim / 8;
  for (int i = threadIdx.x; i < kTileKeys * kPieces; i += blockDim.x) {
    const int key = i / kPieces, piece = i % kPieces;
    const int64_t position = begin + key;
    int64_t row = -1;
    if (position < end) row = cache_row(p.sequences, tile.sequence, position);
    const uint16_t* from =
        p.layer + (row < 0 ? 0 : row) * p.row_stride + kv_head * kDim + piece * 8;
    cp_async_16(shared_address(&shared.keys[stage][key][piece * 8]), from, row >= 0);
    cp_async_16(shared_address(&shared.values[stage][key][piece * 8]), from + p.kv_heads * kDim,
                row >= 0);
  }
  cp_async_commit();
}

// Block (segment, key-value head and group of its query heads, row tile); a warp a query head.
template <int kDim>
__global__ void __launch_bounds__(kMaxWarps * 32) gqa_kernel(const GqaAttentionParams p) {
  follow_previous_kernel();
  constexpr int kSteps = kDim / 16, kColumns = kDim / 8, kScores = kTileKeys / 8;
  auto& shared = *reinterpret_cast<Shared<kDim>*>(shared_memory());
  Tile tile;
  if (!find_tile(p.sequences, blockIdx.z, tile)) return;
  const int64_t group = p.num_heads / p.kv_heads;
  const int warps = blockDim.x / 32;
  const int64_t groups = (group + warps - 1) / warps;
  const int64_t kv_head = blockIdx.y / groups;
  const int64_t in_group = blockIdx.y % groups * warps + threadIdx.x / 32;
  const bool active = in_group < group;
  const int64_t head = kv_head * group + (active ? in_group : 0);
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;

  const int64_t rows = min(static_cast<int64_t>(kTileRows), tile.num_rows - tile.first_slot);
  const Range first = visible(p, tile.prefix_len, tile.num_rows, tile.first_slot);
  const Range last = visible(p, tile.prefix_len, tile.num_rows, tile.first_slot + rows - 1);
  // The segment's keys that any row of the tile sees; begins and ends do not fall with the row.
  const int64_t segment_begin = static_cast<int64_t>(blockIdx.x) * p.segment_size;
  const int64_t begin = max(segment_begin, first.begin);
  const int64_t end = min(segment_begin + p.segment_size, last.end);
  if (begin >= end) return;  // the merge does not read what no row sees
  // Tiles of keys lie at fixed places of the segment.
  const int64_t first_tile = (begin - segment_begin) / kTileKeys;
  const int64_t num_tiles = (end - segment_begin + kTileKeys - 1) / kTileKeys;

  const int64_t first_row = p.sequences.row_begin[tile.sequence] + tile.first_slot;
  uint32_t q[kSteps][4];
  for (int part = 0; part < 4; ++part) {
    const int64_t row = g + part % 2 * 8;
    const uint16_t* from =
        p.query + ((first_row + (row < rows ? row : 0)) * p.num_heads + head) * kDim;
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      const int column = k * 16 + 2 * t + part / 2 * 8;
      q[k][part] = row < rows ? *reinterpret_cast<const uint32_t*>(from + column) : 0;
    }
  }
  Range range[2];
  for (int i = 0; i < 2; ++i)
    range[i] = visible(p, tile.prefix_len, tile.num_rows, tile.first_slot + g + 8 * i);

  float out[kColumns][4] = {};
  float greatest[2] = {kMinusInfinity, kMinusInfinity}, sum[2] = {0, 0};
  load_tile<kDim>(p, tile, kv_head, segment_begin + first_tile * kTileKeys, end, 0);
  for (int64_t i = first_tile; i < num_tiles; ++i) {
    const int stage = static_cast<int>((i - first_tile) % 2);
    if (i + 1 < num_tiles) {
      load_tile<kDim>(p, tile, kv_head, segment_begin + (i + 1) * kTileKeys, end, 1 - stage);
    } else {
      cp_async_commit();
    }
    cp_async_wait<1>();
    __syncthreads();
    float scores[kScores][4] = {};
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
#pragma unroll
      for (int n = 0; n < kScores; n += 2) {
        uint32_t b[4];
        ldmatrix_x4(
            b,
            shared_address(
                &shared.keys[stage][n * 8 + lane / 16 * 8 + lane % 8][k * 16 + lane / 8 % 2 * 8]));
        mma_bf16(scores[n], q[k], b[0], b[1]);
        mma_bf16(scores[n + 1], q[k], b[2], b[3]);
      }
    }
    const int64_t position = segment_begin + i * kTileKeys + 2 * t;
    float tile_greatest[2] = {kMinusInfinity, kMinusInfinity};
#pragma unroll
    for (int n = 0; n < kScores; ++n) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const int64_t at = position + n * 8 + c % 2;
        const Range& r = range[c / 2];
        if (at < r.begin || at >= r.end) scores[n][c] = kMinusInfinity;
        tile_greatest[c / 2] = fmaxf(tile_greatest[c / 2], scores[n][c]);
      }
    }
    float base[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float m = tile_greatest[r];
      m = fmaxf(m, __shfl_xor_sync(0xFFFFFFFFu, m, 1));
      m = fmaxf(m, __shfl_xor_sync(0xFFFFFFFFu, m, 2));
      m = fmaxf(m, greatest[r]);
      base[r] = m == kMinusInfinity ? 0.0f : m;
      const float factor = exp2_approx(greatest[r] - base[r]);
      greatest[r] = m;
      sum[r] *= factor;
#pragma unroll
      for (int n = 0; n < kColumns; ++n) {
        out[n][2 * r] *= factor;
        out[n][2 * r + 1] *= factor;
      }
    }
#pragma unroll
    for (int n = 0; n < kScores; ++n) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        scores[n][c] = exp2_approx(scores[n][c] - base[c / 2]);
        sum[c / 2] += scores[n][c];
      }
    }
#pragma unroll
    for (int k = 0; k < kTileKeys / 16; ++k) {
      const uint32_t weights[4] = {pack_bf16(scores[2 * k][0], scores[2 * k][1]),
                                   pack_bf16(scores[2 * k][2], scores[2 * k][3]),
                                   pack_bf16(scores[2 * k + 1][0], scores[2 * k + 1][1]),
                                   pack_bf16(scores[2 * k + 1][2], scores[2 * k + 1][3])};
#pragma unroll
      for (int n = 0; n < kColumns; n += 2) {
        uint32_t b[4];
        ldmatrix_x4_trans(
            b, shared_address(&shared.values[stage][k * 16 + lane % 16][n * 8 + lane / 16 * 8]));
        mma_bf16(out[n], weights, b[0], b[1]);
        mma_bf16(out[n + 1], weights, b[2], b[3]);
      }
    }
    __syncthreads();
  }
  cp_async_wait<0>();
  for (int r = 0; r < 2; ++r) {
    sum[r] += __shfl_xor_sync(0xFFFFFFFFu, sum[r], 1);
    sum[r] += __shfl_xor_sync(0xFFFFFFFFu, sum[r], 2);
  }
  if (!active) return;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int64_t row = g + 8 * r;
    if (row >= rows) continue;
    const int64_t at = ((first_row + row) * p.num_heads + head) * p.num_segments + blockIdx.x;
    if (t == 0) p.partial_lse[at] = make_float2(greatest[r], sum[r]);
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
      *reinterpret_cast<float2*>(p.partial_out + at * kDim + n * 8 + 2 * t) =
          make_float2(out[n][2 * r], out[n][2 * r + 1]);
    }
  }
}

// Block (row, head): merges the segments in order.
__global__ void gqa_merge_kernel(const GqaAttentionParams p) {
  follow_previous_kernel();
  const int64_t row = blockIdx.x, head = blockIdx.y;
  const int sequence = sequence_of(p.sequences, row);
  const int64_t begin_row = p.sequences.row_begin[sequence];
  const Range range = visible(p, p.sequences.prefix_len[sequence],
                              p.sequences.row_begin[sequence + 1] - begin_row, row - begin_row);
  const int64_t first = range.begin / p.segment_size;
  const int64_t last =
      min((range.end + p.segment_size - 1) / p.segment_size, static_cast<int64_t>(p.num_segments));
  const int64_t base = (row * p.num_heads + head) * p.num_segments;
  float greatest = kMinusInfinity;
  for (int64_t s = first; s < last; ++s) greatest = fmaxf(greatest, p.partial_lse[base + s].x);
  for (int64_t d = threadIdx.x; d < p.head_dim; d += blockDim.x) {
    float value = 0, sum = 0;
    for (int64_t s = first; s < last; ++s) {
      const float2 lse = p.partial_lse[base + s];
      if (lse.x == kMinusInfinity) continue;
      const float factor = exp2_approx(lse.x - greatest);
      value = fmaf(p.partial_out[(base + s) * p.head_dim + d], factor, value);
      sum = fmaf(lse.y, factor, sum);
    }
    p.out[(row * p.num_heads + head) * p.head_dim + d] = value / sum;
  }
}

// Any head size: a warp a row and head, key after key.
__global__ void gqa_plain_kernel(const GqaAttentionParams p) {
  const int64_t row = blockIdx.x, head = blockIdx.y;
  const int sequence = sequence_of(p.sequences, row);
  const int64_t begin_row = p.sequences.row_begin[sequence];
  const Range range = visible(p, p.sequences.prefix_len[sequence],
                              p.sequences.row_begin[sequence + 1] - begin_row, row - begin_row);
  const int64_t kv_head = head / (p.num_heads / p.kv_heads);
  const uint16_t* q = p.query + (row * p.num_heads + head) * p.head_dim;
  float out[kMaxPlainDim / 32] = {}, greatest = kMinusInfinity, sum = 0;
  for (int64_t position = range.begin; position < range.end; ++position) {
    const int64_t at = cache_row(p.sequences, sequence, position);
    if (at < 0) return;
    const uint16_t* key = p.layer + at * p.row_stride + kv_head * p.head_dim;
    const uint16_t* value = key + p.kv_heads * p.head_dim;
    float score = 0;
    for (int d = threadIdx.x; d < p.head_dim; d += 32)
      score = fmaf(bf16_value(q[d]), bf16_value(key[d]), score);
    score = warp_sum(score);
    const float m = fmaxf(greatest, score);
    const float factor = exp2_approx(greatest - m), weight = exp2_approx(score - m);
    greatest = m;
    sum = fmaf(sum, factor, weight);
#pragma unroll
    for (int i = 0; i < kMaxPlainDim / 32; ++i) {
      const int d = threadIdx.x + 32 * i;
      if (d < p.head_dim) out[i] = fmaf(out[i], factor, weight * bf16_value(value[d]));
    }
  }
#pragma unroll
  for (int i = 0; i < kMaxPlainDim / 32; ++i) {
    const int d = threadIdx.x + 32 * i;
    if (d < p.head_dim) p.out[(row * p.num_heads + head) * p.head_dim + d] = out[i] / sum;
  }
}

template <int kDim>
void launch_tiles(const GqaAttentionParams& p, cudaStream_t stream) {
  const int64_t group = p.num_heads / p.kv_heads;
  const int warps = static_cast<int>(group < kMaxWarps ? group : kMaxWarps);
  const dim3 grid(
      static_cast<unsigned>(p.num_segments),
      static_cast<unsigned>(p.kv_heads * ceil_div(group, warps)),
      static_cast<unsigned>(p.sequences.num_rows / kTileRows + p.sequences.num_sequences));
  static_assert(sizeof(Shared<kDim>) <= kMaxSharedBytes);
  launch<gqa_kernel<kDim>>(grid, 32 * warps, sizeof(Shared<kDim>), stream, p, /*early=*/true);
  launch<gqa_merge_kernel>(
      dim3(static_cast<unsigned>(p.sequences.num_rows), static_cast<unsigned>(p.num_heads)), kDim,
      0, stream, p, /*early=*/true);
}

}  // namespace

void launch_gqa_attention(const GqaAttentionParams& params, cudaStream_t stream) {
  if (params.head_dim == 64) return launch_tiles<64>(params, stream);
  if (params.head_dim == 128) return launch_tiles<128>(params, stream);
  KDT_CHECK(params.head_dim <= kMaxPlainDim, "gqa_attention: head_dim ", params.head_dim,
            ", at most ", kMaxPlainDim, " on cuda");
  launch<gqa_plain_kernel>(dim3(static_cast<unsigned>(params.sequences.num_rows),
                                static_cast<unsigned>(params.num_heads)),
                           32, 0, stream, params);
}

}  // namespace kdt::cuda
