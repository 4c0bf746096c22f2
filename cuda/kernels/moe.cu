#include "kernels/moe.h"

#include <algorithm>

#include "launch.cuh"
#include "primitives.cuh"

namespace kdt::cuda {
namespace {

constexpr unsigned kAll = 0xFFFFFFFFu;
constexpr int kPrepareThreads = 512;
constexpr int kPrepareWarps = kPrepareThreads / 32;
constexpr int64_t kMostCounters = kMaxExperts;
constexpr int64_t kRoundColumns = 4 * kPrepareThreads;
constexpr int kSumThreads = 256;
constexpr int kSumAtOnce = 8;

// Each takes 32 slots at a time.
__host__ __device__ int sorting_warps(const MoePrepareParams& p) {
  int64_t warps = (p.num_tokens * p.top_k + 31) / 32;
  if (warps > kPrepareWarps) warps = kPrepareWarps;
  if (warps * p.num_experts > kMostCounters) warps = kMostCounters / p.num_experts;
  return static_cast<int>(warps);
}

// Lanes with the same id; `bits` holds every id.
__device__ unsigned lanes_of(int id, int bits) {
  unsigned same = kAll;
  for (int bit = 0; bit < bits; ++bit) {
    const unsigned set = __ballot_sync(kAll, (id >> bit & 1) != 0);
    same &= (id >> bit & 1) != 0 ? set : ~set;
  }
  return same;
}

// Sums over the threads before this one, and over all. shared: [kPrepareWarps].
struct Prefix {
  int before, all;
};
__device__ Prefix block_prefix(int value, int* shared) {
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  int sum = value;
  for (int offset = 1; offset < 32; offset *= 2) {
    const int other = __shfl_up_sync(kAll, sum, offset);
    if (lane >= offset) sum += other;
  }
  __syncthreads();  // what was read before is free
  if (lane == 31) shared[warp] = sum;
  __syncthreads();
  Prefix prefix{sum - value, 0};
  for (int w = 0; w < kPrepareWarps; ++w) {
    if (w < warp) prefix.before += shared[w];
    prefix.all += shared[w];
  }
  return prefix;
}

// Stable counting sort by one block. Each warp that takes part has a run of slots and, in shared
// memory, a counter for each expert: first how many slots of the run are the expert's, then where
// the next of them goes. Shared: [kPrepareWarps], then the counters [warps, num_experts].
__device__ void sort_slots(const MoePrepareParams& p, int num_warps) {
  auto* scratch = reinterpret_cast<int*>(shared_memory());
  int* counters = scratch + kPrepareWarps;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int num_slots = static_cast<int>(p.num_tokens) * p.top_k;
  const int run = (num_slots + 32 * num_warps - 1) / (32 * num_warps) * 32;
  int* mine = counters + warp * p.num_experts;
  int bits = 1;
  while (p.num_experts >> bits != 0) ++bits;

  for (int i = static_cast<int>(threadIdx.x); i < num_warps * p.num_experts; i += kPrepareThreads)
    counters[i] = 0;
  __syncthreads();
  const auto for_slots = [&](const auto& body) {
    if (warp >= num_warps) return;
    for (int begin = warp * run; begin < min((warp + 1) * run, num_slots); begin += 32) {
      const int slot = begin + lane;
      const int global = slot < num_slots ? p.ids[slot] : -1;
      const bool valid = is_expert(global, p.first_expert, p.num_experts);
      const int id = valid ? global - p.first_expert : p.num_experts;
      const unsigned same = lanes_of(id, bits);
      const int rank = __popc(same & ((1u << lane) - 1));
      body(slot, id, valid, rank);
      __syncwarp();
      if (valid && rank == 0) mine[id] += __popc(same);
      __syncwarp();
    }
  };
  for_slots([](int, int, bool, int) {});
  __syncthreads();

  int tiles_before = 0;
  for (int begin = 0; begin < p.num_experts; begin += kPrepareThreads) {
    const int e = begin + static_cast<int>(threadIdx.x);
    const bool exists = e < p.num_experts;
    int count = 0;
    for (int w = 0; w < num_warps && exists; ++w) {
      const int of_warp = counters[w * p.num_experts + e];
      counters[w * p.num_experts + e] = count;
      count += of_warp;
    }
    const int tiles = (count + p.tile_rows - 1) / p.tile_rows;
    const Prefix prefix = block_prefix(tiles, scratch);
    const int first = tiles_before + prefix.before;
    for (int w = 0; w < num_warps && exists; ++w)
      counters[w * p.num_experts + e] += first * p.tile_rows;
    for (int i = 0; i < tiles; ++i) p.tiles.expert_of_tile[first + i] = e;
    for (int i = count; i < tiles * p.tile_rows; ++i)
      p.tiles.slots_of_tile[static_cast<int64_t>(first) * p.tile_rows + i] = -1;
    tiles_before += prefix.all;
  }
  if (threadIdx.x == 0) *p.tiles.num_tiles = tiles_before;
  __syncthreads();
  for_slots([&](int slot, int id, bool valid, int rank) {
    if (valid) p.tiles.slots_of_tile[mine[id] + rank] = slot;
  });
}

// Block 0 sorts, the others round: each a run of columns of a token.
__global__ void moe_prepare_kernel(const MoePrepareParams p) {
  follow_previous_kernel();
  if (blockIdx.x == 0) return sort_slots(p, sorting_warps(p));
  const int64_t parts = (p.x_stride + kRoundColumns - 1) / kRoundColumns;
  for (int64_t part = blockIdx.x - 1; part < parts * p.num_tokens; part += gridDim.x - 1) {
    const int64_t token = part / parts, begin = (part - token * parts) * kRoundColumns;
    const int64_t end = min(begin + kRoundColumns, p.x_stride);
    for (int64_t i = begin + threadIdx.x; i < end; i += kPrepareThreads)
      p.x_bf16[token * p.x_stride + i] =
          to_bf16(i < p.hidden_size ? p.x[token * p.hidden_size + i] : 0.0f);
  }
}

__global__ void moe_sum_kernel(const MoeSumParams p) {
  follow_previous_kernel();
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kSumThreads + threadIdx.x;
  if (i >= p.hidden_size) return;
  for (int64_t token = blockIdx.y; token < p.num_tokens; token += gridDim.y) {
    float sum = p.out[token * p.hidden_size + i];
    const int64_t end = (token + 1) * p.top_k;
    for (int64_t first = token * p.top_k; first < end; first += kSumAtOnce) {
      // Loads of several at once; the part of an id that is no expert is not used.
      bool exists[kSumAtOnce];
      float weight[kSumAtOnce], part[kSumAtOnce];
#pragma unroll
      for (int k = 0; k < kSumAtOnce; ++k) {
        const int64_t slot = min(first + k, end - 1);
        exists[k] = first + k < end && is_expert(p.ids[slot], p.first_expert, p.num_experts);
        weight[k] = p.weights[slot];
        part[k] = p.part[slot * p.hidden_size + i];
      }
#pragma unroll
      for (int k = 0; k < kSumAtOnce; ++k)
        if (exists[k]) sum = fmaf(weight[k], part[k], sum);
    }
    p.out[token * p.hidden_size + i] = sum;
  }
}

}  // namespace

int64_t max_moe_tiles(int64_t num_slots, int64_t num_experts, int64_t tile_rows) {
  return std::min(num_slots, num_experts) + num_slots / tile_rows;
}

void launch_moe_prepare(const MoePrepareParams& params, cudaStream_t stream) {
  KDT_CHECK(params.num_experts <= kMaxExperts, "moe_experts: ", params.num_experts,
            " experts, at most ", kMaxExperts);
  const int64_t parts = params.num_tokens * ceil_div(params.x_stride, kRoundColumns);
  launch<moe_prepare_kernel>(
      dim3(static_cast<unsigned>(1 + std::min<int64_t>(parts, 1024))), kPrepareThreads,
      (kPrepareWarps + sorting_warps(params) * params.num_experts) * 4, stream, params,
      /*early=*/true);
}

void launch_moe_sum(const MoeSumParams& params, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(ceil_div(params.hidden_size, kSumThreads)),
                  static_cast<unsigned>(std::min<int64_t>(params.num_tokens, 65535)));
  launch<moe_sum_kernel>(grid, kSumThreads, 0, stream, params, /*early=*/true);
}

}  // namespace kdt::cuda
