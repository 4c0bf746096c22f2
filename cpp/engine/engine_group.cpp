#include "engine/engine_group.h"

#include <chrono>
#include <future>
#include <stdexcept>
#include <thread>

#include "parallel/launch.h"
#include "parallel/tcp_group.h"

namespace kdt {
namespace {

// How the processes of `size` ranks were started; a process alone for one rank, which is nobody's
// part.
Launch launch_of(int size) {
  if (size == 1) return {};
  const Launch launch = launch_from_environment();
  KDT_CHECK_ARGUMENT(size % launch.world_size == 0, "tensor_parallel_size is ", size,
                     ", which the number of processes, ", launch.world_size, ", does not divide");
  return launch;
}

// Waits for the other processes in a thread of its own, which is left behind when the caller is
// interrupted.
std::vector<std::unique_ptr<RankGroup>> meet_processes(int local, const Launch& launch,
                                                       const EngineOptions& options) {
  using Groups = std::vector<std::unique_ptr<RankGroup>>;
  std::packaged_task<Groups()> joining([local, launch, timeout_s = options.timeout_s] {
    return make_hybrid_group(local, launch, timeout_s);
  });
  std::future<Groups> met = joining.get_future();
  std::thread(std::move(joining)).detach();
  while (met.wait_for(std::chrono::milliseconds(50)) != std::future_status::ready) {
    if (options.interrupted) options.interrupted();
  }
  return met.get();
}

// The leader's call in all processes.
std::string receive(RankGroup& group, std::string bytes) {
  uint64_t size = bytes.size();
  group.wait_for_leader(&size, sizeof(size));
  bytes.resize(size);
  group.broadcast(bytes.data(), static_cast<int64_t>(size));
  return bytes;
}

}  // namespace

EngineGroup::EngineGroup(const EngineOptions& options) : ranks_(std::make_shared<Ranks>()) {
  const int size = options.tensor_parallel_size;
  check_ranks(size, options.expert_parallel);
  KDT_CHECK_ARGUMENT(options.timeout_s >= 0.01 && options.timeout_s <= 1e6, "timeout_s is ",
                     options.timeout_s, "; want 0.01 to 1000000 seconds");
  const Launch launch = launch_of(size);
  const int local = size / launch.world_size;
  const std::vector<RankDevice> devices =
      rank_devices(options.device, options.num_threads, local, launch.local_rank * local,
                   launch.local_size * local);
  ranks_->options = options;
  ranks_->has_followers = launch.world_size > 1;
  is_leader_ = launch.rank == 0;
  if (ranks_->has_followers) {
    workers_ = std::make_unique<WorkerGroup>(meet_processes(local, launch, options));
  } else if (size > 1) {
    workers_ = std::make_unique<WorkerGroup>(size, options.timeout_s);
  }
  ranks_->checkpoints = std::make_unique<Checkpoints>(options, local);
  ranks_->engines.resize(local);
  ranks_->groups.resize(local);
  const auto make = [ranks = ranks_, devices](int i) {
    ranks->engines[i] =
        std::make_unique<Engine>(ranks->options, *ranks->checkpoints, devices[i].device,
                                 devices[i].num_threads, ranks->groups[i]);
  };
  if (workers_) {
    for (int i = 0; i < local; ++i) ranks_->groups[i] = &workers_->rank(i);
    workers_->run(make, options.interrupted);
  } else {
    make(0);
  }
  ranks_->checkpoints.reset();
  ranks_->options.progress = nullptr;
  ranks_->options.interrupted = nullptr;
}

EngineGroup::~EngineGroup() {
  if (!ranks_->has_followers || !is_leader_) return;
  try {
    Command close;
    close.kind = Command::Kind::kClose;
    run(std::move(close));
  } catch (const std::exception&) {  // they have gone already
  }
}

CommandResult EngineGroup::run(Command command) {
  KDT_CHECK(is_leader_, "this process follows rank 0's: only follow() can be called");
  if (!workers_) return run_command(*ranks_->engines[0], command);
  const auto shared = std::make_shared<const Command>(std::move(command));
  const auto result = std::make_shared<CommandResult>();
  workers_->run([ranks = ranks_, shared, result](int i) {
    if (ranks->has_followers) receive(*ranks->groups[i], shared->encode());
    CommandResult mine = run_command(*ranks->engines[i], *shared);
    if (i == 0) *result = std::move(mine);
  });
  return std::move(*result);
}

void EngineGroup::follow(const std::function<void()>& interrupted) {
  KDT_CHECK(!is_leader_, "this process leads: there is nobody to follow");
  workers_->run(
      [ranks = ranks_](int i) {
        for (;;) {
          const Command command = Command::decode(receive(*ranks->groups[i], ""));
          if (command.kind == Command::Kind::kClose) return;
          try {
            run_command(*ranks->engines[i], command);
          } catch (const std::invalid_argument&) {  // refused alike on all ranks; the leader tells
          }
        }
      },
      interrupted);
}

int64_t EngineGroup::add_request(const std::vector<int64_t>& prompt_token_ids,
                                 const RequestOptions& options) {
  Command command;
  command.kind = Command::Kind::kAddRequest;
  command.token_ids = prompt_token_ids;
  command.options = options;
  return run(std::move(command)).request_id;
}

std::vector<StepOutput> EngineGroup::step() { return run(Command()).outputs; }

bool EngineGroup::abort(int64_t request_id) {
  Command command;
  command.kind = Command::Kind::kAbort;
  command.request_id = request_id;
  return run(std::move(command)).was_there;
}

std::vector<float> EngineGroup::logits(const std::vector<int64_t>& token_ids) {
  Command command;
  command.kind = Command::Kind::kLogits;
  command.token_ids = token_ids;
  return run(std::move(command)).logits;
}

std::vector<float> EngineGroup::tree_logits(const std::vector<int64_t>& prefix,
                                            const std::vector<int64_t>& tokens,
                                            const std::vector<int64_t>& parents) {
  Command command;
  command.kind = Command::Kind::kTreeLogits;
  command.token_ids = prefix;
  command.tokens = tokens;
  command.parents = parents;
  return run(std::move(command)).logits;
}

std::vector<StepOutput> EngineGroup::generate(const std::vector<int64_t>& prompt_token_ids,
                                              const RequestOptions& options,
                                              const std::function<void()>& after_step) {
  const int64_t id = add_request(prompt_token_ids, options);
  std::vector<StepOutput> mine;
  try {
    while (mine.empty() || !mine.back().finished) {
      for (StepOutput& output : step()) {
        if (output.request_id == id) mine.push_back(std::move(output));
      }
      if (after_step) after_step();
    }
  } catch (...) {
    abort(id);
    throw;
  }
  return mine;
}

}  // namespace kdt
