#include "kernels/mla_items.cuh"
#include "kernels/mla_tile.cuh"

namespace kdt::cuda {
namespace {

template <typename C>
__global__ void __launch_bounds__(C::kThreads, C::kGroups == 1 ? 2 : 1)
    mla_attention_kernel(const MlaAttentionParams p) {
  auto& shared = *reinterpret_cast<typename C::Shared*>(shared_memory());
  for (int32_t index = blockIdx.x;; index = shared.item.index + gridDim.x) {
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
}

template <typename C>
void launch_config(const MlaAttentionParams& params, int num_multiprocessors, cudaStream_t stream) {
  const int64_t rows = params.end_row - params.first_row;
  const int64_t items =
      C::kIsPath ? rows * ceil_div(params.num_heads, C::kPairs)
                 : (ceil_div(rows * params.num_heads, C::kPairs) + params.sequences.num_sequences) *
                       params.num_segments;
  const int64_t resident = static_cast<int64_t>(num_multiprocessors) * (C::kGroups == 1 ? 2 : 1);
  launch<mla_attention_kernel<C>>(dim3(static_cast<unsigned>(items < resident ? items : resident)),
                                  C::kThreads, static_cast<int64_t>(sizeof(typename C::Shared)),
                                  stream, params);
}

// The fewer pairs a sequence has, the smaller its tiles: more blocks then share a segment's keys.
template <int kRank, int kRope>
void launch_shape(const MlaAttentionParams& params, int num_multiprocessors, cudaStream_t stream) {
  const int64_t pairs =
      ceil_div(params.end_row - params.first_row, params.sequences.num_sequences) *
      params.num_heads;
  if (pairs <= 16) {
    launch_config<MlaConfig<kRank, kRope, 1, 1, false>>(params, num_multiprocessors, stream);
  } else if (pairs <= 128) {
    launch_config<MlaConfig<kRank, kRope, 1, 2, false>>(params, num_multiprocessors, stream);
  } else {
    launch_config<MlaConfig<kRank, kRope, 2, 2, false>>(params, num_multiprocessors, stream);
  }
  // The keys of a path belong to the heads of one row.
  if (params.num_heads <= 16) {
    launch_config<MlaConfig<kRank, kRope, 1, 1, true>>(params, num_multiprocessors, stream);
  } else {
    launch_config<MlaConfig<kRank, kRope, 1, 2, true>>(params, num_multiprocessors, stream);
  }
}

}  // namespace

bool mla_runs_on_tensor_cores(int64_t rank, int64_t rope, int64_t block_size) {
  return (rank == 512 || rank == 128) && rope == 64 && block_size % kMlaPieceKeys == 0;
}

void launch_mla_attention(const MlaAttentionParams& params, int num_multiprocessors,
                          cudaStream_t stream) {
  if (params.rank == 512) {
    launch_shape<512, 64>(params, num_multiprocessors, stream);
  } else {
    launch_shape<128, 64>(params, num_multiprocessors, stream);
  }
}

}  // namespace kdt::cuda
