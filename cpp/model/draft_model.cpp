#include "model/draft_model.h"

#include <algorithm>
#include <cmath>

#include "model/rope.h"

namespace kdt {

DraftModel::DraftModel(const RankContext& ranks, const DraftConfig& config,
                       const TensorSource& source, int64_t max_context_rows, int64_t max_sequences,
                       int64_t max_positions)
    : ranks_(ranks), backend_(ranks.backend), config_(config) {
  const DraftConfig& c = config_;
  check_shard(c, ranks.shard);
  Backend& backend = backend_;
  plan_ = std::make_unique<LoadPlan>(backend, source, draft_weight_specs(c), ranks.shard);
  const std::string& p = c.tensor_prefix;
  plan_->linear({p + "fc"}, &fc_);
  plan_->vector(p + "hidden_norm.weight", &hidden_norm_);
  plan_->vector(p + "norm.weight", &norm_);
  layers_.resize(c.num_hidden_layers);
  for (int64_t l = 0; l < c.num_hidden_layers; ++l) {
    const std::string name = p + "layers." + std::to_string(l) + ".";
    const std::string attention = name + "self_attn.";
    Layer& layer = layers_[l];
    plan_->vector(name + "input_layernorm.weight", &layer.input_layernorm);
    plan_->vector(name + "post_attention_layernorm.weight", &layer.post_attention_layernorm);
    plan_->vector(attention + "q_norm.weight", &layer.q_norm);
    plan_->vector(attention + "k_norm.weight", &layer.k_norm);
    plan_->linear({attention + "q_proj"}, &layer.q_proj);
    plan_->linear({attention + "k_proj", attention + "v_proj"}, &layer.kv_proj);
    plan_->linear({attention + "o_proj"}, &layer.o_proj);
    plan_->linear({name + "mlp.gate_proj", name + "mlp.up_proj"}, &layer.gate_up);
    plan_->linear({name + "mlp.down_proj"}, &layer.down);
  }
  const std::string attention = p + "layers.0.self_attn.";
  heads_ = plan_->spec(attention + "q_proj").slice_count(ranks.shard) / c.head_dim;
  kv_heads_ = plan_->spec(attention + "k_proj").slice_count(ranks.shard) / c.head_dim;
  feature_begin_ = plan_->spec(p + "fc").slice_begin(ranks.shard);
  feature_count_ = plan_->spec(p + "fc").slice_count(ranks.shard);
  const int64_t intermediate = ranks.shard.count(c.intermediate_size);

  const std::vector<float> table = rope_table(c.rope, c.head_dim, max_positions);
  rope_memory_ = backend.allocate(DType::kFloat32, {max_positions, c.head_dim});
  backend.upload(rope_memory_.tensor, table.data());
  rope_ = {.cos_sin = rope_memory_.tensor, .interleaved = false};

  const int64_t block_rows = max_sequences * c.block_size;
  const auto matrix = [&](int64_t rows, int64_t width) {
    return backend.allocate(DType::kFloat32, {rows, width});
  };
  if (ranks.shard.size > 1) features_ = matrix(max_context_rows, feature_count_);
  context_ = matrix(max_context_rows, c.hidden_size);
  context_normed_ = matrix(max_context_rows, c.hidden_size);
  kv_ = matrix(std::max(max_context_rows, block_rows), 2 * kv_heads_ * c.head_dim);
  residual_ = matrix(block_rows, c.hidden_size);
  x_ = matrix(block_rows, c.hidden_size);
  delta_ = matrix(block_rows, c.hidden_size);
  q_ = backend.allocate(DType::kFloat32, {block_rows, heads_, c.head_dim});
  attended_ = backend.allocate(DType::kFloat32, {block_rows, heads_, c.head_dim});
  gate_up_ = matrix(block_rows, 2 * intermediate);
  activated_ = matrix(block_rows, intermediate);

  chosen_ = matrix(block_rows, c.hidden_size);
}

std::unique_ptr<KvCache> DraftModel::make_cache(int64_t num_blocks, int64_t block_size) const {
  return backend_.make_gqa_cache(config_.num_hidden_layers, num_blocks, block_size, kv_heads_,
                                 config_.head_dim);
}

void DraftModel::extend_context(const RowBatch& batch, const Tensor& features, KvCache& cache) {
  const int64_t rows = batch.num_rows();
  const auto eps = static_cast<float>(config_.rms_norm_eps);
  const Tensor context = context_.tensor.rows(0, rows);
  const Tensor normed = context_normed_.tensor.rows(0, rows);
  const Tensor kv = kv_.tensor.rows(0, rows);
  // fc is cut by its input columns.
  Tensor mine = features;
  if (features_.memory) {
    mine = features_.tensor.rows(0, rows);
    backend_.copy_columns(features, feature_begin_, mine, 0, feature_count_);
  }
  backend_.linear(mine, *fc_, context);
  ranks_.all_reduce(context);
  backend_.rms_norm({.x = context, .weight = hidden_norm_.tensor, .out = normed, .eps = eps});
  for (int64_t l = 0; l < config_.num_hidden_layers; ++l) {
    // The context enters every layer as it is: no input norm, no residual.
    backend_.linear(normed, *layers_[l].kv_proj, kv);
    backend_.gqa_store({.kv = kv,
                        .k_norm = layers_[l].k_norm.tensor,
                        .eps = eps,
                        .rope = rope_,
                        .positions = batch.positions(),
                        .cache = &cache,
                        .layer = l,
                        .rows = batch.rows()});
  }
}

void DraftModel::add_block(RowBatch& batch, int64_t num_context,
                           const std::vector<int32_t>& block_table, int32_t root,
                           int64_t depth) const {
  KDT_CHECK(depth >= 1 && depth < config_.block_size, "draft: depth ", depth, " of a block of ",
            config_.block_size);
  std::vector<int32_t> block(config_.block_size, static_cast<int32_t>(config_.mask_token_id));
  block[0] = root;
  batch.begin_sequence(num_context, block_table);
  // Every row of a block but the first predicts a token.
  for (int64_t row = 1; row <= depth; ++row) batch.choose_row(batch.num_rows() + row);
  batch.add_chain(block.data(), config_.block_size, num_context);
}

void DraftModel::draft(const RowBatch& batch, TargetModel& target, KvCache& cache,
                       const Tensor& logits) {
  const DraftConfig& c = config_;
  const int64_t rows = batch.num_rows();
  const auto eps = static_cast<float>(c.rms_norm_eps);
  const Tensor residual = residual_.tensor.rows(0, rows);
  const Tensor x = x_.tensor.rows(0, rows);
  const Tensor kv = kv_.tensor.rows(0, rows);
  const Tensor q = q_.tensor.rows(0, rows);
  const Tensor attended = attended_.tensor.rows(0, rows);
  const Tensor delta = delta_.tensor.rows(0, rows);
  const Tensor gate_up = gate_up_.tensor.rows(0, rows);
  const Tensor activated = activated_.tensor.rows(0, rows);

  target.embed(batch.token_ids(), residual);
  backend_.rms_norm(
      {.x = residual, .weight = layers_[0].input_layernorm.tensor, .out = x, .eps = eps});
  for (int64_t l = 0; l < c.num_hidden_layers; ++l) {
    const Layer& layer = layers_[l];
    backend_.linear(x, *layer.q_proj, q);
    backend_.linear(x, *layer.kv_proj, kv);
    // The block's rows follow the context in the cache and are written over by the next round.
    backend_.gqa_store({.kv = kv,
                        .k_norm = layer.k_norm.tensor,
                        .eps = eps,
                        .rope = rope_,
                        .positions = batch.positions(),
                        .cache = &cache,
                        .layer = l,
                        .rows = batch.rows()});
    backend_.gqa_attention({.q = q,
                            .q_norm = layer.q_norm.tensor,
                            .eps = eps,
                            .rope = rope_,
                            .positions = batch.positions(),
                            .scale = 1.0f / std::sqrt(static_cast<float>(c.head_dim)),
                            .causal = c.layer_causal[l],
                            .window = c.layer_window[l],
                            .cache = &cache,
                            .layer = l,
                            .rows = batch.rows(),
                            .out = attended});
    backend_.linear(attended, *layer.o_proj, delta);
    ranks_.add_rms_norm(residual, delta, layer.post_attention_layernorm.tensor, eps, x);
    backend_.linear(x, *layer.gate_up, gate_up);
    backend_.silu_mul(gate_up, activated);
    backend_.linear(activated, *layer.down, delta);
    const Tensor& next_norm =
        l + 1 < c.num_hidden_layers ? layers_[l + 1].input_layernorm.tensor : norm_.tensor;
    ranks_.add_rms_norm(residual, delta, next_norm, eps, x);
  }
  const Tensor chosen = chosen_.tensor.rows(0, batch.num_chosen());
  backend_.gather_rows(x, batch.chosen_rows(), chosen);
  target.lm_head(chosen, logits);
}

}  // namespace kdt
