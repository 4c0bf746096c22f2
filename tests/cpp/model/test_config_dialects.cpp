// config.json as each version of the models writes it, every number of it, and yarn's frequencies
// against those of transformers 5.24.
#include <algorithm>
#include <cmath>

#include "check.h"
#include "model/config.h"
#include "model/rope.h"

using kdt::ModelConfig;
using kdt::parse_model_config;
using kdt::RopeConfig;

namespace {

// What every version of Kimi K2 says, keys without a meaning here included.
const std::string kKimi = R"(
  "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
  "bos_token_id": 163584, "pad_token_id": 163839, "first_k_dense_replace": 1, "hidden_act": "silu",
  "hidden_size": 7168, "initializer_range": 0.02, "intermediate_size": 18432, "kv_lora_rank": 512,
  "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 1, "n_routed_experts": 384,
  "n_shared_experts": 1, "norm_topk_prob": true, "num_attention_heads": 64,
  "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 64,
  "num_nextn_predict_layers": 0, "pretraining_tp": 1, "q_lora_rank": 1536,
  "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "routed_scaling_factor": 2.827,
  "scoring_func": "sigmoid", "tie_word_embeddings": false, "topk_group": 1,
  "topk_method": "noaux_tc", "use_cache": true, "v_head_dim": 128, "vocab_size": 163840)";
const std::string kRawKeys = R"(,
  "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}, "aux_loss_alpha": 0.001,
  "ep_size": 1, "seq_aux": true, "torch_dtype": "bfloat16", "model_type": "kimi_k2")";
const std::string kFp8 = R"("quantization_config": {"activation_scheme": "dynamic", "fmt": "e4m3",
  "quant_method": "fp8", "weight_block_size": [128, 128]})";

std::string int4(const std::string& ignore) {
  return R"("quantization_config": {"quant_method": "compressed-tensors",
    "format": "pack-quantized", "quantization_status": "compressed", "kv_cache_scheme": null,
    "config_groups": {"group_0": {"targets": ["Linear"], "input_activations": null,
      "output_activations": null, "weights": {"num_bits": 4, "type": "int", "symmetric": true,
        "strategy": "group", "group_size": 32, "dynamic": false, "actorder": null,
        "observer": "minmax", "observer_kwargs": {}, "block_structure": null}}},
    "ignore": [)" +
         ignore + "]}";
}
const std::string kIgnore = R"("re:.*self_attn.*", "re:.*shared_experts.*",
  "re:.*mlp\\.(gate|up|gate_up|down)_proj.*")";

std::string rope_scaling(const std::string& factor, const std::string& beta_fast) {
  return R"("rope_theta": 50000.0, "rope_scaling": {"type": "yarn", "beta_slow": 1.0,
    "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096,
    "factor": )" +
         factor + ", \"beta_fast\": " + beta_fast + "}";
}
const std::string kRopeParameters = R"("rope_parameters": {"beta_fast": 32.0, "beta_slow": 1.0,
  "factor": 64.0, "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096,
  "rope_theta": 50000.0, "rope_type": "yarn", "type": "yarn"})";

const std::string kRest =
    R"("max_position_embeddings": 262144, "rms_norm_eps": 1e-05, "eos_token_id": 163586)";

std::string object(std::initializer_list<std::string> parts) {
  std::string text;
  for (const std::string& part : parts) text += (text.empty() ? "{" : ", ") + part;
  return text + "}";
}

const std::string kInstruct =
    object({kKimi + kRawKeys, rope_scaling("32.0", "1.0"), kFp8,
            R"("max_position_embeddings": 131072, "rms_norm_eps": 1e-06, "eos_token_id": 163585)"});
const std::string kThinking =
    object({kKimi + kRawKeys, kRest, rope_scaling("64.0", "1.0"), int4("\"lm_head\", " + kIgnore)});

const std::string kOuterKeys = R"("architectures": ["KimiK25ForConditionalGeneration"],
  "model_type": "kimi_k25", "bos_token_id": 163584, "pad_token_id": 163839, "dtype": "bfloat16",
  "ignore_index": -100, "media_placeholder_token_id": 163605, "tie_word_embeddings": false,
  "use_unified_vision_chunk": true, "video_placeholder": "<|kimi_k25_video_placeholder|>",
  "vision_config": {"vt_hidden_size": 1152, "vt_num_hidden_layers": 27, "patch_size": 14,
                    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "axial"}})";
