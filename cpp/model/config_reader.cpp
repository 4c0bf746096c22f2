#include "model/config_reader.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "core/error.h"

namespace kdt {
namespace {

std::optional<int64_t> as_integer(const Json& json, int64_t min, int64_t max) {
  int64_t value = 0;
  if (const auto* negative = json.get_if<int64_t>()) {
    value = *negative;
  } else if (const auto* positive = json.get_if<uint64_t>(); positive && *positive <= INT64_MAX) {
    value = static_cast<int64_t>(*positive);
  } else {
    return std::nullopt;
  }
  if (value < min || value > max) return std::nullopt;
  return value;
}

std::optional<double> as_number(const Json& json) {
  if (const auto* number = json.get_if<double>()) return *number;
  if (const auto* negative = json.get_if<int64_t>()) return static_cast<double>(*negative);
  if (const auto* positive = json.get_if<uint64_t>()) return static_cast<double>(*positive);
  return std::nullopt;
}

// The rope object's kind; "" when it does not say.
std::string rope_type(const ConfigReader& rope) {
  const std::string type = rope.string("type", ""), rope_type = rope.string("rope_type", type);
  if (!type.empty() && type != rope_type) rope.fail("type", "rope_type is \"" + rope_type + "\"");
  return rope_type;
}

RopeConfig read_rope_object(const ConfigReader& rope, double theta) {
  RopeConfig config;
  config.rope_theta = theta;
  rope.expect_only({"type", "rope_type", "rope_theta", "factor", "beta_fast", "beta_slow", "mscale",
                    "mscale_all_dim", "original_max_position_embeddings", "attention_factor",
                    "truncate", "partial_rotary_factor"});
  if (rope.number("partial_rotary_factor", 0, 1, 1) != 1)
    rope.fail("partial_rotary_factor", "want 1");
  const std::string type = rope_type(rope);
  if (type.empty() || type == "default") {
    // A factor that nobody applies would change the model in silence.
    for (const char* key : {"factor", "attention_factor"}) {
      if (rope.number(key, 0, 1e9, 1) != 1) rope.fail(key, "the rope_type is not yarn");
    }
    rope.expect_flag("truncate", true);
    return config;
  }
  if (type != "yarn")
    rope.fail(rope.find("rope_type") ? "rope_type" : "type", "want default or yarn");
  config.yarn = true;
  config.factor = rope.number("factor", 1, 1e6);
  config.original_max_position_embeddings =
      rope.integer("original_max_position_embeddings", 1, kMaxPositions);
  config.beta_fast = rope.number("beta_fast", 1e-3, 1e6, config.beta_fast);
  config.beta_slow = rope.number("beta_slow", 1e-3, 1e6, config.beta_slow);
  if (config.beta_fast < config.beta_slow) rope.fail("beta_fast", "want at least beta_slow");
  config.truncate = rope.boolean("truncate", config.truncate);
  config.attention_factor = rope.number("attention_factor", 1e-3, 1e3, config.attention_factor);
  config.mscale = rope.number("mscale", 0, 100, config.mscale);
  config.mscale_all_dim = rope.number("mscale_all_dim", 0, 100, config.mscale_all_dim);
  // Implementations disagree on what one of the two alone means, unless it says what its absence
  // says.
  if (config.mscale_all_dim != 0 && (!rope.find("mscale") || config.mscale == 0)) {
    rope.fail("mscale", "want a number beside mscale_all_dim");
  }
  if (config.mscale_all_dim == 0 && config.mscale != 1)
    rope.fail("mscale", "want 1 without mscale_all_dim");
  return config;
}

}  // namespace

ConfigReader::ConfigReader(std::string source, const Json& object, std::string prefix)
    : source_(std::move(source)), object_(&object), prefix_(std::move(prefix)) {
  const std::string name = prefix_.empty() ? "" : " " + prefix_.substr(0, prefix_.size() - 1);
  KDT_CHECK(object.get_if<Json::Object>() != nullptr, source_, ":", name, " is ", object.text(),
            ", want an object");
}

const Json* ConfigReader::find(std::string_view key) const {
  const Json* value = object_->find(key);
  return value == nullptr || value->is_null() ? nullptr : value;
}

std::string ConfigReader::where(std::string_view key) const {
  return join(source_, ": ", prefix_, key);
}

void ConfigReader::fail(std::string_view key, const std::string& what) const {
  const Json* value = object_->find(key);
  throw Error(join(where(key), " is ", value == nullptr ? "missing" : value->text(), ", ", what));
}

const Json& ConfigReader::required(std::string_view key, const std::string& what) const {
  const Json* value = find(key);
  if (value == nullptr) fail(key, what);
  return *value;
}

int64_t ConfigReader::integer(std::string_view key, int64_t min, int64_t max) const {
  const std::string want = join("want an integer from ", min, " to ", max);
  const auto value = as_integer(required(key, want), min, max);
  if (!value) fail(key, want);
  return *value;
}

int64_t ConfigReader::integer(std::string_view key, int64_t min, int64_t max,
                              int64_t fallback) const {
  return find(key) ? integer(key, min, max) : fallback;
}

double ConfigReader::number(std::string_view key, double min, double max) const {
  const std::string want = join("want a number from ", min, " to ", max);
  const auto value = as_number(required(key, want));
  if (!value || !(*value >= min && *value <= max)) fail(key, want);
  return *value;
}

double ConfigReader::number(std::string_view key, double min, double max, double fallback) const {
  return find(key) ? number(key, min, max) : fallback;
}

bool ConfigReader::boolean(std::string_view key) const {
  const auto* value = required(key, "want true or false").get_if<bool>();
  if (value == nullptr) fail(key, "want true or false");
  return *value;
}

bool ConfigReader::boolean(std::string_view key, bool fallback) const {
  return find(key) ? boolean(key) : fallback;
}

std::string ConfigReader::string(std::string_view key, std::string_view fallback) const {
  const Json* value = find(key);
  if (value == nullptr) return std::string(fallback);
  const auto* text = value->get_if<std::string>();
  if (text == nullptr) fail(key, "want a string");
  return *text;
}

std::vector<int64_t> ConfigReader::integers(std::string_view key, int64_t min, int64_t max) const {
  const Json* value = find(key);
  if (value == nullptr) return {};
  const std::string want = join("want integers from ", min, " to ", max);
  const auto* array = value->get_if<Json::Array>();
  if (array == nullptr) return {integer(key, min, max)};
  std::vector<int64_t> list;
  for (const Json& item : *array) {
    const auto integer = as_integer(item, min, max);
    if (!integer) fail(key, join("holds ", item.text(), "; ", want));
    list.push_back(*integer);
  }
  return list;
}

std::vector<std::string> ConfigReader::strings(std::string_view key) const {
  const Json* value = find(key);
  if (value == nullptr) return {};
  const auto* array = value->get_if<Json::Array>();
  if (array == nullptr) fail(key, "want a list of strings");
  std::vector<std::string> list;
  for (const Json& item : *array) {
    const auto* text = item.get_if<std::string>();
    if (text == nullptr) fail(key, "want a list of strings");
    list.push_back(*text);
  }
  return list;
}

ConfigReader ConfigReader::child(std::string_view key) const {
  return ConfigReader(source_, required(key, "want an object"), join(prefix_, key, "."));
}

void ConfigReader::expect_text(std::string_view key, std::string_view value) const {
  if (string(key, value) != value) fail(key, join("this engine supports \"", value, "\""));
}

void ConfigReader::expect_flag(std::string_view key, bool value) const {
  if (boolean(key, value) != value)
    fail(key, join("this engine supports ", value ? "true" : "false"));
}

void ConfigReader::expect_number(std::string_view key, double value) const {
  if (find(key) && as_number(*find(key)) != value) fail(key, join("this engine supports ", value));
}

void ConfigReader::expect_none(std::string_view key) const {
  const Json* value = find(key);
  if (value == nullptr) return;
  const auto* flag = value->get_if<bool>();
  const auto* object = value->get_if<Json::Object>();
  if ((flag != nullptr && !*flag) || (object != nullptr && object->empty())) return;
  fail(key, "this engine supports null");
}

void ConfigReader::expect_only(std::initializer_list<std::string_view> keys) const {
  for (const auto& [key, value] : *object_->get_if<Json::Object>()) {
    if (std::find(keys.begin(), keys.end(), key) == keys.end() && !value.is_null()) {
      fail(key, "a key this engine does not know");
    }
  }
}

RopeConfig read_rope(const ConfigReader& config) {
  constexpr double kMinTheta = 2, kMaxTheta = 1e12;
  const double outer = config.number("rope_theta", kMinTheta, kMaxTheta, 0);
  std::optional<RopeConfig> rope;
  for (const char* key : {"rope_parameters", "rope_scaling"}) {
    if (config.find(key) == nullptr) continue;
    const ConfigReader object = config.child(key);
    const double theta = object.number("rope_theta", kMinTheta, kMaxTheta, outer);
    if (config.find("rope_theta") && theta != outer)
      object.fail("rope_theta", join("the outer one is ", outer));
    const RopeConfig read = read_rope_object(object, theta);
    if (rope && !(*rope == read)) config.fail(key, "rope_parameters says otherwise");
    rope = read;
  }
  if (!rope) {
    rope.emplace();
    rope->rope_theta = outer;
  }
  // No default: the dialects' differ.
  if (rope->rope_theta == 0) config.number("rope_theta", kMinTheta, kMaxTheta);
  return *rope;
}

void expect_plain_arithmetic(const ConfigReader& config) {
  for (const char* key : {"attention_bias", "qkv_bias", "add_qkv_bias", "use_qkv_bias", "mlp_bias",
                          "use_bias", "add_bias_linear", "qk_layernorm"}) {
    config.expect_flag(key, false);
  }
  for (const char* key :
       {"partial_rotary_factor", "rotary_pct", "rope_ratio", "logits_scaling", "logit_scale",
        "embedding_multiplier", "residual_multiplier", "scale_emb"}) {
    config.expect_number(key, 1);
  }
  for (const char* key :
       {"attn_logit_softcapping", "final_logit_softcapping", "router_logit_softcapping",
        "attention_multiplier", "query_pre_attn_scalar", "attention_chunk_size",
        "attn_temperature_tuning", "scale_depth", "swiglu_limit", "index_topk"}) {
    config.expect_none(key);
  }
  config.expect_text("hidden_act", "silu");
}

}  // namespace kdt
