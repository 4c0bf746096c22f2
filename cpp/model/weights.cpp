#include "model/weights.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <set>

#include "core/error.h"
#include "model/fp8.h"

namespace kdt {
namespace {

std::string shape_text(const std::vector<int64_t>& shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) text += (i ? ", " : "") + std::to_string(shape[i]);
  return text + "]";
}

const std::set<std::string> kFloats = {"BF16", "F32"};
const std::set<std::string> kFloatsOrFp8 = {"BF16", "F32", "F8_E4M3"};
const std::set<std::string> kShapeTypes = {"I32", "I64"};

// Empty when the tensor is as asked.
std::string fault_of(const TensorSource& source, const std::string& name,
                     const std::vector<int64_t>& shape, const std::set<std::string>& dtypes) {
  const SafetensorsView* view = source.find(name);
  if (view == nullptr) return name + ": missing";
  if (view->shape != shape)
    return name + ": shape " + shape_text(view->shape) + ", want " + shape_text(shape);
  if (!dtypes.contains(view->dtype)) {
    std::string wanted;
    for (const std::string& dtype : dtypes) wanted += (wanted.empty() ? "" : " or ") + dtype;
    return name + ": dtype " + view->dtype + ", want " + wanted;
  }
  return "";
}

bool is_ignored(const WeightSpecs& specs, const std::string& name) {
  // What comes before a name in order and is its beginning, comes right before it.
  const auto next = specs.upper_bound(name);
  if (next == specs.begin()) return false;
  const auto& [ignored, spec] = *std::prev(next);
  return spec.kind == WeightSpec::Kind::kIgnored &&
         (name == ignored || (ignored.ends_with('.') && name.starts_with(ignored)));
}

// `num_units` 0: any rows.
WeightSpec by_rows(WeightSpec::Kind kind, int64_t out, int64_t in, int64_t num_units = 0) {
  return {kind, out, in, WeightSpec::Split::kRows, num_units == 0 ? out : num_units};
}
WeightSpec by_columns(int64_t out, int64_t in, int64_t num_units = 0) {
  return {WeightSpec::Kind::kMatrix, out, in, WeightSpec::Split::kColumns,
          num_units == 0 ? in : num_units};
}

void add_mlp(WeightSpecs& specs, const std::string& name, int64_t hidden_size,
             int64_t intermediate_size) {
  using Kind = WeightSpec::Kind;
  specs[name + ".gate_proj"] = by_rows(Kind::kMatrix, intermediate_size, hidden_size);
  specs[name + ".up_proj"] = by_rows(Kind::kMatrix, intermediate_size, hidden_size);
  specs[name + ".down_proj"] = by_columns(hidden_size, intermediate_size);
}

}  // namespace

int64_t WeightSpec::slice_count(const Shard& shard) const {
  if (split == Split::kNone) return split_size();
  const int64_t unit = split_size() / num_units;
  return num_units % shard.size == 0 ? num_units / shard.size * unit : unit;
}

int64_t WeightSpec::slice_begin(const Shard& shard) const {
  if (split == Split::kNone) return 0;
  return shard.rank * num_units / shard.size * (split_size() / num_units);
}

int64_t WeightSpec::local_out(const Shard& shard) const {
  return split == Split::kRows ? slice_count(shard) : out;
}

int64_t WeightSpec::local_in(const Shard& shard) const {
  return split == Split::kColumns ? slice_count(shard) : in;
}

