#include "model/draft_model.h"

#include <algorithm>
#include <cmath>

#include "model/rope.h"

namespace kdt {

DraftModel::DraftModel(Backend& backend, const DraftConfig& config, const SafetensorsFolder& folder,
                       int64_t max_context_rows, int64_t max_sequences, int64_t max_positions,
                       const LoadProgress& progress)
    : backend_(backend), config_(config) {
  const DraftConfig& c = config_;
  WeightReader reader(folder, draft_weight_specs(c), backend, progress);
  const std::vector<float> table = rope_table(c.rope, c.head_dim, max_positions);
  rope_memory_ = backend.allocate(DType::kFloat32, {max_positions, c.head_dim});
  backend.upload(rope_memory_.tensor, table.data());
  rope_ = {.cos_sin = rope_memory_.tensor, .interleaved = false};

  const std::string& p = c.tensor_prefix;
  fc_ = reader.linear({p + "fc"});
  hidden_norm_ = reader.vector(p + "hidden_norm.weight");
  norm_ = reader.vector(p + "norm.weight");
  for (int64_t l = 0; l < c.num_hidden_layers; ++l) {
    const std::string name = p + "layers." + std::to_string(l) + ".";
    const std::string attention = name + "self_attn.";
    Layer layer;
    layer.input_layernorm = reader.vector(name + "input_layernorm.weight");
    layer.post_attention_layernorm = reader.vector(name + "post_attention_layernorm.weight");
    layer.q_norm = reader.vector(attention + "q_norm.weight");
    layer.k_norm = reader.vector(attention + "k_norm.weight");
    layer.q_proj = reader.linear({attention + "q_proj"});
    layer.kv_proj = reader.linear({attention + "k_proj", attention + "v_proj"});
    layer.o_proj = reader.linear({attention + "o_proj"});
    layer.gate_up = reader.linear({name + "mlp.gate_proj", name + "mlp.up_proj"});
    layer.down = reader.linear({name + "mlp.down_proj"});
    layers_.push_back(std::move(layer));
  }

  const int64_t block_rows = max_sequences * c.block_size;
  const auto matrix = [&](int64_t rows, int64_t width) {
    return backend.allocate(DType::kFloat32, {rows, width});
  };
  context_ = matrix(max_context_rows, c.hidden_size);
  context_normed_ = matrix(max_context_rows, c.hidden_size);
  kv_ = matrix(std::max(max_context_rows, block_rows), 2 * c.num_key_value_heads * c.head_dim);
  residual_ = matrix(block_rows, c.hidden_size);
  x_ = matrix(block_rows, c.hidden_size);
  delta_ = matrix(block_rows, c.hidden_size);
  q_ = backend.allocate(DType::kFloat32, {block_rows, c.num_attention_heads, c.head_dim});
  attended_ = backend.allocate(DType::kFloat32, {block_rows, c.num_attention_heads, c.head_dim});
  gate_up_ = matrix(block_rows, 2 * c.intermediate_size);
  activated_ = matrix(block_rows, c.intermediate_size);

  drafted_rows_ = backend.allocate(DType::kInt32, {block_rows});
  drafted_ = matrix(block_rows, c.hidden_size);
}

std::unique_ptr<KvCache> DraftModel::make_cache(int64_t num_blocks, int64_t block_size) const {
  return backend_.make_gqa_cache(config_.num_hidden_layers, num_blocks, block_size,
                                 config_.num_key_value_heads, config_.head_dim);
}

void DraftModel::extend_context(const RowBatch& batch, const Tensor& features, KvCache& cache) {
  const int64_t rows = batch.num_rows();
  const auto eps = static_cast<float>(config_.rms_norm_eps);
  const Tensor context = context_.tensor.rows(0, rows);
  const Tensor normed = context_normed_.tensor.rows(0, rows);
  const Tensor kv = kv_.tensor.rows(0, rows);
  backend_.linear(features, *fc_, context);
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

void DraftModel::draft(const RowBatch& batch, int64_t depth, TargetModel& target, KvCache& cache,
                       const Tensor& logits) {
  const DraftConfig& c = config_;
  KDT_CHECK(depth >= 1 && depth < c.block_size, "draft: depth ", depth, " of a block of ",
            c.block_size);
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

  backend_.embed(target.embed_tokens(), batch.token_ids(), residual);
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
    backend_.add_rms_norm(residual, delta, layer.post_attention_layernorm.tensor, eps, x);
    backend_.linear(x, *layer.gate_up, gate_up);
    backend_.silu_mul(gate_up, activated);
    backend_.linear(activated, *layer.down, delta);
    const Tensor& next_norm =
        l + 1 < c.num_hidden_layers ? layers_[l + 1].input_layernorm.tensor : norm_.tensor;
    backend_.add_rms_norm(residual, delta, next_norm, eps, x);
  }
  // Every row of a block but the first predicts a token.
  std::vector<int32_t> drafted;
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t position = row % c.block_size;
    if (position >= 1 && position <= depth) drafted.push_back(static_cast<int32_t>(row));
  }
  const auto count = static_cast<int64_t>(drafted.size());
  const Tensor indices = drafted_rows_.tensor.rows(0, count);
  const Tensor hidden = drafted_.tensor.rows(0, count);
  backend_.upload(indices, drafted.data());
  backend_.gather_rows(x, indices, hidden);
  target.lm_head(hidden, logits);
}

}  // namespace kdt
