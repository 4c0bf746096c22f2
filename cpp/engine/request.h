// A request, what it asks for, and what a round did for it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace kdt {

enum class Method { kPlain, kChain, kTree };

// The largest tree that automatic choice considers: past it the drafter's probabilities are too
// small to pay.
inline constexpr int64_t kMaxAutoBudget = 64;

struct RequestOptions {
  int64_t max_tokens = 16;
  std::vector<int64_t> stop_token_ids = {};
  // Do not stop at the checkpoint's own eos ids.
  bool ignore_eos = false;
  // "none", "dflash", "ddtree"; "": "ddtree" with a drafter, else "none".
  std::string method = {};
  // Most draft nodes below the root; 0: chosen each round (dflash: the whole block).
  int64_t tree_budget = 0;
  // Candidates of a depth, at most the budget; 0: as many as the budget.
  int64_t tree_topk = 0;
  // Divides the drafter's logits: changes the tree, never the output. 1 without a tree.
  double draft_temperature = 1.0;
  // How the target's token is chosen (engine/sampler.h). 0: the likeliest, whatever the others are.
  double temperature = 0;
  int64_t top_k = 0;  // 0: all
  double top_p = 1;
  double min_p = 0;
  int64_t seed = 0;
};

// A draft tree on the host. Arrays are indexed by slot; slot 0 is the root.
struct DraftTree {
  std::vector<int32_t> tokens, parents, depths, first_child, next_sibling;
  std::vector<double> logw;

  int64_t num_nodes() const { return static_cast<int64_t>(tokens.size()); }
  // Keeps the first `count` slots. Slots are in best-first order, so this is the tree of budget
  // count - 1.
  void truncate(int64_t count);
  // The child of `slot` that carries the token; -1: none.
  int32_t child(int32_t slot, int32_t token) const;
};

struct StepOutput {
  int64_t request_id = 0;
  std::vector<int32_t> token_ids;  // committed by this round
  // Tokens the target's forward committed, bonus included; 0 while prefilling.
  int64_t accept_length = 0;
  int64_t num_prefilled = 0;
  int64_t prompt_length = 0;
  bool finished = false;
  std::string finish_reason;   // "", "stop", "length", "error" (the logits were no numbers)
  int32_t stop_token_id = -1;  // the token that stopped it
  int32_t root_token_id = -1;  // the last committed token before the round
  DraftTree tree;              // empty after a plain step or prefill
  std::vector<int32_t> accepted;
  double draft_ms = 0, build_ms = 0, verify_ms = 0, commit_ms = 0;
};

struct Request {
  int64_t id = 0;
  RequestOptions options;
  Method method = Method::kPlain;
  std::vector<int32_t> token_ids;  // prompt, then what was generated
  int64_t prompt_length = 0;
  int64_t max_length = 0;  // of token_ids
  int64_t slot = -1;       // place in the caches; -1: waiting
  int64_t num_cached = 0;  // rows in the target's cache
  // The drafter's context lags behind: features of committed rows wait until it drafts.
  int64_t num_context = 0;  // rows in the drafter's cache
  int64_t num_pending = 0;  // rows of features after those

  bool prefilling() const { return num_cached < prompt_length; }
  bool is_greedy() const { return options.temperature == 0; }
  bool is_auto() const { return method == Method::kTree && options.tree_budget == 0; }
};

}  // namespace kdt
