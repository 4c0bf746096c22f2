#include "cuda_backend.h"

namespace kdt::cuda {

void CudaBackend::mla_attention(const MlaAttentionArgs&) { throw Error("cuda: not built yet"); }

}  // namespace kdt::cuda
