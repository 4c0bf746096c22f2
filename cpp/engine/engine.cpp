#include "engine/engine.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <stdexcept>

#include "backend/checks.h"
#include "core/clock.h"
#include "engine/limits.h"
#include "engine/sampler.h"
#include "io/xxh64.h"

namespace kdt {

Engine::Engine(const EngineOptions& options, Checkpoints& checkpoints, const std::string& device,
               int num_threads, RankGroup* group)
    : group_(group) {
  try {
    start(options, checkpoints, device, num_threads);
  } catch (const std::invalid_argument&) {  // by all ranks alike
    throw;
  } catch (const std::exception& error) {
    // Before the members end: that may take as long as another rank waits for this one.
    if (group_ != nullptr) group_->abort(join("rank ", group_->rank(), ": ", error.what()));
    throw;
  }
}

void Engine::check_alike(const EngineOptions& o, const Checkpoints& checkpoints) {
  const auto hash = [](const std::string& text) { return xxh64(text.data(), text.size()); };
  const std::array<uint64_t, 3> mine = {
      checkpoints.fingerprint(),
      hash(join(o.max_model_len, ' ', o.max_num_seqs, ' ', o.prefill_chunk_size, ' ',
                o.latent_rms_norm_eps, ' ', o.expert_parallel, ' ', o.drafter.empty())),
      hash(backend_->info().isa + ' ' + backend_->weight_layout())};
  std::vector<std::array<uint64_t, 3>> all(shard_.size);
  group_->all_gather(mine.data(), sizeof(mine), all.data());
  constexpr const char* kWhat[] = {"other files (config.json or tensors, of the drafter too)",
                                   "other options", "another kind of device"};
  for (int rank = 1; rank < shard_.size; ++rank) {
    for (size_t i = 0; i < mine.size(); ++i) {
      KDT_CHECK(all[rank][i] == all[0][i], "rank ", rank, " has ", kWhat[i], " than rank 0");
    }
  }
}

void Engine::start(const EngineOptions& options, Checkpoints& checkpoints,
                   const std::string& device, int num_threads) {
  KDT_CHECK_ARGUMENT(options.max_num_seqs >= 1 && options.max_num_seqs <= kMaxSequences,
                     "max_num_seqs is ", options.max_num_seqs, "; want 1 to ", kMaxSequences);
  KDT_CHECK_ARGUMENT(options.prefill_chunk_size >= 1 && options.prefill_chunk_size <= kMaxChunk,
                     "prefill_chunk_size is ", options.prefill_chunk_size, "; want 1 to ",
                     kMaxChunk);
  KDT_CHECK_ARGUMENT(options.max_model_len >= 0 && options.max_model_len <= kMaxContext,
                     "max_model_len is ", options.max_model_len, "; want 0 (the checkpoint's) to ",
                     kMaxContext);
  backend_ = make_backend(device, num_threads);
  if (group_ != nullptr) {
    shard_ = {group_->rank(), group_->size(), options.expert_parallel};
    check_alike(options, checkpoints);
    communicator_ = backend_->make_communicator(*group_);
  }
  load(options, checkpoints);

  batch_ = std::make_unique<RowBatch>(*backend_, max_rows_, max_num_seqs_, blocks_per_slot_);
  logits_ = backend_->allocate(DType::kFloat32, {kLogitRows, target_->vocab_local()});
  token_out_ = backend_->allocate(DType::kInt32, {2 * max_rows_});
  row_indices_ = backend_->allocate(DType::kInt32, {max_rows_});
  const int64_t block = draft_ ? draft_->config().block_size : 1;
  const int64_t candidates = std::max(kLogitRows * kSampleHead, (block - 1) * kMaxTreeBudget);
  candidates_ = backend_->allocate(DType::kInt32, {2 * candidates});
  if (communicator_) {
    const int64_t of_topk = 2 * candidates + std::max(kLogitRows, block - 1);
    part_topk_ = backend_->allocate(DType::kInt32, {of_topk});
    const int64_t most = std::max({2 * max_rows_, kLogitRows * target_->vocab_local(), of_topk});
    gathered_ = backend_->allocate(DType::kInt32, {shard_.size * most});
  }
  constexpr int64_t kMaxSlots = kMaxTreeBudget + 1;
  tree_ints_ = backend_->allocate(DType::kInt32,
                                  {std::max(2 + 5 * kMaxSlots, blocks_per_slot_ + 2 * kMaxSlots)});
  tree_logw_ = backend_->allocate(DType::kFloat64, {kMaxTreeBudget + 1});
  for (int64_t slot = max_num_seqs_ - 1; slot >= 0; --slot) free_slots_.push_back(slot);
  passes_ = std::make_unique<RecordedPasses>(*backend_);
  if (!draft_) return;
  draft_batch_ =
      std::make_unique<RowBatch>(*backend_, max_num_seqs_ * block, max_num_seqs_, blocks_per_slot_);
  context_batch_ = std::make_unique<RowBatch>(*backend_, max_rows_, 1, blocks_per_slot_);
  draft_logits_ =
      backend_->allocate(DType::kFloat32, {max_num_seqs_ * (block - 1), target_->vocab_local()});
  const int64_t width = target_->features(1).dim(1);
  const int64_t pending_rows = std::max(max_rows_, std::min(kPendingRows, max_model_len_));
  for (int64_t slot = 0; slot < max_num_seqs_; ++slot) {
    pending_features_.push_back(backend_->allocate(DType::kFloat32, {pending_rows, width}));
  }
  // Taking memory may wait for a device on which another rank's sum waits for this one.
  if (group_ != nullptr) group_->barrier();
  measure_costs();
}

void Engine::load(const EngineOptions& options, Checkpoints& checkpoints) {
  config_ = checkpoints.config;
  max_num_seqs_ = options.max_num_seqs;
  chunk_size_ = options.prefill_chunk_size;
  max_model_len_ =
      options.max_model_len == 0 ? config_.max_position_embeddings : options.max_model_len;
  KDT_CHECK_ARGUMENT(max_model_len_ <= config_.max_position_embeddings, "max_model_len is ",
                     max_model_len_, "; the checkpoint's max_position_embeddings is ",
                     config_.max_position_embeddings);
  KDT_CHECK(max_model_len_ <= kMaxContext, options.model,
            "/config.json: max_position_embeddings is ", max_model_len_,
            "; this engine takes at most ", kMaxContext, ": set max_model_len");
  max_rows_ = std::max(chunk_size_, kMaxTreeBudget + 1);
  // A tree's rows follow the committed ones, whatever their positions.
  blocks_per_slot_ = (max_model_len_ + kMaxTreeBudget + kBlockSize) / kBlockSize;

  // One bar for both: the drafter's bytes follow the target's.
  model_bytes_ = checkpoints.all_bytes();
  const auto progress_from = [&](int64_t begin) -> LoadProgress {
    if (!options.progress || shard_.rank != 0) return nullptr;
    return [&, begin](int64_t done, int64_t) { options.progress(begin + done, model_bytes_); };
  };
  const RankContext ranks{*backend_, shard_, communicator_.get()};
  const DraftConfig& draft_config = checkpoints.draft_config;
  const int64_t num_blocks = (max_num_seqs_ + 1) * blocks_per_slot_;
  const auto make_cache = [&](const auto& model) {
    try {
      return model.make_cache(num_blocks, kBlockSize);
    } catch (const Error& error) {
      throw Error(join("the cache of ", max_num_seqs_,
                       " sequences (max_num_seqs) and a spare one, ", max_model_len_,
                       " tokens each (max_model_len): ", error.what(),
                       ": set a smaller max_model_len or max_num_seqs"));
    }
  };
  target_ = std::make_unique<TargetModel>(ranks, config_, *checkpoints.source, max_rows_,
                                          max_model_len_, draft_config.target_layer_ids);
  // Nodes read their disks at their own pace.
  const auto wait_for_all = [&] {
    if (group_ != nullptr) group_->wait_for_all();
  };
  load_report_ = checkpoints.load(*target_->take_plan(), group_, progress_from(0));
  wait_for_all();
  target_cache_ = make_cache(*target_);
  if (checkpoints.draft_source) {
    draft_ = std::make_unique<DraftModel>(ranks, draft_config, *checkpoints.draft_source, max_rows_,
                                          max_num_seqs_, max_model_len_ + draft_config.block_size);
    load_report_.add(
        checkpoints.load(*draft_->take_plan(), group_, progress_from(checkpoints.target_bytes())));
    wait_for_all();
    draft_cache_ = make_cache(*draft_);
  }
  if (options.progress && shard_.rank == 0) options.progress(model_bytes_, model_bytes_);
}

std::vector<int32_t> Engine::block_table(int64_t slot) const {
  std::vector<int32_t> blocks(blocks_per_slot_);
  for (int64_t i = 0; i < blocks_per_slot_; ++i)
    blocks[i] = static_cast<int32_t>(slot * blocks_per_slot_ + i);
  return blocks;
}

void Engine::check_token_ids(const char* name, const std::vector<int64_t>& token_ids) const {
  for (size_t i = 0; i < token_ids.size(); ++i) {
    KDT_CHECK_ARGUMENT(token_ids[i] >= 0 && token_ids[i] < config_.vocab_size, name, "[", i,
                       "] is ", token_ids[i], "; want 0 to ", config_.vocab_size - 1);
  }
}

Method Engine::checked_method(const RequestOptions& o) const {
  KDT_CHECK_ARGUMENT(o.max_tokens >= 0, "max_tokens is ", o.max_tokens, "; want at least 0");
  KDT_CHECK_ARGUMENT(o.tree_budget >= 0 && o.tree_budget <= kMaxTreeBudget, "tree_budget is ",
                     o.tree_budget, "; want 1 to ", kMaxTreeBudget, ", or 0 for automatic");
  KDT_CHECK_ARGUMENT(o.tree_topk >= 0 && o.tree_topk <= kMaxTreeBudget, "tree_topk is ",
                     o.tree_topk, "; want 1 to ", kMaxTreeBudget, ", or 0 for the budget");
  KDT_CHECK_ARGUMENT(std::isfinite(o.draft_temperature) && o.draft_temperature >= 1e-3 &&
                         o.draft_temperature <= 1e3,
                     "draft_temperature is ", o.draft_temperature, "; want 0.001 to 1000");
  check_token_ids("stop_token_ids", o.stop_token_ids);
  check_sampling(o);
  if (o.method == "none" || (o.method.empty() && !draft_)) {
    KDT_CHECK_ARGUMENT(o.tree_budget == 0, "method is 'none', but tree_budget is ", o.tree_budget);
    KDT_CHECK_ARGUMENT(o.tree_topk == 0, "method is 'none', but tree_topk is ", o.tree_topk);
    KDT_CHECK_ARGUMENT(o.draft_temperature == 1, "method is 'none', but draft_temperature is ",
                       o.draft_temperature);
    return Method::kPlain;
  }
  KDT_CHECK_ARGUMENT(o.method.empty() || o.method == "ddtree" || o.method == "dflash",
                     "method is '", o.method, "'; want 'none', 'dflash' or 'ddtree'");
  KDT_CHECK_ARGUMENT(draft_ != nullptr, "method is '", o.method,
                     "', but the engine was loaded without a drafter");
  if (o.method == "dflash") {
    KDT_CHECK_ARGUMENT(o.tree_topk <= 1, "method is 'dflash', a chain, but tree_topk is ",
                       o.tree_topk);
    KDT_CHECK_ARGUMENT(o.draft_temperature == 1,
                       "method is 'dflash', a chain, but draft_temperature is ",
                       o.draft_temperature);
    return Method::kChain;
  }
  // No depth has more candidates than the tree nodes, or the vocabulary tokens.
  const int64_t budget = o.tree_budget == 0 ? kMaxAutoBudget : o.tree_budget;
  KDT_CHECK_ARGUMENT(o.tree_topk <= budget, "tree_topk is ", o.tree_topk, "; want at most ",
                     o.tree_budget == 0 ? "the largest automatic budget, " : "tree_budget, ",
                     budget);
  KDT_CHECK_ARGUMENT(o.tree_topk <= config_.vocab_size, "tree_topk is ", o.tree_topk,
                     "; want at most vocab_size, ", config_.vocab_size);
  return Method::kTree;
}

int64_t Engine::add_request(const std::vector<int64_t>& prompt_token_ids,
                            const RequestOptions& options) {
  KDT_CHECK_ARGUMENT(!prompt_token_ids.empty(), "prompt_token_ids is empty");
  check_token_ids("prompt_token_ids", prompt_token_ids);
  const auto length = static_cast<int64_t>(prompt_token_ids.size());
  KDT_CHECK_ARGUMENT(length <= max_model_len_, "prompt_token_ids has ", length,
                     " tokens; max_model_len is ", max_model_len_);
  auto request = std::make_unique<Request>();
  request->method = checked_method(options);
  request->options = options;
  request->id = next_id_++;
  request->token_ids.assign(prompt_token_ids.begin(), prompt_token_ids.end());
  request->prompt_length = length;
  request->max_length = length + std::min(options.max_tokens, max_model_len_ - length);
  if (request->max_length == length) {
    StepOutput output;
    output.request_id = request->id;
    output.prompt_length = length;
    output.finished = true;
    output.finish_reason = "length";
    ended_.push_back(output);
  } else {
    waiting_.push_back(std::move(request));
  }
  return next_id_ - 1;
}

bool Engine::abort(int64_t request_id) {
  const auto same_id = [&](const auto& request) { return request->id == request_id; };
  if (const auto found = std::find_if(waiting_.begin(), waiting_.end(), same_id);
      found != waiting_.end()) {
    waiting_.erase(found);
    return true;
  }
  if (const auto found = std::find_if(active_.begin(), active_.end(), same_id);
      found != active_.end()) {
    free_slots_.push_back((*found)->slot);
    active_.erase(found);
    return true;
  }
  const auto ended = std::find_if(ended_.begin(), ended_.end(),
                                  [&](const auto& o) { return o.request_id == request_id; });
  if (ended == ended_.end()) return false;
  ended_.erase(ended);
  return true;
}

void Engine::admit() {
  while (!waiting_.empty() && !free_slots_.empty()) {
    waiting_.front()->slot = free_slots_.back();
    free_slots_.pop_back();
    active_.push_back(std::move(waiting_.front()));
    waiting_.pop_front();
  }
}

std::vector<StepOutput> Engine::step() {
  std::vector<StepOutput> outputs = std::move(ended_);
  ended_.clear();
  admit();
  std::vector<Request*> decoding;
  const size_t first = outputs.size();
  outputs.resize(first + active_.size());
  std::vector<StepOutput*> decoding_outputs;
  for (size_t i = 0; i < active_.size(); ++i) {
    StepOutput& output = outputs[first + i];
    output.request_id = active_[i]->id;
    output.prompt_length = active_[i]->prompt_length;
    if (active_[i]->prefilling()) {
      prefill(*active_[i], output);
    } else {
      decoding.push_back(active_[i].get());
      decoding_outputs.push_back(&output);
    }
    output.num_prefilled = std::min(active_[i]->num_cached, active_[i]->prompt_length);
  }
  if (!decoding.empty()) decode(decoding, decoding_outputs);
  for (size_t i = active_.size(); i-- > 0;) {
    if (!outputs[first + i].finished) continue;
    free_slots_.push_back(active_[i]->slot);
    active_.erase(active_.begin() + static_cast<int64_t>(i));
  }
  return outputs;
}

void Engine::commit_tokens(Request& request, const std::vector<int32_t>& tokens,
                           StepOutput& output) {
  const auto has = [](const std::vector<int64_t>& ids, int32_t id) {
    return std::find(ids.begin(), ids.end(), id) != ids.end();
  };
  for (const int32_t token : tokens) {
    if (token < 0) {
      // The logits were no numbers: this request cannot go on, the others can.
      output.finished = true;
      output.finish_reason = "error";
      return;
    }
    request.token_ids.push_back(token);
    output.token_ids.push_back(token);
    ++stats_.generated_tokens;
    if (has(request.options.stop_token_ids, token) ||
        (!request.options.ignore_eos && has(config_.eos_token_ids, token))) {
      output.finished = true;
      output.finish_reason = "stop";
      output.stop_token_id = token;
      return;
    }
    if (static_cast<int64_t>(request.token_ids.size()) == request.max_length) {
      output.finished = true;
      output.finish_reason = "length";
      return;
    }
  }
}

bool Engine::forward() {
  batch_->upload();
  return passes_->run({kForward, batch_->num_rows(), batch_->num_sequences()},
                      [&] { target_->forward(*batch_, *target_cache_); });
}

void Engine::prefill(Request& request, StepOutput& output) {
  const Clock clock;
  const int64_t begin = request.num_cached;
  const int64_t count = std::min(chunk_size_, request.prompt_length - begin);
  batch_->clear();
  batch_->begin_sequence(begin, block_table(request.slot));
  batch_->add_chain(request.token_ids.data() + begin, count, begin);
  forward();
  if (request.method != Method::kPlain) {
    std::vector<int32_t> rows(count);
    for (int64_t i = 0; i < count; ++i) rows[i] = static_cast<int32_t>(i);
    keep_features(request, rows);
  }
  request.num_cached += count;
  stats_.prefill_tokens += count;
  ++stats_.target_forwards;
  if (!request.prefilling()) {
    commit_tokens(request, next_tokens({{&request, &output.tree, count - 1}})[0], output);
    output.accept_length = 1;
  }
  output.verify_ms = clock.ms();
  stats_.prefill_ms += output.verify_ms;
}

void Engine::prefill_spare(const char* name, const std::vector<int64_t>& token_ids,
                           std::vector<float>* logits) {
  check_token_ids(name, token_ids);
  const auto length = static_cast<int64_t>(token_ids.size());
  KDT_CHECK_ARGUMENT(length <= max_model_len_, name, " has ", length, " tokens; max_model_len is ",
                     max_model_len_);
  const std::vector<int32_t> ids(token_ids.begin(), token_ids.end());
  for (int64_t begin = 0; begin < length; begin += chunk_size_) {
    const int64_t count = std::min(chunk_size_, length - begin);
    batch_->clear();
    batch_->begin_sequence(begin, block_table(spare_slot()));
    batch_->add_chain(ids.data() + begin, count, begin);
    forward();
    if (logits != nullptr) append_logits(0, count, *logits);
  }
}

std::vector<float> Engine::logits(const std::vector<int64_t>& token_ids) {
  std::vector<float> out;
  prefill_spare("token_ids", token_ids, &out);
  return out;
}

std::vector<float> Engine::tree_logits(const std::vector<int64_t>& prefix,
                                       const std::vector<int64_t>& tokens,
                                       const std::vector<int64_t>& parents) {
  const auto prefix_len = static_cast<int64_t>(prefix.size());
  const auto slots = static_cast<int64_t>(tokens.size());
  check_token_ids("tokens", tokens);
  KDT_CHECK_ARGUMENT(slots >= 1 && slots <= kMaxTreeBudget + 1, "tokens has ", slots,
                     " slots; want 1 to ", kMaxTreeBudget + 1);
  KDT_CHECK_ARGUMENT(parents.size() == tokens.size(), "parents has ", parents.size(),
                     " slots, tokens has ", slots);
  std::vector<int64_t> depths(slots);
  bool chain = true;
  for (int64_t slot = 0; slot < slots; ++slot) {
    const bool fits = slot == 0 ? parents[0] == -1 : parents[slot] >= 0 && parents[slot] < slot;
    KDT_CHECK_ARGUMENT(fits, "parents[", slot, "] is ", parents[slot], "; want ",
                       slot == 0 ? "-1" : "a slot before its own");
    depths[slot] = slot == 0 ? 0 : depths[parents[slot]] + 1;
    chain = chain && depths[slot] == slot;
    KDT_CHECK_ARGUMENT(chain || depths[slot] <= kMaxTreeDepth, "slot ", slot, " is at depth ",
                       depths[slot], "; a tree that is no chain has at most ", kMaxTreeDepth);
    KDT_CHECK_ARGUMENT(prefix_len + depths[slot] < max_model_len_, "slot ", slot,
                       " is at position ", prefix_len + depths[slot], "; max_model_len is ",
                       max_model_len_);
  }
  prefill_spare("prefix_token_ids", prefix, nullptr);
  batch_->clear();
  batch_->begin_sequence(prefix_len, block_table(spare_slot()));
  for (int64_t slot = 0; slot < slots; ++slot) {
    batch_->add_row(static_cast<int32_t>(tokens[slot]), prefix_len + depths[slot],
                    static_cast<int32_t>(parents[slot]));
  }
  forward();
  std::vector<float> out;
  append_logits(0, slots, out);
  return out;
}

}  // namespace kdt