// As transformers 5 saves it: another model_type inside, rope_parameters, sizes that it derives.
const std::string kK25 =
    object({kOuterKeys,
            R"("eos_token_id": 163585, "transformers_version": "5.7.0", "text_config": )" +
                object({kKimi, kRopeParameters, int4("\"lm_head\", " + kIgnore),
                        R"("model_type": "deepseek_v3", "max_position_embeddings": 262144,
      "rms_norm_eps": 1e-05, "eos_token_id": 163585, "head_dim": 64, "qk_head_dim": 192,
      "rope_interleave": true, "output_router_logits": false)"}),
            int4("\"lm_head\", " + kIgnore)});
const std::string kK26 =
    object({kOuterKeys,
            R"("eos_token_id": 163586, "text_config": )" +
                object({kKimi + kRawKeys, kRest, rope_scaling("64.0", "32.0"),
                        int4(kIgnore +
                             R"(, "re:.*lm_head.*", "re:vision_tower.*", "re:mm_projector.*")")})});

const std::string kDeepseek = object({R"("architectures": ["DeepseekV3ForCausalLM"],
  "attention_bias": false, "attention_dropout": 0.0, "bos_token_id": 0, "eos_token_id": 1,
  "ep_size": 1, "first_k_dense_replace": 3, "hidden_act": "silu", "hidden_size": 7168,
  "initializer_range": 0.02, "intermediate_size": 18432, "kv_lora_rank": 512,
  "max_position_embeddings": 163840, "model_type": "deepseek_v3", "moe_intermediate_size": 2048,
  "moe_layer_freq": 1, "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1,
  "norm_topk_prob": true, "num_attention_heads": 128, "num_experts_per_tok": 8,
  "num_hidden_layers": 61, "num_key_value_heads": 128, "num_nextn_predict_layers": 1,
  "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06,
  "rope_theta": 10000, "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40,
    "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096,
    "type": "yarn"},
  "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "tie_word_embeddings": false,
  "topk_group": 4, "topk_method": "noaux_tc", "torch_dtype": "bfloat16", "use_cache": true,
  "v_head_dim": 128, "vocab_size": 129280)",
                                      kFp8});

ModelConfig parse(const std::string& text) { return parse_model_config(text, "config.json"); }

std::string replaced(std::string text, const std::string& from, const std::string& to) {
  const size_t at = text.find(from);
  EXPECT(at != std::string::npos);
  return at == std::string::npos ? text : text.replace(at, from.size(), to);
}

void expect_kimi(const ModelConfig& c) {
  EXPECT_EQ(c.vocab_size, 163840);
  EXPECT_EQ(c.hidden_size, 7168);
  EXPECT_EQ(c.intermediate_size, 18432);
  EXPECT_EQ(c.moe_intermediate_size, 2048);
  EXPECT_EQ(c.num_hidden_layers, 61);
  EXPECT_EQ(c.num_nextn_predict_layers, 0);
  EXPECT_EQ(c.num_attention_heads, 64);
  EXPECT_EQ(c.q_lora_rank, 1536);
  EXPECT_EQ(c.kv_lora_rank, 512);
  EXPECT_EQ(c.qk_nope_head_dim, 128);
  EXPECT_EQ(c.qk_rope_head_dim, 64);
  EXPECT_EQ(c.v_head_dim, 128);
  EXPECT_EQ(c.n_routed_experts, 384);
  EXPECT_EQ(c.n_shared_experts, 1);
  EXPECT_EQ(c.num_experts_per_tok, 8);
  EXPECT_EQ(c.n_group, 1);
  EXPECT_EQ(c.topk_group, 1);
  EXPECT(!c.is_moe_layer(0) && c.is_moe_layer(1) && c.is_moe_layer(60));
  EXPECT(c.norm_topk_prob && !c.tie_word_embeddings && c.rope_interleave);
  EXPECT_EQ(c.routed_scaling_factor, 2.827);
  EXPECT_EQ(c.bos_token_id, 163584);
}

