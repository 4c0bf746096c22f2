#include "cuda_backend.h"

namespace kdt::cuda {

std::unique_ptr<ExpertsWeight> CudaBackend::prepare_experts(const std::vector<HostExpert>&) {
  throw Error("cuda: not built yet");
}
void CudaBackend::moe_route(const MoeRouteArgs&) { throw Error("cuda: not built yet"); }
void CudaBackend::moe_experts(const MoeExpertsArgs&) { throw Error("cuda: not built yet"); }

}  // namespace kdt::cuda
