#include <algorithm>

#include "check.h"
#include "io/temp_dir.h"
#include "model/config.h"

using kdt::DraftConfig;
using kdt::parse_draft_config;

namespace {

// A drafter like Kimi-K2.5's, with three layers. `changes` is text that goes before the other keys;
// `without` is left out.
std::string drafter(
    const std::string& changes = "", const std::vector<std::string>& without = {},
    const std::string& dflash = R"("target_layer_ids":[1,12,24],"mask_token_id":163838)") {
  const std::vector<std::pair<std::string, std::string>> keys = {
      {"architectures", "[\"DFlashDraftModel\"]"},
      {"model_type", "\"qwen3\""},
      {"vocab_size", "163840"},
      {"hidden_size", "7168"},
      {"intermediate_size", "18432"},
      {"num_hidden_layers", "3"},
      {"num_attention_heads", "64"},
      {"num_key_value_heads", "8"},
      {"head_dim", "128"},
      {"rms_norm_eps", "1e-06"},
      {"rope_theta", "50000"},
      {"rope_scaling",
       R"({"rope_type":"yarn","factor":64.0,"original_max_position_embeddings":4096})"},
      {"max_position_embeddings", "262144"},
      {"hidden_act", "\"silu\""},
      {"attention_bias", "false"},
      {"block_size", "8"},
      {"num_target_layers", "61"},
      {"use_sliding_window", "false"},
      {"sliding_window", "null"}};
  std::string text = "{" + changes;
  for (const auto& [key, value] : keys) {
    if (std::find(without.begin(), without.end(), key) != without.end()) continue;
    text += (text.size() > 1 ? ",\"" : "\"") + key + "\":" + value;
  }
  return text + ",\"dflash_config\":{" + dflash + "}}";
}

DraftConfig parse(const std::string& text) { return parse_draft_config(text, "drafter"); }

// The key with this value instead of its own is refused with both in the message.
void refuses(const std::string& key, const std::vector<std::string>& values) {
  for (const std::string& value : values) {
    const std::string changes = value == "-" ? "" : "\"" + key + "\":" + value;
    EXPECT_THROWS("drafter: " + key + " is " + (value == "-" ? "missing" : value),
                  parse(drafter(changes, {key})));
  }
}

const std::string kTaps = R"("target_layer_ids":[1,12,24],"mask_token_id":163838,)";

}  // namespace

KDT_TEST(reads_the_numbers_of_a_drafter) {
  const DraftConfig c = parse(drafter());
  EXPECT_EQ(c.vocab_size, 163840);
  EXPECT_EQ(c.hidden_size, 7168);
  EXPECT_EQ(c.intermediate_size, 18432);
  EXPECT_EQ(c.num_hidden_layers, 3);
  EXPECT_EQ(c.num_attention_heads, 64);
  EXPECT_EQ(c.num_key_value_heads, 8);
  EXPECT_EQ(c.head_dim, 128);
  EXPECT_EQ(c.rms_norm_eps, 1e-6);
  EXPECT_EQ(c.block_size, 8);
  EXPECT_EQ(c.mask_token_id, 163838);
  EXPECT(c.target_layer_ids == (std::vector<int64_t>{1, 12, 24}));
  EXPECT_EQ(c.max_position_embeddings, 262144);
  EXPECT(c.rope.yarn);
  EXPECT_EQ(c.rope.mscale, 1.0);
  EXPECT_EQ(c.rope.mscale_all_dim, 0.0);
  EXPECT(c.layer_window == std::vector<int64_t>(3, 0));
  EXPECT(c.layer_causal == std::vector<bool>(3, false));
  EXPECT_EQ(parse(drafter("", {"max_position_embeddings"})).max_position_embeddings, 0);
}

