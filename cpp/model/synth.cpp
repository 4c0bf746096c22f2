#include "model/synth.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <iterator>
#include <sstream>
#include <string_view>
#include <utility>

#include "core/dtype.h"
#include "core/error.h"
#include "io/xxh64.h"
#include "model/fp8.h"

namespace kdt {
namespace {

// Deviations: of norms' weights around 1, of the scores that choose experts, of logits.
constexpr double kNormSpread = 0.1, kBiasSpread = 0.03, kLogitSpread = 4;

// Types in the order of a safetensors file, and their bytes.
constexpr std::pair<const char*, uint64_t> kTypes[] = {
    {"F32", 4}, {"I32", 4}, {"BF16", 2}, {"F8_E4M3", 1}};

int type_of(const std::string& dtype) {
  const auto* found = std::find_if(std::begin(kTypes), std::end(kTypes),
                                   [&](const auto& type) { return dtype == type.first; });
  return static_cast<int>(found - kTypes);
}

std::vector<uint8_t> bytes_of(const auto& values) {
  std::vector<uint8_t> bytes(values.size() * sizeof(values[0]));
  std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}

std::string numbered(const char* format, int64_t index, int64_t count) {
  char name[64];
  std::snprintf(name, sizeof(name), format, static_cast<int>(index), static_cast<int>(count));
  return name;
}

}  // namespace

SynthSource::SynthSource(const SynthModel& model, Part part, uint64_t seed)
    : name_(part == Part::kTarget ? model.name : model.name + "/drafter"),
      fp8_(model.config.fp8 && part == Part::kTarget),
      seed_(seed) {
  if (part == Part::kTarget) {
    list_target(model);
  } else {
    list_drafter(model.drafter);
  }
}

template <typename Make>
const SynthRecipe& SynthSource::recipe(const std::string& id, const Make& make) {
  const auto found = recipes_.find(id);
  return found != recipes_.end() ? found->second : recipes_.emplace(id, make()).first->second;
}

// ------------------------------------------------------------------ modules

void SynthSource::tensor(const char* part, const std::string& name, const char* dtype,
                         std::vector<int64_t> shape, const SynthRecipe& recipe) {
  uint64_t bytes = kTypes[type_of(dtype)].second;
  for (const int64_t size : shape) bytes *= size;
  const auto [at, added] = tensors_.insert({name, {dtype, std::move(shape), nullptr, 0, bytes}});
  KDT_CHECK(added, "synth: tensor '", name, "' twice");
  entries_.push_back({&at->first, &at->second, &recipe, xxh64(name.data(), name.size(), seed_)});
  bytes_by_part_[part] += bytes;
}

void SynthSource::norm(const char* part, const std::string& name, int64_t size) {
  tensor(part, name, "BF16", {size}, recipe("norm", [] { return normal_bf16(1, kNormSpread); }));
}

void SynthSource::matrix(const char* part, const std::string& module, int64_t out, int64_t in,
                         double gain) {
  const double deviation = gain / std::sqrt(in);
  tensor(part, module + ".weight", "BF16", {out, in},
         recipe(join("normal ", deviation), [=] { return normal_bf16(0, deviation); }));
}

void SynthSource::fp8(const char* part, const std::string& module, int64_t out, int64_t in) {
  const double size = fp8_unit() / std::sqrt(in);
  tensor(part, module + ".weight", "F8_E4M3", {out, in}, recipe("fp8", fp8_codes));
  tensor(part, module + ".weight_scale_inv", "F32",
         {(out + kFp8Block - 1) / kFp8Block, (in + kFp8Block - 1) / kFp8Block},
         recipe(join("fp8 scales ", size), [=] { return scales_f32(size); }));
}

void SynthSource::int4(const char* part, const std::string& module, int64_t out, int64_t in) {
  const double size = int4_unit() / std::sqrt(in);
  tensor(part, module + ".weight_packed", "I32", {out, in / 8}, recipe("int4", int4_codes));
  tensor(part, module + ".weight_scale", "BF16", {out, in / 32},
         recipe(join("int4 scales ", size), [=] { return scales_bf16(size); }));
  tensor(part, module + ".weight_shape", "I32", {2}, recipe(join("shape ", out, " ", in), [=] {
           const std::vector<int32_t> shape = {static_cast<int32_t>(out), static_cast<int32_t>(in)};
           return SynthRecipe{SynthRecipe::Kind::kLiteral, 1, bytes_of(shape)};
         }));
}

void SynthSource::linear(const char* part, const std::string& module, int64_t out, int64_t in) {
  fp8_ ? fp8(part, module, out, in) : matrix(part, module, out, in, 1);
}

void SynthSource::expert(const char* part, const std::string& module, int64_t out, int64_t in) {
  fp8_ ? fp8(part, module, out, in) : int4(part, module, out, in);
}

void SynthSource::mlp(Add add, const char* part, const std::string& module, int64_t hidden,
                      int64_t width) {
  (this->*add)(part, module + ".gate_proj", width, hidden);
  (this->*add)(part, module + ".up_proj", width, hidden);
  (this->*add)(part, module + ".down_proj", hidden, width);
}

// ------------------------------------------------------------------ models

void SynthSource::list_target(const SynthModel& model) {
  const ModelConfig& c = model.config;
  // K2.6: a shard a layer, and one more for the rest. K2-Instruct has as many shards as layers.
  const int64_t count = c.num_hidden_layers + (fp8_ ? 0 : 1);
  const char* format = fp8_ ? "model-%d-of-%d.safetensors" : "model-%05d-of-%06d.safetensors";
  const auto embedding = [&] {
    tensor("embedding", c.tensor_prefix + "embed_tokens.weight", "BF16",
           {c.vocab_size, c.hidden_size}, recipe("normal 1", [] { return normal_bf16(0, 1); }));
  };
  if (fp8_) embedding();
  for (int64_t layer = 0; layer < c.num_hidden_layers; ++layer) {
    list_layer(c, layer);
    if (layer + 1 < count) end_shard(numbered(format, layer + 1, count));
  }
  if (!fp8_) embedding();
  norm("norms", c.tensor_prefix + "norm.weight", c.hidden_size);
  matrix("head", c.lm_head_name.substr(0, c.lm_head_name.rfind('.')), c.vocab_size, c.hidden_size,
         kLogitSpread);
  end_shard(numbered(format, count, count));
}

void SynthSource::list_layer(const ModelConfig& c, int64_t index) {
  const std::string layer = join(c.tensor_prefix, "layers.", index, ".");
  const std::string attention = layer + "self_attn.", mlp_name = layer + "mlp";
  norm("norms", layer + "input_layernorm.weight", c.hidden_size);
  norm("norms", layer + "post_attention_layernorm.weight", c.hidden_size);
  norm("attention", attention + "q_a_layernorm.weight", c.q_lora_rank);
  norm("attention", attention + "kv_a_layernorm.weight", c.kv_lora_rank);
  const auto add = [&](const char* name, int64_t out, int64_t in) {
    linear("attention", attention + name, out, in);
  };
  add("q_a_proj", c.q_lora_rank, c.hidden_size);
  add("q_b_proj", c.num_attention_heads * (c.qk_nope_head_dim + c.qk_rope_head_dim), c.q_lora_rank);
  add("kv_a_proj_with_mqa", c.kv_lora_rank + c.qk_rope_head_dim, c.hidden_size);
  add("kv_b_proj", c.num_attention_heads * (c.qk_nope_head_dim + c.v_head_dim), c.kv_lora_rank);
  add("o_proj", c.hidden_size, c.num_attention_heads * c.v_head_dim);
  if (fp8_) {
    // K2-Instruct's files have this table, which no reader needs, at the width of plain attention.
    const int64_t size = std::max<int64_t>(1, c.hidden_size / c.num_attention_heads / 2);
    std::vector<uint16_t> values;
    for (int64_t i = 0; i < size; ++i) {
      const double frequency = std::pow(c.rope.rope_theta, -static_cast<double>(i) / size);
      values.push_back(float_to_bf16(static_cast<float>(frequency)));
    }
    tensor("attention", attention + "rotary_emb.inv_freq", "BF16", {size}, recipe("inv_freq", [&] {
             return SynthRecipe{SynthRecipe::Kind::kLiteral, 1, bytes_of(values)};
           }));
  }
  if (!c.is_moe_layer(index)) {
    mlp(&SynthSource::linear, "dense mlp", mlp_name, c.hidden_size, c.intermediate_size);
    return;
  }
  matrix("router", mlp_name + ".gate", c.n_routed_experts, c.hidden_size, 1);
  tensor("router", mlp_name + ".gate.e_score_correction_bias", "F32", {c.n_routed_experts},
         recipe("bias", [] { return normal_f32(0, kBiasSpread); }));
  mlp(&SynthSource::linear, "shared experts", mlp_name + ".shared_experts", c.hidden_size,
      c.moe_intermediate_size * c.n_shared_experts);
  for (int64_t e = 0; e < c.n_routed_experts; ++e) {
    mlp(&SynthSource::expert, "experts", join(mlp_name, ".experts.", e), c.hidden_size,
        c.moe_intermediate_size);
  }
}

void SynthSource::list_drafter(const DraftConfig& c) {
  linear("other", "fc", c.hidden_size,
         c.hidden_size * static_cast<int64_t>(c.target_layer_ids.size()));
  norm("norms", "hidden_norm.weight", c.hidden_size);
  norm("norms", "norm.weight", c.hidden_size);
  const int64_t q_size = c.num_attention_heads * c.head_dim;
  const int64_t kv_size = c.num_key_value_heads * c.head_dim;
  for (int64_t l = 0; l < c.num_hidden_layers; ++l) {
    const std::string layer = join("layers.", l, "."), attention = layer + "self_attn.";
    norm("norms", layer + "input_layernorm.weight", c.hidden_size);
    norm("norms", layer + "post_attention_layernorm.weight", c.hidden_size);
    linear("attention", attention + "q_proj", q_size, c.hidden_size);
    linear("attention", attention + "k_proj", kv_size, c.hidden_size);
    linear("attention", attention + "v_proj", kv_size, c.hidden_size);
    linear("attention", attention + "o_proj", c.hidden_size, q_size);
    norm("attention", attention + "q_norm.weight", c.head_dim);
    norm("attention", attention + "k_norm.weight", c.head_dim);
    mlp(&SynthSource::linear, "dense mlp", layer + "mlp", c.hidden_size, c.intermediate_size);
  }
  end_shard("model.safetensors");
}

// ------------------------------------------------------------------ shards

void SynthSource::end_shard(const std::string& file) {
  const auto first = entries_.begin() + static_cast<int64_t>(num_placed_);
  // As the `safetensors` package sorts: wide types first, then by name.
  std::sort(first, entries_.end(), [](const Entry& a, const Entry& b) {
    return std::pair(type_of(a.view->dtype), std::string_view(*a.name)) <
           std::pair(type_of(b.view->dtype), std::string_view(*b.name));
  });
  shards_.push_back({file, end_, 0});
  for (auto entry = first; entry != entries_.end(); ++entry) {
    entry->view->offset = end_;
    end_ += entry->view->bytes;
  }
  shards_.back().bytes = end_ - shards_.back().offset;
  num_placed_ = entries_.size();
}

size_t SynthSource::entry_at(uint64_t offset) const {
  const auto after = std::upper_bound(
      entries_.begin(), entries_.end(), offset,
      [](uint64_t value, const Entry& entry) { return value < entry.view->offset; });
  return after - entries_.begin() - 1;
}

std::string SynthSource::header(const SynthShard& shard) const {
  std::ostringstream json;
  json << R"({"__metadata__":{"format":"pt"})";
  for (size_t i = entry_at(shard.offset); i < entries_.size(); ++i) {
    const SafetensorsView& view = *entries_[i].view;
    const uint64_t begin = view.offset - shard.offset;
    if (begin >= shard.bytes) break;
    json << ",\"" << *entries_[i].name << R"(":{"dtype":")" << view.dtype << R"(","shape":[)";
    for (size_t d = 0; d < view.shape.size(); ++d) json << (d ? "," : "") << view.shape[d];
    json << R"(],"data_offsets":[)" << begin << "," << begin + view.bytes << "]}";
  }
  json << "}";
  std::string text = json.str();
  text.resize((text.size() + 7) / 8 * 8, ' ');
  const uint64_t length = text.size();
  return std::string(reinterpret_cast<const char*>(&length), sizeof(length)) + text;
}

void SynthSource::read_range(const InputFile* file, uint64_t offset, uint64_t bytes,
                             void* out) const {
  KDT_CHECK_ARGUMENT(file == nullptr, name_, ": file is ", file->path(), "; want none");
  KDT_CHECK_ARGUMENT(offset <= end_ && bytes <= end_ - offset, name_, ": offset is ", offset,
                     " and bytes ", bytes, "; there are ", end_);
  auto* to = static_cast<uint8_t*>(out);
  const uint64_t end = offset + bytes;
  for (size_t i = entry_at(offset); offset < end; ++i) {
    const Entry& entry = entries_[i];
    const uint64_t begin = offset - entry.view->offset;
    const uint64_t stop = std::min(entry.view->bytes, end - entry.view->offset);
    make_synth_bytes(*entry.recipe, entry.key, begin, stop, to);
    to += stop - begin;
    offset += stop - begin;
  }
}

}  // namespace kdt