RopeConfig yarn(double theta, double factor, double beta_fast) {
  RopeConfig rope;
  rope.rope_theta = theta;
  rope.yarn = true;
  rope.factor = factor;
  rope.beta_fast = beta_fast;
  rope.mscale_all_dim = 1.0;
  rope.original_max_position_embeddings = 4096;
  return rope;
}

// The angle of each pair at position 1, and that all of them are scaled by `multiplier`.
void expect_frequencies(const RopeConfig& rope, int64_t dim, double multiplier,
                        const std::vector<std::pair<int64_t, double>>& want) {
  const std::vector<float> table = kdt::rope_table(rope, dim, 2);
  for (const auto& [i, frequency] : want) {
    const double cosine = table[dim + i], sine = table[dim + dim / 2 + i];
    EXPECT_NEAR(std::atan2(sine, cosine) / frequency, 1.0, 1e-5);
    EXPECT_NEAR(std::hypot(sine, cosine), multiplier, 1e-6);
  }
}

double softmax_scale(const ModelConfig& c) {
  return kdt::yarn_softmax_factor(c.rope) /
         std::sqrt(static_cast<double>(c.qk_nope_head_dim + c.qk_rope_head_dim));
}

}  // namespace

KDT_TEST(kimi_k2_instruct) {
  const ModelConfig c = parse(kInstruct);
  expect_kimi(c);
  EXPECT_EQ(c.max_position_embeddings, 131072);
  EXPECT_EQ(c.rms_norm_eps, 1e-6);
  EXPECT_EQ(c.latent_rms_norm_eps, 1e-6);
  EXPECT(c.eos_token_ids == std::vector<int64_t>{163585});
  EXPECT(c.rope == yarn(50000, 32, 1));
  EXPECT(c.fp8);
  EXPECT_EQ(c.int4_group_size, 0);
  EXPECT_EQ(c.tensor_prefix, "model.");
  EXPECT_EQ(c.lm_head_name, "lm_head.weight");
  EXPECT_NEAR(softmax_scale(c), 0.13086079996, 1e-11);
  // The ramp is a step between pairs 19 and 20.
  expect_frequencies(c.rope, 64, 1.0,
                     {{0, 1.0},
                      {18, 0.00227420381},
                      {19, 0.00162175996},
                      {20, 3.61404673e-05},
                      {31, 8.76441277e-07}});
}

KDT_TEST(kimi_k2_thinking) {
  const ModelConfig c = parse(kThinking);
  expect_kimi(c);
  EXPECT_EQ(c.max_position_embeddings, 262144);
  EXPECT_EQ(c.rms_norm_eps, 1e-5);
  EXPECT_EQ(c.latent_rms_norm_eps, 1e-5);
  EXPECT(c.eos_token_ids == std::vector<int64_t>{163586});
  EXPECT(c.rope == yarn(50000, 64, 1));
  EXPECT(!c.fp8);
  EXPECT_EQ(c.int4_group_size, 32);
  EXPECT_EQ(c.tensor_prefix, "model.");
  EXPECT_NEAR(softmax_scale(c), 0.14467962580, 1e-11);
  expect_frequencies(c.rope, 64, 1.0,
                     {{19, 0.00162175996}, {20, 1.80702336e-05}, {31, 4.38220638e-07}});
}

