// Small checkpoints, written by the tests themselves.
#pragma once

#include <array>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "backend/op_test.h"
#include "io/temp_dir.h"
#include "model/weights.h"

namespace kdt::test {

// Tensors of a checkpoint, written as one safetensors file.
struct Tensors {
  struct Entry {
    std::string dtype;
    Shape shape;
    std::vector<uint8_t> bytes;
  };
  std::map<std::string, Entry> entries;

  static int64_t bytes_of(const std::string& dtype) {
    return dtype == "I64"                     ? 8
           : dtype == "F32" || dtype == "I32" ? 4
           : dtype.starts_with("F8")          ? 1
                                              : 2;
  }

  void add(const std::string& name, const std::string& dtype, const Shape& shape) {
    int64_t n = bytes_of(dtype);
    for (int64_t size : shape) n *= size;
    std::vector<uint8_t> bytes(n);
    Random random(entries.size());
    for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random.below(60));  // numbers, no NaN
    entries[name] = {dtype, shape, bytes};
  }

  // `name`.weight_shape.
  template <typename T>
  void add_shape(const std::string& name, std::array<T, 2> shape) {
    add(name + ".weight_shape", sizeof(T) == 8 ? "I64" : "I32", {2});
    std::memcpy(entries[name + ".weight_shape"].bytes.data(), shape.data(), sizeof(shape));
  }

  void write(const TempDir& folder) const {
    std::string header, data;
    for (const auto& [name, entry] : entries) {
      header += join(header.empty() ? "{" : ",", "\"", name, "\":{\"dtype\":\"", entry.dtype,
                     "\",\"shape\":[");
      for (size_t i = 0; i < entry.shape.size(); ++i) header += join(i ? "," : "", entry.shape[i]);
      header +=
          join("],\"data_offsets\":[", data.size(), ",", data.size() + entry.bytes.size(), "]}");
      data.append(entry.bytes.begin(), entry.bytes.end());
    }
    header += "}";
    const uint64_t length = header.size();
    std::string file(reinterpret_cast<const char*>(&length), 8);
    folder.write("model.safetensors", file + header + data);
  }
};

inline DraftConfig small_drafter() {
  DraftConfig config;
  config.hidden_size = 32;
  config.intermediate_size = 64;
  config.num_hidden_layers = 1;
  config.num_attention_heads = 4;
  config.num_key_value_heads = 2;
  config.head_dim = 8;
  config.target_layer_ids = {0, 1};
  return config;
}

inline Tensors small_tensors() {
  Tensors t;
  t.add("fc.weight", "BF16", {32, 64});
  for (const char* name : {"hidden_norm.weight", "norm.weight", "layers.0.input_layernorm.weight",
                           "layers.0.post_attention_layernorm.weight"}) {
    t.add(name, "BF16", {32});
  }
  t.add("layers.0.self_attn.q_proj.weight", "BF16", {32, 32});
  t.add("layers.0.self_attn.k_proj.weight", "F32", {16, 32});
  t.add("layers.0.self_attn.v_proj.weight", "BF16", {16, 32});
  t.add("layers.0.self_attn.o_proj.weight", "BF16", {32, 32});
  t.add("layers.0.self_attn.q_norm.weight", "F32", {8});
  t.add("layers.0.self_attn.k_norm.weight", "BF16", {8});
  t.add("layers.0.mlp.gate_proj.weight", "BF16", {64, 32});
  t.add("layers.0.mlp.up_proj.weight_packed", "I32", {64, 4});
  t.add("layers.0.mlp.up_proj.weight_scale", "BF16", {64, 1});
  t.add_shape<int32_t>("layers.0.mlp.up_proj", {64, 32});
  t.add("layers.0.mlp.down_proj.weight", "BF16", {32, 64});
  return t;
}

// As if config.json had a quantization_config.
inline WeightSpecs int4_specs(const DraftConfig& config = small_drafter()) {
  WeightSpecs specs = draft_weight_specs(config);
  for (auto& [name, spec] : specs) spec.int4 = spec.kind == WeightSpec::Kind::kMatrix;
  return specs;
}

}  // namespace kdt::test
