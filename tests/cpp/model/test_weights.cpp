// The contract of a checkpoint's tensors, and their way to the back end.
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
    return dtype == "F32" || dtype == "I32" ? 4 : 2;
  }

  void add(const std::string& name, const std::string& dtype, const Shape& shape) {
    int64_t n = bytes_of(dtype);
    for (int64_t size : shape) n *= size;
    std::vector<uint8_t> bytes(n);
    Random random(entries.size());
    for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random.below(60));  // numbers, no NaN
    entries[name] = {dtype, shape, bytes};
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
  t.add("layers.0.mlp.up_proj.weight_shape", "I32", {2});
  t.add("layers.0.mlp.down_proj.weight", "BF16", {32, 64});
  return t;
}

WeightFaults faults_of(const Tensors& tensors, const DraftConfig& config = small_drafter()) {
  const TempDir folder;
  tensors.write(folder);
  return check_weights(draft_weight_specs(config), SafetensorsFolder(folder.path("")));
}

std::string only_fault(const Tensors& tensors) {
  const WeightFaults result = faults_of(tensors);
  return result.faults.size() == 1 ? result.faults[0] : join(result.faults.size(), " faults");
}

KDT_TEST(a_complete_checkpoint_has_no_fault) {
  const WeightFaults result = faults_of(small_tensors());
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
  t.add("layers.0.mlp.up_proj.weight_packed", "I32", {64, 8});
  EXPECT_EQ(only_fault(t), "layers.0.mlp.up_proj.weight_packed: shape [64, 8], want [64, 4]");
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
  const WeightFaults result = faults_of(t, config);
  EXPECT_EQ(result.faults.size(), 1u);
  EXPECT_EQ(
      result.faults.at(0),
      "layers.0.mlp.down_proj.weight_packed: this module cannot be int4, its 40 inputs are no "
      "multiple of 32");
}

KDT_TEST(tensors_outside_the_contract_are_listed) {
  Tensors t = small_tensors();
  t.add("layers.1.self_attn.q_proj.weight", "BF16", {32, 32});
  t.add("layers.0.self_attn.rotary_emb.inv_freq", "F32", {4});  // known, of no use
  const WeightFaults result = faults_of(t);
  EXPECT(result.faults.empty());
  EXPECT(result.unknown == std::vector<std::string>{"layers.1.self_attn.q_proj.weight"});
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
  const auto read = [&] {
    WeightReader(files, draft_weight_specs(small_drafter()), backend(), {});
  };
  EXPECT_THROWS("6 tensors are not as config.json asks: fc.weight: missing;", read());
  EXPECT_THROWS("; ...", read());
}

KDT_TEST(values_on_their_way) {
  const TempDir folder;
  const Tensors t = small_tensors();
  t.write(folder);
  const SafetensorsFolder files(folder.path(""));
  int64_t done = 0, total = 0;
  bool ascending = true;
  WeightReader reader(files, draft_weight_specs(small_drafter()), backend(),
                      [&](int64_t d, int64_t all) {
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
    const WeightFaults result =
        check_weights(target_weight_specs(load_model_config(preset_folder(preset))), files);
    for (const std::string& fault : result.faults) report(__FILE__, __LINE__, fault);
    for (const std::string& name : result.unknown) report(__FILE__, __LINE__, name);
    const std::string drafter = preset_folder(preset) + "/drafter";
    const WeightFaults drafted =
        check_weights(draft_weight_specs(load_draft_config(drafter)), SafetensorsFolder(drafter));
    EXPECT(drafted.faults.empty() && drafted.unknown.empty());
  }
}

}  // namespace
}  // namespace kdt::test

KDT_OP_TEST_MAIN
