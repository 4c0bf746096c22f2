// The engine as its users see it: one rank in the caller's thread, or several, each with its part
// of the models, in threads of their own and in one process or more.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "engine/command.h"
#include "engine/engine.h"
#include "parallel/worker_group.h"

namespace kdt {

// Not for use by several threads at once. After a rank has failed or has not come in time, every
// call throws Error with the first cause.
//
// In a process that torchrun, mpirun or srun started as one of several (parallel/launch.h), with
// more than one rank asked for, the ranks are shared between all of them. The process of rank 0
// makes the calls below, the others follow() them.
class EngineGroup {
 public:
  // Throws Error for files and std::invalid_argument for options, naming the field and the value.
  explicit EngineGroup(const EngineOptions& options);
  // Lets the processes that follow go.
  ~EngineGroup();

  bool is_leader() const { return is_leader_; }
  // Does what rank 0's process does until that ends its group. `interrupted` is called now and then
  // and may throw.
  void follow(const std::function<void()>& interrupted = nullptr);
  bool has_followers() const { return ranks_->has_followers; }

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

  // This process' first rank's, to be read between calls.
  const Engine& first() const { return *ranks_->engines[0]; }

 private:
  // What a rank's thread works with. Shared with the threads, because one that is stuck may
  // outlive this object.
  struct Ranks {
    EngineOptions options;
    std::unique_ptr<Checkpoints> checkpoints;  // while loading
    std::vector<RankGroup*> groups;            // of this process' ranks; none when it is alone
    std::vector<std::unique_ptr<Engine>> engines;
    bool has_followers = false;
  };

  // On all ranks; rank 0's result.
  CommandResult run(Command command);

  std::unique_ptr<WorkerGroup> workers_;  // null: one rank
  std::shared_ptr<Ranks> ranks_;          // ends first: engines refer to their rank's RankGroup
  bool is_leader_ = true;
};

}  // namespace kdt
