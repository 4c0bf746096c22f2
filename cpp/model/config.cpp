#include "model/config.h"

#include <algorithm>
#include <filesystem>

#include "core/error.h"
#include "io/mmap_file.h"
#include "model/config_reader.h"
#include "model/fp8.h"

namespace fs = std::filesystem;

namespace kdt {
namespace {

constexpr int64_t kInt4GroupSize = 32;

// Adds what is not there yet.
void unite(std::vector<int64_t>& ids, const std::vector<int64_t>& more) {
  for (int64_t id : more) {
    if (std::find(ids.begin(), ids.end(), id) == ids.end()) ids.push_back(id);
  }
}

// float8 weights with a scale for each block of 128 by 128. Which modules are quantized shows in
// the tensors' names, here and below: lists of modules are not needed.
void check_fp8(const ConfigReader& quantization) {
  quantization.expect_only({"quant_method", "fmt", "weight_block_size", "activation_scheme",
                            "scale_fmt", "expert_dtype", "dequantize", "modules_to_not_convert",
                            "modules_to_convert", "ignored_layers"});
  quantization.expect_text("fmt", "e4m3");
  if (quantization.integers("weight_block_size", 0, INT64_MAX) !=
      std::vector<int64_t>(2, kFp8Block)) {
    quantization.fail("weight_block_size", "this engine supports [128, 128]");
  }
  // The activations are not quantized here; "static" would bring tensors with their scales.
  quantization.expect_text("activation_scheme", "dynamic");
  // "ue8m0": the scales are powers of two, in F32 all the same.
  if (const std::string scale = quantization.string("scale_fmt", "float");
      scale != "float" && scale != "ue8m0") {
    quantization.fail("scale_fmt", "this engine supports \"float\" and \"ue8m0\"");
  }
  quantization.expect_text("expert_dtype", "fp8");
}

// compressed-tensors' pack-quantized int4.
void check_int4(const ConfigReader& quantization) {
  if (!quantization.find("format")) quantization.fail("format", "want \"pack-quantized\"");
  quantization.expect_text("format", "pack-quantized");
  quantization.expect_text("quantization_status", "compressed");
  for (const char* key : {"kv_cache_scheme", "sparsity_config", "transform_config"})
    quantization.expect_none(key);
  const Json* groups = quantization.find("config_groups");
  const auto* members = groups == nullptr ? nullptr : groups->get_if<Json::Object>();
  if (members == nullptr || members->empty())
    quantization.fail("config_groups", "want an object with a group");
  const ConfigReader config_groups = quantization.child("config_groups");
  for (const auto& [name, value] : *members) {
    const ConfigReader group = config_groups.child(name);
    group.expect_text("format", "pack-quantized");
    group.expect_none("input_activations");
    group.expect_none("output_activations");
    const ConfigReader weights = group.child("weights");
    weights.integer("num_bits", 4, 4);
    weights.integer("group_size", kInt4GroupSize, kInt4GroupSize);
    for (const char* key : {"type", "strategy"}) {
      if (!weights.find(key)) weights.fail(key, "want a string");
    }
    weights.expect_text("type", "int");
    weights.expect_text("strategy", "group");
    if (!weights.boolean("symmetric"))
      weights.fail("symmetric", "this engine supports true (no zero points)");
    for (const char* key : {"actorder", "dynamic", "block_structure"}) weights.expect_none(key);
  }
}

void read_quantization(const ConfigReader& quantization, ModelConfig& c) {
  const std::string method = quantization.string("quant_method", "");
  if (method != "compressed-tensors" && method != "fp8") {
    quantization.fail("quant_method", "this engine supports \"compressed-tensors\" and \"fp8\"");
  }
  const bool fp8 = method == "fp8";
  if (fp8 ? c.int4_group_size != 0 : c.fp8)
    quantization.fail("quant_method", "text_config.quantization_config says otherwise");
  c.fp8 = fp8;
  c.int4_group_size = fp8 ? 0 : kInt4GroupSize;
  if (fp8) {
    check_fp8(quantization);
  } else {
    check_int4(quantization);
  }
}

void read_sizes(const ConfigReader& text, ModelConfig& c) {
  c.vocab_size = text.integer("vocab_size", 1, kMaxVocab);
  c.hidden_size = text.integer("hidden_size", 1, kMaxWidth);
  c.intermediate_size = text.integer("intermediate_size", 1, kMaxWidth);
  c.num_hidden_layers = text.integer("num_hidden_layers", 1, kMaxLayers);
  c.num_attention_heads = text.integer("num_attention_heads", 1, kMaxHeads);
  if (!text.contains("q_lora_rank")) text.fail("q_lora_rank", "want an integer, or null for none");
  c.q_lora_rank = text.integer("q_lora_rank", 1, kMaxWidth, 0);
  c.kv_lora_rank = text.integer("kv_lora_rank", 1, kMaxWidth);
  c.qk_nope_head_dim = text.integer("qk_nope_head_dim", 1, kMaxHeadDim);
  c.qk_rope_head_dim = text.integer("qk_rope_head_dim", 2, kMaxHeadDim);
  if (c.qk_rope_head_dim % 2 != 0) text.fail("qk_rope_head_dim", "want an even number");
  c.v_head_dim = text.integer("v_head_dim", 1, kMaxHeadDim);
  c.max_position_embeddings = text.integer("max_position_embeddings", 1, kMaxPositions);
}

void read_experts(const ConfigReader& text, ModelConfig& c) {
  c.n_routed_experts = text.integer("n_routed_experts", 0, kMaxExperts, 0);
  if (c.n_routed_experts == 0) {
    if (!text.contains("n_routed_experts"))
      text.fail("n_routed_experts", "want an integer, or 0 for none");
    return;
  }
  c.moe_intermediate_size = text.integer("moe_intermediate_size", 1, kMaxWidth);
  c.n_shared_experts = text.integer("n_shared_experts", 0, 256, 0);
  c.num_experts_per_tok = text.integer("num_experts_per_tok", 1, c.n_routed_experts);
  c.first_k_dense_replace = text.integer("first_k_dense_replace", 0, c.num_hidden_layers);
  c.moe_layer_freq = text.integer("moe_layer_freq", 1, kMaxLayers, 1);
  c.norm_topk_prob = text.boolean("norm_topk_prob");
  c.routed_scaling_factor = text.number("routed_scaling_factor", 1e-6, 1e6);
  text.expect_text("scoring_func", "sigmoid");
  text.expect_text("topk_method", "noaux_tc");
  c.n_group = text.integer("n_group", 1, c.n_routed_experts);
  c.topk_group = text.integer("topk_group", 1, c.n_group);
  if (c.n_routed_experts % c.n_group != 0) {
    text.fail("n_group", join("want a divisor of n_routed_experts ", c.n_routed_experts));
  }
  const int64_t group_size = c.n_routed_experts / c.n_group;
  // A group's score is the sum of its two best experts.
  if (c.n_group > 1 && group_size < 2) text.fail("n_group", "want at least two experts in a group");
  if (c.num_experts_per_tok > c.topk_group * group_size) {
    text.fail("num_experts_per_tok",
              join("topk_group ", c.topk_group, " leaves ", c.topk_group * group_size, " experts"));
  }
}

void read_norms(const ConfigReader& text, bool kimi, ModelConfig& c) {
  constexpr double kMinEps = 1e-12, kMaxEps = 1;
  c.rms_norm_eps = text.number("rms_norm_eps", kMinEps, kMaxEps);
  // The reference code of deepseek_v3 builds the two latent norms without the config's eps, so they
  // have its default; engines that serve the kimi dialects give them the config's.
  c.latent_rms_norm_eps =
      text.number("latent_rms_norm_eps", kMinEps, kMaxEps, kimi ? c.rms_norm_eps : 1e-6);
}

// Ids of stop tokens in the order of their first mention.
std::vector<int64_t> read_eos(const ConfigReader& reader, int64_t vocab_size) {
  return reader.integers("eos_token_id", 0, vocab_size - 1);
}

}  // namespace

ModelConfig parse_model_config(const std::string& json, const std::string& source) {
  const Json root = parse_json(json, source);
  const ConfigReader outer(source, root);
  const bool nested = outer.find("text_config") != nullptr;
  const ConfigReader text = nested ? outer.child("text_config") : outer;
  if (nested) {
    if (!outer.find("model_type"))
      outer.fail("model_type", "want \"kimi_k25\" around a text_config");
    outer.expect_text("model_type", "kimi_k25");
    for (const std::string& name : outer.strings("architectures")) {
      if (name != "KimiK25ForConditionalGeneration" && name != "Kimi_K25ForConditionalGeneration")
        outer.fail("architectures", "this engine supports \"KimiK25ForConditionalGeneration\"");
    }
  }
  ModelConfig c;
  c.model_type = text.string("model_type", "");
  if (c.model_type != "deepseek_v3" && c.model_type != "kimi_k2") {
    text.fail("model_type", "this engine supports \"deepseek_v3\" and \"kimi_k2\"");
  }
  for (const std::string& name : text.strings("architectures")) {
    if (name != "DeepseekV3ForCausalLM")
      text.fail("architectures", "this engine supports \"DeepseekV3ForCausalLM\"");
  }
  c.tensor_prefix = nested ? "language_model.model." : "model.";
  c.lm_head_name = nested ? "language_model.lm_head.weight" : "lm_head.weight";
  read_sizes(text, c);
  read_experts(text, c);
  // A kimi_k25 that was saved anew calls its text_config deepseek_v3.
  read_norms(text, nested || c.model_type == "kimi_k2", c);
  expect_plain_arithmetic(text);
  text.expect_none("use_qk_norm");
  text.expect_none("sliding_window");
  // Latent attention has one key a token, from which every head makes its own.
  if (text.integer("num_key_value_heads", 1, kMaxHeads, c.num_attention_heads) !=
      c.num_attention_heads) {
    text.fail("num_key_value_heads", join("want num_attention_heads, ", c.num_attention_heads));
  }
  c.num_nextn_predict_layers = text.integer("num_nextn_predict_layers", 0, kMaxLayers, 0);
  c.tie_word_embeddings =
      text.boolean("tie_word_embeddings", outer.boolean("tie_word_embeddings", false));
  c.rope_interleave = text.boolean("rope_interleave", true);
  c.rope = read_rope(text);

  for (const ConfigReader& reader : {text, outer}) {
    if (reader.find("quantization_config"))
      read_quantization(reader.child("quantization_config"), c);
  }
  if (c.int4_group_size > 0 && c.n_routed_experts > 0) {
    for (const auto& [key, size] : {std::pair{"hidden_size", c.hidden_size},
                                    {"moe_intermediate_size", c.moe_intermediate_size}}) {
      if (size % c.int4_group_size != 0)
        text.fail(key, join("want a multiple of the group_size ", c.int4_group_size));
    }
  }
  c.eos_token_ids = read_eos(text, c.vocab_size);
  unite(c.eos_token_ids, read_eos(outer, c.vocab_size));
  c.bos_token_id = text.integer("bos_token_id", 0, c.vocab_size - 1,
                                outer.integer("bos_token_id", 0, c.vocab_size - 1, -1));
  return c;
}

ModelConfig load_model_config(const std::string& folder) {
  ModelConfig config = load_config_alone(folder);
  add_generation_eos(folder, config);
  return config;
}

ModelConfig load_config_alone(const std::string& folder) {
  const std::string path = (fs::path(folder) / "config.json").string();
  return parse_model_config(read_text_file(path, kMaxConfigBytes), path);
}

void add_generation_eos(const std::string& folder, ModelConfig& config) {
  const std::string path = (fs::path(folder) / "generation_config.json").string();
  if (!has_entry(path)) return;
  unite(config.eos_token_ids,
        parse_generation_eos(read_text_file(path, kMaxConfigBytes), path, config.vocab_size));
}

std::vector<int64_t> parse_generation_eos(const std::string& json, const std::string& source,
                                          int64_t vocab_size) {
  const Json root = parse_json(json, source);
  return read_eos(ConfigReader(source, root), vocab_size);
}

}  // namespace kdt
