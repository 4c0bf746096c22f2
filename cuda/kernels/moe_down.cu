#include "kernels/moe_product.cuh"

namespace kdt::cuda {
namespace {

template <int kTiles>
class DownJob : public ExpertJob<kTiles> {
 public:
  using ExpertJob<kTiles>::ExpertJob;

  __device__ void store(const Unit& unit, int s, int slot, float upper, float lower) const {
    const int column = (this->own_stripe(unit) + s) * 16 + this->lane_ / 4;
    float* out = static_cast<float*>(this->p_.out) + slot * this->p_.out_stride;
    if (column < this->p_.out_stride) out[column] = upper;
    if (column + 8 < this->p_.out_stride) out[column + 8] = lower;
  }
};

template <typename Format, int kTiles>
__global__ void __launch_bounds__(kStreamThreads, kExpertBlocks<kTiles>)
    down_kernel(const MoeProductParams p) {
  stream_products<Format, kExpertStripes, kTiles>(DownJob<kTiles>(p),
                                                  {p.weights, p.num_chunks, p.k_warps});
}

template <typename Format>
void start(const MoeProductParams& p, cudaStream_t stream) {
  switch (p.tile_rows) {
    case 8:
      return launch_expert_product<down_kernel<Format, 1>, Format, 1>(p, stream);
    case 16:
      return launch_expert_product<down_kernel<Format, 2>, Format, 2>(p, stream);
    default:
      return launch_expert_product<down_kernel<Format, 4>, Format, 4>(p, stream);
  }
}

}  // namespace

void launch_moe_down(const MoeProductParams& params, cudaStream_t stream) {
  params.dtype == DType::kInt32 ? start<Int4Format>(params, stream)
                                : start<BFloat16Format>(params, stream);
}

}  // namespace kdt::cuda
