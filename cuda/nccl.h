// Sums and gathers through NCCL, for ranks of several processes or whose devices do not reach each
// other's memory. libnccl is loaded when it is first asked for: the engine runs without it.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "core/clock.h"
#include "parallel/rank_group.h"

struct ncclComm;

namespace kdt::cuda {

class CudaBackend;

// Where the library is; asked before the loader's default, after KDTREE_NCCL_LIBRARY. Before the
// first communicator.
void set_nccl_library(const std::string& path);

// NCCL's version, as 22703; throws Error naming what was tried when it cannot be loaded.
int nccl_version();

class NcclRanks {
 public:
  // All ranks call it. Throws Error; two ranks on one device are refused.
  NcclRanks(CudaBackend& backend, RankGroup& group);
  ~NcclRanks();
  NcclRanks(const NcclRanks&) = delete;
  NcclRanks& operator=(const NcclRanks&) = delete;

  // In rank order whatever the size: parts are gathered, or each rank gathers and adds up a range,
  // and NCCL adds nothing.
  void all_reduce(float* x, int64_t count);
  void all_gather(const void* from, void* to, int64_t bytes);

  // From begin_wait to end_wait the host waits for the stream.
  void begin_wait();
  void end_wait();
  // Ends NCCL's kernels; nothing can be called any more.
  void stop();
  bool stopped() const { return stopped_; }

 private:
  void add_up(const float* parts, float* out, int64_t count);
  void reduce_ranges(float* x, int64_t range);
  void started();
  void check_open() const;
  bool stream_is_busy() const;
  void watch();

  CudaBackend& backend_;
  RankGroup& group_;
  ncclComm* comm_ = nullptr;
  std::shared_ptr<void> parts_;
  int64_t parts_bytes_ = 0;
  uint64_t* progress_ = nullptr;  // sums that have ended; in the host's memory, mapped
  uint64_t* device_progress_ = nullptr;

  // The watchdog. NCCL waits without end, on the device and in its calls.
  std::thread watchdog_;
  std::mutex mutex_;
  std::condition_variable wake_;
  bool ending_ = false;
  bool busy_ = false;  // something was started or is waited for
  Clock since_;        // of the last progress
  std::atomic<bool> stopped_ = false;
};

}  // namespace kdt::cuda
