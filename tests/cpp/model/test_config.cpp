#include "check.h"
#include "io/temp_dir.h"
#include "model/config.h"

using kdt::ModelConfig;
using kdt::parse_model_config;
using kdt::test::TempDir;

namespace {

using Keys = std::vector<std::pair<std::string, std::string>>;

// `keys` with some values replaced or added; the value "-" removes a key.
Keys with(Keys keys, const Keys& changes) {
  for (const auto& [key, value] : changes) {
    std::erase_if(keys, [&](const auto& have) { return have.first == key; });
    if (value != "-") keys.emplace_back(key, value);
  }
  return keys;
}

std::string json(const Keys& keys) {
  std::string text = "{";
  for (const auto& [key, value] : keys)
    text += (text.size() > 1 ? ",\"" : "\"") + key + "\":" + value;
  return text + "}";
}

const Keys kYarn = {{"type", "\"yarn\""},
                    {"factor", "64.0"},
                    {"beta_fast", "32.0"},
                    {"beta_slow", "1.0"},
                    {"mscale", "1.0"},
                    {"mscale_all_dim", "1.0"},
                    {"original_max_position_embeddings", "4096"}};

const Keys kWeights = {{"num_bits", "4"},          {"type", "\"int\""},
                       {"symmetric", "true"},      {"strategy", "\"group\""},
                       {"group_size", "32"},       {"dynamic", "false"},
                       {"actorder", "null"},       {"block_structure", "null"},
                       {"observer", "\"minmax\""}, {"observer_kwargs", "{}"}};

Keys group(const Keys& weights) {
  return {{"targets", "[\"Linear\"]"},
          {"weights", json(weights)},
          {"input_activations", "null"},
          {"output_activations", "null"}};
}

Keys quantization(const Keys& group_0) {
  return {{"quant_method", "\"compressed-tensors\""},
          {"format", "\"pack-quantized\""},
          {"quantization_status", "\"compressed\""},
          {"kv_cache_scheme", "null"},
          {"ignore", "[\"lm_head\",\"re:.*self_attn.*\"]"},
          {"config_groups", json({{"group_0", json(group_0)}})}};
}

// A kimi_k2, in numbers near those of the released ones, which test_config_dialects.cpp has.
const Keys kKimi = {{"architectures", "[\"DeepseekV3ForCausalLM\"]"},
                    {"model_type", "\"kimi_k2\""},
                    {"vocab_size", "163840"},
                    {"hidden_size", "7168"},
                    {"intermediate_size", "18432"},
                    {"moe_intermediate_size", "2048"},
                    {"num_hidden_layers", "61"},
                    {"num_attention_heads", "64"},
                    {"num_key_value_heads", "64"},
                    {"q_lora_rank", "1536"},
                    {"kv_lora_rank", "512"},
                    {"qk_nope_head_dim", "128"},
                    {"qk_rope_head_dim", "64"},
                    {"v_head_dim", "128"},
                    {"n_routed_experts", "384"},
                    {"num_experts_per_tok", "8"},
                    {"n_shared_experts", "1"},
                    {"n_group", "1"},
                    {"topk_group", "1"},
                    {"first_k_dense_replace", "1"},
                    {"moe_layer_freq", "1"},
                    {"scoring_func", "\"sigmoid\""},
                    {"topk_method", "\"noaux_tc\""},
                    {"norm_topk_prob", "true"},
                    {"routed_scaling_factor", "2.827"},
                    {"hidden_act", "\"silu\""},
                    {"attention_bias", "false"},
                    {"tie_word_embeddings", "false"},
                    {"num_nextn_predict_layers", "0"},
                    {"max_position_embeddings", "262144"},
                    {"rms_norm_eps", "1e-05"},
                    {"rope_theta", "50000.0"},
                    {"rope_scaling", json(kYarn)},
                    {"bos_token_id", "163584"},
                    {"eos_token_id", "163586"},
                    {"aux_loss_alpha", "0.001"},
                    {"quantization_config", json(quantization(group(kWeights)))}};

ModelConfig parse(const Keys& changes) {
  return parse_model_config(json(with(kKimi, changes)), "config.json");
}

// Each of these values of `key` is refused by a message that names the key and the value.
void refuses(const std::string& key, const std::vector<std::string>& values) {
  for (const std::string& value : values) {
    const std::string fault = "config.json: " + key + " is " +
                              (value == "-"      ? "missing"
                               : value == "null" ? "null"
                                                 : value);
    EXPECT_THROWS(fault, parse({{key, value}}));
  }
}

void refuses_rope(const std::string& fault, const Keys& changes) {
  EXPECT_THROWS("config.json: rope_scaling." + fault,
                parse({{"rope_scaling", json(with(kYarn, changes))}}));
}

void refuses_weights(const std::string& fault, const Keys& changes) {
  EXPECT_THROWS(
      "config.json: quantization_config.config_groups.group_0.weights." + fault,
      parse({{"quantization_config", json(quantization(group(with(kWeights, changes))))}}));
}

}  // namespace

