#include "model/target_model.h"

#include <algorithm>
#include <cmath>

#include "model/rope.h"

namespace kdt {

TargetModel::TargetModel(const RankContext& ranks, const ModelConfig& config,
                         const TensorSource& source, int64_t max_rows, int64_t max_positions,
                         std::vector<int64_t> tap_layers)
    : ranks_(ranks), backend_(ranks.backend), config_(config), tap_layers_(std::move(tap_layers)) {
  const ModelConfig& c = config_;
  check_shard(c, ranks.shard);
  Backend& backend = backend_;
  const int64_t head_dim = c.qk_nope_head_dim + c.qk_rope_head_dim;
  softmax_scale_ = static_cast<float>(std::pow(static_cast<double>(head_dim), -0.5) *
                                      yarn_softmax_factor(c.rope));

  plan_ = std::make_unique<LoadPlan>(backend, source, target_weight_specs(c, source), ranks.shard);
  const std::string& p = c.tensor_prefix;
  plan_->table(p + "embed_tokens", &embed_tokens_);
  plan_->vector(p + "norm.weight", &norm_);
  plan_->linear({c.tie_word_embeddings ? p + "embed_tokens"
                                       : c.lm_head_name.substr(0, c.lm_head_name.rfind('.'))},
                &lm_head_);
  layers_.resize(c.num_hidden_layers);
  for (int64_t l = 0; l < c.num_hidden_layers; ++l) plan_layer(l);

  const std::vector<float> table = rope_table(c.rope, c.qk_rope_head_dim, max_positions);
  rope_memory_ = backend.allocate(DType::kFloat32, {max_positions, c.qk_rope_head_dim});
  backend.upload(rope_memory_.tensor, table.data());
  rope_ = {.cos_sin = rope_memory_.tensor, .interleaved = c.rope_interleave};

  const auto rows = [&](int64_t width) {
    return backend.allocate(DType::kFloat32, {max_rows, width});
  };
  const int64_t heads = ranks.shard.count(c.num_attention_heads), rope_dim = c.qk_rope_head_dim;
  const int64_t widest_mlp = ranks.shard.count(
      std::max(c.intermediate_size,
               c.n_routed_experts > 0 ? c.moe_intermediate_size * c.n_shared_experts : int64_t{0}));
  residual_ = rows(c.hidden_size);
  hidden_ = rows(c.hidden_size);
  delta_ = rows(c.hidden_size);
  qkv_a_ = rows((c.q_lora_rank > 0 ? c.q_lora_rank : heads * head_dim) + c.kv_lora_rank + rope_dim);
  q_a_ = rows(std::max<int64_t>(c.q_lora_rank, 1));
  q_ = backend.allocate(DType::kFloat32, {max_rows, heads, head_dim});
  query_ = backend.allocate(DType::kFloat32, {max_rows, heads, c.kv_lora_rank + rope_dim});
  latent_ = backend.allocate(DType::kFloat32, {max_rows, heads, c.kv_lora_rank});
  heads_ = backend.allocate(DType::kFloat32, {max_rows, heads, c.v_head_dim});
  // Flat, because each MLP takes a view of its own width.
  gate_up_ = backend.allocate(DType::kFloat32, {max_rows * 2 * widest_mlp});
  activated_ = backend.allocate(DType::kFloat32, {max_rows * widest_mlp});
  if (c.n_routed_experts > 0) {
    router_logits_ = rows(c.n_routed_experts);
    expert_weights_ = rows(c.num_experts_per_tok);
    expert_ids_ = backend.allocate(DType::kInt32, {max_rows, c.num_experts_per_tok});
  }
  features_ = rows(std::max<int64_t>(1, static_cast<int64_t>(tap_layers_.size()) * c.hidden_size));
}

void TargetModel::plan_mlp(const std::string& name, Mlp& mlp) {
  plan_->linear({name + ".gate_proj", name + ".up_proj"}, &mlp.gate_up);
  plan_->linear({name + ".down_proj"}, &mlp.down);
  mlp.intermediate_size = plan_->spec(name + ".gate_proj").local_out(ranks_.shard);
}

void TargetModel::plan_layer(int64_t index) {
  const ModelConfig& c = config_;
  const std::string name = c.tensor_prefix + "layers." + std::to_string(index) + ".";
  const std::string attention = name + "self_attn.";
  Layer& layer = layers_[index];
  plan_->vector(name + "input_layernorm.weight", &layer.input_layernorm);
  plan_->vector(name + "post_attention_layernorm.weight", &layer.post_attention_layernorm);
  plan_->vector(attention + "kv_a_layernorm.weight", &layer.kv_a_layernorm);
  if (c.q_lora_rank > 0) {
    plan_->vector(attention + "q_a_layernorm.weight", &layer.q_a_layernorm);
    plan_->linear({attention + "q_a_proj", attention + "kv_a_proj_with_mqa"}, &layer.qkv_a);
    plan_->linear({attention + "q_b_proj"}, &layer.q_b);
  } else {
    plan_->linear({attention + "q_proj", attention + "kv_a_proj_with_mqa"}, &layer.qkv_a);
  }
  plan_->linear({attention + "o_proj"}, &layer.o_proj);
  plan_->kv_b(attention + "kv_b_proj", c.qk_nope_head_dim, c.v_head_dim, &layer.w_uk, &layer.w_uv);

  const std::string mlp = name + "mlp";
  if (!c.is_moe_layer(index)) {
    layer.dense = std::make_unique<Mlp>();
    plan_mlp(mlp, *layer.dense);
    return;
  }
  plan_->linear({mlp + ".gate"}, &layer.router);
  plan_->vector(mlp + ".gate.e_score_correction_bias", &layer.router_bias);
  plan_->experts(mlp + ".experts", c.n_routed_experts, &layer.experts);
  if (c.n_shared_experts > 0) {
    layer.shared = std::make_unique<Mlp>();
    plan_mlp(mlp + ".shared_experts", *layer.shared);
  }
}

std::unique_ptr<KvCache> TargetModel::make_cache(int64_t num_blocks, int64_t block_size) const {
  return backend_.make_mla_cache(config_.num_hidden_layers, num_blocks, block_size,
                                 config_.kv_lora_rank, config_.qk_rope_head_dim);
}

// Leaves the sublayer's output in delta_.
void TargetModel::attention(const Layer& layer, int64_t index, const RowBatch& batch,
                            KvCache& cache) {
  const int64_t rows = batch.num_rows();
  const auto latent_eps = static_cast<float>(config_.latent_rms_norm_eps);
  const Tensor qkv_a = qkv_a_.tensor.rows(0, rows);
  const Tensor q = q_.tensor.rows(0, rows);
  const Tensor query = query_.tensor.rows(0, rows);
  const Tensor latent = latent_.tensor.rows(0, rows);
  const Tensor heads = heads_.tensor.rows(0, rows);
  const int64_t kv_column = qkv_a.dim(1) - config_.kv_lora_rank - config_.qk_rope_head_dim;

  backend_.linear(hidden(rows), *layer.qkv_a, qkv_a);
  backend_.mla_store({.kv = qkv_a,
                      .column = kv_column,
                      .norm_weight = layer.kv_a_layernorm.tensor,
                      .eps = latent_eps,
                      .rope = rope_,
                      .positions = batch.positions(),
                      .cache = &cache,
                      .layer = index,
                      .rows = batch.rows()});
  if (layer.q_b) {
    const Tensor q_a = q_a_.tensor.rows(0, rows);
    backend_.rms_norm(
        {.x = qkv_a, .weight = layer.q_a_layernorm.tensor, .out = q_a, .eps = latent_eps});
    backend_.linear(q_a, *layer.q_b, q);
  } else {
    backend_.copy_columns(qkv_a, 0, q.view({rows, kv_column}), 0, kv_column);
  }
  backend_.mla_query({.q = q,
                      .w_uk = layer.w_uk.get(),
                      .rope = rope_,
                      .positions = batch.positions(),
                      .scale = softmax_scale_,
                      .out = query});
  backend_.mla_attention({.query = query,
                          .cache = &cache,
                          .layer = index,
                          .rows = batch.rows(),
                          .positions = batch.positions(),
                          .out = latent});
  backend_.head_linear(latent, *layer.w_uv, heads);
  backend_.linear(heads, *layer.o_proj, delta_.tensor.rows(0, rows));
}

void TargetModel::run_mlp(const Mlp& mlp, const Tensor& x, const Tensor& out) {
  const int64_t rows = x.dim(0), width = mlp.intermediate_size;
  const Tensor gate_up = gate_up_.tensor.rows(0, rows * 2 * width).view({rows, 2 * width});
  const Tensor activated = activated_.tensor.rows(0, rows * width).view({rows, width});
  backend_.linear(x, *mlp.gate_up, gate_up);
  backend_.silu_mul(gate_up, activated);
  backend_.linear(activated, *mlp.down, out);
}

void TargetModel::run_experts(const Layer& layer, const Tensor& x, const Tensor& out) {
  const int64_t rows = x.dim(0);
  const Tensor logits = router_logits_.tensor.rows(0, rows);
  const Tensor ids = expert_ids_.tensor.rows(0, rows);
  const Tensor weights = expert_weights_.tensor.rows(0, rows);
  backend_.linear(x, *layer.router, logits);
  backend_.moe_route({.logits = logits,
                      .bias = layer.router_bias.tensor,
                      .n_group = config_.n_group,
                      .topk_group = config_.topk_group,
                      .norm_topk_prob = config_.norm_topk_prob,
                      .routed_scaling_factor = static_cast<float>(config_.routed_scaling_factor),
                      .ids = ids,
                      .weights = weights});
  if (layer.shared) {
    run_mlp(*layer.shared, x, out);
  } else {
    backend_.fill_zero(out);
  }
  const Shard& shard = ranks_.shard;
  backend_.moe_experts(
      {.x = x,
       .ids = ids,
       .weights = weights,
       .experts = layer.experts.get(),
       .out = out,
       .first_expert = shard.expert_parallel ? shard.begin(config_.n_routed_experts) : 0});
}

void TargetModel::embed(const Tensor& token_ids, const Tensor& out) {
  backend_.embed({.table = embed_tokens_.tensor,
                  .token_ids = token_ids,
                  .out = out,
                  .first_id = vocab_begin(),
                  .vocab_size = config_.vocab_size});
  // All ranks but one have zeros, so the sum is exact.
  ranks_.all_reduce(out);
}

void TargetModel::forward(const RowBatch& batch, KvCache& cache) {
  const int64_t rows = batch.num_rows();
  const auto eps = static_cast<float>(config_.rms_norm_eps);
  const Tensor residual = residual_.tensor.rows(0, rows);
  const Tensor x = hidden(rows);
  const Tensor delta = delta_.tensor.rows(0, rows);
  embed(batch.token_ids(), residual);
  backend_.rms_norm(
      {.x = residual, .weight = layers_[0].input_layernorm.tensor, .out = x, .eps = eps});
  for (int64_t l = 0; l < config_.num_hidden_layers; ++l) {
    const Layer& layer = layers_[l];
    attention(layer, l, batch, cache);
    ranks_.add_rms_norm(residual, delta, layer.post_attention_layernorm.tensor, eps, x);
    layer.dense ? run_mlp(*layer.dense, x, delta) : run_experts(layer, x, delta);
    // The norm that follows is the next layer's, or the last.
    const Tensor& next_norm =
        l + 1 < config_.num_hidden_layers ? layers_[l + 1].input_layernorm.tensor : norm_.tensor;
    ranks_.add_rms_norm(residual, delta, next_norm, eps, x);
    for (size_t tap = 0; tap < tap_layers_.size(); ++tap) {
      if (tap_layers_[tap] == l) {
        backend_.copy_columns(residual, 0, features(rows),
                              static_cast<int64_t>(tap) * config_.hidden_size, config_.hidden_size);
      }
    }
  }
}

}  // namespace kdt
