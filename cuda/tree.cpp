#include "cuda_backend.h"

namespace kdt::cuda {

void CudaBackend::tree_build(const TreeBuildArgs&) { throw Error("cuda: not built yet"); }
void CudaBackend::tree_accept(const TreeAcceptArgs&) { throw Error("cuda: not built yet"); }

}  // namespace kdt::cuda
