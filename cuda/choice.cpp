#include "cuda_backend.h"

namespace kdt::cuda {

void CudaBackend::topk_logprobs(const TopkLogprobsArgs&) { throw Error("cuda: not built yet"); }
void CudaBackend::argmax(const Tensor&, const Tensor&) { throw Error("cuda: not built yet"); }

}  // namespace kdt::cuda