KDT_TEST(kimi_k2_5_and_k2_6_are_one_model_in_two_dialects) {
  for (const auto& [text, eos] : {std::pair{kK25, 163585}, {kK26, 163586}}) {
    const ModelConfig c = parse(text);
    expect_kimi(c);
    EXPECT_EQ(c.max_position_embeddings, 262144);
    EXPECT_EQ(c.rms_norm_eps, 1e-5);
    EXPECT_EQ(c.latent_rms_norm_eps, 1e-5);
    EXPECT(c.eos_token_ids == std::vector<int64_t>{eos});
    EXPECT(c.rope == yarn(50000, 64, 32));
    EXPECT(!c.fp8);
    EXPECT_EQ(c.int4_group_size, 32);
    EXPECT_EQ(c.tensor_prefix, "language_model.model.");
    EXPECT_EQ(c.lm_head_name, "language_model.lm_head.weight");
    EXPECT_NEAR(softmax_scale(c), 0.14467962580, 1e-11);
    expect_frequencies(c.rope, 64, 1.0,
                       {{0, 1.0},
                        {8, 0.0668740347},
                        {9, 0.0437766574},
                        {14, 0.00446584867},
                        {19, 0.000158374969},
                        {20, 1.80702336e-05},
                        {31, 4.38220638e-07}});
  }
  EXPECT_THROWS("config.json: architectures is [\"LlavaForConditionalGeneration\"]",
                parse(replaced(kK26, "KimiK25For", "LlavaFor")));
  parse(replaced(kK25, "KimiK25For", "Kimi_K25For"));  // the name in transformers
}

KDT_TEST(deepseek_v3) {
  const ModelConfig c = parse(kDeepseek);
  EXPECT_EQ(c.vocab_size, 129280);
  EXPECT_EQ(c.num_attention_heads, 128);
  EXPECT_EQ(c.n_routed_experts, 256);
  EXPECT_EQ(c.n_group, 8);
  EXPECT_EQ(c.topk_group, 4);
  EXPECT(!c.is_moe_layer(2) && c.is_moe_layer(3));
  EXPECT_EQ(c.routed_scaling_factor, 2.5);
  EXPECT_EQ(c.num_nextn_predict_layers, 1);
  EXPECT_EQ(c.max_position_embeddings, 163840);
  EXPECT_EQ(c.rms_norm_eps, 1e-6);
  EXPECT_EQ(c.latent_rms_norm_eps, 1e-6);
  EXPECT_EQ(c.bos_token_id, 0);
  EXPECT(c.eos_token_ids == std::vector<int64_t>{1});
  EXPECT(c.fp8);
  EXPECT(c.rope == yarn(10000, 40, 32));
  EXPECT_NEAR(softmax_scale(c), 0.13523377886, 1e-11);
  expect_frequencies(c.rope, 64, 1.0,
                     {{10, 0.0562341288},
                      {11, 0.0390069261},
                      {16, 0.00550000044},
                      {22, 0.00017782794},
                      {23, 3.3338034e-05}});
  // Alone it has the reference's eps of the latent norms, whatever the config's eps.
  EXPECT_EQ(parse(replaced(kDeepseek, "1e-06", "1e-05")).latent_rms_norm_eps, 1e-6);
}

KDT_TEST(angles_are_right_to_the_last_position) {
  const ModelConfig c = parse(kK26);
  const int64_t dim = 64, last = c.max_position_embeddings - 1;
  const std::vector<float> table = kdt::rope_table(c.rope, dim, last + 1);
  for (int64_t i : {0, 8, 14, 20, 31}) {
    const double ramp = std::clamp((static_cast<double>(i) - 8) / 12, 0.0, 1.0);
    const double angle =
        static_cast<double>(last) * std::pow(50000.0, -2.0 * i / dim) * (1 - ramp + ramp / 64);
    EXPECT_NEAR(table[last * dim + i], std::cos(angle), 1e-7);
    EXPECT_NEAR(table[last * dim + dim / 2 + i], std::sin(angle), 1e-7);
  }
}

KDT_TEST(yarn_takes_every_parameter) {
  const std::string with = R"("mscale": 1.0, "attention_factor": 1.25)";
  const ModelConfig c = parse(replaced(kK26, "\"mscale\": 1.0", with));
  EXPECT_EQ(c.rope.attention_factor, 1.25);
  EXPECT_NEAR(softmax_scale(c), 0.14467962580, 1e-11);
  expect_frequencies(c.rope, 64, 1.25, {{8, 0.0668740347}, {20, 1.80702336e-05}});
  const auto parameters = [](const std::string& more) {
    return parse(object({kKimi + kRawKeys, kRest,
                         "\"rope_parameters\": " + object({"\"rope_theta\": 50000.0", more})}))
        .rope;
  };
  const std::string qwen =
      R"("rope_type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096)";
  const RopeConfig rope = parameters(qwen + ", \"truncate\": false");
  EXPECT(!rope.truncate);
  expect_frequencies(rope, 64, 1.4158883083359672,
                     {{8, 0.0668740347},
                      {9, 0.0472970344},
                      {14, 0.00449924031},
                      {19, 5.09722158e-05},
                      {20, 1.80702336e-05}});
  EXPECT_THROWS("rope_parameters.attention_factor is -1",
                parameters(qwen + R"(, "attention_factor": -1)"));
  EXPECT_THROWS("rope_parameters.truncate is 0", parameters(qwen + R"(, "truncate": 0)"));
  // Plain rope has neither.
  EXPECT_THROWS("rope_parameters.attention_factor is 1.2, the rope_type is not yarn",
                parameters("\"attention_factor\": 1.2"));
  EXPECT_THROWS("rope_parameters.truncate is false", parameters("\"truncate\": false"));
}

