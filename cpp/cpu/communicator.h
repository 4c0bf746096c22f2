// Sums and gathers over ranks whose tensors lie in the host's memory.
#pragma once

#include <vector>

#include "backend/backend.h"
#include "parallel/communicator.h"

namespace kdt::cpu {

// Works over any RankGroup: threads of one process or processes.
class CpuCommunicator final : public Communicator {
 public:
  // The group must outlive it.
  explicit CpuCommunicator(RankGroup& group) : group_(group) {}

  std::string describe() const override { return "host memory"; }
  void all_reduce(const Tensor& x) override;
  void all_gather(const Tensor& from, const Tensor& to) override;

 private:
  RankGroup& group_;
  std::vector<float> parts_;  // [size, n] of the piece that is summed
};

}  // namespace kdt::cpu
