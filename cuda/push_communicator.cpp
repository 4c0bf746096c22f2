#include "push_communicator.h"

#include <algorithm>
#include <atomic>
#include <random>

#include "cuda_backend.h"

namespace kdt::cuda {
namespace {

#ifdef KDT_EMULATOR
constexpr int64_t kSlotBytes = 4096;  // so that tests reach messages of several pieces
#else
constexpr int64_t kSlotBytes = 2 << 20;  // 73 rows of 7168
#endif

// What a rank tells the others of itself.
struct Place {
  uint64_t process;
  int32_t device, num_multiprocessors;
};

uint64_t process_token() {
  static const uint64_t token = [] {
    std::random_device device;
    return static_cast<uint64_t>(device()) << 32 | device();
  }();
  return token;
}

std::vector<Place> places(const CudaBackend& backend, RankGroup& group) {
  const Place mine = {process_token(), backend.device(), backend.num_multiprocessors()};
  std::vector<Place> all(group.size());
  group.all_gather(&mine, sizeof(mine), all.data());
  return all;
}

// Blocks of one call: those of all ranks of a device run at the same time.
int blocks_of_all(const std::vector<Place>& all) {
  int blocks = kMaxPushBlocks;
  for (const Place& place : all) {
    const auto sharing = std::count_if(
        all.begin(), all.end(), [&](const Place& other) { return other.device == place.device; });
    blocks = std::min(blocks, place.num_multiprocessors / static_cast<int>(sharing));
  }
  return blocks;
}

// The first device of the others whose memory this one cannot reach; -1: all are reached. Enables
// the access.
int unreachable(int device, const std::vector<Place>& all) {
  for (const Place& place : all) {
    if (place.device == device) continue;
    int possible = 0;
    KDT_CUDA_CHECK(cudaDeviceCanAccessPeer(&possible, device, place.device));
    if (possible == 0) return place.device;
    const cudaError_t status = cudaDeviceEnablePeerAccess(place.device, 0);
    if (status == cudaSuccess) continue;
    static_cast<void>(cudaGetLastError());
    if (status != cudaErrorPeerAccessAlreadyEnabled) return place.device;
  }
  return -1;
}

}  // namespace

std::string PushRanks::obstacle(const CudaBackend& backend, RankGroup& group) {
  if (group.size() > kMaxPushRanks) return join(group.size(), " ranks, at most ", kMaxPushRanks);
  const std::vector<Place> all = places(backend, group);
  for (int rank = 1; rank < group.size(); ++rank) {
    if (all[rank].process != all[0].process)
      return join("rank ", rank, " is in another process than rank 0");
  }
  if (blocks_of_all(all) == 0) return "more ranks share a device than it has multiprocessors";
  KDT_CUDA_CHECK(cudaSetDevice(backend.device()));
  const int32_t mine = unreachable(backend.device(), all);
  std::vector<int32_t> missed(group.size());
  group.all_gather(&mine, sizeof(mine), missed.data());
  for (int rank = 0; rank < group.size(); ++rank) {
    if (missed[rank] >= 0)
      return join("cuda:", all[rank].device, " cannot reach the memory of cuda:", missed[rank]);
  }
  return "";
}

bool PushRanks::share_a_device(const CudaBackend& backend, RankGroup& group) {
  const std::vector<Place> all = places(backend, group);
  for (size_t i = 0; i < all.size(); ++i) {
    for (size_t k = 0; k < i; ++k) {
      if (all[i].process == all[k].process && all[i].device == all[k].device) return true;
    }
  }
  return false;
}

PushRanks::PushRanks(CudaBackend& backend, RankGroup& group) : backend_(backend) {
  const int size = group.size();
  KDT_CUDA_CHECK(cudaSetDevice(backend.device()));
  const std::shared_ptr<void> inbox = device_memory(inbox_bytes(size, kSlotBytes));
  state_ = device_memory(sizeof(PushState));
  const int64_t flags = inbox_flags_begin(size, kSlotBytes);
  KDT_CUDA_CHECK(cudaMemsetAsync(typed<char>(inbox) + flags, 0,
                                 inbox_bytes(size, kSlotBytes) - flags, backend.stream()));
  KDT_CUDA_CHECK(cudaMemsetAsync(state_.get(), 0, sizeof(PushState), backend.stream()));
  KDT_CUDA_CHECK(cudaStreamSynchronize(backend.stream()));

  context_.state = typed<PushState>(state_);
  context_.rank = group.rank();
  context_.size = size;
  context_.num_blocks = blocks_of_all(places(backend, group));
  context_.slot_bytes = kSlotBytes;
  constexpr double kLongest = 1e9;  // seconds
  context_.timeout_ns = static_cast<uint64_t>(std::clamp(group.timeout_s(), 0.0, kLongest) * 1e9);

  // The others copy the pointer, and with it a share of the memory, before this one ends.
  const std::shared_ptr<void>* mine = &inbox;
  std::vector<const std::shared_ptr<void>*> all(size);
  group.all_gather(&mine, sizeof(mine), all.data());
  for (int rank = 0; rank < size; ++rank) {
    inboxes_.push_back(*all[rank]);
    context_.inboxes[rank] = typed<unsigned char>(inboxes_.back());
  }
  group.barrier();
  KDT_CUDA_CHECK(
      cudaHostAlloc(reinterpret_cast<void**>(&report_), sizeof(PushReport), cudaHostAllocMapped));
  *report_ = PushReport{0, 0};
  KDT_CUDA_CHECK(cudaHostGetDevicePointer(reinterpret_cast<void**>(&context_.report), report_, 0));
}

PushRanks::~PushRanks() {
  static_cast<void>(cudaSetDevice(backend_.device()));
  static_cast<void>(cudaStreamSynchronize(backend_.stream()));
  static_cast<void>(cudaFreeHost(report_));
}

void PushRanks::all_reduce(float* x, int64_t count) {
  constexpr int64_t kPiece = kSlotBytes / 4;
  for (int64_t begin = 0; begin < count; begin += kPiece) {
    launch_push_reduce(
        {.context = context_, .x = x + begin, .count = std::min(kPiece, count - begin)},
        backend_.stream());
  }
}

void PushRanks::all_gather(const void* from, void* to, int64_t bytes) {
  for (int64_t begin = 0; begin < bytes; begin += kSlotBytes) {
    launch_push_gather({.context = context_,
                        .from = static_cast<const unsigned char*>(from) + begin,
                        .to = static_cast<unsigned char*>(to) + begin,
                        .bytes = std::min(kSlotBytes, bytes - begin),
                        .to_stride = bytes},
                       backend_.stream());
  }
}

int PushRanks::missing() const {
  return static_cast<int>(std::atomic_ref(report_->missing).load()) - 1;
}

void PushRanks::stop() { std::atomic_ref(report_->stop).store(1); }

}  // namespace kdt::cuda
