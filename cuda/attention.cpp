#include "cuda_backend.h"

namespace kdt::cuda {

void CudaBackend::mla_attention(const MlaAttentionArgs&) { throw Error("cuda: not built yet"); }
void CudaBackend::gqa_attention(const GqaAttentionArgs&) { throw Error("cuda: not built yet"); }

}  // namespace kdt::cuda
