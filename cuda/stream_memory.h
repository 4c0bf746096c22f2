// A stream and memory that is taken and given back in its order. Unlike cudaFree this waits for
// nothing: ranks of a group wait for each other on the device, so a rank that waited for the device
// could wait for ever.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>

namespace kdt::cuda {

class StreamMemory : public std::enable_shared_from_this<StreamMemory> {
 public:
  // On the current device.
  explicit StreamMemory(int device);
  ~StreamMemory();
  StreamMemory(const StreamMemory&) = delete;
  StreamMemory& operator=(const StreamMemory&) = delete;

  cudaStream_t stream() const { return stream_; }
  // For this stream's work only. Throws Error when there is no room, and while a graph is captured.
  std::shared_ptr<void> allocate(int64_t bytes);

 private:
  cudaStream_t stream_ = nullptr;
  // Its own: one that streams share could make one wait for another.
  cudaMemPool_t pool_ = nullptr;
};

}  // namespace kdt::cuda
