// Tile sizes and shared memory of the tensor core kernels of mla_attention.
#pragma once

#include "kernels/mla_rows.cuh"
#include "launch.cuh"

namespace kdt::cuda {

inline constexpr int kMlaTileKeys = 32;
inline constexpr int kMlaPieceKeys = 16;  // what the ring of shared memory goes by

// What a block does at a time: some pairs, with the keys of a segment or of one row's path.
struct MlaItem {
  MlaSequence sequence;
  int32_t row, head;  // of pair 0; heads past the last go on in the next row
  int32_t count;      // pairs
  int32_t segment;    // -1: the row's path
  int32_t index;
  int32_t num_tiles;
};

// A block holds kGroups * kTiles * 16 (row, head) pairs of one sequence and takes the keys of one
// segment or, with kIsPath, of one row's path, in tiles of 32.
//
// The four warps of a group share its pairs. Query, scores and output live in registers: warp w
// has the 16 of every 64 dimensions that begin at 16 w, both of the query and of the output. A
// tile's scores are thus sums of four slices, which meet in shared memory in the order of warps;
// an owner warp for each 8 pairs adds them up, takes the softmax and gives the weights back. What
// is done to a pair does not depend on its place in the tile, so all instances give the same bits.
template <int kRank_, int kRope_, int kGroups_, int kTiles_, bool kIsPath_>
struct MlaConfig {
  static constexpr int kRank = kRank_, kRope = kRope_, kGroups = kGroups_, kTiles = kTiles_;
  static constexpr bool kIsPath = kIsPath_;
  static constexpr int kWidth = kRank + kRope;
  static constexpr int kThreads = 128 * kGroups;
  static constexpr int kPairs = 16 * kTiles * kGroups;
  static constexpr int kQuerySteps = kWidth / 64, kOutSteps = kRank / 64;
  static constexpr int kRowBytes = kWidth * 2;  // a multiple of 128, so bits 4-6 can be swizzled
  static constexpr int kPieceBytes = kMlaPieceKeys * kRowBytes;
  static constexpr int kBlocks = kPairs <= 32 ? 2 : 1;  // of a multiprocessor
  static constexpr int kPieces = kTiles * kGroups == 1 ? 5 : 4;
  static_assert(kWidth % 64 == 0 && kRank % 64 == 0);

  struct Shared {
    unsigned char ring[kPieces][kPieceBytes];
    // Scores for [owner, one of the other warps, piece of the tile, n8 of the piece, lane]; then,
    // in the place of the first, the owner's weights [piece, n8, lane].
    float2 exchange[kGroups][2 * kTiles * 3 * 2 * 2 * 32];
    int64_t keys[kMlaPathKeys];  // cache rows of a path's keys, or of a segment's pieces; -1: none
    int32_t limits[kPairs];      // keys that a pair sees; -1 for no pair
    float2 sums[kPairs];         // score that weights are relative to, their sum
    float scales[kPairs];        // of what was summed before this tile
    MlaItem item;
  };
  static_assert(sizeof(MlaPathScratch) <= sizeof(Shared::exchange));
  static_assert(kMlaSegmentMost / kMlaPieceKeys <= kMlaPathKeys);
  static_assert(sizeof(Shared) <= kMaxSharedBytes);
};

}  // namespace kdt::cuda
