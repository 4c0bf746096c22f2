#include "kernels/cache.h"

#include "kernels/block_sum.cuh"
#include "launch.cuh"
#include "sequences.cuh"

namespace kdt::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / 32;

// Value i of a rotated vector `x`; `at` gives value j of the vector.
template <typename At>
__device__ float rotated(const RopeParams& rope, int64_t position, int i, const At& at) {
  const int half = rope.dim / 2;
  const int pair = rope.interleaved ? i / 2 : i % half;
  const bool second = rope.interleaved ? i % 2 == 1 : i >= half;
  const float cosine = rope.cos_sin[position * rope.dim + pair];
  const float sine = rope.cos_sin[position * rope.dim + half + pair];
  const float a = at(rope.interleaved ? 2 * pair : pair);
  const float b = at(rope.interleaved ? 2 * pair + 1 : pair + half);
  return second ? fmaf(b, cosine, a * sine) : fmaf(a, cosine, -(b * sine));
}

// The row's position, or 0, reported, when the table has none of it.
__device__ int64_t checked_position(const RopeParams& rope, int64_t row, Fault* fault) {
  const int32_t position = rope.positions[row];
  if (position >= 0 && position < rope.num_positions) return position;
  if (threadIdx.x == 0) report(fault, FaultKind::kPosition, row, position);
  return 0;
}

// 1 / root mean square of x[0, n), by one warp; the order depends on n alone.
__device__ float warp_rms_scale(const float* x, int64_t n, float eps) {
  float squares = 0;
  for (int64_t i = threadIdx.x % 32; i < n; i += 32) squares = fmaf(x[i], x[i], squares);
  return 1.0f / sqrtf(warp_sum(squares) / static_cast<float>(n) + eps);
}

// A thread a value.
__global__ void rotate_query_kernel(const RotateQueryParams p) {
  follow_previous_kernel();
  const int64_t row = blockIdx.x;
  const int64_t position = checked_position(p.rope, row, p.fault);
  const auto i = static_cast<int>(blockIdx.y * kThreads + threadIdx.x);
  if (i >= p.num_heads * p.rope.dim) return;
  const int64_t head = row * p.num_heads + i / p.rope.dim;
  const float* q = p.q + head * p.q_stride + p.q_begin;
  const int d = i % p.rope.dim;
  p.out[head * p.out_stride + p.out_begin + d] =
      rotated(p.rope, position, d, [&](int j) { return q[j]; }) * p.scale;
}

// A block a row, a warp a head at a time.
__global__ void prepare_heads_kernel(const PrepareHeadsParams p) {
  follow_previous_kernel();
  const int64_t row = blockIdx.x;
  const int64_t position = checked_position(p.rope, row, p.fault);
  const int dim = p.rope.dim;
  for (int64_t head = threadIdx.x / 32; head < p.num_heads; head += kWarps) {
    const float* x = p.x + (row * p.num_heads + head) * dim;
    const float scale = warp_rms_scale(x, dim, p.eps);
    for (int d = threadIdx.x % 32; d < dim; d += 32) {
      const float value =
          rotated(p.rope, position, d, [&](int j) { return x[j] * scale * p.weight[j]; });
      p.out[(row * p.num_heads + head) * dim + d] = to_bf16(value * p.scale);
    }
  }
}

// A block a row.
__global__ void mla_store_kernel(const MlaStoreParams p) {
  auto* shared = reinterpret_cast<float*>(shared_memory());
  follow_previous_kernel();
  const int64_t row = blockIdx.x;
  const float* kv = p.kv + row * p.kv_stride;
  float squares = 0;
  for (int64_t i = threadIdx.x; i < p.rank; i += kThreads) squares = fmaf(kv[i], kv[i], squares);
  const int sequence = sequence_of(p.sequences, row);
  const int64_t slot = row - p.sequences.row_begin[sequence];
  const int64_t at = cache_row(p.sequences, sequence, p.sequences.prefix_len[sequence] + slot);
  if (at < 0) return;
  const int64_t position = checked_position(p.rope, row, p.sequences.fault);
  uint16_t* to = p.layer + at * p.row_stride;
  const float mean = block_sum<kWarps>(squares, shared) / static_cast<float>(p.rank);
  const float scale = 1.0f / sqrtf(mean + p.eps);
  for (int64_t i = threadIdx.x; i < p.rank; i += kThreads)
    to[i] = to_bf16(kv[i] * scale * p.norm_weight[i]);
  for (int d = threadIdx.x; d < p.rope.dim; d += kThreads)
    to[p.rank + d] = to_bf16(rotated(p.rope, position, d, [&](int j) { return kv[p.rank + j]; }));
}

