// One round of decoding: draft, build, verify, accept, commit.
#include <algorithm>

#include "backend/checks.h"
#include "core/clock.h"
#include "engine/engine.h"

namespace kdt {

void DraftTree::truncate(int64_t count) {
  for (auto* list : {&tokens, &parents, &depths, &first_child, &next_sibling}) list->resize(count);
  logw.resize(count);
  // Siblings are linked in ascending order, so what is left of a list is its start.
  for (auto* links : {&first_child, &next_sibling}) {
    for (int32_t& link : *links) link = link < count ? link : -1;
  }
}

int32_t DraftTree::child(int32_t slot, int32_t token) const {
  int32_t child = first_child.empty() ? -1 : first_child[slot];
  while (child >= 0 && tokens[child] != token) child = next_sibling[child];
  return child;
}

// How deep a tree may go: not past the block, the budget, the last token asked for, or the
// drafter's positions.
int64_t Engine::draft_depth(const Request& request) const {
  if (request.method == Method::kPlain) return 0;
  const auto length = static_cast<int64_t>(request.token_ids.size());
  const int64_t positions = draft_->config().max_position_embeddings;
  if (positions > 0 && length - 1 + draft_->config().block_size > positions) return 0;
  const int64_t widest = request.is_auto()                  ? auto_budget_.depth()
                         : request.options.tree_budget == 0 ? block_drafts()
                                                            : request.options.tree_budget;
  return std::min({block_drafts(), widest, request.max_length - length - 1});
}

void Engine::decode(const std::vector<Request*>& requests, std::vector<StepOutput*>& outputs) {
  for (size_t i = 0; i < requests.size(); ++i)
    outputs[i]->root_token_id = requests[i]->token_ids.back();
  if (draft_) draft_trees(requests, outputs);

  std::vector<std::vector<int32_t>> target_tokens;
  for (size_t begin = 0; begin < requests.size();) {
    int64_t rows = 0;
    size_t end = begin;
    for (; end < requests.size(); ++end) {
      rows += std::max<int64_t>(1, outputs[end]->tree.num_nodes());
      if (end > begin && rows > max_rows_) break;
    }
    std::vector<Request*> some(requests.begin() + static_cast<int64_t>(begin),
                               requests.begin() + static_cast<int64_t>(end));
    std::vector<StepOutput*> some_outputs(outputs.begin() + static_cast<int64_t>(begin),
                                          outputs.begin() + static_cast<int64_t>(end));
    verify(some, some_outputs, target_tokens);
    const Clock clock;
    int64_t row = 0;
    for (size_t i = 0; i < some.size(); ++i) {
      accept_and_commit(*some[i], *some_outputs[i], target_tokens[i], row);
      row += static_cast<int64_t>(target_tokens[i].size());
    }
    const double ms = clock.ms();
    stats_.commit_ms += ms;
    for (StepOutput* output : some_outputs) output->commit_ms = ms;
    begin = end;
  }
}

void Engine::draft_trees(const std::vector<Request*>& requests, std::vector<StepOutput*>& outputs) {
  const Clock draft_clock;
  // Asked once a round, whatever the number of requests that leave it to the engine.
  const auto first_auto =
      std::find_if(requests.begin(), requests.end(), [](const Request* r) { return r->is_auto(); });
  const bool auto_drafts =
      first_auto != requests.end() && auto_budget_.should_draft(costs_, (*first_auto)->token_ids);
  std::vector<size_t> drafting;
  for (size_t i = 0; i < requests.size(); ++i) {
    if (draft_depth(*requests[i]) > 0 && (!requests[i]->is_auto() || auto_drafts)) {
      drafting.push_back(i);
    }
  }
  if (drafting.empty()) return;
  for (const size_t i : drafting) extend_context(*requests[i]);
  backend_->synchronize();
  const double extend_ms = draft_clock.ms();
  const auto count = static_cast<int64_t>(drafting.size());
  int64_t depth = 0;
  for (const size_t i : drafting) depth = std::max(depth, draft_depth(*requests[i]));
  draft_batch_->clear();
  for (const size_t i : drafting) {
    const Request& request = *requests[i];
    draft_->add_block(*draft_batch_, request.num_context, block_table(request.slot),
                      request.token_ids.back(), depth);
  }
  const bool typical = draft();
  backend_->synchronize();
  ++stats_.draft_forwards;
  const double draft_ms = draft_clock.ms();
  stats_.draft_ms += draft_ms;

  const Clock build_clock;
  for (size_t i = 0; i < drafting.size(); ++i) {
    const Request& request = *requests[drafting[i]];
    StepOutput& output = *outputs[drafting[i]];
    output.tree =
        build_tree(request, draft_logits_.tensor.rows(static_cast<int64_t>(i) * depth, depth),
                   draft_depth(request));
    if (request.is_auto())
      output.tree.truncate(auto_budget_.choose_slots(output.tree.logw, costs_));
    output.draft_ms = draft_ms;
  }
  const double build_ms = build_clock.ms();
  stats_.build_ms += build_ms;
  for (const size_t i : drafting) outputs[i]->build_ms = build_ms;
  // The context's rows must be added once, whichever round does it.
  if (count == 1 && typical) costs_.observe_draft(agreed(draft_ms - extend_ms + build_ms));
}

DraftTree Engine::build_tree(const Request& request, const Tensor& logits, int64_t max_depth) {
  const bool chain = request.method == Method::kChain;
  int64_t budget = request.options.tree_budget;
  if (budget == 0) budget = chain ? max_depth : kMaxAutoBudget;
  int64_t width = request.options.tree_topk == 0 ? budget : request.options.tree_topk;
  width = chain ? 1 : std::min({width, budget, config_.vocab_size});

  const auto [logprobs, ids] = candidates(max_depth, width);
  if (request.is_greedy()) {
    choose_candidates(logits.rows(0, max_depth), request.options.draft_temperature, logprobs, ids);
  } else {
    choose_noisy_candidates(request, logits.rows(0, max_depth), logprobs, ids);
  }
  const int64_t slots = budget + 1;
  const auto array = [&](int64_t i) { return tree_ints_.tensor.rows(1 + i * slots, slots); };
  backend_->tree_build({.logprobs = logprobs,
                        .ids = ids,
                        .budget = budget,
                        .tokens = array(0),
                        .parents = array(1),
                        .depths = array(2),
                        .first_child = array(3),
                        .next_sibling = array(4),
                        .logw = tree_logw_.tensor,
                        .num_nodes = tree_ints_.tensor.rows(0, 1)});
  std::vector<int32_t> ints(1 + 5 * slots);
  backend_->download(ints.data(), tree_ints_.tensor.rows(0, 1 + 5 * slots));
  const int32_t count = ints[0];
  DraftTree tree;
  auto from = ints.begin() + 1;
  for (auto* list :
       {&tree.tokens, &tree.parents, &tree.depths, &tree.first_child, &tree.next_sibling}) {
    list->assign(from, from + count);
    from += slots;
  }
  tree.logw.resize(count);
  backend_->download(tree.logw.data(), tree_logw_.tensor.rows(0, count));
  return tree;
}

bool Engine::draft() {
  draft_batch_->upload();
  return passes_->run({kDraft, draft_batch_->num_sequences(), draft_batch_->num_chosen()}, [&] {
    draft_->draft(*draft_batch_, *target_, *draft_cache_,
                  draft_logits_.tensor.rows(0, draft_batch_->num_chosen()));
  });
}

bool Engine::forward_and_choose() {
  batch_->upload();
  return passes_->run({kVerify, batch_->num_rows(), batch_->num_sequences()}, [&] {
    target_->forward(*batch_, *target_cache_);
    choose_tokens(batch_->num_rows());
  });
}

void Engine::verify(const std::vector<Request*>& requests, std::vector<StepOutput*>& outputs,
                    std::vector<std::vector<int32_t>>& target_tokens) {
  const Clock clock;
  batch_->clear();
  std::vector<PassRows> parts;
  for (size_t i = 0; i < requests.size(); ++i) {
    const Request& request = *requests[i];
    const DraftTree& tree = outputs[i]->tree;
    parts.push_back({&request, &tree, batch_->num_rows()});
    batch_->begin_sequence(request.num_cached, block_table(request.slot));
    batch_->add_row(request.token_ids.back(), request.num_cached, -1);
    for (int64_t slot = 1; slot < tree.num_nodes(); ++slot) {
      batch_->add_row(tree.tokens[slot], request.num_cached + tree.depths[slot],
                      tree.parents[slot]);
    }
  }
  const bool greedy = std::all_of(requests.begin(), requests.end(),
                                  [](const Request* request) { return request->is_greedy(); });
  const bool typical = greedy ? forward_and_choose() : forward();
  target_tokens.clear();
  if (greedy) {
    const std::vector<int32_t> tokens = chosen_tokens(batch_->num_rows());
    for (const PassRows& part : parts)
      target_tokens.emplace_back(tokens.begin() + part.begin, tokens.begin() + part.end());
  } else {
    target_tokens = next_tokens(parts);
  }
  ++stats_.target_forwards;
  const double ms = clock.ms();
  stats_.verify_ms += ms;
  for (StepOutput* output : outputs) output->verify_ms = ms;
  if (draft_ && requests.size() == 1 && typical)
    costs_.observe_verify(batch_->num_rows(), agreed(ms));
}

void Engine::accept_and_commit(Request& request, StepOutput& output,
                               const std::vector<int32_t>& target_tokens, int64_t first_row) {
  const DraftTree& tree = output.tree;
  const auto slots = static_cast<int64_t>(target_tokens.size());
  output.accepted = {0};
  if (slots > 1) {
    std::vector<int32_t> ints;
    for (const auto* list : {&tree.tokens, &tree.first_child, &tree.next_sibling, &target_tokens})
      ints.insert(ints.end(), list->begin(), list->begin() + slots);
    backend_->upload(tree_ints_.tensor.rows(0, 4 * slots), ints.data());
    const auto array = [&](int64_t i) { return tree_ints_.tensor.rows(i * slots, slots); };
    const Tensor result = tree_ints_.tensor.rows(4 * slots, 2 + slots);
    backend_->tree_accept({.tokens = array(0),
                           .first_child = array(1),
                           .next_sibling = array(2),
                           .target = array(3),
                           .accepted = result.rows(2, slots),
                           .accept_length = result.rows(0, 1),
                           .bonus_token = result.rows(1, 1)});
    backend_->download(ints.data(), result);
    output.accepted.assign(ints.begin() + 2, ints.begin() + 2 + ints[0]);
  }

  // The tokens after each accepted slot; those past a stop are dropped with the request.
  std::vector<int32_t> tokens;
  for (const int32_t slot : output.accepted) tokens.push_back(target_tokens[slot]);
  output.accept_length = static_cast<int64_t>(tokens.size());
  if (request.is_auto() && tree.num_nodes() > 0) {
    auto_budget_.observe(tree.logw, output.accept_length, costs_);
  }
  commit_tokens(request, tokens, output);
  if (output.finished) {
    output.accept_length = static_cast<int64_t>(output.token_ids.size());
    output.accepted.resize(output.accept_length);
    return;
  }

  const auto count = static_cast<int64_t>(output.accepted.size());
  std::vector<int32_t> from(count), to(count), rows(count);
  bool moves = false;
  for (int64_t i = 0; i < count; ++i) {
    from[i] = static_cast<int32_t>(request.num_cached + output.accepted[i]);
    to[i] = static_cast<int32_t>(request.num_cached + i);
    rows[i] = static_cast<int32_t>(first_row + output.accepted[i]);
    moves = moves || from[i] != to[i];
  }
  if (moves) {
    std::vector<int32_t> ints = block_table(request.slot);
    const auto blocks = static_cast<int64_t>(ints.size());
    ints.insert(ints.end(), from.begin(), from.end());
    ints.insert(ints.end(), to.begin(), to.end());
    const Tensor moved = tree_ints_.tensor.rows(0, blocks + 2 * count);
    backend_->upload(moved, ints.data());
    backend_->kv_compact(*target_cache_, moved.rows(0, blocks), moved.rows(blocks, count),
                         moved.rows(blocks + count, count));
  }
  if (request.method != Method::kPlain) keep_features(request, rows);
  request.num_cached += count;
}

void Engine::keep_features(Request& request, const std::vector<int32_t>& rows) {
  const auto count = static_cast<int64_t>(rows.size());
  const Tensor& pending = pending_features_[request.slot].tensor;
  if (request.num_pending + count > pending.dim(0)) extend_context(request);
  const Tensor indices = row_indices_.tensor.rows(0, count);
  backend_->upload(indices, rows.data());
  backend_->gather_rows(target_->features(batch_->num_rows()), indices,
                        pending.rows(request.num_pending, count));
  request.num_pending += count;
}

void Engine::extend_context(Request& request) {
  for (int64_t begin = 0; begin < request.num_pending; begin += max_rows_) {
    const int64_t count = std::min(max_rows_, request.num_pending - begin);
    // Only the rows' positions matter here; the features stand in for the tokens.
    const std::vector<int32_t> tokens(count, 0);
    context_batch_->clear();
    context_batch_->begin_sequence(request.num_context, block_table(request.slot));
    context_batch_->add_chain(tokens.data(), count, request.num_context);
    context_batch_->upload();
    draft_->extend_context(
        *context_batch_, pending_features_[request.slot].tensor.rows(begin, count), *draft_cache_);
    request.num_context += count;
  }
  request.num_pending = 0;
}

// Times passes of both models in the spare slot. Every size has its turn in each of a few sweeps,
// so that a disturbance does not hit one size alone; the quickest of a size counts.
void Engine::measure_costs() {
  constexpr int64_t kSizes[] = {1, 2, 3, 4, 5, 6, 7, 9, 11, 13, 17, 21, 25, 33, 49, 65};
  constexpr int kSweeps = 6;
  constexpr double kEnoughMs = 300;  // a busy machine gets fewer sweeps
  const int64_t context = std::min<int64_t>(256, max_model_len_ / 2);
  const int warm_ups = passes_->active() ? RecordedPasses::kRuns + 1 : 1;
  const auto timed = [&](const auto& body) {
    const Clock pass;
    body();
    backend_->synchronize();
    return agreed(pass.ms());
  };
  std::vector<std::pair<int64_t, double>> points;
  for (const int64_t rows : kSizes) points.emplace_back(rows, 1e9);
  double draft_ms = 1e9;
  const int64_t depth = std::min(block_drafts(), auto_budget_.depth());
  int64_t token = 0;
  const Clock clock;
  for (int sweep = 0; sweep < warm_ups + kSweeps; ++sweep) {
    if (sweep > warm_ups && agreed(clock.ms()) > kEnoughMs) break;
    for (auto& [rows, best] : points) {
      batch_->clear();
      batch_->begin_sequence(context, block_table(spare_slot()));
      // Other tokens each time, so that rows and sweeps go to different experts.
      for (int64_t row = 0; row < rows; ++row) {
        token = (token + 7919) % config_.vocab_size;
        // A chain; rows that find no position of their own share the last.
        const int64_t depth = std::min(row, max_model_len_ - 1 - context);
        batch_->add_row(static_cast<int32_t>(token), context + depth,
                        static_cast<int32_t>(depth) - 1);
      }
      const double ms = timed([&] {
        forward_and_choose();
        chosen_tokens(rows);
      });
      if (sweep >= warm_ups) best = std::min(best, ms);
    }
    draft_batch_->clear();
    draft_->add_block(*draft_batch_, context, block_table(spare_slot()), 0, depth);
    const double ms = timed([&] { draft(); });
    if (sweep >= warm_ups) draft_ms = std::min(draft_ms, ms);
  }
  costs_.set_verify(std::move(points));
  costs_.set_draft(draft_ms);
}

}  // namespace kdt
