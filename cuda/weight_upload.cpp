#include "weight_upload.h"

#include <algorithm>
#include <cstring>
#include <thread>

#include "cuda_check.h"
#include "device.h"

namespace kdt::cuda {
namespace {

constexpr int64_t kPieceBytes = int64_t{8} << 20;
constexpr int64_t kTaskBytes = int64_t{64} << 10;  // less is not worth handing to another thread

// One thread alone is slower than a good disk. Several ranks may load at a time, one a device.
int threads_for_packing() {
  const int cores = static_cast<int>(std::thread::hardware_concurrency());
  return std::clamp(cores / std::max(1, device_count()), 1, 8);
}

}  // namespace

std::unique_ptr<WeightUpload> make_weight_upload() {
  try {
    return std::make_unique<WeightUpload>(threads_for_packing());
  } catch (const Error&) {
    return std::make_unique<WeightUpload>(1);
  }
}

WeightUpload::WeightUpload(int num_threads) : pool_(num_threads) {}

WeightUpload::~WeightUpload() {
  for (Piece& piece : pieces_) {
    if (piece.sent == nullptr) continue;
    static_cast<void>(cudaEventSynchronize(piece.sent));
    static_cast<void>(cudaEventDestroy(piece.sent));
  }
}

WeightUpload::Piece& WeightUpload::next_piece(int64_t bytes) {
  Piece& piece = pieces_[turn_];
  turn_ = 1 - turn_;
  if (piece.sent == nullptr)
    KDT_CUDA_CHECK(cudaEventCreateWithFlags(&piece.sent, cudaEventDisableTiming));
  KDT_CUDA_CHECK(cudaEventSynchronize(piece.sent));
  if (piece.bytes < bytes) {
    piece.memory.reset();
    piece.bytes = 0;
    const int64_t size = std::max(bytes, kPieceBytes);
    void* memory = nullptr;
    KDT_CUDA_CHECK(cudaHostAlloc(&memory, size, cudaHostAllocDefault));
    piece.memory = {memory, [](void* p) { static_cast<void>(cudaFreeHost(p)); }};
    piece.bytes = size;
  }
  return piece;
}

template <typename Write>
void WeightUpload::send(int64_t count, int64_t item_bytes, void* to, cudaStream_t stream,
                        const Write& write) {
  const int64_t step = std::clamp<int64_t>(kPieceBytes / item_bytes, 1, count);
  const int64_t of_task = std::max<int64_t>(1, kTaskBytes / item_bytes);
  for (int64_t begin = 0; begin < count; begin += step) {
    const int64_t end = std::min(begin + step, count);
    Piece& piece = next_piece((end - begin) * item_bytes);
    auto* at = static_cast<uint8_t*>(piece.memory.get());
    pool_.run((end - begin + of_task - 1) / of_task, [&](int64_t task, int) {
      const int64_t first = begin + task * of_task;
      for (int64_t i = first; i < std::min(first + of_task, end); ++i)
        write(i, at + (i - begin) * item_bytes);
    });
    KDT_CUDA_CHECK(cudaMemcpyAsync(static_cast<uint8_t*>(to) + begin * item_bytes, at,
                                   (end - begin) * item_bytes, cudaMemcpyHostToDevice, stream));
    KDT_CUDA_CHECK(cudaEventRecord(piece.sent, stream));
  }
}

void WeightUpload::panels(const std::vector<PanelRow>& rows, DType dtype, int64_t in_features,
                          void* to, cudaStream_t stream) {
  send(static_cast<int64_t>(rows.size()) / kPanelRows,
       stream_shape(dtype, in_features).panel_bytes(), to, stream, [&](int64_t panel, uint8_t* at) {
         pack_panel(&rows[panel * kPanelRows], dtype, in_features, at);
       });
}

void WeightUpload::plain(const HostMatrix& matrix, void* to, cudaStream_t stream) {
  const int64_t row_bytes = matrix.row_bytes();
  send(matrix.out_features, row_bytes, to, stream,
       [&](int64_t row, uint8_t* at) { std::memcpy(at, matrix.row(row), row_bytes); });
}

}  // namespace kdt::cuda
