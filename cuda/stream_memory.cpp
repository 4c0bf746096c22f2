#include "stream_memory.h"

#include <algorithm>

#include "cuda_backend.h"

namespace kdt::cuda {

StreamMemory::StreamMemory(int device) {
  cudaMemPoolProps properties = {};
  properties.allocType = cudaMemAllocationTypePinned;
  properties.location.type = cudaMemLocationTypeDevice;
  properties.location.id = device;
  KDT_CUDA_CHECK(cudaMemPoolCreate(&pool_, &properties));
  // Given back memory stays in the pool.
  uint64_t keep = ~uint64_t{0};
  KDT_CUDA_CHECK(cudaMemPoolSetAttribute(pool_, cudaMemPoolAttrReleaseThreshold, &keep));
  KDT_CUDA_CHECK(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
}

StreamMemory::~StreamMemory() {
  if (stream_ != nullptr) static_cast<void>(cudaStreamSynchronize(stream_));
  if (stream_ != nullptr) static_cast<void>(cudaStreamDestroy(stream_));
  if (pool_ != nullptr) static_cast<void>(cudaMemPoolDestroy(pool_));
}

std::shared_ptr<void> StreamMemory::allocate(int64_t bytes) {
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  KDT_CUDA_CHECK(cudaStreamIsCapturing(stream_, &capture));
  KDT_CHECK(capture == cudaStreamCaptureStatusNone, "cuda: ", bytes,
            " bytes are taken while a graph is captured; run its ops once before");
  void* memory = nullptr;
  const auto size = static_cast<size_t>(std::max<int64_t>(bytes, 1));
  const cudaError_t status = cudaMallocFromPoolAsync(&memory, size, pool_, stream_);
  if (status != cudaSuccess) throw no_room(bytes, status);
  return {memory, [owner = shared_from_this()](void* p) {
            static_cast<void>(cudaFreeAsync(p, owner->stream()));
          }};
}

}  // namespace kdt::cuda
