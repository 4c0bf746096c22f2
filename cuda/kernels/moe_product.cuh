// Both products of the experts, as jobs of stream.cuh.
#pragma once

#include <algorithm>

#include "kernels/moe.h"
#include "launch.cuh"
#include "stream.cuh"

namespace kdt::cuda {

inline constexpr int kExpertStripes = 2;  // a warp takes a panel

// Units: tiles times groups of stripes, the groups of one tile beside each other.
template <int kTiles>
class ExpertJob {
 public:
  using Source = BFloat16Source;
  static constexpr int kTileRows = 8 * kTiles;

  struct Rows {
    const uint16_t* x;  // from this lane's first activation on
    int64_t stride;
    int row[kTiles];  // -1: none
    __device__ const uint16_t* at(int n) const {
      return row[n] < 0 ? nullptr : x + row[n] * stride;
    }
  };

  __device__ explicit ExpertJob(const MoeProductParams& p)
      : p_(p),
        lane_(static_cast<int>(threadIdx.x) % 32),
        unit_stripes_(kStreamWarps / p.k_warps * kExpertStripes),
        warp_stripe_(static_cast<int>(threadIdx.x) / 32 / p.k_warps * kExpertStripes),
        groups_((p.num_stripes + unit_stripes_ - 1) / unit_stripes_),
        num_units_(*p.tiles.num_tiles * groups_) {}

  __device__ int num_units() const { return num_units_; }

  // A warp without a stripe of its own does the last ones once more and does not store them.
  __device__ int stripe(int unit) const {
    const int tile = unit / groups_;
    return p_.tiles.expert_of_tile[tile] * p_.num_stripes +
           min(expert_stripe(unit - tile * groups_), p_.num_stripes - kExpertStripes);
  }

  __device__ Rows rows(int unit) const {
    Rows rows;
    rows.x = p_.x + lane_ % 4 * 8;
    rows.stride = p_.x_stride;
    const int32_t* slots = slots_of(unit) + lane_ / 4;
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const int slot = slots[8 * n];
      rows.row[n] = slot < 0 ? -1 : slot / p_.slots_per_x;
    }
    return rows;
  }

 protected:
  // The slot of row 2 t + j of tile n, -1: none; and the expert's stripe, past the last: none.
  __device__ int slot(int unit, int n, int j) const {
    return slots_of(unit)[8 * n + lane_ % 4 * 2 + j];
  }
  __device__ int stripe_of_unit(int unit) const { return expert_stripe(unit % groups_); }

  const MoeProductParams& p_;
  int lane_;

 private:
  __device__ int expert_stripe(int group) const { return group * unit_stripes_ + warp_stripe_; }
  __device__ const int32_t* slots_of(int unit) const {
    return p_.tiles.slots_of_tile + static_cast<int64_t>(unit / groups_) * kTileRows;
  }

  int unit_stripes_, warp_stripe_, groups_, num_units_;
};

// Two blocks of a multiprocessor while their registers allow it.
template <int kTiles>
inline constexpr int kExpertBlocks = kTiles <= 2 ? 2 : 1;

// Shared by the launchers of both products.
template <auto kKernel, typename Format, int kTiles>
void launch_expert_product(const MoeProductParams& p, cudaStream_t stream) {
  const int64_t groups = ceil_div(p.num_stripes, kStreamWarps / p.k_warps * kExpertStripes);
  const int64_t units = p.max_tiles * groups;
  KDT_CHECK(units < (int64_t{1} << 30), "moe_experts: ", p.max_tiles, " tiles of ", groups,
            " stripe groups in one call");
  const int64_t blocks = std::min<int64_t>(units, p.num_multiprocessors * kExpertBlocks<kTiles>);
  launch<kKernel>(dim3(static_cast<unsigned>(blocks)), kStreamThreads,
                  StreamLayout<Format, kExpertStripes>::kBytes, stream, p);
}

}  // namespace kdt::cuda
