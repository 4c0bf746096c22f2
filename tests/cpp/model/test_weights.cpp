// The contract of a checkpoint's tensors, and their way to the back end.
#include <array>

#include "io/temp_dir.h"
#include "tiny_models.h"

namespace kdt::test {
namespace {

// Tensors of a checkpoint, written as one safetensors file.
struct Tensors {
  struct Entry {
    std::string dtype;
    Shape shape;
    std::vector<uint8_t> bytes;
  };
  std::map<std::string, Entry> entries;

  static int64_t bytes_of(const std::string& dtype) {
    return dtype == "I64" ? 8 : dtype == "F32" || dtype == "I32" ? 4 : 2;
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

DraftConfig small_drafter() {
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

Tensors small_tensors() {
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
WeightSpecs int4_specs(const DraftConfig& config = small_drafter()) {
  WeightSpecs specs = draft_weight_specs(config);
  for (auto& [name, spec] : specs) spec.int4 = spec.kind == WeightSpec::Kind::kMatrix;
  return specs;
}

WeightFaults faults_of(const Tensors& tensors, const WeightSpecs& specs = int4_specs()) {
  const TempDir folder;
  tensors.write(folder);
  return check_weights(specs, SafetensorsFolder(folder.path("")));
}

std::string only_fault(const Tensors& tensors) {
  const WeightFaults result = faults_of(tensors);
  return result.faults.size() == 1 ? result.faults[0] : join(result.faults.size(), " faults");
}

KDT_TEST(a_complete_checkpoint_has_no_fault) {
  const WeightFaults result = faults_of(small_tensors());
  EXPECT_EQ(result.count, 0u);
  EXPECT(result.faults.empty());
  EXPECT(result.unknown.empty());
}

KDT_TEST(each_fault_names_the_tensor_and_the_values) {
  Tensors t = small_tensors();
  t.entries.erase("norm.weight");
  EXPECT_EQ(only_fault(t), "norm.weight: missing");
  t = small_tensors();
  t.add("fc.weight", "BF16", {64, 32});
  EXPECT_EQ(only_fault(t), "fc.weight: shape [64, 32], want [32, 64]");
  t = small_tensors();
  t.add("fc.weight", "F16", {32, 64});
  EXPECT_EQ(only_fault(t), "fc.weight: dtype F16, want BF16 or F32");
  t = small_tensors();
  t.add("layers.0.mlp.up_proj.weight_scale", "F32", {64, 1});
  EXPECT_EQ(only_fault(t), "layers.0.mlp.up_proj.weight_scale: dtype F32, want BF16");
  t = small_tensors();
  t.entries.erase("layers.0.mlp.up_proj.weight_scale");
  EXPECT_EQ(only_fault(t), "layers.0.mlp.up_proj.weight_scale: missing");
  t = small_tensors();
  t.entries.erase("layers.0.mlp.gate_proj.weight");
  EXPECT_EQ(only_fault(t),
            "layers.0.mlp.gate_proj: missing, neither .weight_packed (int4) nor .weight is there");
  t = small_tensors();
  t.add("layers.0.mlp.up_proj.weight_packed", "I32", {64, 8});
  EXPECT_EQ(only_fault(t), "layers.0.mlp.up_proj.weight_packed: shape [64, 8], want [64, 4]");
}

KDT_TEST(int4_needs_a_quantization_config) {
  const WeightFaults result = faults_of(small_tensors(), draft_weight_specs(small_drafter()));
  EXPECT_EQ(result.faults.size(), 1u);
  EXPECT_EQ(result.faults.at(0),
            "layers.0.mlp.up_proj.weight_packed: int4, but config.json has no quantization_config");
}

KDT_TEST(weight_shape_repeats_the_shape) {
  const std::string up = "layers.0.mlp.up_proj";
  const auto fault = [&](const Tensors& tensors) {
    const TempDir folder;
    tensors.write(folder);
    const SafetensorsFolder files(folder.path(""));
    const std::string found = weight_shape_fault(files, up, int4_specs().at(up));
    WeightReader reader(files, int4_specs(), backend(), {});
    if (!found.empty()) EXPECT_THROWS(found, reader.matrix(up));
    if (found.empty()) reader.matrix(up);
    return found;
  };
  Tensors t = small_tensors();
  EXPECT_EQ(fault(t), "");
  t.add_shape<int64_t>(up, {64, 32});
  EXPECT_EQ(fault(t), "");
  t.add_shape<int64_t>(up, {64, 31});
  EXPECT_EQ(fault(t), up + ".weight_shape: holds [64, 31], want [64, 32]");
  t.add_shape<int32_t>(up, {32, 64});
  EXPECT_EQ(fault(t), up + ".weight_shape: holds [32, 64], want [64, 32]");
  t.add(up + ".weight_shape", "I32", {3});
  EXPECT_EQ(fault(t), up + ".weight_shape: shape [3], want [2]");
  t.add(up + ".weight_shape", "BF16", {2});
  EXPECT_EQ(fault(t), up + ".weight_shape: dtype BF16, want I32 or I64");
  t.entries.erase(up + ".weight_shape");
  EXPECT_EQ(fault(t), "");
}

KDT_TEST(int4_needs_whole_groups) {
  DraftConfig config = small_drafter();
  config.intermediate_size = 40;
  Tensors t = small_tensors();
  t.add("layers.0.mlp.gate_proj.weight", "BF16", {40, 32});
  t.add("layers.0.mlp.up_proj.weight_packed", "I32", {40, 4});
  t.add("layers.0.mlp.up_proj.weight_scale", "BF16", {40, 1});
  t.entries.erase("layers.0.mlp.down_proj.weight");
  t.add("layers.0.mlp.down_proj.weight_packed", "I32", {32, 5});
  const WeightFaults result = faults_of(t, int4_specs(config));
  EXPECT_EQ(result.faults.size(), 1u);
  EXPECT_EQ(
      result.faults.at(0),
      "layers.0.mlp.down_proj.weight_packed: this module cannot be int4, its 40 inputs are no "
      "multiple of 32");
}

KDT_TEST(tensors_outside_the_contract_are_faults) {
  Tensors t = small_tensors();
  t.add("layers.0.self_attn.rotary_emb.inv_freq", "F32", {4});  // known, of no use
  EXPECT_EQ(faults_of(t).count, 0u);
  for (const char* name :
       {"layers.1.self_attn.q_proj.weight", "layers.0.self_attn.q_proj.bias", "d2t", "t2d",
        "lm_head.weight", "embed_tokens.weight", "layers.0.mlp.up_proj.weight_zero_point",
        "layers.0.mlp.up_proj.weight_g_idx", "layers.0.mlp.up_proj.weight",
        "layers.0.mlp.down_proj.weight_shape", "layers.0.self_attn.rotary_emb.inv_freqs",
        "layers.1.self_attn.rotary_emb.inv_freq", "vision_tower.x", "mm_projector.x",
        "fc.vision_tower.rotary_emb.inv_freq", "!", "~"}) {
    Tensors more = t;
    more.add(name, "BF16", {2});
    const WeightFaults result = faults_of(more);
    EXPECT_EQ(only_fault(more),
              std::string(name) + ": the model of config.json has no such tensor");
    EXPECT(result.unknown == std::vector<std::string>{name});
  }
}

KDT_TEST(a_list_of_faults_has_an_end) {
  Tensors t = small_tensors();
  for (int i = 0; i < 100; ++i) t.add(join("x", i), "BF16", {1});
  t.entries.erase("norm.weight");
  const WeightFaults result = faults_of(t);
  EXPECT_EQ(result.count, 101u);
  EXPECT_EQ(result.faults.size(), WeightFaults::kMaxKept);
  EXPECT_EQ(result.unknown.size(), WeightFaults::kMaxKept);
  EXPECT_EQ(result.faults.at(0), "norm.weight: missing");
}

// The tensors of a target without experts, of these names and nothing else.
KDT_TEST(the_contract_of_a_target_depends_on_what_is_there) {
  ModelConfig config;
  config.num_hidden_layers = 2;
  config.tensor_prefix = "language_model.model.";
  config.lm_head_name = "language_model.lm_head.weight";
  const auto unknown = [&](const std::vector<std::string>& names) {
    const TempDir folder;
    Tensors tensors;
    for (const std::string& name : names) tensors.add(name, "BF16", {1});
    tensors.write(folder);
    const SafetensorsFolder files(folder.path(""));
    return check_weights(target_weight_specs(config, files), files).unknown;
  };
  const std::string p = config.tensor_prefix;
  const auto none = std::vector<std::string>{};
  EXPECT(unknown({"vision_tower.a.b", "mm_projector.c",
                  p + "layers.1.self_attn.rotary_emb.inv_freq"}) == none);
  // A layer behind the last is no layer for the token after the next unless config.json says so and
  // it looks like one.
  const std::vector<std::string> next = {p + "layers.2.eh_proj.weight",
                                         p + "layers.2.enorm.weight"};
  const std::string more = p + "layers.2.input_layernorm.weight";
  EXPECT(unknown(next) == next);
  config.num_nextn_predict_layers = 1;
  EXPECT(unknown(next) == none);
  EXPECT(unknown({more}) == std::vector<std::string>{more});
  EXPECT(unknown({p + "layers.3.eh_proj.weight"}) ==
         std::vector<std::string>{p + "layers.3.eh_proj.weight"});
  config.tensor_prefix = "model.";
  EXPECT(unknown({"vision_tower.a"}) == std::vector<std::string>{"vision_tower.a"});

  config.num_hidden_layers = 1024;
  config.n_routed_experts = 65536;
  EXPECT_THROWS(
      "config.json asks for 1024 layers of n_routed_experts 65536, the files hold 1 tensors",
      unknown({"a"}));
}

KDT_TEST(the_prefix_of_a_drafter) {
  Tensors plain, prefixed;
  plain.add("fc.weight", "BF16", {32, 64});
  prefixed.add("model.fc.weight", "BF16", {32, 64});
  const TempDir a, b;
  plain.write(a);
  prefixed.write(b);
  EXPECT_EQ(find_draft_prefix(SafetensorsFolder(a.path(""))), "");
  EXPECT_EQ(find_draft_prefix(SafetensorsFolder(b.path(""))), "model.");
}

KDT_TEST(a_reader_refuses_a_folder_that_breaks_the_contract) {
  const TempDir folder;
  Tensors t = small_tensors();
  for (const char* name :
       {"norm.weight", "fc.weight", "hidden_norm.weight", "layers.0.self_attn.q_proj.weight",
        "layers.0.self_attn.o_proj.weight", "layers.0.self_attn.v_proj.weight"}) {
    t.entries.erase(name);
  }
  t.write(folder);
  const SafetensorsFolder files(folder.path(""));
  const auto read = [&] { WeightReader(files, int4_specs(), backend(), {}); };
  EXPECT_THROWS("6 tensors are not as config.json asks: fc: missing,", read());
  EXPECT_THROWS("; ...", read());
}

KDT_TEST(values_on_their_way) {
  const TempDir folder;
  const Tensors t = small_tensors();
  t.write(folder);
  const SafetensorsFolder files(folder.path(""));
  int64_t done = 0, total = 0;
  bool ascending = true;
  WeightReader reader(files, int4_specs(), backend(), [&](int64_t d, int64_t all) {
    ascending = ascending && d > done && d <= all;
    done = d;
    total = all;
  });
  const auto expected = [&](const std::string& name) {
    const Tensors::Entry& entry = t.entries.at(name);
    Floats values;
    for (size_t i = 0; i < entry.bytes.size(); i += Tensors::bytes_of(entry.dtype)) {
      float value;
      uint16_t bits;
      std::memcpy(&bits, &entry.bytes[i], 2);
      if (entry.dtype == "BF16") {
        value = bf16_to_float(bits);
      } else {
        std::memcpy(&value, &entry.bytes[i], 4);
      }
      values.push_back(value);
    }
    return values;
  };
  for (const char* name : {"norm.weight", "layers.0.self_attn.q_norm.weight"}) {
    EXPECT(same_bits(download(backend(), reader.vector(name).tensor), expected(name)));
  }
  EXPECT(same_bits(reader.values("layers.0.self_attn.k_proj"),
                   expected("layers.0.self_attn.k_proj.weight")));
  EXPECT(same_bits(reader.values("fc"), expected("fc.weight")));
  const Buffer table = reader.table("fc");
  EXPECT(table.tensor.dtype() == DType::kBFloat16 && table.tensor.dim(0) == 32 &&
         table.tensor.dim(1) == 64);
  const HostMatrix packed = reader.matrix("layers.0.mlp.up_proj");
  EXPECT(packed.dtype == DType::kInt32 && packed.out_features == 64 && packed.in_features == 32);
  EXPECT(std::memcmp(packed.data, t.entries.at("layers.0.mlp.up_proj.weight_packed").bytes.data(),
                     64 * 16) == 0);
  EXPECT(std::memcmp(packed.scale, t.entries.at("layers.0.mlp.up_proj.weight_scale").bytes.data(),
                     64 * 2) == 0);
  reader.release();
  const auto stacked = reader.linear({"layers.0.mlp.gate_proj", "layers.0.mlp.gate_proj"});
  EXPECT(stacked->out_features == 128 && stacked->in_features == 32);
  EXPECT(ascending);
  EXPECT_EQ(total, static_cast<int64_t>(files.total_bytes()));
  EXPECT_THROWS("weights: 'lm_head' is not in the contract", reader.matrix("lm_head"));
}

KDT_TEST(the_contract_of_each_tiny_model) {
  if (!std::filesystem::exists(preset_folder("tiny"))) return;
  for (const char* preset : {"tiny", "groups", "kimi_groups", "plain", "nested"}) {
    const SafetensorsFolder files(preset_folder(preset));
    const WeightSpecs specs = target_weight_specs(load_model_config(preset_folder(preset)), files);
    const WeightFaults result = check_weights(specs, files);
    for (const std::string& fault : result.faults) report(__FILE__, __LINE__, fault);
    for (const auto& [name, spec] : specs) EXPECT_EQ(weight_shape_fault(files, name, spec), "");
    const std::string drafter = preset_folder(preset) + "/drafter";
    const WeightFaults drafted =
        check_weights(draft_weight_specs(load_draft_config(drafter)), SafetensorsFolder(drafter));
    EXPECT_EQ(drafted.count, 0u);
  }
}

}  // namespace
}  // namespace kdt::test

KDT_OP_TEST_MAIN
