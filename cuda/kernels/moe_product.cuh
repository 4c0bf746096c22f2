// Both products of the experts, as jobs of stream.cuh.
#pragma once

#include <algorithm>

#include "kernels/moe.h"
#include "kernels/stream.cuh"
#include "launch.cuh"

namespace kdt::cuda {

inline constexpr int kExpertStripes = 2;  // a warp takes a panel

// Units: tiles times groups of stripes, the groups of one tile beside each other.
template <int kTiles, typename SourceType = BFloat16Source>
class ExpertJob {
 public:
  using Source = SourceType;
  using Value = typename Source::Value;
  static constexpr int kTileRows = 8 * kTiles;

  __device__ explicit ExpertJob(const MoeProductParams& p)
      : p_(p),
        lane_(static_cast<int>(threadIdx.x) % 32),
        unit_stripes_(kStreamWarps / p.k_warps * kExpertStripes),
        warp_stripe_(static_cast<int>(threadIdx.x) / 32 / p.k_warps * kExpertStripes) {
    const int groups = (p.num_stripes + unit_stripes_ - 1) / unit_stripes_;
    units_ = {(p.tiles.num_tiles != nullptr ? *p.tiles.num_tiles : p.max_tiles) * groups, groups};
  }

  __device__ const Units& units() const { return units_; }

  // A warp without a stripe of its own does the last ones once more and does not store them.
  __device__ int stripe(const Unit& unit) const {
    const int id = p_.tiles.expert_of_tile[unit.outer];
    const bool exists = is_expert(id, p_.first_expert, p_.num_experts);
    return (exists ? id - p_.first_expert : 0) * p_.num_stripes +
           min(own_stripe(unit), p_.num_stripes - kExpertStripes);
  }

  // The slot.
  __device__ int tag(const Unit& unit, int n) const {
    if (p_.tiles.num_tiles == nullptr) return n == 0 && lane_ < 4 ? unit.outer : -1;
    return p_.tiles.slots_of_tile[static_cast<int64_t>(unit.outer) * kTileRows + 8 * n + lane_ / 4];
  }
  __device__ const Value* row(const Unit&, int slot) const {
    return static_cast<const Value*>(p_.x) + slot / p_.slots_per_x * p_.x_stride + lane_ % 4 * 8;
  }

 protected:
  // Of the expert; past the last: none.
  __device__ int own_stripe(const Unit& unit) const {
    return unit.inner * unit_stripes_ + warp_stripe_;
  }

  const MoeProductParams& p_;
  int lane_;

 private:
  int unit_stripes_, warp_stripe_;
  Units units_;
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
                  StreamLayout<Format, kExpertStripes>::kBytes, stream, p, /*early=*/true);
}

}  // namespace kdt::cuda
