// Sums and gathers of ranks that are threads of one process and whose devices reach each other's
// memory (kernels/all_reduce.h). Ranks may share a device.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "kernels/all_reduce.h"
#include "parallel/rank_group.h"

namespace kdt::cuda {

class CudaBackend;

class PushRanks {
 public:
  // Why these ranks cannot do this; "" when they can. All ranks call it and get the same.
  static std::string obstacle(const CudaBackend& backend, RankGroup& group);

  // Whether ranks of one process use one device. All ranks call it.
  static bool share_a_device(const CudaBackend& backend, RankGroup& group);

  // All ranks call it, when there is no obstacle.
  PushRanks(CudaBackend& backend, RankGroup& group);
  ~PushRanks();
  PushRanks(const PushRanks&) = delete;
  PushRanks& operator=(const PushRanks&) = delete;

  void all_reduce(float* x, int64_t count);
  void all_gather(const void* from, void* to, int64_t bytes);

  // The rank that did not come in time, or -1.
  int missing() const;
  // Ends what kernels wait for.
  void stop();

 private:
  CudaBackend& backend_;
  // All ranks': whoever is last releases them, as others may still write.
  std::vector<std::shared_ptr<void>> inboxes_;
  std::shared_ptr<void> state_;
  PushReport* report_ = nullptr;  // in the host's memory, mapped
  PushContext context_{};
};

}  // namespace kdt::cuda