// A block a row, a warp a head at a time.
__global__ void gqa_store_kernel(const GqaStoreParams p) {
  follow_previous_kernel();
  const int64_t row = blockIdx.x;
  const int sequence = sequence_of(p.sequences, row);
  const int64_t slot = row - p.sequences.row_begin[sequence];
  const int64_t at = cache_row(p.sequences, sequence, p.sequences.prefix_len[sequence] + slot);
  if (at < 0) return;
  const int64_t position = checked_position(p.rope, row, p.sequences.fault);
  const int dim = p.rope.dim;
  const float* kv = p.kv + row * p.kv_stride;
  uint16_t* to = p.layer + at * p.row_stride;
  for (int64_t head = threadIdx.x / 32; head < p.kv_heads; head += kWarps) {
    const float* key = kv + head * dim;
    const float scale = warp_rms_scale(key, dim, p.eps);
    for (int d = threadIdx.x % 32; d < dim; d += 32)
      to[head * dim + d] = to_bf16(
          rotated(p.rope, position, d, [&](int j) { return key[j] * scale * p.k_norm[j]; }));
  }
  const int64_t width = p.kv_heads * dim;
  for (int64_t i = threadIdx.x; i < width; i += kThreads) to[width + i] = to_bf16(kv[width + i]);
}

// Rows staged at a time, and 16-byte pieces of each that a block moves.
constexpr int kStagedRows = 256;
constexpr int kPieces = 4;

// A block a layer and a column strip. Rows are read before any is written, batch by batch: a later
// batch reads behind all that an earlier one writes, since to[i] <= from[i] < from[i + 1].
__global__ void kv_compact_kernel(const KvCompactParams p) {
  auto* staged = reinterpret_cast<uint4*>(shared_memory());  // [kStagedRows, kPieces]
  const int64_t pieces = p.row_stride / 8;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kPieces;
  uint16_t* layer =
      p.memory + static_cast<int64_t>(blockIdx.y) * p.num_blocks * p.block_size * p.row_stride;
  const auto row_at = [&](int64_t move, int32_t position) -> uint4* {
    const int64_t index = position / p.block_size;
    if (position < 0 || index >= p.num_table_blocks) {
      report(p.fault, FaultKind::kRow, move, position);
      return nullptr;
    }
    const int32_t block = p.block_table[index];
    if (block < 0 || block >= p.num_blocks) {
      report(p.fault, FaultKind::kBlock, move, block);
      return nullptr;
    }
    const int64_t row = static_cast<int64_t>(block) * p.block_size + position % p.block_size;
    return reinterpret_cast<uint4*>(layer + row * p.row_stride);
  };
  for (int64_t begin = 0; begin < p.num_moves; begin += kStagedRows) {
    const int64_t count = min(static_cast<int64_t>(kStagedRows), p.num_moves - begin);
    for (int64_t i = threadIdx.x; i < count * kPieces; i += kThreads) {
      const int64_t move = begin + i / kPieces, piece = first + i % kPieces;
      const uint4* from = piece < pieces ? row_at(move, p.from[move]) : nullptr;
      if (from != nullptr) staged[i] = from[piece];
    }
    __syncthreads();
    for (int64_t i = threadIdx.x; i < count * kPieces; i += kThreads) {
      const int64_t move = begin + i / kPieces, piece = first + i % kPieces;
      if (piece >= pieces) continue;
      const bool ascends =
          move == 0 || (p.from[move] > p.from[move - 1] && p.to[move] > p.to[move - 1]);
      if (!ascends || p.to[move] > p.from[move]) {
        report(p.fault, FaultKind::kRow, move, p.to[move]);
        continue;
      }
      uint4* to = row_at(move, p.to[move]);
      if (to != nullptr && row_at(move, p.from[move]) != nullptr) to[piece] = staged[i];
    }
    __syncthreads();
  }
}

dim3 rows_grid(int64_t rows) { return dim3(static_cast<unsigned>(rows)); }

}  // namespace

void launch_rotate_query(const RotateQueryParams& params, cudaStream_t stream) {
  if (params.rope.dim == 0) return;
  const dim3 grid(static_cast<unsigned>(params.num_rows),
                  static_cast<unsigned>(ceil_div(params.num_heads * params.rope.dim, kThreads)));
  launch<rotate_query_kernel>(grid, kThreads, 0, stream, params, /*early=*/true);
}

void launch_prepare_heads(const PrepareHeadsParams& params, cudaStream_t stream) {
  launch<prepare_heads_kernel>(rows_grid(params.num_rows), kThreads, 0, stream, params,
                               /*early=*/true);
}

void launch_mla_store(const MlaStoreParams& params, cudaStream_t stream) {
  launch<mla_store_kernel>(rows_grid(params.sequences.num_rows), kThreads, kWarps * sizeof(float),
                           stream, params, /*early=*/true);
}

void launch_gqa_store(const GqaStoreParams& params, cudaStream_t stream) {
  launch<gqa_store_kernel>(rows_grid(params.sequences.num_rows), kThreads, 0, stream, params,
                           /*early=*/true);
}

void launch_kv_compact(const KvCompactParams& params, cudaStream_t stream) {
  if (params.num_moves == 0) return;
  const dim3 grid(static_cast<unsigned>(ceil_div(params.row_stride / 8, kPieces)),
                  static_cast<unsigned>(params.num_layers));
  launch<kv_compact_kernel>(grid, kThreads, kStagedRows * kPieces * sizeof(uint4), stream, params);
}

}  // namespace kdt::cuda
