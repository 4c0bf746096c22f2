// The target: a DeepSeek-V3 decoder (MLA, sigmoid-routed experts), written once over the back end's
// ops.
#pragma once

#include <memory>
#include <vector>

#include "backend/backend.h"
#include "model/config.h"
#include "model/load_plan.h"
#include "model/rank_context.h"
#include "model/row_batch.h"

namespace kdt {

class TargetModel {
 public:
  // `max_rows`: most rows of a forward pass; `max_positions`: positions the rope table covers;
  // `tap_layers`: layers whose outputs a drafter wants, in its order. Throws Error when the source
  // breaks the contract of its config.json, std::invalid_argument when the model cannot be cut into
  // that many shards.
  TargetModel(const RankContext& ranks, const ModelConfig& config, const TensorSource& source,
              int64_t max_rows, int64_t max_positions, std::vector<int64_t> tap_layers);

  // The model has no weights until this, which refers to it, is loaded. To be called once.
  std::unique_ptr<LoadPlan> take_plan() { return std::move(plan_); }

  std::unique_ptr<KvCache> make_cache(int64_t num_blocks, int64_t block_size) const;

  // Runs all layers over the batch's rows and stores their cache rows. Leaves the normalised hidden
  // state in hidden() and the taps in features().
  void forward(const RowBatch& batch, KvCache& cache);
  Tensor hidden(int64_t num_rows) const { return hidden_.tensor.rows(0, num_rows); }
  // [num_rows, taps * hidden_size]: the residual stream after each tap layer, side by side.
  Tensor features(int64_t num_rows) const { return features_.tensor.rows(0, num_rows); }

  // token_ids [n] -> out [n, hidden_size], the same on all ranks
  void embed(const Tensor& token_ids, const Tensor& out);
  // x [n, hidden_size] -> logits [n, vocab_local()], of this rank's part of the vocabulary
  void lm_head(const Tensor& x, const Tensor& logits) { backend_.linear(x, *lm_head_, logits); }
  int64_t vocab_local() const { return ranks_.shard.count(config_.vocab_size); }
  int64_t vocab_begin() const { return ranks_.shard.begin(config_.vocab_size); }
  const ModelConfig& config() const { return config_; }

 private:
  struct Mlp {
    std::unique_ptr<LinearWeight> gate_up, down;
    int64_t intermediate_size = 0;
  };
  struct Layer {
    Buffer input_layernorm, post_attention_layernorm, q_a_layernorm, kv_a_layernorm;
    std::unique_ptr<LinearWeight> qkv_a;  // q_a (q_proj without q_lora), then kv_a
    std::unique_ptr<LinearWeight> q_b;    // null without q_lora
    std::unique_ptr<LinearWeight> w_uk, w_uv, o_proj;
    std::unique_ptr<Mlp> dense, shared;
    std::unique_ptr<LinearWeight> router;
    Buffer router_bias;
    std::unique_ptr<ExpertsWeight> experts;
  };

  void plan_layer(int64_t index);
  void plan_mlp(const std::string& name, Mlp& mlp);
  void attention(const Layer& layer, int64_t index, const RowBatch& batch, KvCache& cache);
  void run_mlp(const Mlp& mlp, const Tensor& x, const Tensor& out);
  void run_experts(const Layer& layer, const Tensor& x, const Tensor& out);

  const RankContext ranks_;
  Backend& backend_;
  ModelConfig config_;
  std::vector<int64_t> tap_layers_;
  std::unique_ptr<LoadPlan> plan_;
  float softmax_scale_ = 1;
  RopeTable rope_;
  Buffer rope_memory_, embed_tokens_, norm_;
  std::unique_ptr<LinearWeight> lm_head_;
  std::vector<Layer> layers_;
  // Activations, [max_rows, ...].
  Buffer residual_, hidden_, delta_, qkv_a_, q_a_, q_, query_, latent_, heads_, gate_up_,
      activated_, router_logits_, expert_ids_, expert_weights_, features_;
};

}  // namespace kdt
