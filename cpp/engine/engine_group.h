// The engine as its users see it: one rank in the caller's thread, or several in threads of their
// own, each with its part of the models.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "parallel/worker_group.h"

namespace kdt {

// Not for use by several threads at once. After a rank has failed or has not come in time, every
// call throws Error with the first cause.
class EngineGroup {
 public:
  // Throws Error for files and std::invalid_argument for options, naming the field and the value.
  explicit EngineGroup(const EngineOptions& options);

  // As Engine's.
  int64_t add_request(const std::vector<int64_t>& prompt_token_ids, const RequestOptions& options);
  std::vector<StepOutput> step();
  bool abort(int64_t request_id);
  std::vector<float> logits(const std::vector<int64_t>& token_ids);
  std::vector<float> tree_logits(const std::vector<int64_t>& prefix,
                                 const std::vector<int64_t>& tokens,
                                 const std::vector<int64_t>& parents);

  // Adds a request and steps until it has ended; what the rounds did for it. Others advance too,
  // and what the rounds did for them is lost to the caller. `after_step` may throw: that ends the
  // request.
  std::vector<StepOutput> generate(const std::vector<int64_t>& prompt_token_ids,
                                   const RequestOptions& options,
                                   const std::function<void()>& after_step = nullptr);

  // Rank 0's, to be read between calls.
  const Engine& leader() const { return *ranks_->engines[0]; }
  int size() const { return static_cast<int>(ranks_->engines.size()); }

 private:
  // What a rank's thread works with. Shared with the threads, because one that is stuck may
  // outlive this object.
  struct Ranks {
    EngineOptions options;
    std::unique_ptr<Checkpoints> checkpoints;  // while loading
    std::vector<std::unique_ptr<Engine>> engines;
  };

  // call(engine) on all ranks; rank 0's result. `call` owns what it uses.
  template <typename Call>
  auto on_all(Call call);

  std::shared_ptr<Ranks> ranks_;
  std::unique_ptr<WorkerGroup> workers_;  // null: one rank. Ends before ranks_.
};

}  // namespace kdt
