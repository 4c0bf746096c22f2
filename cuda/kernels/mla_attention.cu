#include "kernels/mla_items.cuh"
#include "kernels/mla_tile.cuh"

namespace kdt::cuda {
namespace {

template <typename C>
__global__ void __launch_bounds__(C::kThreads, C::kBlocks)
    mla_attention_kernel(const MlaAttentionParams p) {
  auto& shared = *reinterpret_cast<typename C::Shared*>(shared_memory());
  if (!C::kIsPath) follow_previous_kernel();
  // Items get shorter; every second round goes backwards, so that none has the longest of each.
  const auto next = [&](int32_t index) {
    const auto blocks = static_cast<int32_t>(gridDim.x), block = static_cast<int32_t>(blockIdx.x);
    const int32_t round = index / blocks + 1;
    return round * blocks + (round % 2 == 0 ? block : blocks - 1 - block);
  };
  for (int32_t index = blockIdx.x;; index = next(shared.item.index)) {
    const int num_tiles = mla_begin_item<C>(p, index, shared);
    if (num_tiles < 0) break;
    if (num_tiles == 0) continue;  // the rows of this tile end before the segment
#pragma unroll
    for (int piece = 0; piece < C::kPieces - 2; ++piece) mla_copy_piece<C>(p, shared, piece);
    uint32_t q[C::kTiles][C::kQuerySteps][4];
    // Of the thread's group.
    const int pairs = shared.item.count - 16 * C::kTiles * mla_place<C>().group;
    mla_load_query<C>(p, shared, pairs, q);
    float out[C::kTiles][C::kOutSteps][2][4] = {};

    for (int tile = 0; tile < shared.item.num_tiles; ++tile) {
      cp_async_wait<C::kPieces - 4>();
      __syncthreads();  // the tile is there, and the pieces of the one before are free
      mla_copy_piece<C>(p, shared, 2 * tile + C::kPieces - 2);
      mla_copy_piece<C>(p, shared, 2 * tile + C::kPieces - 1);
      const auto address = [&](int piece) {
        return shared_address(shared.ring[0]) + piece % C::kPieces * C::kPieceBytes;
      };
      const uint32_t first = address(2 * tile);
      const uint32_t pieces[2] = {
          first, C::kPieces % 2 == 0 ? first + C::kPieceBytes : address(2 * tile + 1)};
      float own[2][4];
      mla_scores<C>(shared, q, pieces, own);
      __syncthreads();
      if (C::kTiles == 2 || mla_place<C>().warp < 2 * C::kTiles) mla_softmax<C>(shared, own, tile);
      __syncthreads();
      mla_add_values<C>(shared, out, pieces);
    }
    cp_async_wait<0>();
    mla_store_out<C>(p, shared, out);
  }
  if (C::kIsPath) wait_for_previous_kernel();
}

// Returns whether there was anything to start.
template <typename C>
bool launch_config(const MlaAttentionParams& params, const MlaChip& chip, cudaStream_t stream,
                   bool early) {
  const int64_t rows = params.end_row - params.first_row;
  const int64_t items =
      C::kIsPath ? rows * ceil_div(params.num_heads, C::kPairs)
                 : (ceil_div(rows * params.num_heads, C::kPairs) + params.sequences.num_sequences) *
                       params.num_segments;
  const int64_t resident = static_cast<int64_t>(chip.num_multiprocessors) * C::kBlocks;
  launch<mla_attention_kernel<C>>(dim3(static_cast<unsigned>(items < resident ? items : resident)),
                                  C::kThreads, static_cast<int64_t>(sizeof(typename C::Shared)),
                                  stream, params, early);
  return items > 0;
}

// The fewer pairs a sequence has, the smaller its tiles: more blocks then share a segment's keys.
// Two blocks of 32 pairs, which wait for different things, are quicker than one of 64 that waits as
// one.
template <int kRank, int kRope>
void launch_shape(const MlaAttentionParams& params, const MlaChip& chip, cudaStream_t stream) {
  const int64_t pairs =
      ceil_div(params.end_row - params.first_row, params.sequences.num_sequences) *
      params.num_heads;
  using Small = typename MlaConfig<kRank, kRope, 1, 2, false>::Shared;
  constexpr int64_t kReserved = 1024;  // of each block, by the system
  const bool two_fit = chip.shared_bytes >= 2 * (static_cast<int64_t>(sizeof(Small)) + kReserved);
  bool started;
  if (pairs <= 16) {
    started = launch_config<MlaConfig<kRank, kRope, 1, 1, false>>(params, chip, stream, true);
  } else if (pairs <= 128 || two_fit) {
    started = launch_config<MlaConfig<kRank, kRope, 1, 2, false>>(params, chip, stream, true);
  } else {
    started = launch_config<MlaConfig<kRank, kRope, 2, 2, false>>(params, chip, stream, true);
  }
  // The keys of a path belong to the heads of one row. Paths need nothing of the segments, so they
  // fill the multiprocessors that those leave.
  if (params.num_heads <= 16) {
    launch_config<MlaConfig<kRank, kRope, 1, 1, true>>(params, chip, stream, started);
  } else {
    launch_config<MlaConfig<kRank, kRope, 1, 2, true>>(params, chip, stream, started);
  }
}

}  // namespace

bool mla_runs_on_tensor_cores(int64_t rank, int64_t rope, int64_t block_size) {
  return (rank == 512 || rank == 128) && rope == 64 && block_size % kMlaPieceKeys == 0;
}

void launch_mla_attention(const MlaAttentionParams& params, const MlaChip& chip,
                          cudaStream_t stream) {
  if (params.rank == 512) {
    launch_shape<512, 64>(params, chip, stream);
  } else {
    launch_shape<128, 64>(params, chip, stream);
  }
}

}  // namespace kdt::cuda