WeightSpecs target_weight_specs(const ModelConfig& c, const TensorSource& source) {
  using Kind = WeightSpec::Kind;
  int64_t moe_layers = 0;
  for (int64_t l = 0; l < c.num_hidden_layers; ++l) moe_layers += c.is_moe_layer(l) ? 1 : 0;
  const auto num_tensors = static_cast<int64_t>(source.tensors().size());
  KDT_CHECK(moe_layers * c.n_routed_experts <= num_tensors, source.name(),
            ": config.json asks for ", moe_layers, " layers of n_routed_experts ",
            c.n_routed_experts, ", the files hold ", num_tensors, " tensors");
  WeightSpecs specs;
  const std::string& p = c.tensor_prefix;
  specs[p + "embed_tokens"] = by_rows(Kind::kTable, c.vocab_size, c.hidden_size);
  specs[p + "norm.weight"] = {Kind::kVector, c.hidden_size};
  if (!c.tie_word_embeddings)
    specs[c.lm_head_name.substr(0, c.lm_head_name.rfind('.'))] =
        by_rows(Kind::kMatrix, c.vocab_size, c.hidden_size);
  const int64_t q_out = c.num_attention_heads * (c.qk_nope_head_dim + c.qk_rope_head_dim);
  for (int64_t l = 0; l < c.num_hidden_layers; ++l) {
    const std::string layer = p + "layers." + std::to_string(l) + ".";
    const std::string attention = layer + "self_attn.";
    specs[layer + "input_layernorm.weight"] = {Kind::kVector, c.hidden_size};
    specs[layer + "post_attention_layernorm.weight"] = {Kind::kVector, c.hidden_size};
    if (c.q_lora_rank > 0) {
      specs[attention + "q_a_proj"] = {Kind::kMatrix, c.q_lora_rank, c.hidden_size};
      specs[attention + "q_a_layernorm.weight"] = {Kind::kVector, c.q_lora_rank};
      specs[attention + "q_b_proj"] =
          by_rows(Kind::kMatrix, q_out, c.q_lora_rank, c.num_attention_heads);
    } else {
      specs[attention + "q_proj"] =
          by_rows(Kind::kMatrix, q_out, c.hidden_size, c.num_attention_heads);
    }
    specs[attention + "kv_a_proj_with_mqa"] = {Kind::kMatrix, c.kv_lora_rank + c.qk_rope_head_dim,
                                               c.hidden_size};
    specs[attention + "kv_a_layernorm.weight"] = {Kind::kVector, c.kv_lora_rank};
    // Read by rows, because its halves serve on both sides of the attention.
    specs[attention + "kv_b_proj"] =
        by_rows(Kind::kTable, c.num_attention_heads * (c.qk_nope_head_dim + c.v_head_dim),
                c.kv_lora_rank, c.num_attention_heads);
    specs[attention + "o_proj"] =
        by_columns(c.hidden_size, c.num_attention_heads * c.v_head_dim, c.num_attention_heads);
    const std::string mlp = layer + "mlp";
    if (!c.is_moe_layer(l)) {
      add_mlp(specs, mlp, c.hidden_size, c.intermediate_size);
      continue;
    }
    specs[mlp + ".gate"] = {Kind::kTable, c.n_routed_experts, c.hidden_size};
    specs[mlp + ".gate.e_score_correction_bias"] = {Kind::kVector, c.n_routed_experts};
    for (int64_t e = 0; e < c.n_routed_experts; ++e) {
      add_mlp(specs, mlp + ".experts." + std::to_string(e), c.hidden_size, c.moe_intermediate_size);
    }
    if (c.n_shared_experts > 0) {
      add_mlp(specs, mlp + ".shared_experts", c.hidden_size,
              c.moe_intermediate_size * c.n_shared_experts);
    }
  }
  for (auto& [name, spec] : specs) {
    spec.int4 = spec.kind == Kind::kMatrix && c.int4_group_size > 0;
    spec.fp8 = c.fp8 && (spec.kind == Kind::kMatrix || name.ends_with(".kv_b_proj"));
  }

  for (int64_t l = 0; l < c.num_hidden_layers; ++l) {
    specs[p + "layers." + std::to_string(l) + ".self_attn.rotary_emb.inv_freq"] = {Kind::kIgnored};
  }
  // Layers that predict the token after the next. They have a projection that no other layer has.
  for (int64_t l = c.num_hidden_layers; l < c.num_hidden_layers + c.num_nextn_predict_layers; ++l) {
    const std::string layer = p + "layers." + std::to_string(l) + ".";
    if (source.find(layer + "eh_proj.weight") != nullptr) specs[layer] = {Kind::kIgnored};
  }
  if (p.starts_with("language_model.")) {
    for (const char* part : {"vision_tower.", "mm_projector."}) specs[part] = {Kind::kIgnored};
  }
  return specs;
}

