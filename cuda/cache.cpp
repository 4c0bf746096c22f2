#include "cuda_backend.h"

namespace kdt::cuda {

std::unique_ptr<KvCache> CudaBackend::make_mla_cache(int64_t, int64_t, int64_t, int64_t, int64_t) {
  throw Error("cuda: not built yet");
}
std::unique_ptr<KvCache> CudaBackend::make_gqa_cache(int64_t, int64_t, int64_t, int64_t, int64_t) {
  throw Error("cuda: not built yet");
}
void CudaBackend::mla_query(const MlaQueryArgs&) { throw Error("cuda: not built yet"); }
void CudaBackend::mla_store(const MlaStoreArgs&) { throw Error("cuda: not built yet"); }
void CudaBackend::gqa_store(const GqaStoreArgs&) { throw Error("cuda: not built yet"); }
void CudaBackend::kv_compact(KvCache&, const Tensor&, const Tensor&, const Tensor&) {
  throw Error("cuda: not built yet");
}

}  // namespace kdt::cuda
