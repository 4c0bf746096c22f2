// Loads a checkpoint for all ranks of a process at once.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "io/tensor_stream.h"
#include "model/load_plan.h"
#include "parallel/rank_group.h"

namespace kdt {

// Called with the bytes read so far and the bytes of all tensors.
using LoadProgress = std::function<void(int64_t done, int64_t total)>;

// Reads each byte of a source once, for one load by every rank of this process; a rank takes its
// slices of each part while the next are read. docs/adr/0018-loading.md.
class Loader {
 public:
  explicit Loader(int num_ranks, const StreamOptions& options = StreamOptions::from_environment());

  // Makes and fills all items of the plan. Every rank calls it once, in its thread; their plans
  // have equal parts, of the same source. `group`: what this rank meets the others in, null when
  // there is one. Throws Error, on all ranks when one fails or the group has ended, and when a rank
  // takes nothing for the group's time-out.
  LoadReport load(LoadPlan& plan, RankGroup* group, const LoadProgress& progress);

 private:
  // Where a module's tensors are in its part's list, and what they make.
  struct Module {
    std::string name;
    HostMatrix matrix;  // without data
    int data = -1, scale = -1, shape = -1;
    int64_t extra = -1;  // the widened values' place; -1: the data are used as they are
    std::vector<int64_t> size() const { return {matrix.out_features, matrix.in_features}; }
  };
  struct Shared {
    std::vector<std::vector<Module>> parts;
    std::vector<int> ranks;                         // that have come
    std::unique_ptr<std::atomic<int64_t>[]> taken;  // [num_ranks] parts
    std::unique_ptr<TensorStream> stream;
  };

  std::shared_ptr<Shared> begin(const LoadPlan& plan, int rank, int& index);
  void fill(LoadPlan& plan, Shared& shared, int index, RankGroup* group,
            const LoadProgress& progress) const;
  StreamPart stream_part(const LoadPlan& plan, const LoadPart& part,
                         std::vector<Module>& modules) const;
  HostMatrix whole(const LoadPlan& plan, const Module& module,
                   const TensorStream::Bytes& bytes) const;

  const int num_ranks_;
  const StreamOptions options_;
  std::mutex mutex_;
  std::shared_ptr<Shared> shared_;  // until all ranks have come
};

// For one rank alone.
LoadReport load_checkpoint(LoadPlan& plan, const LoadProgress& progress);

}  // namespace kdt