WeightSpecs draft_weight_specs(const DraftConfig& c) {
  using Kind = WeightSpec::Kind;
  WeightSpecs specs;
  const std::string& p = c.tensor_prefix;
  specs[p + "fc"] =
      by_columns(c.hidden_size, c.hidden_size * static_cast<int64_t>(c.target_layer_ids.size()));
  specs[p + "hidden_norm.weight"] = {Kind::kVector, c.hidden_size};
  specs[p + "norm.weight"] = {Kind::kVector, c.hidden_size};
  for (int64_t l = 0; l < c.num_hidden_layers; ++l) {
    const std::string layer = p + "layers." + std::to_string(l) + ".";
    const std::string attention = layer + "self_attn.";
    specs[layer + "input_layernorm.weight"] = {Kind::kVector, c.hidden_size};
    specs[layer + "post_attention_layernorm.weight"] = {Kind::kVector, c.hidden_size};
    specs[attention + "q_proj"] = by_rows(Kind::kMatrix, c.num_attention_heads * c.head_dim,
                                          c.hidden_size, c.num_attention_heads);
    for (const char* part : {"k_proj", "v_proj"}) {
      specs[attention + part] = by_rows(Kind::kMatrix, c.num_key_value_heads * c.head_dim,
                                        c.hidden_size, c.num_key_value_heads);
    }
    specs[attention + "o_proj"] =
        by_columns(c.hidden_size, c.num_attention_heads * c.head_dim, c.num_attention_heads);
    specs[attention + "q_norm.weight"] = {Kind::kVector, c.head_dim};
    specs[attention + "k_norm.weight"] = {Kind::kVector, c.head_dim};
    specs[attention + "rotary_emb.inv_freq"] = {Kind::kIgnored};
    add_mlp(specs, layer + "mlp", c.hidden_size, c.intermediate_size);
  }
  return specs;
}

std::string find_draft_prefix(const TensorSource& source) {
  const bool prefixed =
      source.find("fc.weight") == nullptr && source.find("model.fc.weight") != nullptr;
  return prefixed ? "model." : "";
}

void WeightFaults::add(std::string fault) {
  if (++count <= kMaxKept) faults.push_back(std::move(fault));
}

WeightFaults check_weights(const WeightSpecs& specs, const TensorSource& source) {
  WeightFaults result;
  std::set<std::string> known;
  const auto want = [&](const std::string& name, const std::vector<int64_t>& shape,
                        const std::set<std::string>& dtypes) {
    known.insert(name);
    const std::string fault = fault_of(source, name, shape, dtypes);
    if (!fault.empty()) result.add(fault);
  };
  for (const auto& [name, spec] : specs) {
    if (spec.kind == WeightSpec::Kind::kIgnored) continue;
    if (spec.kind == WeightSpec::Kind::kVector) {
      want(name, {spec.out}, kFloats);
      continue;
    }
    const bool packed = source.find(name + ".weight_packed") != nullptr;
    if (!packed && spec.int4 && source.find(name + ".weight") == nullptr) {
      result.add(name + ": missing, neither .weight_packed (int4) nor .weight is there");
    } else if (!packed) {
      const SafetensorsView* weight = source.find(name + ".weight");
      const bool fp8 = weight != nullptr && weight->dtype == "F8_E4M3";
      want(name + ".weight", {spec.out, spec.in}, spec.fp8 ? kFloatsOrFp8 : kFloats);
      if (fp8 && spec.fp8) {
        want(name + ".weight_scale_inv",
             {(spec.out + kFp8Block - 1) / kFp8Block, (spec.in + kFp8Block - 1) / kFp8Block},
             {"F32"});
      } else if (fp8) {
        known.insert(name + ".weight_scale_inv");  // one fault is enough
      }
    } else if (!spec.int4 || spec.in % 32 != 0) {
      for (const char* part : {".weight_packed", ".weight_scale", ".weight_shape"})
        known.insert(name + part);
      result.add(name + ".weight_packed: " +
                 (spec.kind == WeightSpec::Kind::kTable ? "this module cannot be int4"
                  : !spec.int4 ? "int4, but config.json has no quantization_config"
                               : "this module cannot be int4, its " + std::to_string(spec.in) +
                                     " inputs are no multiple of 32"));
    } else {
      want(name + ".weight_packed", {spec.out, spec.in / 8}, {"I32"});
      want(name + ".weight_scale", {spec.out, spec.in / 32}, {"BF16"});
      if (source.find(name + ".weight_shape") != nullptr)
        want(name + ".weight_shape", {2}, kShapeTypes);
    }
  }
  for (const auto& [name, view] : source.tensors()) {
    if (known.contains(name) || is_ignored(specs, name)) continue;
    result.add(name + ": the model of config.json has no such tensor");
    if (result.unknown.size() < WeightFaults::kMaxKept) result.unknown.push_back(name);
  }
  return result;
}

