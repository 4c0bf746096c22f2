// Ops as CUDA graphs.
#include "communicator.h"
#include "cuda_backend.h"

namespace kdt::cuda {
namespace {

class CudaRecording final : public Recording {
 public:
  // Takes the graph. `memory`: what its kernels work in beside the ops' arguments.
  CudaRecording(CudaBackend& backend, cudaGraph_t graph, std::vector<std::shared_ptr<void>> memory)
      : backend_(backend), memory_(std::move(memory)) {
    const cudaError_t status = cudaGraphInstantiate(&graph_, graph, 0);
    static_cast<void>(cudaGraphDestroy(graph));
    KDT_CUDA_CHECK(status);
  }
  ~CudaRecording() override { static_cast<void>(cudaGraphExecDestroy(graph_)); }

  // What the first run would else do.
  void prepare() { KDT_CUDA_CHECK(cudaGraphUpload(graph_, backend_.stream())); }
  void run() override {
    backend_.check_group();
    KDT_CUDA_CHECK(cudaSetDevice(backend_.device()));
    KDT_CUDA_CHECK(cudaGraphLaunch(graph_, backend_.stream()));
  }

 private:
  CudaBackend& backend_;
  const std::vector<std::shared_ptr<void>> memory_;
  cudaGraphExec_t graph_ = nullptr;
};

}  // namespace

void CudaBackend::keep(const std::shared_ptr<void>& memory) {
  if (recorded_memory_ != nullptr) recorded_memory_->push_back(memory);
}

std::unique_ptr<Recording> CudaBackend::record(const std::function<void()>& body) {
  KDT_CHECK(recorded_memory_ == nullptr, "cuda: a recording inside of another");
  KDT_CUDA_CHECK(cudaSetDevice(device_));
  std::vector<std::shared_ptr<void>> memory = {workspace_.memory()};
  // Other threads may take memory meanwhile.
  KDT_CUDA_CHECK(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal));
  cudaGraph_t graph = nullptr;
  recorded_memory_ = &memory;
  try {
    body();
    recorded_memory_ = nullptr;
  } catch (...) {
    recorded_memory_ = nullptr;
    static_cast<void>(cudaStreamEndCapture(stream_, &graph));
    if (graph != nullptr) static_cast<void>(cudaGraphDestroy(graph));
    static_cast<void>(cudaGetLastError());
    throw;
  }
  KDT_CUDA_CHECK(cudaStreamEndCapture(stream_, &graph));
  auto recording = std::make_unique<CudaRecording>(*this, graph, std::move(memory));
  // All this may wait for the device, where a rank that is ahead would wait for this one.
  recording->prepare();
  synchronize();
  if (communicator_ != nullptr) communicator_->wait_for_all();
  return recording;
}

}  // namespace kdt::cuda
