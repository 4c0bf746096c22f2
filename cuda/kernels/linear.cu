#include "kernels/linear.h"

#include <algorithm>

#include "kernels/stream.cuh"
#include "launch.cuh"

namespace kdt::cuda {
namespace {

// Units: stripe groups times tiles of rows, the tiles of one group beside each other, so that
// blocks which run at the same time share weights through the L2 cache.
template <typename SourceType, int kStripes, int kTiles>
class LinearJob {
 public:
  using Source = SourceType;
  using Value = typename Source::Value;
  static constexpr int kTileRows = 8 * kTiles;

  __device__ explicit LinearJob(const LinearParams& p)
      : p_(p),
        lane_(static_cast<int>(threadIdx.x) % 32),
        matrix_stripes_((p.matrix_rows + 31) / 32 * 2),
        num_stripes_(matrix_stripes_ * p.num_matrices),
        unit_stripes_(kStreamWarps / p.k_warps * kStripes),
        warp_stripe_(static_cast<int>(threadIdx.x) / 32 / p.k_warps * kStripes) {
    const int tiles = static_cast<int>((p.num_rows + kTileRows - 1) / kTileRows);
    units_ = {(num_stripes_ + unit_stripes_ - 1) / unit_stripes_ * tiles, tiles};
  }

  __device__ const Units& units() const { return units_; }

  // A warp without a stripe of its own does the last once more and does not store it.
  __device__ int stripe(const Unit& unit) const {
    return min(own_stripe(unit), num_stripes_ - kStripes);
  }

  // The row of the call.
  __device__ int tag(const Unit& unit, int n) const {
    const int row = unit.inner * kTileRows + 8 * n + lane_ / 4;
    return row < p_.num_rows ? row : -1;
  }
  __device__ const Value* row(const Unit& unit, int row) const {
    const int64_t head = stripe(unit) / matrix_stripes_;
    return static_cast<const Value*>(p_.x) + row * p_.x_row_stride + head * p_.x_head_stride +
           lane_ % 4 * 8;
  }

  __device__ void store(const Unit& unit, int s, int row, float upper, float lower) const {
    const int stripe = own_stripe(unit) + s;
    if (stripe >= num_stripes_) return;
    const int head = stripe / matrix_stripes_;
    const int column = (stripe - head * matrix_stripes_) * 16 + lane_ / 4;
    float* out = p_.out + row * p_.out_row_stride + head * p_.out_head_stride + column;
    if (column < p_.matrix_rows) out[0] = p_.alpha * upper;
    if (column + 8 < p_.matrix_rows) out[8] = p_.alpha * lower;
  }

 private:
  __device__ int own_stripe(const Unit& unit) const {
    return unit.outer * unit_stripes_ + warp_stripe_;
  }

  const LinearParams& p_;
  int lane_, matrix_stripes_, num_stripes_, unit_stripes_, warp_stripe_;
  Units units_;
};

// Of a multiprocessor: two while their registers allow it.
template <typename Format, int kTiles>
constexpr int kBlocks = Format::kGroups * kTiles <= 4 ? 2 : 1;

template <typename Format, typename Source, int kStripes, int kTiles>
__global__ void __launch_bounds__(kStreamThreads, kBlocks<Format, kTiles>)
    linear_kernel(const LinearParams p) {
  stream_products<Format, kStripes, kTiles>(LinearJob<Source, kStripes, kTiles>(p),
                                            {p.weights, p.num_chunks, p.k_warps});
}

int64_t num_units(const LinearParams& p, int stripes, int tiles) {
  const int64_t all = ceil_div(p.matrix_rows, 32) * 2 * p.num_matrices;
  return ceil_div(all, kStreamWarps / p.k_warps * stripes) * ceil_div(p.num_rows, 8 * tiles);
}

template <typename Format, typename Source, int kStripes, int kTiles>
void start(const LinearParams& p, cudaStream_t stream) {
  const int64_t units = num_units(p, kStripes, kTiles);
  KDT_CHECK(units < (int64_t{1} << 30), "linear: ", p.num_rows, " rows of ", p.num_matrices, " x ",
            p.matrix_rows, " outputs in one call");
  const int64_t blocks = std::min<int64_t>(units, p.num_multiprocessors * kBlocks<Format, kTiles>);
  launch<linear_kernel<Format, Source, kStripes, kTiles>>(
      dim3(static_cast<unsigned>(blocks)), kStreamThreads, StreamLayout<Format, kStripes>::kBytes,
      stream, p, /*early=*/true);
}

template <typename Format>
void start(const LinearParams& p, cudaStream_t stream) {
  // The activations of 72 rows in two groups of int4 would not fit the registers.
  if constexpr (Format::kGroups == 1) {
    if (p.num_rows > 32) return start<Format, BFloat16Source, 2, 9>(p, stream);
  }
  if (p.num_rows > 8) return start<Format, BFloat16Source, 2, 4>(p, stream);
  if (!p.x_is_float) return start<Format, BFloat16Source, 2, 1>(p, stream);
  // Single stripes while there are too few pairs of them for every multiprocessor.
  if (num_units(p, 2, 1) < 2 * p.num_multiprocessors)
    return start<Format, Float32Source, 1, 1>(p, stream);
  start<Format, Float32Source, 2, 1>(p, stream);
}

constexpr int kRoundThreads = 256;

__global__ void round_rows_kernel(const RoundRowsParams p) {
  follow_previous_kernel();
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kRoundThreads + threadIdx.x;
  if (i >= p.to_stride) return;
  for (int64_t row = blockIdx.y; row < p.num_rows; row += gridDim.y) {
    for (int64_t head = 0; head < p.num_heads; ++head) {
      const float value = i < p.n ? p.from[row * p.row_stride + head * p.head_stride + i] : 0.0f;
      p.to[(row * p.num_heads + head) * p.to_stride + i] = to_bf16(value);
    }
  }
}

}  // namespace

void launch_round_rows(const RoundRowsParams& params, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(ceil_div(params.to_stride, kRoundThreads)),
                  static_cast<unsigned>(std::min<int64_t>(params.num_rows, 65535)));
  launch<round_rows_kernel>(grid, kRoundThreads, 0, stream, params, /*early=*/true);
}

void launch_linear(const LinearParams& params, cudaStream_t stream) {
  if (params.num_rows == 0) return;
  params.dtype == DType::kInt32 ? start<Int4Format>(params, stream)
                                : start<BFloat16Format>(params, stream);
}

}  // namespace kdt::cuda
