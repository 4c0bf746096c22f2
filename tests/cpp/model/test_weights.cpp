// The contract of a checkpoint's tensors.
#include "checkpoint_files.h"
#include "tiny_models.h"

namespace kdt::test {
namespace {

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
    const WeightFaults others = check_weights(int4_specs(), files);
    return join(weight_shape_fault(files, up, int4_specs().at(up)),
                others.faults.empty() ? "" : others.faults[0]);
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

KDT_TEST(fp8_comes_with_a_factor_a_block) {
  DraftConfig config = small_drafter();
  config.intermediate_size = 160;
  WeightSpecs specs = draft_weight_specs(config);
  for (auto& [name, spec] : specs) spec.fp8 = spec.kind == WeightSpec::Kind::kMatrix;
  const auto with = [](const char* dtype, const Shape& scale) {
    Tensors t = small_tensors();
    for (const char* part : {".weight_packed", ".weight_scale", ".weight_shape"})
      t.entries.erase(std::string("layers.0.mlp.up_proj") + part);
    t.add("layers.0.mlp.gate_proj.weight", "BF16", {160, 32});
    t.add("layers.0.mlp.up_proj.weight", "F8_E4M3", {160, 32});
    t.add("layers.0.mlp.down_proj.weight", "F8_E4M3", {32, 160});
    t.add("layers.0.mlp.up_proj.weight_scale_inv", dtype, scale);
    t.add("layers.0.mlp.down_proj.weight_scale_inv", "F32", {1, 2});
    return t;
  };
  const auto fault = [&](const Tensors& t) {
    const WeightFaults found = faults_of(t, specs);
    return found.count == 1 ? found.faults[0] : join(found.count, " faults");
  };
  const std::string scale = "layers.0.mlp.up_proj.weight_scale_inv";
  EXPECT_EQ(fault(with("F32", {2, 1})), "0 faults");
  EXPECT_EQ(fault(with("F32", {1, 2})), scale + ": shape [1, 2], want [2, 1]");
  EXPECT_EQ(fault(with("BF16", {2, 1})), scale + ": dtype BF16, want F32");
  Tensors t = with("F32", {2, 1});
  t.entries.erase(scale);
  EXPECT_EQ(fault(t), scale + ": missing");
  t = with("F32", {2, 1});
  t.add("layers.0.mlp.gate_proj.weight_scale_inv", "F32", {2, 1});  // of a bf16 matrix
  EXPECT_EQ(fault(t),
            "layers.0.mlp.gate_proj.weight_scale_inv: the model of config.json has no such tensor");
  t = with("F32", {2, 1});
  t.add("layers.0.mlp.gate_proj.weight", "F8_E5M2", {160, 32});
  EXPECT_EQ(fault(t), "layers.0.mlp.gate_proj.weight: dtype F8_E5M2, want BF16 or F32 or F8_E4M3");
  for (auto& [name, spec] : specs) spec.fp8 = false;
  EXPECT_EQ(faults_of(with("F32", {2, 1}), specs).faults.at(1),
            "layers.0.mlp.up_proj.weight: dtype F8_E4M3, want BF16 or F32");
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

KDT_TEST(a_plan_refuses_a_folder_that_breaks_the_contract) {
  const TempDir folder;
  Tensors t = small_tensors();
  for (const char* name :
       {"norm.weight", "fc.weight", "hidden_norm.weight", "layers.0.self_attn.q_proj.weight",
        "layers.0.self_attn.o_proj.weight", "layers.0.self_attn.v_proj.weight"}) {
    t.entries.erase(name);
  }
  t.write(folder);
  const SafetensorsFolder files(folder.path(""));
  const auto plan = [&] { LoadPlan(backend(), files, int4_specs(), {}); };
  EXPECT_THROWS("6 tensors are not as config.json asks: fc: missing,", plan());
  EXPECT_THROWS("; ...", plan());
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