// The released drafters, as their config.json says them; the first in the older form.
KDT_TEST(reads_the_drafters_of_kimi) {
  const std::string common = R"({"architectures": ["DFlashDraftModel"], "model_type": "qwen3",
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"}, "attention_bias": false,
    "attention_dropout": 0.0, "head_dim": 128, "hidden_act": "silu", "hidden_size": 7168,
    "initializer_range": 0.02, "intermediate_size": 18432, "max_position_embeddings": 262144,
    "max_window_layers": 6, "num_attention_heads": 64, "num_hidden_layers": 6,
    "num_key_value_heads": 8, "num_target_layers": 61, "tie_word_embeddings": false,
    "use_cache": true, "vocab_size": 163840, )";
  const std::string yarn = R"("beta_fast": 32.0, "beta_slow": 1.0, "factor": 64.0, "mscale": 1.0,
    "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096, "rope_type": "yarn")";
  const std::string taps = R"("mask_token_id": 163838, "target_layer_ids": [1,12,24,35,47,58])";
  const std::string k25 = common + R"("rms_norm_eps": 1e-06, "block_size": 8,
    "rope_theta": 50000.0, "use_sliding_window": false, "sliding_window": null, "layer_types": [
    "full_attention", "full_attention", "full_attention", "full_attention", "full_attention",
    "full_attention"], "dflash_config": {)" +
                          taps + R"(}, "rope_scaling": {)" + yarn + "}}";
  const std::string k26 = common + R"("rms_norm_eps": 1e-05, "use_sliding_window": true,
    "sliding_window": 4096, "layer_types": ["sliding_attention", "sliding_attention",
    "sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
    "dflash_config": {"block_size": 8, )" +
                          taps + R"(}, "rope_parameters": {"rope_theta": 50000.0, )" + yarn + "}}";
  for (const std::string& text : {k25, k26}) {
    const bool slides = text == k26;
    const DraftConfig c = parse(text);
    EXPECT_EQ(c.num_hidden_layers, 6);
    EXPECT_EQ(c.num_target_layers, 61);
    EXPECT_EQ(c.block_size, 8);
    EXPECT_EQ(c.mask_token_id, 163838);
    EXPECT(c.target_layer_ids == (std::vector<int64_t>{1, 12, 24, 35, 47, 58}));
    EXPECT_EQ(c.rms_norm_eps, slides ? 1e-5 : 1e-6);
    EXPECT_EQ(c.rope.rope_theta, 50000.0);
    EXPECT(c.rope.yarn);
    EXPECT_EQ(c.rope.factor, 64.0);
    EXPECT_EQ(c.rope.beta_fast, 32.0);
    EXPECT_EQ(c.rope.mscale, 1.0);
    EXPECT_EQ(c.rope.mscale_all_dim, 1.0);
    EXPECT_EQ(c.rope.original_max_position_embeddings, 4096);
    const int64_t window = slides ? 4096 : 0;
    EXPECT(c.layer_window == (std::vector<int64_t>{window, window, window, window, window, 0}));
    EXPECT(c.layer_causal == (std::vector<bool>{slides, slides, slides, slides, slides, false}));
  }
}

KDT_TEST(keys_of_the_block_may_stand_at_the_top_or_in_dflash_config) {
  const DraftConfig top = parse(drafter(R"("target_layer_ids":[5],"mask_token_id":9)", {}, ""));
  EXPECT(top.target_layer_ids == std::vector<int64_t>{5});
  EXPECT_EQ(top.mask_token_id, 9);
  EXPECT_EQ(parse(drafter("", {"block_size"}, kTaps + R"("block_size":16)")).block_size, 16);
  EXPECT_EQ(parse(drafter("", {}, kTaps + R"("block_size":8)")).block_size, 8);
  EXPECT_THROWS("drafter: dflash_config.block_size is 16, the outer one is 8",
                parse(drafter("", {}, kTaps + R"("block_size":16)")));
  EXPECT_THROWS("drafter: block_size is missing", parse(drafter("", {"block_size"})));
  EXPECT_THROWS("drafter: mask_token_id is missing",
                parse(drafter("", {}, R"("target_layer_ids":[1])")));
  EXPECT_THROWS("drafter: target_layer_ids is missing",
                parse(drafter("", {}, R"("mask_token_id":1)")));
  EXPECT_EQ(parse(drafter("", {"num_target_layers"}, kTaps + R"("num_target_layers":61)"))
                .num_target_layers,
            61);
  EXPECT_THROWS("drafter: dflash_config.num_target_layers is 48, the outer one is 61",
                parse(drafter("", {}, kTaps + R"("num_target_layers":48)")));
  parse(drafter("", {}, kTaps + R"("use_aux_hidden_state":true,"projector_type":"dflash")"));
  for (const char* key : {R"("use_aux_hidden_state":false)", R"("projector_type":"domino")",
                          R"("attention_sink_bias":true)"}) {
    EXPECT_THROWS("drafter: dflash_config.", parse(drafter("", {}, kTaps + key)));
  }
  EXPECT_THROWS("drafter: dflash_config.markov_rank is 256, a key this engine does not know",
                parse(drafter("", {}, kTaps + R"("markov_rank":256)")));
}

