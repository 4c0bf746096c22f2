// Sizes that the engine allocates by, and that the plan of its memory counts with.
#pragma once

#include <cstdint>

namespace kdt {

inline constexpr int64_t kBlockSize = 64;  // rows of a KV block
inline constexpr int64_t kMaxContext = int64_t{1} << 24;
inline constexpr int64_t kMaxSequences = 1024;
// The rows of a chunk all see each other, so what a pass keeps of that grows with the square.
inline constexpr int64_t kMaxChunk = 4096;
inline constexpr int64_t kLogitRows = 128;  // held at once
// Rows of features kept for a drafter that has not been asked; a request that never drafts is
// spared their cost.
inline constexpr int64_t kPendingRows = 1024;

}  // namespace kdt