KDT_TEST(reads_the_numbers_of_a_kimi_k2) {
  const ModelConfig c = parse({});
  EXPECT_EQ(c.vocab_size, 163840);
  EXPECT_EQ(c.hidden_size, 7168);
  EXPECT_EQ(c.intermediate_size, 18432);
  EXPECT_EQ(c.moe_intermediate_size, 2048);
  EXPECT_EQ(c.num_hidden_layers, 61);
  EXPECT_EQ(c.num_attention_heads, 64);
  EXPECT_EQ(c.q_lora_rank, 1536);
  EXPECT_EQ(c.kv_lora_rank, 512);
  EXPECT_EQ(c.qk_nope_head_dim, 128);
  EXPECT_EQ(c.qk_rope_head_dim, 64);
  EXPECT_EQ(c.v_head_dim, 128);
  EXPECT_EQ(c.n_routed_experts, 384);
  EXPECT_EQ(c.num_experts_per_tok, 8);
  EXPECT_EQ(c.n_shared_experts, 1);
  EXPECT(!c.is_moe_layer(0) && c.is_moe_layer(1) && c.is_moe_layer(60));
  EXPECT(c.norm_topk_prob && !c.tie_word_embeddings && c.rope_interleave);
  EXPECT_EQ(c.routed_scaling_factor, 2.827);
  EXPECT_EQ(c.max_position_embeddings, 262144);
  EXPECT_EQ(c.int4_group_size, 32);
  EXPECT(c.rope.yarn);
  EXPECT_EQ(c.rope.rope_theta, 50000.0);
  EXPECT_EQ(c.rope.factor, 64.0);
  EXPECT_EQ(c.rope.beta_fast, 32.0);
  EXPECT_EQ(c.rope.original_max_position_embeddings, 4096);
  EXPECT_EQ(c.rope.mscale_all_dim, 1.0);
  EXPECT(c.eos_token_ids == std::vector<int64_t>{163586});
  EXPECT_EQ(c.bos_token_id, 163584);
  EXPECT_EQ(c.tensor_prefix, "model.");
  EXPECT_EQ(c.lm_head_name, "lm_head.weight");
}

KDT_TEST(reads_the_nested_form_of_kimi_k2_5) {
  Keys outer = {{"architectures", "[\"KimiK25ForConditionalGeneration\"]"},
                {"model_type", "\"kimi_k25\""},
                {"text_config", json(with(kKimi, {{"quantization_config", "-"},
                                                  {"eos_token_id", "-"},
                                                  {"tie_word_embeddings", "-"}}))},
                {"vision_config", "{\"hidden_size\":1152}"},
                {"eos_token_id", "163585"},
                {"tie_word_embeddings", "true"},
                {"quantization_config", json(quantization(group(kWeights)))}};
  const ModelConfig c = parse_model_config(json(outer), "config.json");
  EXPECT_EQ(c.hidden_size, 7168);
  EXPECT_EQ(c.int4_group_size, 32);
  EXPECT(c.tie_word_embeddings);
  EXPECT(c.eos_token_ids == std::vector<int64_t>{163585});
  EXPECT_EQ(c.tensor_prefix, "language_model.model.");
  EXPECT_EQ(c.lm_head_name, "language_model.lm_head.weight");
  EXPECT_THROWS(
      "config.json: model_type is \"llava\"",
      parse_model_config(json(with(outer, {{"model_type", "\"llava\""}})), "config.json"));
  EXPECT_THROWS("config.json: text_config is 3, want an object",
                parse_model_config(json(with(outer, {{"text_config", "3"}})), "config.json"));
  EXPECT_THROWS("config.json: text_config.hidden_size is missing",
                parse_model_config(
                    json(with(outer, {{"text_config", json(with(kKimi, {{"hidden_size", "-"}}))}})),
                    "config.json"));
}

