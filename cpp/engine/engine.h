// The engine: a loaded target with its drafter, and the requests it works on in rounds.
#pragma once

#include <algorithm>
#include <deque>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "backend/backend.h"
#include "engine/auto_budget.h"
#include "engine/checkpoints.h"
#include "engine/recorded_passes.h"
#include "engine/request.h"
#include "model/draft_model.h"
#include "model/row_batch.h"
#include "model/target_model.h"
#include "parallel/communicator.h"

namespace kdt {

struct EngineStats {
  int64_t target_forwards = 0, draft_forwards = 0, generated_tokens = 0, prefill_tokens = 0;
  double prefill_ms = 0, draft_ms = 0, build_ms = 0, verify_ms = 0, commit_ms = 0;
};

// One rank's engine: its back end and its part of the models. All ranks of a group make the same
// calls in the same order and decide alike, from values that are the same on all; what depends on a
// clock is rank 0's. Not for use by several threads at once.
class Engine {
 public:
  // `group` is null for one rank alone. Throws Error for files and std::invalid_argument for
  // options, naming the field and the value.
  Engine(const EngineOptions& options, Checkpoints& checkpoints, const std::string& device,
         int num_threads, RankGroup* group);

  // Returns the request's id. Throws std::invalid_argument for an empty prompt, one longer than
  // max_model_len, an id outside the vocabulary or a bad option; then nothing has changed.
  int64_t add_request(const std::vector<int64_t>& prompt_token_ids, const RequestOptions& options);
  // One round for every active request: a chunk of its prompt, or draft, build, verify, accept and
  // commit.
  std::vector<StepOutput> step();
  bool has_unfinished() const { return !waiting_.empty() || !active_.empty() || !ended_.empty(); }
  // Ends a request at once. False when there is none of that id.
  bool abort(int64_t request_id);

  // Logits [n, vocab_size] after each token. Other requests are not touched.
  std::vector<float> logits(const std::vector<int64_t>& token_ids);
  // Logits [m, vocab_size] of every slot of a tree behind `prefix`, verified in one pass. tokens,
  // parents [m].
  std::vector<float> tree_logits(const std::vector<int64_t>& prefix,
                                 const std::vector<int64_t>& tokens,
                                 const std::vector<int64_t>& parents);

  const ModelConfig& model_config() const { return config_; }
  const DraftConfig* draft_config() const { return draft_ ? &draft_->config() : nullptr; }
  BackendInfo backend_info() const { return backend_->info(); }
  // How sums over ranks are made, in words; "" for one rank.
  std::string communication() const { return communicator_ ? communicator_->describe() : ""; }
  int num_ranks() const { return shard_.size; }
  int64_t model_bytes() const { return model_bytes_; }
  const LoadReport& load_report() const { return load_report_; }
  int64_t kv_tokens_free() const {
    return static_cast<int64_t>(free_slots_.size()) * max_model_len_;
  }
  const EngineStats& stats() const { return stats_; }
  const CostModel& costs() const { return costs_; }
  int64_t max_model_len() const { return max_model_len_; }
  int64_t num_active() const { return static_cast<int64_t>(active_.size()); }
  int64_t num_waiting() const { return static_cast<int64_t>(waiting_.size()); }

 private:
  void start(const EngineOptions& options, Checkpoints& checkpoints, const std::string& device,
             int num_threads);
  // Throws Error naming a rank that was given something else than rank 0.
  void check_alike(const EngineOptions& options, const Checkpoints& checkpoints);
  void load(const EngineOptions& options, Checkpoints& checkpoints);
  Method checked_method(const RequestOptions& options) const;
  void check_token_ids(const char* name, const std::vector<int64_t>& token_ids) const;
  // Blocks of a slot's part of the caches; the last slot is for passes outside of any request.
  std::vector<int32_t> block_table(int64_t slot) const;
  int64_t spare_slot() const { return max_num_seqs_; }
  int64_t block_drafts() const { return draft_->config().block_size - 1; }

  void admit();
  void prefill(Request& request, StepOutput& output);
  // The round of requests that are past their prompt; as many at a time as fit one pass.
  void decode(const std::vector<Request*>& requests, std::vector<StepOutput*>& outputs);
  void draft_trees(const std::vector<Request*>& requests, std::vector<StepOutput*>& outputs);
  DraftTree build_tree(const Request& request, const Tensor& logits, int64_t max_depth);
  void verify(const std::vector<Request*>& requests, std::vector<StepOutput*>& outputs,
              std::vector<std::vector<int32_t>>& target_tokens);
  void accept_and_commit(Request& request, StepOutput& output,
                         const std::vector<int32_t>& target_tokens, int64_t first_row);
  // Appends tokens up to the first that stops the request.
  void commit_tokens(Request& request, const std::vector<int32_t>& tokens, StepOutput& output);
  int64_t draft_depth(const Request& request) const;
  // Moves rows of the last pass's features to the request's pending ones.
  void keep_features(Request& request, const std::vector<int32_t>& rows);
  void extend_context(Request& request);
  // Uploads draft_batch_ and runs the drafter over it, with logits [its chosen rows].
  // Returns what RecordedPasses::run does.
  bool draft();
  void measure_costs();
  // Rank 0's.
  double agreed(double ms);
  // The passes that are recorded.
  enum Pass : uint8_t { kForward, kVerify, kDraft };

