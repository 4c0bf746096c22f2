// Sums and gathers over ranks whose tensors lie in the host's memory.
#pragma once

#include <vector>

#include "backend/backend.h"
#include "parallel/communicator.h"

namespace kdt::cpu {

// Works over any RankGroup: threads of one process or processes.
class CpuCommunicator final : public Communicator {
 public:
  // Both must outlive it.
  CpuCommunicator(Backend& backend, RankGroup& group) : backend_(backend), group_(group) {}

  std::string describe() const override { return "host memory"; }
  void all_reduce(const Tensor& x) override;
  void all_gather(const Tensor& from, const Tensor& to) override;
  void all_reduce_add_rms_norm(const Tensor& residual, const Tensor& delta, const Tensor& weight,
                               float eps, const Tensor& out) override;

 private:
  Backend& backend_;
  RankGroup& group_;
  std::vector<float> parts_;  // [size, n] of the piece that is summed
};

}  // namespace kdt::cpu