KDT_TEST(latent_norms_have_the_eps_of_their_dialect) {
  EXPECT_EQ(parse({}).rms_norm_eps, 1e-5);
  EXPECT_EQ(parse({}).latent_rms_norm_eps, 1e-5);
  EXPECT_EQ(parse({{"model_type", "\"deepseek_v3\""}}).latent_rms_norm_eps, 1e-6);
  EXPECT_EQ(parse({{"latent_rms_norm_eps", "0.25"}}).latent_rms_norm_eps, 0.25);
}

KDT_TEST(every_spelling_of_plain_rope_is_plain) {
  for (const char* value : {"-", "null", "{}", "{\"type\":\"default\"}",
                            "{\"rope_type\":\"default\",\"rope_theta\":50000.0}",
                            "{\"rope_theta\":50000}", "{\"type\":null,\"factor\":1.0}"}) {
    const ModelConfig c = parse({{"rope_scaling", value}});
    EXPECT(!c.rope.yarn);
    EXPECT_EQ(c.rope.rope_theta, 50000.0);
  }
  // No default stands in for a base that is not there.
  for (const char* value : {"-", "null", "{}", "{\"type\":\"default\"}"}) {
    EXPECT_THROWS("config.json: rope_theta is missing, want a number",
                  parse({{"rope_scaling", value}, {"rope_theta", "-"}}));
  }
  EXPECT_THROWS("rope_theta is missing", parse({{"rope_theta", "-"}}));
}

KDT_TEST(every_spelling_of_yarn_is_the_same_yarn) {
  const kdt::RopeConfig want = parse({}).rope;
  const Keys renamed = with(kYarn, {{"type", "-"}, {"rope_type", "\"yarn\""}});
  EXPECT(parse({{"rope_scaling", json(renamed)}}).rope == want);
  EXPECT(parse({{"rope_scaling", json(with(kYarn, {{"rope_type", "\"yarn\""}}))}}).rope == want);
  const std::string parameters = json(with(renamed, {{"rope_theta", "50000.0"}}));
  EXPECT(
      parse({{"rope_scaling", "-"}, {"rope_theta", "-"}, {"rope_parameters", parameters}}).rope ==
      want);
  EXPECT(parse({{"rope_parameters", parameters}}).rope == want);
  EXPECT(parse({{"rope_scaling",
                 json(with(kYarn, {{"attention_factor", "null"}, {"truncate", "true"}}))}})
             .rope == want);
}

KDT_TEST(refuses_rope_that_is_incomplete_or_unknown) {
  refuses_rope("original_max_position_embeddings is missing",
               {{"original_max_position_embeddings", "-"}});
  refuses_rope("original_max_position_embeddings is null",
               {{"original_max_position_embeddings", "null"}});
  refuses_rope("original_max_position_embeddings is 0",
               {{"original_max_position_embeddings", "0"}});
  refuses_rope("factor is missing", {{"factor", "-"}});
  refuses_rope("factor is 0.5", {{"factor", "0.5"}});
  refuses_rope("factor is \"64\"", {{"factor", "\"64\""}});
  refuses_rope("type is \"longrope\"", {{"type", "\"longrope\""}});
  refuses_rope("rope_type is \"llama3\"", {{"type", "-"}, {"rope_type", "\"llama3\""}});
  refuses_rope("type is \"yarn\", rope_type is \"default\"", {{"rope_type", "\"default\""}});
  refuses_rope("factor is 64.0, the rope_type is not yarn", {{"type", "-"}});
  refuses_rope("beta_fast is 0.5, want at least beta_slow", {{"beta_fast", "0.5"}});
  refuses_rope("mscale is missing", {{"mscale", "-"}});
  refuses_rope("mscale is 0.7", {{"mscale", "0.7"}, {"mscale_all_dim", "-"}});
  refuses_rope("attention_factor is 0", {{"attention_factor", "0"}});
  refuses_rope("truncate is \"no\"", {{"truncate", "\"no\""}});
  refuses_rope("short_factor is [1]", {{"short_factor", "[1]"}});
  refuses_rope("rope_theta is 10000, the outer one is 50000", {{"rope_theta", "10000"}});
  EXPECT_THROWS("config.json: rope_scaling is {",
                parse({{"rope_parameters", json(with(kYarn, {{"factor", "32"}}))}}));
  EXPECT_THROWS("config.json: rope_scaling is [], want an object", parse({{"rope_scaling", "[]"}}));
  refuses("rope_theta", {"0", "-1", "1e+30", "\"50000\"", "true"});
}

