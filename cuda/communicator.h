// The ranks of a group on GPUs: which way each message goes, and what ends a wait for a rank that
// does not come (docs/adr/0017).
#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <string>

#include "nccl.h"
#include "parallel/communicator.h"
#include "push_communicator.h"

namespace kdt::cuda {

class CudaBackend;

class CudaCommunicator final : public Communicator {
 public:
  // All ranks call it; both must outlive it. KDTREE_ALL_REDUCE asks for one way: "push", "nccl" or
  // "auto". Throws std::invalid_argument for another word and Error when the ranks have no way.
  CudaCommunicator(CudaBackend& backend, RankGroup& group);
  ~CudaCommunicator() override;

  std::string describe() const override;
  void all_reduce(const Tensor& x) override;
  void all_gather(const Tensor& from, const Tensor& to) override;

  // Throws Error when the group has ended.
  void check_open() const;
  // Waits for the other ranks to call it.
  void wait_for_all() { group_.barrier(); }
  // Waits for the back end's stream. Throws Error when the group has ended or a rank does not come.
  void wait_for_stream();

 private:
  void choose();
  void measure_crossover();
  double time_us(int64_t count, float* x, bool with_nccl);
  bool takes_nccl(int64_t bytes) const { return push_ == nullptr || bytes >= nccl_from_bytes_; }
  void reduce(float* x, int64_t count);
  [[noreturn]] void end(const std::string& reason);

  CudaBackend& backend_;
  RankGroup& group_;
  std::unique_ptr<PushRanks> push_;
  std::unique_ptr<NcclRanks> nccl_;
  int64_t nccl_from_bytes_ = std::numeric_limits<int64_t>::max();
  std::string measured_;  // in words
  bool ended_ = false;
};

}  // namespace kdt::cuda
