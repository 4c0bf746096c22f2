// The drafter: a DFlash block-diffusion model (Qwen3-style layers) that proposes a distribution for
// every position of a block at once. It borrows the target's embedding and head.
#pragma once

#include <memory>
#include <vector>

#include "backend/backend.h"
#include "model/config.h"
#include "model/load_plan.h"
#include "model/rank_context.h"
#include "model/row_batch.h"
#include "model/target_model.h"

namespace kdt {

class DraftModel {
 public:
  // `max_context_rows`: most rows of one extend_context; `max_sequences`: most blocks of one draft.
  // Throws as TargetModel does.
  DraftModel(const RankContext& ranks, const DraftConfig& config, const TensorSource& source,
             int64_t max_context_rows, int64_t max_sequences, int64_t max_positions);

  // As TargetModel's.
  std::unique_ptr<LoadPlan> take_plan() { return std::move(plan_); }

  std::unique_ptr<KvCache> make_cache(int64_t num_blocks, int64_t block_size) const;

  // Appends keys and values of committed tokens to the cache. features [n, taps * hidden_size];
  // `batch` holds the rows' positions and, as prefix_len, how many rows are cached before them.
  void extend_context(const RowBatch& batch, const Tensor& features, KvCache& cache);

  // Adds a sequence to the batch, a block behind `num_context` cached rows: block_size rows, the
  // root's token, then mask tokens. Chosen are its rows for the `depth` positions past the root;
  // depth is 1 to block_size - 1.
  void add_block(RowBatch& batch, int64_t num_context, const std::vector<int32_t>& block_table,
                 int32_t root, int64_t depth) const;
  // Runs blocks over the cached context. logits [chosen rows, target's vocab_local()].
  void draft(const RowBatch& batch, TargetModel& target, KvCache& cache, const Tensor& logits);

  const DraftConfig& config() const { return config_; }

 private:
  struct Layer {
    Buffer input_layernorm, post_attention_layernorm, q_norm, k_norm;
    std::unique_ptr<LinearWeight> q_proj, kv_proj, o_proj, gate_up, down;
  };

  const RankContext ranks_;
  Backend& backend_;
  DraftConfig config_;
  std::unique_ptr<LoadPlan> plan_;
  // This rank's.
  int64_t heads_ = 0, kv_heads_ = 0, feature_begin_ = 0, feature_count_ = 0;
  RopeTable rope_;
  Buffer rope_memory_, hidden_norm_, norm_;
  std::unique_ptr<LinearWeight> fc_;
  std::vector<Layer> layers_;
  // Activations, [rows, ...].
  Buffer features_, context_, context_normed_, kv_, residual_, x_, q_, attended_, delta_, gate_up_,
      activated_, chosen_;
};

}  // namespace kdt