KDT_TEST(refuses_sizes_that_are_missing_or_out_of_bounds) {
  for (const char* key :
       {"vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
        "num_attention_heads", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
        "max_position_embeddings", "moe_intermediate_size", "num_experts_per_tok", "n_group",
        "topk_group"}) {
    refuses(key, {"-", "null", "0", "-8", "9223372036854775807", "18446744073709551615", "8.0",
                  "\"8\"", "true", "[8]"});
  }
  refuses("q_lora_rank", {"-", "0", "-1", "\"1536\""});
  refuses("qk_rope_head_dim", {"63"});
  refuses("n_routed_experts", {"-", "-1", "1000000"});
  refuses("n_shared_experts", {"-1", "1000"});
  refuses("first_k_dense_replace", {"-", "-1", "62"});
  refuses("moe_layer_freq", {"0", "[0, 1]"});
  refuses("rms_norm_eps", {"-", "0", "-1e-05", "2", "\"1e-5\""});
  refuses("latent_rms_norm_eps", {"0", "\"x\""});
  refuses("routed_scaling_factor", {"-", "0", "-1", "true"});
  refuses("norm_topk_prob", {"-", "1", "\"true\""});
  refuses("hidden_size", {"7169"});            // not whole groups of 32
  refuses("moe_intermediate_size", {"2050"});  // not whole groups of 32
}

KDT_TEST(refuses_expert_groups_that_do_not_fit) {
  EXPECT_EQ(parse({{"n_group", "8"}, {"topk_group", "4"}}).topk_group, 4);
  EXPECT_THROWS("n_group is 7, want a divisor of n_routed_experts 384", parse({{"n_group", "7"}}));
  EXPECT_THROWS("n_group is 384, want at least two experts in a group",
                parse({{"n_group", "384"}, {"topk_group", "8"}}));
  EXPECT_THROWS("topk_group is 5, want an integer from 1 to 4",
                parse({{"n_group", "4"}, {"topk_group", "5"}}));
  EXPECT_THROWS("num_experts_per_tok is 8, topk_group 1 leaves 4 experts",
                parse({{"n_group", "96"}, {"topk_group", "1"}}));
}

KDT_TEST(reads_a_model_without_experts_or_query_rank) {
  const ModelConfig c = parse({{"n_routed_experts", "0"},
                               {"moe_intermediate_size", "-"},
                               {"q_lora_rank", "null"},
                               {"quantization_config", "null"}});
  EXPECT(!c.is_moe_layer(5));
  EXPECT_EQ(c.q_lora_rank, 0);
  EXPECT_EQ(c.int4_group_size, 0);
}

KDT_TEST(refuses_what_the_engine_does_not_compute) {
  refuses("model_type", {"-", "\"deepseek_v2\"", "\"kimi_k25\"", "7"});
  refuses("architectures", {"[\"LlamaForCausalLM\"]", "\"DeepseekV3ForCausalLM\""});
  refuses("scoring_func", {"\"softmax\""});
  refuses("topk_method", {"\"greedy\""});
  refuses("hidden_act", {"\"gelu\"", "1"});
  refuses("num_nextn_predict_layers", {"1025", "-1"});
  refuses("num_key_value_heads", {"1", "8", "128", "\"64\""});
  EXPECT_EQ(parse({{"num_key_value_heads", "-"}}).num_attention_heads, 64);
  for (const char* key : {"attention_bias", "mlp_bias", "qkv_bias", "use_bias", "qk_layernorm"}) {
    refuses(key, {"true", "0"});
    parse({{key, "false"}});
  }
  for (const char* key : {"partial_rotary_factor", "logits_scaling", "residual_multiplier"}) {
    refuses(key, {"0.5", "0", "\"1\"", "true"});
    parse({{key, "1.0"}});
  }
  for (const char* key : {"attn_logit_softcapping", "final_logit_softcapping", "sliding_window",
                          "index_topk", "use_qk_norm", "swiglu_limit"}) {
    refuses(key, {"30.0", "true", "[1]"});
    parse({{key, "null"}});
    parse({{key, "false"}});
  }
  refuses("rope_interleave", {"1"});
  EXPECT_EQ(parse({{"num_nextn_predict_layers", "1"}}).num_nextn_predict_layers, 1);
  EXPECT_EQ(parse({{"num_nextn_predict_layers", "-"}, {"scoring_func", "-"}, {"topk_method", "-"}})
                .n_group,
            1);
  EXPECT_THROWS("config.json: duplicate key 'a'", parse({{"x", "{\"a\":1,\"a\":2}"}}));
  EXPECT_THROWS("config.json: not valid JSON", parse_model_config("", "config.json"));
  EXPECT_THROWS("config.json: is [], want an object", parse_model_config("[]", "config.json"));
}

