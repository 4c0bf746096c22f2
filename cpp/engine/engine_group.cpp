#include "engine/engine_group.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <thread>

namespace kdt {
namespace {

constexpr int kMaxRanks = 64;

}  // namespace

template <typename Call>
auto EngineGroup::on_all(Call call) {
  if (!workers_) return call(*ranks_->engines[0]);
  using Result = decltype(call(*ranks_->engines[0]));
  const auto result = std::make_shared<std::optional<Result>>();
  workers_->run([ranks = ranks_, result, call = std::move(call)](int rank) {
    Result mine = call(*ranks->engines[rank]);
    if (rank == 0) *result = std::move(mine);
  });
  return std::move(**result);
}

EngineGroup::EngineGroup(const EngineOptions& options) : ranks_(std::make_shared<Ranks>()) {
  const int size = options.tensor_parallel_size;
  KDT_CHECK_ARGUMENT(size >= 1 && size <= kMaxRanks, "tensor_parallel_size is ", size,
                     "; want 1 to ", kMaxRanks);
  KDT_CHECK_ARGUMENT(size > 1 || !options.expert_parallel,
                     "expert_parallel is true, but tensor_parallel_size is 1");
  KDT_CHECK_ARGUMENT(std::isfinite(options.timeout_s) && options.timeout_s > 0, "timeout_s is ",
                     options.timeout_s, "; want seconds, more than 0");
  const std::vector<RankDevice> devices = rank_devices(options.device, options.num_threads, size);
  ranks_->options = options;
  ranks_->checkpoints = std::make_unique<Checkpoints>(options);
  ranks_->engines.resize(size);
  const auto make = [](Ranks& ranks, int rank, const RankDevice& device, RankGroup* group) {
    ranks.engines[rank] = std::make_unique<Engine>(ranks.options, *ranks.checkpoints, device.device,
                                                   device.num_threads, group);
  };
  if (size == 1) {
    make(*ranks_, 0, devices[0], nullptr);
  } else {
    workers_ = std::make_unique<WorkerGroup>(size, options.timeout_s);
    std::vector<RankGroup*> groups;
    for (int rank = 0; rank < size; ++rank) groups.push_back(&workers_->rank(rank));
    workers_->run([ranks = ranks_, devices, groups, make](int rank) {
      make(*ranks, rank, devices[rank], groups[rank]);
    });
  }
  ranks_->checkpoints.reset();
  ranks_->options.progress = nullptr;
}

int64_t EngineGroup::add_request(const std::vector<int64_t>& prompt_token_ids,
                                 const RequestOptions& options) {
  return on_all([=](Engine& e) { return e.add_request(prompt_token_ids, options); });
}

std::vector<StepOutput> EngineGroup::step() {
  return on_all([](Engine& e) { return e.step(); });
}

bool EngineGroup::abort(int64_t request_id) {
  return on_all([=](Engine& e) { return e.abort(request_id); });
}

std::vector<float> EngineGroup::logits(const std::vector<int64_t>& token_ids) {
  return on_all([=](Engine& e) { return e.logits(token_ids); });
}

std::vector<float> EngineGroup::tree_logits(const std::vector<int64_t>& prefix,
                                            const std::vector<int64_t>& tokens,
                                            const std::vector<int64_t>& parents) {
  return on_all([=](Engine& e) { return e.tree_logits(prefix, tokens, parents); });
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
