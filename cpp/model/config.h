// The models' numbers, read from config.json. Members carry the checkpoint's key names.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace kdt {

// Rotary embedding: plain when `factor` is 1, yarn otherwise.
struct RopeConfig {
  double rope_theta = 0.0;
  bool yarn = false;
  double factor = 1.0;
  double beta_fast = 32.0;
  double beta_slow = 1.0;
  double mscale = 1.0;
  double mscale_all_dim = 0.0;
  double attention_factor = 0.0;  // of the cosines and sines; 0: from mscale and mscale_all_dim
  bool truncate = true;           // the ends of yarn's ramp are whole numbers
  int64_t original_max_position_embeddings = 0;

  bool operator==(const RopeConfig&) const = default;
};

struct ModelConfig {
  std::string model_type;
  int64_t vocab_size = 0;
  int64_t hidden_size = 0;
  int64_t intermediate_size = 0;
  int64_t moe_intermediate_size = 0;
  int64_t num_hidden_layers = 0;
  int64_t num_nextn_predict_layers = 0;  // layers behind these, which are not used
  int64_t num_attention_heads = 0;
  int64_t q_lora_rank = 0;  // 0: the query is one product, `q_proj`
  int64_t kv_lora_rank = 0;
  int64_t qk_nope_head_dim = 0;
  int64_t qk_rope_head_dim = 0;
  int64_t v_head_dim = 0;
  int64_t n_routed_experts = 0;  // 0: every layer is dense
  int64_t n_shared_experts = 0;
  int64_t num_experts_per_tok = 0;
  int64_t n_group = 1;
  int64_t topk_group = 1;
  int64_t first_k_dense_replace = 0;
  int64_t moe_layer_freq = 1;
  bool norm_topk_prob = true;
  double routed_scaling_factor = 1.0;
  double rms_norm_eps = 1e-6;
  // Of q_a_layernorm and kv_a_layernorm; the rule is in config.cpp.
  double latent_rms_norm_eps = 1e-6;
  int64_t max_position_embeddings = 0;
  bool tie_word_embeddings = false;
  bool rope_interleave = true;
  RopeConfig rope;
  int64_t int4_group_size = 0;  // 0: no packed integers
  // Linears may come as F8_E4M3 `.weight` and F32 `.weight_scale_inv` [ceil(out/128),
  // ceil(in/128)].
  bool fp8 = false;
  std::vector<int64_t> eos_token_ids;
  int64_t bos_token_id = -1;
  std::string tensor_prefix;  // "model." or "language_model.model."
  std::string lm_head_name;   // "lm_head.weight" or "language_model.lm_head.weight"

  bool is_moe_layer(int64_t layer) const {
    return n_routed_experts > 0 && layer >= first_k_dense_replace && layer % moe_layer_freq == 0;
  }
};

// A DFlash drafter (Qwen3-style layers).
struct DraftConfig {
  int64_t vocab_size = 0;
  int64_t hidden_size = 0;
  int64_t intermediate_size = 0;
  int64_t num_hidden_layers = 0;
  int64_t num_attention_heads = 0;
  int64_t num_key_value_heads = 0;
  int64_t head_dim = 0;
  double rms_norm_eps = 1e-6;
  RopeConfig rope;
  int64_t max_position_embeddings = 0;  // 0: no limit given
  int64_t block_size = 0;               // the anchor and block_size - 1 drafted positions
  int64_t num_target_layers = 0;        // 0: not given
  std::vector<int64_t> target_layer_ids;
  int64_t mask_token_id = 0;
  std::string mask_token;             // its text, "": not given
  std::vector<bool> layer_causal;     // [num_hidden_layers] causal inside the block
  std::vector<int64_t> layer_window;  // [num_hidden_layers] sliding window in tokens, 0: none
  // "" or "model."; config.json does not tell, so the parser leaves it "".
  std::string tensor_prefix;
};

// Reads `folder`/config.json (and generation_config.json for the stop ids). Throws Error naming the
// file, the key and the value for anything missing, of the wrong type, out of range or not
// supported.
ModelConfig load_model_config(const std::string& folder);
// The two files one by one, for who can use the first without the second.
ModelConfig load_config_alone(const std::string& folder);
void add_generation_eos(const std::string& folder, ModelConfig& config);
DraftConfig load_draft_config(const std::string& folder);
// Throws Error naming the drafter's key (after `where`) that does not fit the target.
void check_draft_config(const DraftConfig& drafter, const ModelConfig& target,
                        const std::string& where);
// Whether `folder`/config.json is a drafter's. Throws Error when it is no JSON.
bool is_draft_config(const std::string& folder);

// The same from the text of config.json; `source` is the name put into messages.
ModelConfig parse_model_config(const std::string& text, const std::string& source);
DraftConfig parse_draft_config(const std::string& text, const std::string& source);
// The stop ids of a generation_config.json, which join those of config.json.
std::vector<int64_t> parse_generation_eos(const std::string& text, const std::string& source,
                                          int64_t vocab_size);

}  // namespace kdt
