#include "cuda_backend.h"

namespace kdt::cuda {

std::unique_ptr<LinearWeight> CudaBackend::prepare_linear(const std::vector<HostMatrix>&) {
  throw Error("cuda: not built yet");
}
void CudaBackend::linear(const Tensor&, const LinearWeight&, const Tensor&) {
  throw Error("cuda: not built yet");
}
void CudaBackend::head_linear(const Tensor&, const LinearWeight&, const Tensor&) {
  throw Error("cuda: not built yet");
}
void CudaBackend::multiply(const CudaLinear&, const float*, int64_t, int64_t, int64_t, float*, int64_t, int64_t, float) { throw Error("cuda: not built yet"); }

}  // namespace kdt::cuda
