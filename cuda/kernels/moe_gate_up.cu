#include "kernels/moe_product.cuh"

namespace kdt::cuda {
namespace {

template <int kTiles, typename Source>
class GateUpJob : public ExpertJob<kTiles, Source> {
 public:
  using ExpertJob<kTiles, Source>::ExpertJob;

  __device__ void store(const Unit& unit, int s, int slot, float gate, float up) const {
    const int stripe = this->own_stripe(unit) + s;
    if (stripe >= this->p_.num_stripes) return;
    auto* out = static_cast<uint16_t*>(this->p_.out) + slot * this->p_.out_stride;
    out[stripe * 8 + this->lane_ / 4] = to_bf16(gate / (1.0f + expf(-gate)) * up);
  }
};

template <typename Format, int kTiles, typename Source>
__global__ void __launch_bounds__(kStreamThreads, kExpertBlocks<kTiles>)
    gate_up_kernel(const MoeProductParams p) {
  follow_previous_kernel();  // which may have listed the tiles
  stream_products<Format, kExpertStripes, kTiles>(GateUpJob<kTiles, Source>(p),
                                                  {p.weights, p.num_chunks, p.k_warps});
}

template <typename Format, int kTiles>
void start(const MoeProductParams& p, cudaStream_t stream) {
  launch_expert_product<gate_up_kernel<Format, kTiles, BFloat16Source>, Format, kTiles>(p, stream);
}

template <typename Format>
void start(const MoeProductParams& p, cudaStream_t stream) {
  if (p.x_is_float)
    return launch_expert_product<gate_up_kernel<Format, 1, Float32Source>, Format, 1>(p, stream);
  switch (p.tile_rows) {
    case 8:
      return start<Format, 1>(p, stream);
    case 16:
      return start<Format, 2>(p, stream);
    default:
      return start<Format, 4>(p, stream);
  }
}

}  // namespace

void launch_moe_gate_up(const MoeProductParams& params, cudaStream_t stream) {
  params.dtype == DType::kInt32 ? start<Int4Format>(params, stream)
                                : start<BFloat16Format>(params, stream);
}

}  // namespace kdt::cuda