KDT_TEST(reads_sliding_layers) {
  const std::string types =
      R"("layer_types":["sliding_attention","full_attention","sliding_attention"])";
  const std::vector<std::string> qwen = {"use_sliding_window", "sliding_window"};
  const DraftConfig c = parse(drafter(types + R"(,"sliding_window":12)", qwen));
  EXPECT(c.layer_window == (std::vector<int64_t>{12, 0, 12}));
  EXPECT(c.layer_causal == (std::vector<bool>{true, false, true}));
  EXPECT(parse(drafter(types + R"(,"sliding_window":12)", qwen, kTaps + R"("causal":false)"))
             .layer_causal == std::vector<bool>(3, false));
  EXPECT(parse(drafter("\"is_causal\":true")).layer_causal == std::vector<bool>(3, true));
  EXPECT(parse(drafter(R"("is_causal":false,"causal":false)")).layer_causal ==
         std::vector<bool>(3, false));
  EXPECT_THROWS("drafter: is_causal is true, another key says false",
                parse(drafter(R"("causal":false,"is_causal":true)")));
  EXPECT_THROWS("drafter: causal is false, another key says true",
                parse(drafter("\"causal\":false", {}, kTaps + R"("causal":true)")));
  EXPECT_THROWS("drafter: is_causal is 1, want true or false", parse(drafter("\"is_causal\":1")));

  EXPECT_THROWS("drafter: sliding_window is null, layer_types names sliding_attention",
                parse(drafter(types)));
  EXPECT_THROWS("drafter: use_sliding_window is false, layer_types names",
                parse(drafter(types + R"(,"sliding_window":12)", {"sliding_window"})));
  EXPECT_THROWS("drafter: layer_types is [\"full_attention\"], want one for each of the 3 layers",
                parse(drafter(R"("layer_types":["full_attention"])")));
  EXPECT_THROWS("drafter: layer_types is [",
                parse(drafter(R"("layer_types":["full_attention","x","y"])")));
  EXPECT_THROWS("drafter: use_sliding_window is true",
                parse(drafter("\"use_sliding_window\":true", {"use_sliding_window"})));
  refuses("sliding_window", {"0", "-1", "\"12\""});
  EXPECT(parse(drafter(types, qwen, kTaps + R"("sliding_window":12)")).layer_window ==
         (std::vector<int64_t>{12, 0, 12}));
  EXPECT_THROWS(
      "drafter: dflash_config.sliding_window is 12, the outer one is 24",
      parse(drafter(types + R"(,"sliding_window":24)", qwen, kTaps + R"("sliding_window":12)")));
}

KDT_TEST(reads_the_window_of_dflash_config) {
  const std::string types =
      R"("layer_types":["sliding_attention","full_attention","sliding_attention"])";
  const std::string swa = kTaps + R"("use_swa":true,"swa_window_size":40)";
  EXPECT(parse(drafter("", {}, swa)).layer_window == std::vector<int64_t>(3, 40));
  EXPECT(parse(drafter(types, {"use_sliding_window"}, swa)).layer_window ==
         (std::vector<int64_t>{40, 0, 40}));
  EXPECT(parse(drafter("", {}, kTaps + R"("use_swa":false,"swa_window_size":40)")).layer_window ==
         std::vector<int64_t>(3, 0));
  EXPECT_THROWS("drafter: dflash_config.swa_window_size is missing",
                parse(drafter("", {}, kTaps + R"("use_swa":true)")));
  EXPECT_THROWS("drafter: dflash_config.swa_window_size is 40, sliding_window is 12",
                parse(drafter("\"sliding_window\":12", {"sliding_window"}, swa)));
  EXPECT_THROWS(
      "drafter: dflash_config.use_swa is true, layer_types names no sliding_attention",
      parse(drafter(R"("layer_types":["full_attention","full_attention","full_attention"])", {},
                    swa)));
}

