// Weights on their way from the host to the device.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>
#include <vector>

#include "parallel/thread_pool.h"
#include "repack.h"

namespace kdt::cuda {

// Puts weights into the kernels' order on a few threads, piece by piece: one is packed while the
// one before travels. What it holds of the host's memory does not grow with the weights.
class WeightUpload {
 public:
  explicit WeightUpload(int num_threads);
  ~WeightUpload();
  WeightUpload(const WeightUpload&) = delete;
  WeightUpload& operator=(const WeightUpload&) = delete;

  // Panels of rows, whose number is a multiple of kPanelRows, to the device's memory.
  void panels(const std::vector<PanelRow>& rows, DType dtype, int64_t in_features, void* to,
              cudaStream_t stream);
  // The rows of a matrix as they are.
  void plain(const HostMatrix& matrix, void* to, cudaStream_t stream);

 private:
  struct Piece {
    std::shared_ptr<void> memory;  // the host's, pinned
    int64_t bytes = 0;
    cudaEvent_t sent = nullptr;
  };

  // The piece whose turn it is, with room for so many bytes, once no copy reads it any more.
  Piece& next_piece(int64_t bytes);
  // `count` items of item_bytes, each made by write(item, memory).
  template <typename Write>
  void send(int64_t count, int64_t item_bytes, void* to, cudaStream_t stream, const Write& write);

  ThreadPool pool_;
  Piece pieces_[2];
  int turn_ = 0;
};

// With as many threads as are worth it, or one where the system has no more.
std::unique_ptr<WeightUpload> make_weight_upload();

}  // namespace kdt::cuda
