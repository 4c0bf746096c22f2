#include <algorithm>
#include <filesystem>
#include <optional>
#include <set>

#include "core/error.h"
#include "io/mmap_file.h"
#include "model/config.h"
#include "model/config_reader.h"

namespace kdt {
namespace {

constexpr int64_t kMaxBlockSize = 256;
constexpr int64_t kMaxTaps = 64;
constexpr int64_t kMaxWindow = kMaxPositions;

// Some drafters write a key at the top, some in dflash_config. Returns the reader that has it; both
// must agree.
const ConfigReader& holder(const ConfigReader& top, const ConfigReader& dflash, const char* key) {
  if (dflash.find(key) == nullptr) return top;
  if (top.find(key) != nullptr &&
      top.integers(key, 0, INT64_MAX) != dflash.integers(key, 0, INT64_MAX)) {
    dflash.fail(key, "the outer one is " + top.find(key)->text());
  }
  return dflash;
}

// [num_hidden_layers] sliding window in tokens, 0 for a layer that sees everything.
std::vector<int64_t> read_windows(const ConfigReader& top, const ConfigReader& dflash,
                                  int64_t num_layers) {
  int64_t window =
      holder(top, dflash, "sliding_window").integer("sliding_window", 1, kMaxWindow, 0);
  top.expect_none("use_swa");  // a key of dflash_config
  const bool swa = dflash.boolean("use_swa", false);
  if (swa) {
    const int64_t swa_window = dflash.integer("swa_window_size", 1, kMaxWindow);
    if (window != 0 && window != swa_window)
      dflash.fail("swa_window_size", join("sliding_window is ", window));
    window = swa_window;
  }
  const std::vector<std::string> types = top.strings("layer_types");
  if (types.empty()) {
    // Qwen3's rule is by max_window_layers, which no drafter uses.
    top.expect_none("use_sliding_window");
    return std::vector<int64_t>(num_layers, swa ? window : 0);
  }
  if (types.size() != static_cast<size_t>(num_layers)) {
    top.fail("layer_types", join("want one for each of the ", num_layers, " layers"));
  }
  std::vector<int64_t> windows;
  for (const std::string& type : types) {
    if (type != "full_attention" && type != "sliding_attention") {
      top.fail("layer_types", "want full_attention and sliding_attention");
    }
    const bool slides = type == "sliding_attention";
    if (slides && window == 0) top.fail("sliding_window", "layer_types names sliding_attention");
    if (slides && !top.boolean("use_sliding_window", true)) {
      top.fail("use_sliding_window", "layer_types names sliding_attention");
    }
    windows.push_back(slides ? window : 0);
  }
  if (swa && std::count(windows.begin(), windows.end(), 0) == num_layers) {
    dflash.fail("use_swa", "layer_types names no sliding_attention");
  }
  return windows;
}

std::vector<bool> read_causal(const ConfigReader& top, const ConfigReader& dflash,
                              const std::vector<int64_t>& windows) {
  std::optional<bool> stated;
  for (const auto& [reader, key] :
       {std::pair{&dflash, "causal"}, {&top, "causal"}, {&top, "is_causal"}}) {
    if (reader->find(key) == nullptr) continue;
    const bool value = reader->boolean(key);
    if (stated && *stated != value)
      reader->fail(key, join("another key says ", *stated ? "true" : "false"));
    stated = value;
  }
  std::vector<bool> causal;
  // Where the checkpoint does not say: sliding layers are causal inside the block, full ones are
  // not.
  for (int64_t window : windows) causal.push_back(stated.value_or(window != 0));
  return causal;
}

}  // namespace

DraftConfig parse_draft_config(const std::string& json, const std::string& source) {
  const Json root = parse_json(json, source), empty{Json::Object{}};
  const ConfigReader top(source, root);
  const ConfigReader dflash = top.find("dflash_config")
                                  ? top.child("dflash_config")
                                  : ConfigReader(source, empty, "dflash_config.");
  if (!top.find("model_type")) top.fail("model_type", "want \"qwen3\"");
  top.expect_text("model_type", "qwen3");
  for (const std::string& name : top.strings("architectures")) {
    if (name != "DFlashDraftModel")
      top.fail("architectures", "this engine supports \"DFlashDraftModel\"");
  }
  dflash.expect_only({"target_layer_ids", "num_target_layers", "mask_token_id", "mask_token",
                      "block_size", "causal", "sliding_window", "use_swa", "swa_window_size",
                      "use_aux_hidden_state", "projector_type", "attention_sink_bias"});
  dflash.expect_flag("use_aux_hidden_state", true);
  dflash.expect_text("projector_type", "dflash");
  dflash.expect_none("attention_sink_bias");
  top.expect_none("add_swa_attention_sink_bias");

  DraftConfig c;
  c.vocab_size = top.integer("vocab_size", 1, kMaxVocab);
  if (top.integer("draft_vocab_size", 1, kMaxVocab, c.vocab_size) != c.vocab_size) {
    top.fail("draft_vocab_size", "this engine supports the whole vocabulary");
  }
  c.hidden_size = top.integer("hidden_size", 1, kMaxWidth);
  c.intermediate_size = top.integer("intermediate_size", 1, kMaxWidth);
  c.num_hidden_layers = top.integer("num_hidden_layers", 1, kMaxLayers);
  c.num_attention_heads = top.integer("num_attention_heads", 1, kMaxHeads);
  c.num_key_value_heads = top.integer("num_key_value_heads", 1, c.num_attention_heads);
  if (c.num_attention_heads % c.num_key_value_heads != 0) {
    top.fail("num_key_value_heads",
             join("want a divisor of num_attention_heads ", c.num_attention_heads));
  }
  c.head_dim = top.integer("head_dim", 2, kMaxHeadDim);
  if (c.head_dim % 2 != 0) top.fail("head_dim", "want an even number");
  c.rms_norm_eps = top.number("rms_norm_eps", 1e-12, 1);
  c.max_position_embeddings = top.integer("max_position_embeddings", 1, kMaxPositions, 0);
  c.rope = read_rope(top);
  expect_plain_arithmetic(top);
  top.expect_flag("use_qk_norm", true);
  top.expect_none("quantization_config");

  c.block_size = holder(top, dflash, "block_size").integer("block_size", 2, kMaxBlockSize);
  c.mask_token_id =
      holder(top, dflash, "mask_token_id").integer("mask_token_id", 0, c.vocab_size - 1);
  c.mask_token = dflash.string("mask_token", "");
  const ConfigReader& taps = holder(top, dflash, "target_layer_ids");
  c.num_target_layers =
      holder(top, dflash, "num_target_layers").integer("num_target_layers", 1, kMaxLayers, 0);
  c.target_layer_ids = taps.integers(
      "target_layer_ids", 0, (c.num_target_layers > 0 ? c.num_target_layers : kMaxLayers) - 1);
  if (c.target_layer_ids.empty() || c.target_layer_ids.size() > static_cast<size_t>(kMaxTaps)) {
    taps.fail("target_layer_ids", join("want 1 to ", kMaxTaps, " layers of the target"));
  }
  if (std::set(c.target_layer_ids.begin(), c.target_layer_ids.end()).size() !=
      c.target_layer_ids.size()) {
    taps.fail("target_layer_ids", "want no layer twice");
  }
  c.layer_window = read_windows(top, dflash, c.num_hidden_layers);
  c.layer_causal = read_causal(top, dflash, c.layer_window);
  return c;
}

DraftConfig load_draft_config(const std::string& folder) {
  const std::string path = (std::filesystem::path(folder) / "config.json").string();
  return parse_draft_config(read_text_file(path, kMaxConfigBytes), path);
}

void check_draft_config(const DraftConfig& drafter, const ModelConfig& target,
                        const std::string& where) {
  const auto same = [&](const char* key, int64_t value, const char* target_key, int64_t want) {
    KDT_CHECK(value == want, where, ": ", key, " is ", value, ", the target's ", target_key, " is ",
              want);
  };
  same("hidden_size", drafter.hidden_size, "hidden_size", target.hidden_size);
  same("vocab_size", drafter.vocab_size, "vocab_size", target.vocab_size);
  if (drafter.num_target_layers > 0) {
    same("num_target_layers", drafter.num_target_layers, "num_hidden_layers",
         target.num_hidden_layers);
  }
  for (const int64_t layer : drafter.target_layer_ids) {
    KDT_CHECK(layer < target.num_hidden_layers, where, ": target_layer_ids holds ", layer,
              ", the target has ", target.num_hidden_layers, " layers");
  }
}

bool is_draft_config(const std::string& folder) {
  const std::string path = (std::filesystem::path(folder) / "config.json").string();
  const Json root = parse_json(read_text_file(path, kMaxConfigBytes), path);
  // A drafter names its taps; a target has none.
  return root.find("dflash_config") != nullptr || root.find("target_layer_ids") != nullptr;
}

}  // namespace kdt
