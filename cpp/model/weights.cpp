#include "model/weights.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <set>

namespace kdt {
namespace {

std::string shape_text(const std::vector<int64_t>& shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) text += (i ? ", " : "") + std::to_string(shape[i]);
  return text + "]";
}

// Empty when the tensor is as asked.
std::string fault_of(const SafetensorsFolder& folder, const std::string& name,
                     const std::vector<int64_t>& shape, const std::set<std::string>& dtypes) {
  const SafetensorsView* view = folder.find(name);
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

void add_mlp(WeightSpecs& specs, const std::string& name, int64_t hidden_size,
             int64_t intermediate_size) {
  using Kind = WeightSpec::Kind;
  specs[name + ".gate_proj"] = {Kind::kMatrix, intermediate_size, hidden_size};
  specs[name + ".up_proj"] = {Kind::kMatrix, intermediate_size, hidden_size};
  specs[name + ".down_proj"] = {Kind::kMatrix, hidden_size, intermediate_size};
}

std::vector<float> to_floats(const std::vector<uint8_t>& bytes, const std::string& dtype) {
  std::vector<float> values(bytes.size() / (dtype == "BF16" ? 2 : 4));
  if (dtype != "BF16") {
    std::memcpy(values.data(), bytes.data(), bytes.size());
    return values;
  }
  for (size_t i = 0; i < values.size(); ++i) {
    uint16_t bits;
    std::memcpy(&bits, bytes.data() + 2 * i, sizeof(bits));
    values[i] = bf16_to_float(bits);
  }
  return values;
}

}  // namespace

WeightSpecs target_weight_specs(const ModelConfig& c, const SafetensorsFolder& folder) {
  using Kind = WeightSpec::Kind;
  int64_t moe_layers = 0;
  for (int64_t l = 0; l < c.num_hidden_layers; ++l) moe_layers += c.is_moe_layer(l) ? 1 : 0;
  const auto num_tensors = static_cast<int64_t>(folder.tensors().size());
  KDT_CHECK(moe_layers * c.n_routed_experts <= num_tensors, folder.folder(),
            ": config.json asks for ", moe_layers, " layers of n_routed_experts ",
            c.n_routed_experts, ", the files hold ", num_tensors, " tensors");
  WeightSpecs specs;
  const std::string& p = c.tensor_prefix;
  specs[p + "embed_tokens"] = {Kind::kTable, c.vocab_size, c.hidden_size};
  specs[p + "norm.weight"] = {Kind::kVector, c.hidden_size};
  if (!c.tie_word_embeddings)
    specs[c.lm_head_name.substr(0, c.lm_head_name.rfind('.'))] = {Kind::kMatrix, c.vocab_size,
                                                                  c.hidden_size};
  const int64_t q_out = c.num_attention_heads * (c.qk_nope_head_dim + c.qk_rope_head_dim);
  for (int64_t l = 0; l < c.num_hidden_layers; ++l) {
    const std::string layer = p + "layers." + std::to_string(l) + ".";
    const std::string attention = layer + "self_attn.";
    specs[layer + "input_layernorm.weight"] = {Kind::kVector, c.hidden_size};
    specs[layer + "post_attention_layernorm.weight"] = {Kind::kVector, c.hidden_size};
    if (c.q_lora_rank > 0) {
      specs[attention + "q_a_proj"] = {Kind::kMatrix, c.q_lora_rank, c.hidden_size};
      specs[attention + "q_a_layernorm.weight"] = {Kind::kVector, c.q_lora_rank};
      specs[attention + "q_b_proj"] = {Kind::kMatrix, q_out, c.q_lora_rank};
    } else {
      specs[attention + "q_proj"] = {Kind::kMatrix, q_out, c.hidden_size};
    }
    specs[attention + "kv_a_proj_with_mqa"] = {Kind::kMatrix, c.kv_lora_rank + c.qk_rope_head_dim,
                                               c.hidden_size};
    specs[attention + "kv_a_layernorm.weight"] = {Kind::kVector, c.kv_lora_rank};
    // Read by rows, because its halves serve on both sides of the attention.
    specs[attention + "kv_b_proj"] = {
        Kind::kTable, c.num_attention_heads * (c.qk_nope_head_dim + c.v_head_dim), c.kv_lora_rank};
    specs[attention + "o_proj"] = {Kind::kMatrix, c.hidden_size,
                                   c.num_attention_heads * c.v_head_dim};
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
  for (auto& [name, spec] : specs) spec.int4 = spec.kind == Kind::kMatrix && c.int4_group_size > 0;

  for (int64_t l = 0; l < c.num_hidden_layers; ++l) {
    specs[p + "layers." + std::to_string(l) + ".self_attn.rotary_emb.inv_freq"] = {Kind::kIgnored};
  }
  // Layers that predict the token after the next. They have a projection that no other layer has.
  for (int64_t l = c.num_hidden_layers; l < c.num_hidden_layers + c.num_nextn_predict_layers; ++l) {
    const std::string layer = p + "layers." + std::to_string(l) + ".";
    if (folder.find(layer + "eh_proj.weight") != nullptr) specs[layer] = {Kind::kIgnored};
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
  specs[p + "fc"] = {Kind::kMatrix, c.hidden_size,
                     c.hidden_size * static_cast<int64_t>(c.target_layer_ids.size())};
  specs[p + "hidden_norm.weight"] = {Kind::kVector, c.hidden_size};
  specs[p + "norm.weight"] = {Kind::kVector, c.hidden_size};
  for (int64_t l = 0; l < c.num_hidden_layers; ++l) {
    const std::string layer = p + "layers." + std::to_string(l) + ".";
    const std::string attention = layer + "self_attn.";
    specs[layer + "input_layernorm.weight"] = {Kind::kVector, c.hidden_size};
    specs[layer + "post_attention_layernorm.weight"] = {Kind::kVector, c.hidden_size};
    specs[attention + "q_proj"] = {Kind::kMatrix, c.num_attention_heads * c.head_dim,
                                   c.hidden_size};
    specs[attention + "k_proj"] = {Kind::kMatrix, c.num_key_value_heads * c.head_dim,
                                   c.hidden_size};
    specs[attention + "v_proj"] = {Kind::kMatrix, c.num_key_value_heads * c.head_dim,
                                   c.hidden_size};
    specs[attention + "o_proj"] = {Kind::kMatrix, c.hidden_size,
                                   c.num_attention_heads * c.head_dim};
    specs[attention + "q_norm.weight"] = {Kind::kVector, c.head_dim};
    specs[attention + "k_norm.weight"] = {Kind::kVector, c.head_dim};
    specs[attention + "rotary_emb.inv_freq"] = {Kind::kIgnored};
    add_mlp(specs, layer + "mlp", c.hidden_size, c.intermediate_size);
  }
  return specs;
}

std::string find_draft_prefix(const SafetensorsFolder& folder) {
  const bool prefixed =
      folder.find("fc.weight") == nullptr && folder.find("model.fc.weight") != nullptr;
  return prefixed ? "model." : "";
}

void WeightFaults::add(std::string fault) {
  if (++count <= kMaxKept) faults.push_back(std::move(fault));
}

WeightFaults check_weights(const WeightSpecs& specs, const SafetensorsFolder& folder) {
  const std::set<std::string> floats = {"BF16", "F32"};
  WeightFaults result;
  std::set<std::string> known;
  const auto want = [&](const std::string& name, const std::vector<int64_t>& shape,
                        const std::set<std::string>& dtypes) {
    known.insert(name);
    const std::string fault = fault_of(folder, name, shape, dtypes);
    if (!fault.empty()) result.add(fault);
  };
  for (const auto& [name, spec] : specs) {
    if (spec.kind == WeightSpec::Kind::kIgnored) continue;
    if (spec.kind == WeightSpec::Kind::kVector) {
      want(name, {spec.out}, floats);
      continue;
    }
    const bool packed = folder.find(name + ".weight_packed") != nullptr;
    if (!packed && spec.int4 && folder.find(name + ".weight") == nullptr) {
      result.add(name + ": missing, neither .weight_packed (int4) nor .weight is there");
    } else if (!packed) {
      want(name + ".weight", {spec.out, spec.in}, floats);
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
      known.insert(name + ".weight_shape");
    }
  }
  for (const auto& [name, view] : folder.tensors()) {
    if (known.contains(name) || is_ignored(specs, name)) continue;
    result.add(name + ": the model of config.json has no such tensor");
    if (result.unknown.size() < WeightFaults::kMaxKept) result.unknown.push_back(name);
  }
  return result;
}

std::string weight_shape_fault(const SafetensorsFolder& folder, const std::string& name,
                               const WeightSpec& spec) {
  const std::string tensor = name + ".weight_shape";
  const SafetensorsView* view = folder.find(tensor);
  if (view == nullptr || folder.find(name + ".weight_packed") == nullptr) return "";
  const std::string fault = fault_of(folder, tensor, {2}, {"I32", "I64"});
  if (!fault.empty()) return fault;
  std::vector<int64_t> stated(2);
  if (view->dtype == "I64") {
    folder.read(*view, stated.data());
  } else {
    std::array<int32_t, 2> narrow;
    folder.read(*view, narrow.data());
    stated.assign(narrow.begin(), narrow.end());
  }
  const std::vector<int64_t> want = {spec.out, spec.in};
  if (stated == want) return "";
  return tensor + ": holds " + shape_text(stated) + ", want " + shape_text(want);
}

WeightReader::WeightReader(const SafetensorsFolder& folder, WeightSpecs specs, Backend& backend,
                           LoadProgress progress)
    : folder_(folder), specs_(std::move(specs)), backend_(backend), progress_(std::move(progress)) {
  const WeightFaults faults = check_weights(specs_, folder_);
  if (faults.count == 0) return;
  constexpr size_t kNamed = 5;
  std::string text;
  for (size_t i = 0; i < faults.faults.size() && i < kNamed; ++i)
    text += (i ? "; " : "") + faults.faults[i];
  throw Error(join(folder_.folder(), ": ", faults.count, " tensors are not as config.json asks: ",
                   text, faults.count > kNamed ? "; ..." : ""));
}

const WeightSpec& WeightReader::spec(const std::string& name) const {
  const auto found = specs_.find(name);
  KDT_CHECK(found != specs_.end(), "weights: '", name, "' is not in the contract");
  return found->second;
}

std::vector<uint8_t> WeightReader::read(const SafetensorsView& view) {
  std::vector<uint8_t> bytes(view.bytes);
  folder_.read(view, bytes.data());
  const auto total = static_cast<int64_t>(folder_.total_bytes());
  // A tied embedding is read twice.
  done_bytes_ = std::min(total, done_bytes_ + static_cast<int64_t>(view.bytes));
  if (progress_) progress_(done_bytes_, total);
  return bytes;
}

DType WeightReader::dtype(const std::string& name) const {
  return folder_.find(name + ".weight")->dtype == "BF16" ? DType::kBFloat16 : DType::kFloat32;
}

HostMatrix WeightReader::matrix(const std::string& name) {
  const WeightSpec& s = spec(name);
  const auto stage = [&](const SafetensorsView* view) {
    return staged_.emplace_back(read(*view)).data();
  };
  HostMatrix matrix;
  matrix.out_features = s.out;
  matrix.in_features = s.in;
  if (const SafetensorsView* packed = folder_.find(name + ".weight_packed")) {
    const std::string fault = weight_shape_fault(folder_, name, s);
    KDT_CHECK(fault.empty(), folder_.folder(), ": ", fault);
    matrix.dtype = DType::kInt32;
    matrix.data = stage(packed);
    matrix.scale = stage(folder_.find(name + ".weight_scale"));
  } else {
    const SafetensorsView* view = folder_.find(name + ".weight");
    matrix.dtype = dtype(name);
    matrix.data = stage(view);
  }
  return matrix;
}

std::unique_ptr<LinearWeight> WeightReader::linear(const std::vector<std::string>& stacked) {
  std::vector<HostMatrix> matrices;
  for (const std::string& name : stacked) matrices.push_back(matrix(name));
  auto weight = backend_.prepare_linear(matrices);
  release();
  return weight;
}

Buffer WeightReader::upload(const std::vector<float>& values) {
  Buffer buffer = backend_.allocate(DType::kFloat32, {static_cast<int64_t>(values.size())});
  backend_.upload(buffer.tensor, values.data());
  return buffer;
}

Buffer WeightReader::vector(const std::string& name) {
  const SafetensorsView* view = folder_.find(name);
  return upload(to_floats(read(*view), view->dtype));
}

Buffer WeightReader::table(const std::string& name) {
  const WeightSpec& s = spec(name);
  const SafetensorsView* view = folder_.find(name + ".weight");
  Buffer buffer = backend_.allocate(dtype(name), {s.out, s.in});
  backend_.upload(buffer.tensor, read(*view).data());
  return buffer;
}

std::vector<float> WeightReader::values(const std::string& name) {
  const SafetensorsView* view = folder_.find(name + ".weight");
  return to_floats(read(*view), view->dtype);
}

}  // namespace kdt
