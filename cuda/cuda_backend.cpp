// Memory, streams and what the ops share.
#include "cuda_backend.h"

#include <algorithm>
#include <cstring>

#include "communicator.h"
#include "device.h"
#include "fault.h"
#include "stream_memory.h"
#include "weight_upload.h"

namespace kdt::cuda {

Error no_room(int64_t bytes, cudaError_t status) {
  size_t free_bytes = 0, total_bytes = 0;
  static_cast<void>(cudaGetLastError());
  static_cast<void>(cudaMemGetInfo(&free_bytes, &total_bytes));
  return Error(join("cuda: no room for ", bytes, " bytes: ", free_bytes, " of the device's ",
                    total_bytes, " are free (", cudaGetErrorString(status), ")"));
}

std::shared_ptr<void> device_memory(int64_t bytes) {
  void* memory = nullptr;
  const cudaError_t status = cudaMalloc(&memory, std::max<int64_t>(bytes, 1));
  if (status != cudaSuccess) throw no_room(bytes, status);
  return {memory, [](void* p) { static_cast<void>(cudaFree(p)); }};
}

void Workspace::reserve(int64_t bytes) {
  begin();
  if (bytes > bytes_) {
    memory_.reset();
    bytes_ = 0;
    const int64_t grown = std::max(bytes, piece(bytes + bytes / 4));
    memory_ = source_->allocate(grown);
    bytes_ = grown;
  }
#ifdef KDT_EMULATOR
  std::memset(memory_.get(), 0xFF, bytes);  // what an op before left must not be read
#endif
}

void* Workspace::take_bytes(int64_t bytes) {
  KDT_CHECK(used_ + bytes <= bytes_, "cuda: an op takes ", used_ + bytes,
            " bytes of a workspace of ", bytes_);
  void* at = typed<char>(memory_) + used_;
  used_ += piece(bytes);
  return at;
}

CudaBackend::CudaBackend(int device) : device_(device) {
  use_device(device);
  cudaDeviceProp properties;
  KDT_CUDA_CHECK(cudaGetDeviceProperties(&properties, device));
  num_multiprocessors_ = properties.multiProcessorCount;
  shared_bytes_ = static_cast<int64_t>(properties.sharedMemPerMultiprocessor);
  chip_ = join(properties.name, " (sm_", properties.major, properties.minor, ")");
  stream_memory_ = std::make_shared<StreamMemory>(device);
  stream_ = stream_memory_->stream();
  workspace_ = Workspace(stream_memory_);
  KDT_CUDA_CHECK(
      cudaHostAlloc(reinterpret_cast<void**>(&fault_), sizeof(Fault), cudaHostAllocMapped));
  *fault_ = Fault{0, 0, 0};
  KDT_CUDA_CHECK(cudaHostGetDevicePointer(reinterpret_cast<void**>(&device_fault_), fault_, 0));
}

CudaBackend::~CudaBackend() {
  static_cast<void>(cudaStreamSynchronize(stream_));
  static_cast<void>(cudaFreeHost(fault_));
}

BackendInfo CudaBackend::info() const { return {join("cuda:", device_), chip_, 0}; }

Buffer CudaBackend::allocate(DType dtype, std::initializer_list<int64_t> shape) {
  KDT_CUDA_CHECK(cudaSetDevice(device_));
  const Tensor measure(nullptr, dtype, shape);
  Buffer buffer;
  buffer.memory = stream_memory_->allocate(measure.bytes());
  KDT_CUDA_CHECK(cudaMemsetAsync(buffer.memory.get(), 0, measure.bytes(), stream_));
  buffer.tensor = Tensor(buffer.memory.get(), dtype, shape);
  return buffer;
}

// From pageable memory the call returns once the bytes are out of it, so the caller may change
// them.
void CudaBackend::upload(const Tensor& to, const void* from) {
  if (to.bytes() == 0) return;
  KDT_CHECK(recorded_memory_ == nullptr, "cuda: an upload is no op to record");
  KDT_CUDA_CHECK(cudaSetDevice(device_));
  KDT_CUDA_CHECK(cudaMemcpyAsync(to.raw(), from, to.bytes(), cudaMemcpyHostToDevice, stream_));
}

void CudaBackend::download(void* to, const Tensor& from) {
  KDT_CHECK(recorded_memory_ == nullptr, "cuda: a download is no op to record");
  if (communicator_ != nullptr) communicator_->wait_for_stream();  // the copy waits without end
  if (from.bytes() > 0)
    KDT_CUDA_CHECK(cudaMemcpyAsync(to, from.raw(), from.bytes(), cudaMemcpyDeviceToHost, stream_));
  synchronize();
}

std::shared_ptr<void> CudaBackend::stream_memory(int64_t bytes) {
  return stream_memory_->allocate(bytes);
}

void CudaBackend::set_communicator(CudaCommunicator* communicator) {
  KDT_CHECK(communicator == nullptr || communicator_ == nullptr,
            "cuda: the back end has a communicator");
  communicator_ = communicator;
}

void CudaBackend::synchronize() {
  KDT_CHECK(recorded_memory_ == nullptr, "cuda: waiting is no op to record");
  if (communicator_ != nullptr) communicator_->wait_for_stream();
  KDT_CUDA_CHECK(cudaStreamSynchronize(stream_));
  const Fault fault = *fault_;
  if (fault.kind == 0) return;
  *fault_ = Fault{0, 0, 0};
  constexpr const char* kNames[] = {"",      "token id", "row",          "position",
                                    "block", "parent",   "link to slot", "rows of sequence"};
  throw Error(join("cuda: ", kNames[fault.kind], " ", fault.value, " at row ", fault.row,
                   " is out of range"));
}

WeightUpload& CudaBackend::upload_of_weights() {
  if (weight_upload_ == nullptr) weight_upload_ = make_weight_upload();
  return *weight_upload_;
}

std::unique_ptr<Backend> make_cuda_backend(int device) {
  return std::make_unique<CudaBackend>(device);
}

}  // namespace kdt::cuda
