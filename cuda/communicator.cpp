#include "communicator.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <thread>
#include <vector>

#include "backend/communicator_checks.h"
#include "core/clock.h"
#include "cuda_backend.h"
#include "device.h"

namespace kdt::cuda {
namespace {

std::string asked_way() {
  const char* value = std::getenv("KDTREE_ALL_REDUCE");
  const std::string way = value == nullptr || *value == '\0' ? "auto" : value;
  KDT_CHECK_ARGUMENT(way == "auto" || way == "push" || way == "nccl", "KDTREE_ALL_REDUCE is '", way,
                     "'; want 'auto', 'push' or 'nccl'");
  return way;
}

}  // namespace

CudaCommunicator::CudaCommunicator(CudaBackend& backend, RankGroup& group)
    : backend_(backend), group_(group) {
  try {
    KDT_CUDA_CHECK(cudaSetDevice(backend.device()));
    load_all_kernels();
    choose();
    backend_.set_communicator(this);
    if (push_ != nullptr && nccl_ != nullptr) measure_crossover();
    // Taking memory may wait for the device, so nobody starts before all have theirs.
    group_.barrier();
  } catch (const std::exception& error) {
    backend_.set_communicator(nullptr);
    group_.abort(join("rank ", group_.rank(), ": ", error.what()));
    throw;
  }
}

CudaCommunicator::~CudaCommunicator() {
  backend_.set_communicator(nullptr);
  if (push_ != nullptr && !group_.aborted().empty()) push_->stop();
}

// Every rank decides the same: from what all have told.
void CudaCommunicator::choose() {
  const std::string way = asked_way();
  if (group_.size() == 1 && way != "nccl") return;
  const bool sharing = PushRanks::share_a_device(backend_, group_);
  const std::string obstacle =
      way == "nccl" ? "KDTREE_ALL_REDUCE is 'nccl'" : PushRanks::obstacle(backend_, group_);
  KDT_CHECK(way != "push" || obstacle.empty(), "KDTREE_ALL_REDUCE is 'push', but ", obstacle);
  if (obstacle.empty()) push_ = std::make_unique<PushRanks>(backend_, group_);
  if (way == "push") return;

  std::string fault = "ranks share a device, which NCCL does not allow";
  if (!sharing) {
    fault = "";
    try {
      nccl_ = std::make_unique<NcclRanks>(backend_, group_);
    } catch (const Error& error) {
      fault = error.what();
    }
  }
  const char mine = fault.empty() ? 1 : 0;
  std::vector<char> all(group_.size());
  group_.all_gather(&mine, 1, all.data());
  for (int rank = 0; rank < group_.size() && fault.empty(); ++rank) {
    if (all[rank] == 0) fault = join("nccl: rank ", rank, " could not start it");
  }
  if (fault.empty()) return;
  nccl_.reset();
  measured_ = fault;
  KDT_CHECK(push_ != nullptr, "the ranks have no way to add up: no push (", obstacle,
            "), no NCCL (", fault, ")",
            sharing ? "; ranks that share a device need KDTREE_ALL_REDUCE=push" : "");
}

// From which size on NCCL is faster, for this and all larger ones of a few.
void CudaCommunicator::measure_crossover() {
  constexpr int64_t kSizes[] = {64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20};
  const std::shared_ptr<void> memory = backend_.stream_memory(kSizes[4]);
  KDT_CUDA_CHECK(cudaMemsetAsync(memory.get(), 0, kSizes[4], backend_.stream()));
  bool faster = true;
  for (int i = 4; i >= 0; --i) {
    const double push_us = time_us(kSizes[i] / 4, typed<float>(memory), false);
    const double nccl_us = time_us(kSizes[i] / 4, typed<float>(memory), true);
    char rank_0 = nccl_us < push_us ? 1 : 0;
    group_.broadcast(&rank_0, 1);
    faster = faster && rank_0 == 1;
    if (faster) nccl_from_bytes_ = kSizes[i];
    measured_ = join(kSizes[i] >> 10, " KiB ", std::llround(push_us), "/", std::llround(nccl_us),
                     measured_.empty() ? " us" : ", ", measured_);
  }
}

// The least of several runs.
double CudaCommunicator::time_us(int64_t count, float* x, bool with_nccl) {
  constexpr int kRuns = 4, kCalls = 8;
  double least = std::numeric_limits<double>::infinity();
  for (int run = 0; run < kRuns; ++run) {
    group_.barrier();
    const Clock clock;
    for (int call = 0; call < kCalls; ++call)
      with_nccl ? nccl_->all_reduce(x, count) : push_->all_reduce(x, count);
    wait_for_stream();
    if (run > 0) least = std::min(least, clock.ms() * 1e3 / kCalls);
  }
  return least;
}

std::string CudaCommunicator::describe() const {
  if (push_ == nullptr && nccl_ == nullptr) return "one rank";
  const std::string nccl = nccl_ == nullptr ? "" : join("NCCL ", nccl_version());
  if (push_ == nullptr) return nccl;
  if (nccl_ == nullptr) return join("push", measured_.empty() ? "" : " (" + measured_ + ")");
  const std::string times = join(" (push/NCCL: ", measured_, ")");
  if (nccl_from_bytes_ == std::numeric_limits<int64_t>::max()) return "push" + times;
  return join("push, ", nccl, " from ", nccl_from_bytes_ >> 10, " KiB", times);
}

void CudaCommunicator::check_open() const {
  if (ended_) throw Error(join("the group has ended: ", group_.aborted()));
}

void CudaBackend::check_group() const {
  if (communicator_ != nullptr) communicator_->check_open();
}

void CudaCommunicator::reduce(float* x, int64_t count) {
  check_open();
  if (takes_nccl(count * 4)) {
    if (nccl_ != nullptr) nccl_->all_reduce(x, count);
  } else {
    push_->all_reduce(x, count);
  }
}

void CudaCommunicator::all_reduce(const Tensor& x) {
  check_all_reduce(x);
  if (x.numel() > 0) reduce(x.data<float>(), x.numel());
}

void CudaCommunicator::all_gather(const Tensor& from, const Tensor& to) {
  check_all_gather(from, to, group_.size());
  check_open();
  if (from.bytes() == 0) return;
  if (!takes_nccl(from.bytes())) {
    push_->all_gather(from.raw(), to.raw(), from.bytes());
  } else if (nccl_ != nullptr) {
    nccl_->all_gather(from.raw(), to.raw(), from.bytes());
  } else {
    KDT_CUDA_CHECK(cudaMemcpyAsync(to.raw(), from.raw(), from.bytes(), cudaMemcpyDeviceToDevice,
                                   backend_.stream()));
  }
}

void CudaCommunicator::end(const std::string& reason) {
  ended_ = true;
  group_.abort(reason);
  if (push_ != nullptr) push_->stop();
  if (nccl_ != nullptr) nccl_->stop();
  static_cast<void>(cudaStreamSynchronize(backend_.stream()));
  throw Error(group_.aborted());
}

// The device itself gives up a wait of PushRanks after the time-out, and NcclRanks' watchdog one of
// NCCL; here only what another rank says is looked for.
void CudaCommunicator::wait_for_stream() {
  if (nccl_ != nullptr) nccl_->begin_wait();
  const Clock clock;
  double next_look_ms = 1;
  for (;;) {
    const cudaError_t status = cudaStreamQuery(backend_.stream());
    if (status == cudaSuccess) break;
    if (status != cudaErrorNotReady) KDT_CUDA_CHECK(status);
    const double now_ms = clock.ms();
    if (now_ms >= next_look_ms) {
      next_look_ms = now_ms + 1;
      if (const std::string reason = group_.aborted(); !reason.empty()) end(reason);
    }
    if (now_ms < 200) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
  }
  if (nccl_ != nullptr) {
    nccl_->end_wait();
    if (nccl_->stopped()) end("NCCL was stopped");
  }
  if (push_ != nullptr && push_->missing() >= 0)
    end(join("rank ", group_.rank(), ": the all-reduce did not end within ", group_.timeout_s(),
             " s: rank ", push_->missing(), " has not come"));
}

std::unique_ptr<Communicator> CudaBackend::make_communicator(RankGroup& group) {
  return std::make_unique<CudaCommunicator>(*this, group);
}

}  // namespace kdt::cuda
