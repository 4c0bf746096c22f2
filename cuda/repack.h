// Weights in the order in which the lanes of a warp read them (kernels/stream_formats.cuh), made on
// the host.
//
// A panel is 32 rows, two stripes of 16; missing rows are zeros. It is one linear stream: for each
// run of k (64 of int4, 32 of bf16; missing columns are zeros) the chunk of the first stripe, then
// that of the second. A chunk holds fragments A of mma m16n8k16, two for each 32 k. Inside such a
// group the four lanes t of a row take k = 8 t + 0 .. 7 instead of the instruction's order, the
// first fragment the lower four, so that a lane's activations lie side by side.
//   int4, 576 bytes: lane (g, t) has 16 bytes, a word for each fragment, whose nibbles s and s + 4
//     are the pair a[s]; then for each g the bf16 scales of row g (group 0, 1) and row g + 8.
//   bf16, 1024 bytes: for each of the two fragments 16 bytes a lane, a[0] .. a[3].
#pragma once

#include <cstdint>

#include "backend/backend.h"

namespace kdt::cuda {

inline constexpr int64_t kStripeRows = 16;
inline constexpr int64_t kPanelRows = 2 * kStripeRows;

// Of int4 (kInt32) or bf16.
struct StreamShape {
  int64_t chunk_k, chunk_bytes;  // of one stripe
  int64_t num_chunks;            // of a stripe
  int64_t panel_bytes() const { return 2 * num_chunks * chunk_bytes; }
};
StreamShape stream_shape(DType dtype, int64_t in_features);

// Row `row` of a matrix; none: zeros.
struct PanelRow {
  const HostMatrix* matrix = nullptr;
  int64_t row = 0;
};

// The kPanelRows rows' matrices are of one dtype, int4 or bf16, and have in_features columns.
// Writes panel_bytes() bytes.
void pack_panel(const PanelRow* rows, DType dtype, int64_t in_features, uint8_t* out);

// The inverse: the 32 rows as a checkpoint stores them. `scale` [32, in_features / 32] of int4
// only.
void unpack_panel(const uint8_t* panel, DType dtype, int64_t in_features, uint8_t* values,
                  uint8_t* scale);

}  // namespace kdt::cuda
