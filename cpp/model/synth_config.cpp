#include "model/synth_config.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>

#include "core/error.h"
#include "model/config_reader.h"

namespace kdt {
namespace {

using JsonText = nlohmann::ordered_json;

// Kimi's control tokens take the last 256 ids, and every single byte has a token.
constexpr int64_t kNumControl = 256, kMinVocab = 256 + kNumControl;
constexpr int64_t kWidthStep = 32;  // one group of int4 codes
constexpr int64_t kMaxExpertsInAll = int64_t{1} << 20;

struct Numbers {
  const char* like;
  bool fp8;
  int64_t layers, hidden, intermediate, moe_intermediate, heads, q_lora, kv_lora, nope, rope, v;
  int64_t experts, experts_per_tok, vocab, max_positions, original_positions;
  double rope_factor, beta_fast, eps;
  int64_t eos;  // from the first control token
  int64_t draft_layers, draft_heads, draft_kv_heads, draft_head_dim, draft_intermediate;
};

constexpr Numbers kKimiK26 = {.like = "kimi-k2.6",
                              .fp8 = false,
                              .layers = 61,
                              .hidden = 7168,
                              .intermediate = 18432,
                              .moe_intermediate = 2048,
                              .heads = 64,
                              .q_lora = 1536,
                              .kv_lora = 512,
                              .nope = 128,
                              .rope = 64,
                              .v = 128,
                              .experts = 384,
                              .experts_per_tok = 8,
                              .vocab = 163840,
                              .max_positions = 262144,
                              .original_positions = 4096,
                              .rope_factor = 64,
                              .beta_fast = 32,
                              .eps = 1e-5,
                              .eos = 2,
                              .draft_layers = 6,
                              .draft_heads = 64,
                              .draft_kv_heads = 8,
                              .draft_head_dim = 128,
                              .draft_intermediate = 18432};

constexpr Numbers kimi_k2_instruct() {
  Numbers n = kKimiK26;
  n.like = "kimi-k2-instruct";
  n.fp8 = true;
  n.max_positions = 131072;
  n.rope_factor = 32;
  n.beta_fast = 1;
  n.eps = 1e-6;
  n.eos = 1;
  return n;
}

// Every number that is split over ranks divides by 8.
constexpr Numbers kTiny = {.like = "tiny",
                           .fp8 = false,
                           .layers = 4,
                           .hidden = 256,
                           .intermediate = 512,
                           .moe_intermediate = 256,
                           .heads = 8,
                           .q_lora = 128,
                           .kv_lora = 128,
                           .nope = 64,
                           .rope = 64,
                           .v = 64,
                           .experts = 16,
                           .experts_per_tok = 4,
                           .vocab = 1024,
                           .max_positions = 4096,
                           .original_positions = 1024,
                           .rope_factor = 4,
                           .beta_fast = 32,
                           .eps = 1e-5,
                           .eos = 2,
                           .draft_layers = 2,
                           .draft_heads = 16,
                           .draft_kv_heads = 8,
                           .draft_head_dim = 64,
                           .draft_intermediate = 512};

constexpr Numbers kModels[] = {kKimiK26, kimi_k2_instruct(), kTiny};
constexpr int64_t kBlockSize = 8, kMaxTaps = 6;

Numbers numbers_of(const SynthOptions& options) {
  const auto* model = std::find_if(std::begin(kModels), std::end(kModels),
                                   [&](const Numbers& m) { return options.like == m.like; });
  KDT_CHECK_ARGUMENT(model != std::end(kModels), "like is '", options.like,
                     "'; want kimi-k2.6, kimi-k2-instruct or tiny");
  Numbers n = *model;
  const auto take = [](const char* name, int64_t value, int64_t least, int64_t most, int64_t& out) {
    if (value == 0) return;
    KDT_CHECK_ARGUMENT(value >= least && value <= most, name, " is ", value, "; want ", least,
                       " to ", most);
    out = value;
  };
  take("layers", options.layers, 1, kMaxLayers, n.layers);
  take("experts", options.experts, n.experts_per_tok, kMaxExperts, n.experts);
  take("hidden", options.hidden, kWidthStep, kMaxWidth, n.hidden);
  take("vocab", options.vocab, kMinVocab, kMaxVocab, n.vocab);
  KDT_CHECK_ARGUMENT(n.hidden % kWidthStep == 0, "hidden is ", n.hidden, "; want a multiple of ",
                     kWidthStep);
  KDT_CHECK_ARGUMENT(n.layers * n.experts <= kMaxExpertsInAll, "experts is ", n.experts,
                     ", which in ", n.layers, " layers is ", n.layers * n.experts,
                     "; want at most ", kMaxExpertsInAll, " in all");
  return n;
}

JsonText int4_quantization() {
  return {
      {"config_groups",
       {{"group_0",
         {{"input_activations", nullptr},
          {"output_activations", nullptr},
          {"targets", {"Linear"}},
          {"weights",
           {{"actorder", nullptr},
            {"block_structure", nullptr},
            {"dynamic", false},
            {"group_size", 32},
            {"num_bits", 4},
            {"observer", "minmax"},
            {"observer_kwargs", JsonText::object()},
            {"strategy", "group"},
            {"symmetric", true},
            {"type", "int"}}}}}}},
      {"format", "pack-quantized"},
      {"ignore",
       {"re:.*lm_head.*", "re:.*self_attn.*", "re:.*shared_experts.*",
        R"(re:.*mlp\.(gate|up|gate_up|down)_proj.*)", "re:vision_tower.*", "re:mm_projector.*"}},
      {"kv_cache_scheme", nullptr},
      {"quant_method", "compressed-tensors"},
      {"quantization_status", "compressed"}};
}

JsonText fp8_quantization() {
  return {{"activation_scheme", "dynamic"},
          {"fmt", "e4m3"},
          {"quant_method", "fp8"},
          {"weight_block_size", {128, 128}}};
}

JsonText text_config(const Numbers& n) {
  const int64_t control = n.vocab - kNumControl;
  return {{"architectures", {"DeepseekV3ForCausalLM"}},
          {"attention_bias", false},
          {"attention_dropout", 0.0},
          {"aux_loss_alpha", 0.001},
          {"bos_token_id", control},
          {"eos_token_id", control + n.eos},
          {"ep_size", 1},
          {"first_k_dense_replace", 1},
          {"hidden_act", "silu"},
          {"hidden_size", n.hidden},
          {"initializer_range", 0.02},
          {"intermediate_size", n.intermediate},
          {"kv_lora_rank", n.kv_lora},
          {"max_position_embeddings", n.max_positions},
          {"model_type", "kimi_k2"},
          {"moe_intermediate_size", n.moe_intermediate},
          {"moe_layer_freq", 1},
          {"n_group", 1},
          {"n_routed_experts", n.experts},
          {"n_shared_experts", 1},
          {"norm_topk_prob", true},
          {"num_attention_heads", n.heads},
          {"num_experts_per_tok", n.experts_per_tok},
          {"num_hidden_layers", n.layers},
          {"num_key_value_heads", n.heads},
          {"num_nextn_predict_layers", 0},
          {"pad_token_id", n.vocab - 1},
          {"pretraining_tp", 1},
          {"q_lora_rank", n.q_lora},
          {"qk_nope_head_dim", n.nope},
          {"qk_rope_head_dim", n.rope},
          {"rms_norm_eps", n.eps},
          {"rope_scaling",
           {{"beta_fast", n.beta_fast},
            {"beta_slow", 1.0},
            {"factor", n.rope_factor},
            {"mscale", 1.0},
            {"mscale_all_dim", 1.0},
            {"original_max_position_embeddings", n.original_positions},
            {"type", "yarn"}}},
          {"rope_theta", 50000.0},
          {"routed_scaling_factor", 2.827},
          {"scoring_func", "sigmoid"},
          {"seq_aux", true},
          {"tie_word_embeddings", false},
          {"topk_group", 1},
          {"topk_method", "noaux_tc"},
          {"torch_dtype", "bfloat16"},
          {"use_cache", true},
          {"v_head_dim", n.v},
          {"vocab_size", n.vocab}};
}

// K2.5's and K2.6's file around the text model's; without the vision model, which is not made.
JsonText nested_config(const Numbers& n, JsonText text) {
  const int64_t control = n.vocab - kNumControl;
  return {{"architectures", {"KimiK25ForConditionalGeneration"}},
          {"bos_token_id", control},
          {"dtype", "bfloat16"},
          {"eos_token_id", control + n.eos},
          {"ignore_index", -100},
          {"media_placeholder_token_id", control + 21},
          {"model_type", "kimi_k25"},
          {"pad_token_id", n.vocab - 1},
          {"text_config", std::move(text)},
          {"tie_word_embeddings", false},
          {"use_unified_vision_chunk", true},
          {"video_placeholder", "<|kimi_k25_video_placeholder|>"}};
}

// Evenly from layer 1 to the third from the end, which gives a 61-layer target's 1 12 24 35 47 58;
// over all layers where these are too few.
std::vector<int64_t> taps(int64_t layers) {
  const int64_t count = std::min(kMaxTaps, layers);
  const bool few = layers - 3 < count;
  const int64_t first = few ? 0 : 1, last = few ? layers - 1 : layers - 3;
  std::vector<int64_t> ids;
  for (int64_t i = 0; i < count; ++i) {
    const double step = count > 1 ? static_cast<double>(last - first) / (count - 1) : 0;
    ids.push_back(first + std::llround(step * i));
  }
  return ids;
}

JsonText drafter_config(const Numbers& n) {
  return {{"architectures", {"DFlashDraftModel"}},
          {"attention_bias", false},
          {"block_size", kBlockSize},
          {"dflash_config", {{"mask_token_id", n.vocab - 2}, {"target_layer_ids", taps(n.layers)}}},
          {"dtype", "bfloat16"},
          {"head_dim", n.draft_head_dim},
          {"hidden_act", "silu"},
          {"hidden_size", n.hidden},
          {"intermediate_size", n.draft_intermediate},
          {"layer_types", std::vector<std::string>(n.draft_layers, "full_attention")},
          {"max_position_embeddings", n.max_positions},
          {"model_type", "qwen3"},
          {"num_attention_heads", n.draft_heads},
          {"num_hidden_layers", n.draft_layers},
          {"num_key_value_heads", n.draft_kv_heads},
          {"num_target_layers", n.layers},
          {"rms_norm_eps", 1e-6},
          {"rope_scaling",
           {{"beta_fast", 32.0},
            {"beta_slow", 1.0},
            {"factor", n.rope_factor},
            {"original_max_position_embeddings", n.original_positions},
            {"rope_type", "yarn"}}},
          {"rope_theta", 50000.0},
          {"sliding_window", nullptr},
          {"tie_word_embeddings", false},
          {"use_sliding_window", false},
          {"vocab_size", n.vocab}};
}

std::string text_of(const JsonText& json) { return json.dump(2) + "\n"; }

}  // namespace

int64_t& SynthOptions::number(std::string_view name) {
  const std::map<std::string_view, int64_t*> numbers = {{"layers", &layers},
                                                        {"experts", &experts},
                                                        {"hidden", &hidden},
                                                        {"vocab", &vocab},
                                                        {"seed", &seed}};
  const auto found = numbers.find(name);
  KDT_CHECK_ARGUMENT(found != numbers.end(), "a synthetic model's option is '", name,
                     "'; want layers, experts, hidden, vocab or seed");
  return *found->second;
}

SynthModel make_synth_model(const SynthOptions& options) {
  const Numbers n = numbers_of(options);
  JsonText text = text_config(n);
  text["quantization_config"] = n.fp8 ? fp8_quantization() : int4_quantization();
  SynthModel model;
  model.name = join("synthetic ", n.like);
  model.config_json = text_of(n.fp8 ? text : nested_config(n, std::move(text)));
  model.generation_config_json = text_of(
      JsonText{{"eos_token_id", n.vocab - kNumControl + n.eos}, {"max_length", n.max_positions}});
  model.drafter_config_json = text_of(drafter_config(n));
  // The generator's numbers are those that a reader of its files gets.
  model.config = parse_model_config(model.config_json, "config.json");
  model.drafter = parse_draft_config(model.drafter_config_json, "drafter/config.json");
  check_draft_config(model.drafter, model.config, "drafter/config.json");
  return model;
}

namespace {

constexpr const char* kSynthPrefix = "synth:";

}  // namespace

bool is_synth_name(const std::string& model) { return model.starts_with(kSynthPrefix); }

SynthOptions parse_synth_name(const std::string& model) {
  std::istringstream parts(model.substr(std::strlen(kSynthPrefix)));
  SynthOptions options;
  std::getline(parts, options.like, ',');
  for (std::string part; std::getline(parts, part, ',');) {
    const size_t equals = std::min(part.find('='), part.size());
    const std::string value = equals < part.size() ? part.substr(equals + 1) : "";
    const bool digits = !value.empty() && value.size() <= 18 &&
                        value.find_first_not_of("0123456789") == std::string::npos;
    KDT_CHECK_ARGUMENT(digits, "model is '", model, "': '", part,
                       "'; want a name, '=' and a number");
    options.number(part.substr(0, equals)) = std::stoll(value);
  }
  return options;
}

}  // namespace kdt