KDT_TEST(fp8_is_e4m3_in_blocks_of_128) {
  const auto refuses = [](const std::string& fault, const std::string& from,
                          const std::string& to) {
    EXPECT_THROWS("config.json: quantization_config." + fault,
                  parse(replaced(kInstruct, from, to)));
  };
  const std::string block = R"("weight_block_size": [128, 128])";
  refuses("weight_block_size is missing", ", " + block, "");
  refuses("weight_block_size is null", block, R"("weight_block_size": null)");
  refuses("weight_block_size is [64, 128]", block, R"("weight_block_size": [64, 128])");
  refuses("weight_block_size is [128]", block, R"("weight_block_size": [128])");
  refuses("weight_block_size is 128", block, R"("weight_block_size": 128)");
  refuses("weight_block_size is \"128\"", block, R"("weight_block_size": "128")");
  refuses("fmt is \"e5m2\"", "\"e4m3\"", "\"e5m2\"");
  refuses("activation_scheme is \"static\"", "\"dynamic\"", "\"static\"");
  refuses("scale_fmt is \"int\"", block, block + R"(, "scale_fmt": "int")");
  refuses("expert_dtype is \"fp4\"", block, block + R"(, "expert_dtype": "fp4")");
  refuses("kv_cache_scheme is {}, a key", block, block + R"(, "kv_cache_scheme": {})");
  refuses("quant_method is \"awq\", this engine supports", "\"fp8\"", "\"awq\"");
  // As transformers saves it, and as DeepSeek-V3.1 has it.
  EXPECT(parse(replaced(kInstruct, R"("fmt": "e4m3",)", R"("dequantize": false,
    "modules_to_not_convert": null, "expert_dtype": "fp8", "scale_fmt": "float",)"))
             .fp8);
  EXPECT(parse(replaced(kInstruct, block, block + R"(, "scale_fmt": "ue8m0")")).fp8);
}

KDT_TEST(quantization_may_stand_in_either_place_but_is_one) {
  const std::string rope = rope_scaling("64.0", "32.0");
  const auto nested = [&](const std::string& inner, const std::string& outer) {
    return parse(object(
        {kOuterKeys, "\"text_config\": " + object({kKimi + kRawKeys, rope, kRest, inner}), outer}));
  };
  const std::string none = "\"quantization_config\": null";
  EXPECT(nested(none, kFp8).fp8);
  EXPECT(nested(kFp8, none).fp8);
  EXPECT(nested(kFp8, kFp8).fp8);
  EXPECT_EQ(nested(none, int4(kIgnore)).int4_group_size, 32);
  EXPECT_EQ(nested(int4(kIgnore), none).int4_group_size, 32);
  EXPECT(!nested(none, none).fp8);
  EXPECT_EQ(nested(none, none).int4_group_size, 0);
  EXPECT_THROWS("config.json: quantization_config.quant_method is \"fp8\", text_config",
                nested(int4(kIgnore), kFp8));
  EXPECT_THROWS("config.json: quantization_config.quant_method is \"compressed-tensors\", text",
                nested(kFp8, int4(kIgnore)));
  EXPECT_THROWS("config.json: text_config.quantization_config.fmt is \"e5m2\"",
                nested(replaced(kFp8, "e4m3", "e5m2"), kFp8));
}

KDT_TEST_MAIN
