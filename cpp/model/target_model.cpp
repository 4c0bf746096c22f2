#include "model/target_model.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "model/rope.h"

namespace kdt {
namespace {

HostMatrix host_f32(const std::vector<float>& values, int64_t out, int64_t in, int64_t offset = 0) {
  HostMatrix matrix;
  matrix.data = reinterpret_cast<const uint8_t*>(values.data() + offset);
  matrix.dtype = DType::kFloat32;
  matrix.out_features = out;
  matrix.in_features = in;
  return matrix;
}

// A bf16 checkpoint's values are exact in bf16, so they go to the back end as such.
std::vector<uint16_t> as_bf16(const std::vector<float>& values) {
  std::vector<uint16_t> bits(values.size());
  for (size_t i = 0; i < values.size(); ++i) bits[i] = float_to_bf16(values[i]);
  return bits;
}

}  // namespace

TargetModel::TargetModel(Backend& backend, const ModelConfig& config,
                         const SafetensorsFolder& folder, int64_t max_rows, int64_t max_positions,
                         std::vector<int64_t> tap_layers, const LoadProgress& progress)
    : backend_(backend), config_(config), tap_layers_(std::move(tap_layers)) {
  const ModelConfig& c = config_;
  const int64_t head_dim = c.qk_nope_head_dim + c.qk_rope_head_dim;
  softmax_scale_ = static_cast<float>(std::pow(static_cast<double>(head_dim), -0.5) *
                                      yarn_softmax_factor(c.rope));
  WeightReader reader(folder, target_weight_specs(c, folder), backend, progress);

  const std::vector<float> table = rope_table(c.rope, c.qk_rope_head_dim, max_positions);
  rope_memory_ = backend.allocate(DType::kFloat32, {max_positions, c.qk_rope_head_dim});
  backend.upload(rope_memory_.tensor, table.data());
  rope_ = {.cos_sin = rope_memory_.tensor, .interleaved = c.rope_interleave};

  const std::string& p = c.tensor_prefix;
  embed_tokens_ = reader.table(p + "embed_tokens");
  norm_ = reader.vector(p + "norm.weight");
  lm_head_ =
      reader.linear({c.tie_word_embeddings ? p + "embed_tokens"
                                           : c.lm_head_name.substr(0, c.lm_head_name.rfind('.'))});
  layers_.resize(c.num_hidden_layers);
  for (int64_t l = 0; l < c.num_hidden_layers; ++l) load_layer(reader, l);

  const auto rows = [&](int64_t width) {
    return backend.allocate(DType::kFloat32, {max_rows, width});
  };
  const int64_t heads = c.num_attention_heads, rope_dim = c.qk_rope_head_dim;
  const int64_t widest_mlp =
      std::max(c.intermediate_size,
               c.n_routed_experts > 0 ? c.moe_intermediate_size * c.n_shared_experts : int64_t{0});
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

std::unique_ptr<TargetModel::Mlp> TargetModel::load_mlp(WeightReader& reader,
                                                        const std::string& name,
                                                        int64_t intermediate_size) {
  auto mlp = std::make_unique<Mlp>();
  mlp->gate_up = reader.linear({name + ".gate_proj", name + ".up_proj"});
  mlp->down = reader.linear({name + ".down_proj"});
  mlp->intermediate_size = intermediate_size;
  return mlp;
}

void TargetModel::load_layer(WeightReader& reader, int64_t index) {
  const ModelConfig& c = config_;
  const std::string name = c.tensor_prefix + "layers." + std::to_string(index) + ".";
  const std::string attention = name + "self_attn.";
  Layer& layer = layers_[index];
  layer.input_layernorm = reader.vector(name + "input_layernorm.weight");
  layer.post_attention_layernorm = reader.vector(name + "post_attention_layernorm.weight");
  layer.kv_a_layernorm = reader.vector(attention + "kv_a_layernorm.weight");
  if (c.q_lora_rank > 0) {
    layer.q_a_layernorm = reader.vector(attention + "q_a_layernorm.weight");
    layer.qkv_a = reader.linear({attention + "q_a_proj", attention + "kv_a_proj_with_mqa"});
    layer.q_b = reader.linear({attention + "q_b_proj"});
  } else {
    layer.qkv_a = reader.linear({attention + "q_proj", attention + "kv_a_proj_with_mqa"});
  }
  layer.o_proj = reader.linear({attention + "o_proj"});

  // kv_b holds, head by head, W_UK [nope, rank] and W_UV [v, rank]. Absorbed attention applies
  // W_UK's transpose to the query and W_UV to the weighted latent (DeepSeek-V2, section 2.1).
  const DType dtype = reader.dtype(attention + "kv_b_proj");
  const std::vector<float> values = reader.values(attention + "kv_b_proj");
  const int64_t nope = c.qk_nope_head_dim, v = c.v_head_dim, rank = c.kv_lora_rank,
                heads = c.num_attention_heads;
  std::vector<float> w_uk(heads * rank * nope), w_uv(heads * v * rank);
  for (int64_t h = 0; h < heads; ++h) {
    const float* head = values.data() + h * (nope + v) * rank;
    for (int64_t i = 0; i < nope; ++i)
      for (int64_t r = 0; r < rank; ++r) w_uk[(h * rank + r) * nope + i] = head[i * rank + r];
    std::memcpy(w_uv.data() + h * v * rank, head + nope * rank, v * rank * sizeof(float));
  }
  const auto prepare_heads = [&](const std::vector<float>& all, int64_t out, int64_t in) {
    const std::vector<uint16_t> bits =
        dtype == DType::kBFloat16 ? as_bf16(all) : std::vector<uint16_t>();
    std::vector<HostMatrix> matrices;
    for (int64_t h = 0; h < heads; ++h) {
      HostMatrix matrix = host_f32(all, out, in, h * out * in);
      if (!bits.empty()) {
        matrix.dtype = DType::kBFloat16;
        matrix.data = reinterpret_cast<const uint8_t*>(bits.data() + h * out * in);
      }
      matrices.push_back(matrix);
    }
    return backend_.prepare_linear(matrices);
  };
  layer.w_uk = prepare_heads(w_uk, rank, nope);
  layer.w_uv = prepare_heads(w_uv, v, rank);

  const std::string mlp = name + "mlp";
  if (!c.is_moe_layer(index)) {
    layer.dense = load_mlp(reader, mlp, c.intermediate_size);
    return;
  }
  layer.router = reader.linear({mlp + ".gate"});
  layer.router_bias = reader.vector(mlp + ".gate.e_score_correction_bias");
  std::vector<HostExpert> experts;
  for (int64_t e = 0; e < c.n_routed_experts; ++e) {
    const std::string expert = mlp + ".experts." + std::to_string(e);
    experts.push_back({.gate = reader.matrix(expert + ".gate_proj"),
                       .up = reader.matrix(expert + ".up_proj"),
                       .down = reader.matrix(expert + ".down_proj")});
  }
  layer.experts = backend_.prepare_experts(experts);
  reader.release();
  if (c.n_shared_experts > 0) {
    layer.shared =
        load_mlp(reader, mlp + ".shared_experts", c.moe_intermediate_size * c.n_shared_experts);
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
  backend_.moe_experts(
      {.x = x, .ids = ids, .weights = weights, .experts = layer.experts.get(), .out = out});
}

void TargetModel::forward(const RowBatch& batch, KvCache& cache) {
  const int64_t rows = batch.num_rows();
  const auto eps = static_cast<float>(config_.rms_norm_eps);
  const Tensor residual = residual_.tensor.rows(0, rows);
  const Tensor x = hidden(rows);
  const Tensor delta = delta_.tensor.rows(0, rows);
  backend_.embed(embed_tokens_.tensor, batch.token_ids(), residual);
  backend_.rms_norm(
      {.x = residual, .weight = layers_[0].input_layernorm.tensor, .out = x, .eps = eps});
  for (int64_t l = 0; l < config_.num_hidden_layers; ++l) {
    const Layer& layer = layers_[l];
    attention(layer, l, batch, cache);
    backend_.add_rms_norm(residual, delta, layer.post_attention_layernorm.tensor, eps, x);
    layer.dense ? run_mlp(*layer.dense, x, delta) : run_experts(layer, x, delta);
    // The norm that follows is the next layer's, or the last.
    const Tensor& next_norm =
        l + 1 < config_.num_hidden_layers ? layers_[l + 1].input_layernorm.tensor : norm_.tensor;
    backend_.add_rms_norm(residual, delta, next_norm, eps, x);
    for (size_t tap = 0; tap < tap_layers_.size(); ++tap) {
      if (tap_layers_[tap] == l) {
        backend_.copy_columns(residual, 0, features(rows),
                              static_cast<int64_t>(tap) * config_.hidden_size, config_.hidden_size);
      }
    }
  }
}

}  // namespace kdt