std::string weight_shape_fault(const std::string& tensor, const SafetensorsView& view,
                               const uint8_t* bytes, const WeightSpec& spec) {
  std::vector<int64_t> stated(2);
  if (view.dtype == "I64") {
    std::memcpy(stated.data(), bytes, 2 * sizeof(int64_t));
  } else {
    std::array<int32_t, 2> narrow;
    std::memcpy(narrow.data(), bytes, sizeof(narrow));
    stated.assign(narrow.begin(), narrow.end());
  }
  const std::vector<int64_t> want = {spec.out, spec.in};
  if (stated == want) return "";
  return tensor + ": holds " + shape_text(stated) + ", want " + shape_text(want);
}

std::string weight_shape_fault(const TensorSource& source, const std::string& name,
                               const WeightSpec& spec) {
  const std::string tensor = name + ".weight_shape";
  const SafetensorsView* view = source.find(tensor);
  if (view == nullptr || source.find(name + ".weight_packed") == nullptr ||
      !fault_of(source, tensor, {2}, kShapeTypes).empty())
    return "";
  std::array<uint8_t, 16> bytes;
  source.read(*view, bytes.data());
  return weight_shape_fault(tensor, *view, bytes.data(), spec);
}

namespace {

void check_divides(const char* key, int64_t value, const Shard& shard) {
  KDT_CHECK_ARGUMENT(value % shard.size == 0, "tensor_parallel_size is ", shard.size,
                     ", which does not divide ", key, ", ", value);
}

// A slice of an int4 matrix' columns is made of whole groups.
void check_groups(const char* key, int64_t value, int64_t group, const Shard& shard,
                  const char* instead) {
  check_divides(key, value, shard);
  KDT_CHECK_ARGUMENT(group == 0 || value / shard.size % group == 0, "tensor_parallel_size is ",
                     shard.size, ": a slice of ", key, " ", value, " would be ", value / shard.size,
                     ", no multiple of the int4 group_size ", group, instead);
}

}  // namespace

void check_ranks(int tensor_parallel_size, bool expert_parallel) {
  KDT_CHECK_ARGUMENT(tensor_parallel_size >= 1 && tensor_parallel_size <= kMaxRanks,
                     "tensor_parallel_size is ", tensor_parallel_size, "; want 1 to ", kMaxRanks);
  KDT_CHECK_ARGUMENT(
      tensor_parallel_size > 1 || !expert_parallel,
      "expert_parallel is true, but tensor_parallel_size is 1: there are no ranks to give "
      "whole experts to");
}

void check_int4_slice(const std::string& name, int64_t columns, const Shard& shard) {
  KDT_CHECK_ARGUMENT(columns % 32 == 0, "tensor_parallel_size is ", shard.size, ": a slice of ",
                     name, " would have ", columns,
                     " columns, no multiple of the int4 group_size 32");
}

void check_shard(const ModelConfig& c, const Shard& shard) {
  if (shard.size == 1) return;
  check_divides("num_attention_heads", c.num_attention_heads, shard);
  check_divides("vocab_size", c.vocab_size, shard);
  bool has_dense = false, has_moe = false;
  for (int64_t l = 0; l < c.num_hidden_layers; ++l)
    (c.is_moe_layer(l) ? has_moe : has_dense) = true;
  if (has_dense) check_divides("intermediate_size", c.intermediate_size, shard);
  if (!has_moe) return;
  check_divides("moe_intermediate_size * n_shared_experts",
                c.moe_intermediate_size * c.n_shared_experts, shard);
  if (shard.expert_parallel) {
    check_divides("n_routed_experts", c.n_routed_experts, shard);
  } else {
    check_groups("moe_intermediate_size", c.moe_intermediate_size, c.int4_group_size, shard,
                 ": use fewer ranks, or expert_parallel");
  }
}

void check_shard(const DraftConfig& c, const Shard& shard) {
  if (shard.size == 1) return;
  check_divides("the drafter's num_attention_heads", c.num_attention_heads, shard);
  check_divides("the drafter's intermediate_size", c.intermediate_size, shard);
  check_divides("the drafter's hidden_size", c.hidden_size, shard);
  const int64_t kv = c.num_key_value_heads;
  KDT_CHECK_ARGUMENT(kv % shard.size == 0 || shard.size % kv == 0, "tensor_parallel_size is ",
                     shard.size,
                     ", which neither divides nor is divided by the drafter's "
                     "num_key_value_heads, ",
                     kv);
}

}  // namespace kdt