  // Uploads batch_ and runs the target over it. Returns what RecordedPasses::run does.
  bool forward();
  // As forward(), and chooses each row's next token.
  bool forward_and_choose();
  // A request's rows of a pass, one for each slot of its tree, or one where that is empty.
  struct PassRows {
    const Request* request;
    const DraftTree* tree;
    int64_t begin;

    int64_t count() const { return std::max<int64_t>(1, tree->num_nodes()); }
    int64_t end() const { return begin + count(); }
  };
  // Likely tokens of some rows on the host, [rows, width], each row descending.
  struct Candidates {
    std::vector<float> logprobs;
    std::vector<int32_t> ids;
  };

  // Logits of the pass's rows [begin, begin + count), at most kLogitRows, until the next call.
  Tensor logits_of(int64_t begin, int64_t count);
  // The likeliest tokens after the pass's first `count` rows: chooses them on the back end, then
  // fetches them.
  void choose_tokens(int64_t count);
  std::vector<int32_t> chosen_tokens(int64_t count);
  // The halves of choose_tokens: rows from `row` on, and the end for all `count`.
  void choose_likeliest(const Tensor& logits, int64_t row, int64_t count);
  void gather_likeliest(int64_t count);
  // The target's token after each row of these requests, which lie one after another in the pass.
  // -1 where the logits are no numbers, and when sampling where the walk does not come.
  std::vector<std::vector<int32_t>> next_tokens(const std::vector<PassRows>& parts);
  std::vector<int32_t> drawn_tokens(const PassRows& part, const Candidates& candidates);
  // Appends the logits of the pass's rows [begin, begin + count).
  void append_logits(int64_t begin, int64_t count, std::vector<float>& out);
  // Log-probabilities and ids [rows, width], side by side in candidates_.
  std::pair<Tensor, Tensor> candidates(int64_t rows, int64_t width) const;
  // The most probable tokens of each row of logits.
  void choose_candidates(const Tensor& logits, double temperature, const Tensor& logprobs,
                         const Tensor& ids);
  // The same, fetched, at the end of `out`.
  void fetch_candidates(const Tensor& logits, double temperature, int64_t width, Candidates& out);
  // Those of drafted logits with the noise of the draws to come, sorted again.
  void choose_noisy_candidates(const Request& request, const Tensor& logits, const Tensor& logprobs,
                               const Tensor& ids);
  // Caches the tokens in the spare slot; their logits go to the end of `logits` unless it is null.
  void prefill_spare(const char* name, const std::vector<int64_t>& token_ids,
                     std::vector<float>* logits);

  std::unique_ptr<Backend> backend_;
  RankGroup* group_;
  std::unique_ptr<Communicator> communicator_;  // null: one rank
  Shard shard_;
  ModelConfig config_;
  int64_t max_model_len_ = 0, max_num_seqs_ = 0, chunk_size_ = 0, max_rows_ = 0,
          blocks_per_slot_ = 0, model_bytes_ = 0;
  std::unique_ptr<TargetModel> target_;
  std::unique_ptr<DraftModel> draft_;
  std::unique_ptr<KvCache> target_cache_, draft_cache_;
  std::unique_ptr<RowBatch> batch_, draft_batch_, context_batch_;
  Buffer logits_, token_out_, draft_logits_, row_indices_;
  Buffer part_topk_, gathered_;  // of this rank and of all, when there are several
  Buffer candidates_;            // of one request's drafts or of kLogitRows rows to sample
  // Of one request's tree at a time, at the largest budget. What goes together to or from the
  // device lies side by side in tree_ints_.
  Buffer tree_ints_, tree_logw_;
  std::vector<Buffer> pending_features_;  // one a slot
  std::vector<int64_t> free_slots_;
  std::deque<std::unique_ptr<Request>> waiting_;
  std::vector<std::unique_ptr<Request>> active_;
  std::vector<StepOutput> ended_;  // finished before they began, for the next step to tell
  int64_t next_id_ = 0;
  CostModel costs_;
  AutoBudget auto_budget_;
  EngineStats stats_;
  LoadReport load_report_;
  std::unique_ptr<RecordedPasses> passes_;  // after what they work with
};

}  // namespace kdt