KDT_TEST(refuses_quantization_other_than_int4_groups) {
  refuses_weights("num_bits is 8", {{"num_bits", "8"}});
  refuses_weights("type is \"float\"", {{"type", "\"float\""}});
  refuses_weights("type is missing", {{"type", "-"}});
  refuses_weights("symmetric is false", {{"symmetric", "false"}});
  refuses_weights("symmetric is missing", {{"symmetric", "-"}});
  refuses_weights("strategy is \"channel\"", {{"strategy", "\"channel\""}});
  refuses_weights("group_size is 128", {{"group_size", "128"}});
  refuses_weights("group_size is null", {{"group_size", "null"}});
  refuses_weights("dynamic is true", {{"dynamic", "true"}});
  refuses_weights("actorder is \"group\"", {{"actorder", "\"group\""}});
  refuses_weights("block_structure is [128, 128]", {{"block_structure", "[128,128]"}});
  const Keys good = quantization(group(kWeights));
  const auto refuses_top = [&](const std::string& fault, const Keys& changes) {
    EXPECT_THROWS("config.json: quantization_config." + fault,
                  parse({{"quantization_config", json(with(good, changes))}}));
  };
  refuses_top("quant_method is \"awq\"", {{"quant_method", "\"awq\""}});
  refuses_top("quant_method is null", {{"quant_method", "null"}});
  refuses_top("quant_method is missing", {{"quant_method", "-"}});
  refuses_top("format is \"nvfp4-pack-quantized\"", {{"format", "\"nvfp4-pack-quantized\""}});
  refuses_top("format is missing", {{"format", "-"}});
  refuses_top("quantization_status is \"frozen\"", {{"quantization_status", "\"frozen\""}});
  refuses_top("kv_cache_scheme is {\"num_bits\": 8}", {{"kv_cache_scheme", "{\"num_bits\":8}"}});
  refuses_top("config_groups is {}", {{"config_groups", "{}"}});
  refuses_top("config_groups is missing", {{"config_groups", "-"}});
  refuses_top("config_groups.group_0.weights is missing", {{"config_groups", "{\"group_0\":{}}"}});
  refuses_top("config_groups.group_0.input_activations is {",
              {{"config_groups",
                json({{"group_0", json(with(group(kWeights),
                                            {{"input_activations", "{\"num_bits\":8}"}}))}})}});
  refuses_top(
      "config_groups.group_1.weights.num_bits is 8",
      {{"config_groups", json({{"group_0", json(group(kWeights))},
                               {"group_1", json(group(with(kWeights, {{"num_bits", "8"}})))}})}});
}

KDT_TEST(stop_ids_come_from_both_files) {
  const TempDir dir;
  dir.write("config.json", json(with(kKimi, {{"eos_token_id", "[163585, 163586]"}})));
  EXPECT(kdt::load_model_config(dir.path(".")).eos_token_ids ==
         (std::vector<int64_t>{163585, 163586}));
  dir.write("generation_config.json", R"({"max_length": 9, "eos_token_id": [163586, 7]})");
  EXPECT(kdt::load_model_config(dir.path(".")).eos_token_ids ==
         (std::vector<int64_t>{163585, 163586, 7}));
  dir.write("generation_config.json", R"({"eos_token_id": 163840})");
  EXPECT_THROWS("generation_config.json: eos_token_id is 163840, want an integer from 0 to 163839",
                kdt::load_model_config(dir.path(".")));
  dir.write("generation_config.json", "[");
  EXPECT_THROWS("generation_config.json: not valid JSON", kdt::load_model_config(dir.path(".")));
  EXPECT_THROWS("nowhere/config.json: cannot open", kdt::load_model_config(dir.path("nowhere")));
  dir.write("config.json", "");
  std::filesystem::resize_file(dir.path("config.json"), uint64_t{1} << 40);
  EXPECT_THROWS("config.json: 1099511627776 bytes, want at most",
                kdt::load_model_config(dir.path(".")));
  EXPECT(parse({{"eos_token_id", "null"}, {"bos_token_id", "-"}}).eos_token_ids.empty());
  EXPECT_EQ(parse({{"bos_token_id", "null"}}).bos_token_id, -1);
  refuses("eos_token_id", {"-1", "163840", "\"x\""});
  refuses("bos_token_id", {"163840"});
  EXPECT_THROWS("eos_token_id is [1, 163840], holds 163840",
                parse({{"eos_token_id", "[1,163840]"}}));
}

KDT_TEST_MAIN