KDT_TEST(refuses_numbers_that_are_missing_or_out_of_bounds) {
  for (const char* key : {"vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
                          "num_attention_heads", "num_key_value_heads", "head_dim", "block_size"}) {
    refuses(key, {"-", "null", "0", "-8", "9223372036854775807", "8.5", "\"8\""});
  }
  refuses("num_key_value_heads", {"7", "65"});
  refuses("head_dim", {"127"});
  refuses("block_size", {"1", "257"});
  refuses("rms_norm_eps", {"-", "0"});
  refuses("max_position_embeddings", {"0"});
  EXPECT_THROWS("dflash_config.mask_token_id is 163840",
                parse(drafter("", {}, R"("target_layer_ids":[1],"mask_token_id":163840)")));
  EXPECT_THROWS("dflash_config.target_layer_ids is [61], holds 61; want integers from 0 to 60",
                parse(drafter("", {}, R"("target_layer_ids":[61],"mask_token_id":1)")));
  EXPECT_THROWS("dflash_config.target_layer_ids is [-1]",
                parse(drafter("", {}, R"("target_layer_ids":[-1],"mask_token_id":1)")));
  EXPECT_THROWS("dflash_config.target_layer_ids is [1, 12, 1], want no layer twice",
                parse(drafter("", {}, R"("target_layer_ids":[1,12,1],"mask_token_id":1)")));
  EXPECT_THROWS("dflash_config.target_layer_ids is []",
                parse(drafter("", {}, R"("target_layer_ids":[],"mask_token_id":1)")));
}

KDT_TEST(refuses_what_the_engine_does_not_compute) {
  refuses("model_type", {"-", "\"llama\""});
  refuses("architectures", {"[\"EagleModel\"]"});
  refuses("hidden_act", {"\"gelu\""});
  for (const char* key :
       {"attention_bias", "mlp_bias", "qkv_bias", "use_swa", "add_swa_attention_sink_bias"}) {
    refuses(key, {"true"});
  }
  refuses("partial_rotary_factor", {"0.5"});
  refuses("attn_logit_softcapping", {"50.0"});
  refuses("use_qk_norm", {"false"});
  refuses("rope_theta", {"-", "null"});
  refuses("draft_vocab_size", {"32000"});
  refuses("quantization_config", {"{\"bits\": 4}"});
  EXPECT_THROWS(
      "rope_scaling.rope_type is \"linear\"",
      parse(drafter(R"("rope_scaling":{"rope_type":"linear","factor":2})", {"rope_scaling"})));
}

KDT_TEST(a_drafter_belongs_to_its_target) {
  kdt::ModelConfig target;
  target.hidden_size = 7168;
  target.vocab_size = 163840;
  target.num_hidden_layers = 61;
  const auto check = [&](const std::string& text) {
    kdt::check_draft_config(parse(text), target, "drafter");
  };
  check(drafter());
  check(drafter("", {"num_target_layers"}));
  EXPECT_THROWS("drafter: num_target_layers is 60, the target's num_hidden_layers is 61",
                check(drafter("\"num_target_layers\":60", {"num_target_layers"})));
  EXPECT_THROWS("drafter: hidden_size is 4096, the target's hidden_size is 7168",
                check(drafter("\"hidden_size\":4096", {"hidden_size"})));
  EXPECT_THROWS("drafter: vocab_size is 163841, the target's vocab_size is 163840",
                check(drafter("\"vocab_size\":163841", {"vocab_size"})));
  target.num_hidden_layers = 24;
  EXPECT_THROWS("drafter: target_layer_ids holds 24, the target has 24 layers",
                check(drafter("", {"num_target_layers"})));
}

KDT_TEST(loads_a_folder) {
  const kdt::test::TempDir dir;
  dir.write("config.json", drafter());
  EXPECT_EQ(kdt::load_draft_config(dir.path(".")).block_size, 8);
  EXPECT_THROWS("nowhere/config.json: cannot open", kdt::load_draft_config(dir.path("nowhere")));
}

KDT_TEST_MAIN
