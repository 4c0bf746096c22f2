// The plan of each rank's memory: Kimi K2.6's numbers from its headers, and the allocations that
// the models make.
#include "backend/spoiled_backend.h"
#include "check.h"
#include "engine/memory_plan.h"
#include "model/draft_model.h"
#include "model/synth.h"
#include "model/target_model.h"

namespace kdt::test {
namespace {

constexpr double kGiB = int64_t{1} << 30;

struct K26 {
  SynthModel model = make_synth_model({.like = "kimi-k2.6"});
  SynthSource tensors{model, SynthSource::Part::kTarget, 0};
};

const K26& k26() {
  static const K26 made;
  return made;
}

MemoryPlan plan_k26(const MemoryOptions& options) {
  return plan_memory(k26().model.config, k26().tensors, nullptr, nullptr, options);
}

double part(const MemoryPlan& plan, const char* name) {
  return static_cast<double>(plan.weights_by_part.at(name)) / kGiB;
}

// Computed from the shapes by hand: routed experts are 60 layers of 384 with 3 * 7168 * 2048
// values of 4.5 bits, and so on.
KDT_TEST(k26_at_8_ranks) {
  const MemoryPlan plan = plan_k26({.tensor_parallel_size = 8});
  EXPECT_EQ(plan.faults.size(), size_t{0});
  EXPECT_EQ(plan.weights_by_part.at("experts"), int64_t{60} * 384 * 3 * 7168 * 2048 * 9 / 16 / 8);
  EXPECT_NEAR(part(plan, "experts"), 66.445, 0.001);
  EXPECT_NEAR(part(plan, "attention"), 1.221 + 1.722, 0.003);
  EXPECT_NEAR(part(plan, "shared experts"), 0.615, 0.001);
  EXPECT_NEAR(part(plan, "router"), 0.308, 0.001);
  EXPECT_NEAR(part(plan, "dense mlp"), 0.092, 0.001);
  EXPECT_NEAR(part(plan, "embedding"), 0.273, 0.001);
  EXPECT_NEAR(part(plan, "head"), 0.273, 0.001);
  EXPECT_NEAR(static_cast<double>(plan.weights) / kGiB, 70.95, 0.01);
  EXPECT_EQ(plan.kv_bytes_per_token, int64_t{70272});
  EXPECT(!plan.weights_by_part.contains("other"));
}

KDT_TEST(k26_with_whole_experts) {
  const MemoryPlan sliced = plan_k26({.tensor_parallel_size = 8});
  const MemoryPlan whole = plan_k26({.tensor_parallel_size = 8, .expert_parallel = true});
  EXPECT_EQ(whole.weights, sliced.weights);
  EXPECT_EQ(whole.weights_by_part.at("experts"), sliced.weights_by_part.at("experts"));
}

KDT_TEST(k26_on_one_rank_is_the_checkpoint) {
  const MemoryPlan plan = plan_k26({});
  // But for vectors, which become f32, weight_shape and what is not of the text model.
  int64_t expected = 0;
  for (const auto& [name, view] : k26().tensors.tensors()) {
    if (name.starts_with("vision_tower.") || name.starts_with("mm_projector.") ||
        name.ends_with(".weight_shape"))
      continue;
    const bool widened = view.shape.size() == 1 && view.dtype == "BF16";
    expected += static_cast<int64_t>(view.bytes) * (widened ? 2 : 1);
  }
  EXPECT_EQ(plan.weights, expected);
}

// Tokens beside the weights on a card with 95.6 GiB; the overhead is all that is no weight.
KDT_TEST(k26_tokens_that_fit) {
  const std::vector<std::pair<int64_t, double>> cases = {{4, 315408}, {8, 254289}, {12, 193170}};
  for (const auto& [overhead, tokens] : cases) {
    MemoryOptions options{.tensor_parallel_size = 8};
    options.gpu_memory = static_cast<int64_t>(95.6 * kGiB);
    const int64_t workspace = plan_k26(options).workspace;
    options.overhead = overhead * static_cast<int64_t>(kGiB) - workspace;
    const MemoryPlan plan = plan_k26(options);
    EXPECT(workspace > 0 && workspace < 2 * kGiB);
    // The weights' 70.95 GiB are rounded to 0.01 GiB, 153 tokens.
    EXPECT_NEAR(static_cast<double>(plan.kv_tokens_fit), tokens, 160);
  }
}

// Whether it has one fault, with this in it.
bool told(const MemoryPlan& plan, const std::string& part) {
  return plan.faults.size() == 1 && plan.faults[0].find(part) != std::string::npos;
}

KDT_TEST(what_does_not_fit_is_told_with_a_way_out) {
  MemoryOptions options{.tensor_parallel_size = 8};
  options.gpu_memory = static_cast<int64_t>(60 * kGiB);
  MemoryPlan plan = plan_k26(options);
  EXPECT_EQ(plan.faults.size(), size_t{1});
  EXPECT(told(plan, "do not fit: raise tensor_parallel_size or gpu_memory"));
  EXPECT_EQ(plan.kv_tokens_fit, int64_t{0});

  options.gpu_memory = static_cast<int64_t>(96 * kGiB);
  plan = plan_k26(options);
  EXPECT_EQ(plan.faults.size(), size_t{1});
  EXPECT(told(plan, "set max_model_len "));
  EXPECT(told(plan, join("the cache of max_num_seqs 8 and a spare sequence, each of max_model_len ",
                         plan.max_model_len, ", takes ", plan.cache_tokens, " tokens, ")));
  // That way out is one.
  options.max_model_len = std::stoll(plan.faults[0].substr(plan.faults[0].rfind(' ') + 1));
  EXPECT(options.max_model_len > 30000);
  EXPECT_EQ(plan_k26(options).faults.size(), size_t{0});
  options.max_model_len = 0;
  options.max_num_seqs = 1;
  plan = plan_k26(options);
  EXPECT_EQ(plan.sequences_fit, int64_t{0});

  // The overhead alone is too much.
  options.gpu_memory = options.overhead;
  plan = plan_k26(options);
  EXPECT_EQ(plan.faults.at(0), std::string("gpu_memory is 2.00 GiB a rank, and overhead is "
                                           "2.00 GiB: raise gpu_memory or lower overhead"));
  // Sizes that are small next to a GiB.
  for (const auto& [bytes, text] : {std::pair{1 << 30, "1.00 GiB"},
                                    {5 << 20, "5.00 MiB"},
                                    {3 << 9, "1.50 KiB"},
                                    {10, "10 B"}}) {
    options.gpu_memory = options.overhead = bytes;
    EXPECT_EQ(plan_k26(options).faults.at(0),
              join("gpu_memory is ", text, " a rank, and overhead is ", text,
                   ": raise gpu_memory or lower overhead"));
  }
  options.gpu_memory = options.overhead = int64_t{2} << 30;
  // The workspace.
  options.gpu_memory += 1 << 20;
  EXPECT(told(plan_k26(options), "do not fit: lower max_model_len or max_num_seqs"));

  // Room for one sequence, but a short one; both options have to change.
  options.max_model_len = 4096;
  options.max_num_seqs = 8;
  options.gpu_memory = int64_t{1} << 50;
  plan = plan_k26(options);
  const int64_t fixed = plan.weights + plan.workspace + plan.overhead;
  options.gpu_memory = fixed + 2000 * plan.kv_bytes_per_token;
  plan = plan_k26(options);
  EXPECT(told(plan, "set max_num_seqs 1 and max_model_len "));
  MemoryOptions shorter = options;
  shorter.max_num_seqs = 1;
  shorter.max_model_len = std::stoll(plan.faults[0].substr(plan.faults[0].rfind(' ') + 1));
  EXPECT(shorter.max_model_len > 500);
  EXPECT_EQ(plan_k26(shorter).faults.size(), size_t{0});
  // And for none.
  options.gpu_memory = fixed + 100 * plan.kv_bytes_per_token;
  EXPECT(told(plan_k26(options), " 100 fit: raise tensor_parallel_size or gpu_memory"));
}

KDT_TEST(what_does_not_divide_is_told) {
  const MemoryPlan plan = plan_k26({.tensor_parallel_size = 3});
  EXPECT_EQ(plan.faults.size(), size_t{1});
  EXPECT(plan.faults[0].find("num_attention_heads, 64") != std::string::npos);
  EXPECT_EQ(plan.weights, int64_t{0});
}

// What no key of config.json tells: the model's own plan refuses it in the same words.
KDT_TEST(slices_that_are_no_whole_groups_are_told) {
  SynthModel made = make_synth_model({.like = "tiny"});
  made.config.v_head_dim = 16;
  const ModelConfig& config = made.config;
  const std::string o_proj = config.tensor_prefix + "layers.0.self_attn.o_proj";
  // A checkpoint whose o_proj is int4.
  struct Int4 : TensorSource {
    std::map<std::string, SafetensorsView> views;
    std::string called = "int4";
    const std::map<std::string, SafetensorsView>& tensors() const override { return views; }
    const std::string& name() const override { return called; }
    void read_range(const InputFile*, uint64_t, uint64_t, void*) const override {}
  } tensors;
  const SynthSource source(made, SynthSource::Part::kTarget, 0);
  tensors.views = source.tensors();
  const int64_t out = config.hidden_size, in = config.num_attention_heads * config.v_head_dim;
  tensors.views.erase(o_proj + ".weight");
  tensors.views[o_proj + ".weight_packed"] = {"I32", {out, in / 8}, nullptr, 0, 0};
  tensors.views[o_proj + ".weight_scale"] = {"BF16", {out, in / 32}, nullptr, 0, 0};
  const int size = static_cast<int>(config.num_attention_heads);
  const std::string fault = join("tensor_parallel_size is ", size, ": a slice of ", o_proj,
                                 " would have 16 columns, no multiple of the int4 group_size 32");
  const MemoryPlan plan =
      plan_memory(config, tensors, nullptr, nullptr, {.tensor_parallel_size = size});
  EXPECT_EQ(plan.faults.size(), size_t{1});
  EXPECT(!plan.faults.empty() && plan.faults[0].starts_with(fault));
  EXPECT_EQ(plan.weights, int64_t{0});
  const auto backend = make_backend("cpu", 1);
  EXPECT_THROWS(fault, TargetModel({*backend, {0, size}}, config, tensors, 1, 1, {}));
}

KDT_TEST(bad_options_are_named) {
  EXPECT_THROWS("tensor_parallel_size is 0", plan_k26({.tensor_parallel_size = 0}));
  EXPECT_THROWS("expert_parallel is true", plan_k26({.expert_parallel = true}));
  MemoryOptions options;
  options.max_num_seqs = 0;
  EXPECT_THROWS("max_num_seqs is 0", plan_k26(options));
  options = {};
  options.gpu_memory = -1;
  EXPECT_THROWS("gpu_memory is -1", plan_k26(options));
  options = {};
  options.max_model_len = 1 << 28;
  EXPECT_THROWS("max_model_len is 268435456", plan_k26(options));
}

// A back end that counts what is allocated.
class Counting final : public Spoiled {
 public:
  Counting() : Spoiled(make_backend("cpu", 1), "", nullptr) {}
  Buffer allocate(DType dtype, std::initializer_list<int64_t> shape) override {
    Buffer buffer = Spoiled::allocate(dtype, shape);
    bytes += buffer.tensor.bytes();
    return buffer;
  }
  int64_t bytes = 0;
};

// The workspace is what the models allocate, and a little for the engine.
KDT_TEST(workspace_is_what_the_models_allocate) {
  const SynthModel made = make_synth_model({.like = "tiny"});
  const SynthSource tensors(made, SynthSource::Part::kTarget, 0);
  const SynthSource draft_tensors(made, SynthSource::Part::kDrafter, 0);
  for (const int size : {1, 2}) {
    Counting backend;
    const RankContext ranks{backend, {0, size}};
    const int64_t length = 512, rows = 257, sequences = 3;
    const TargetModel target(ranks, made.config, tensors, rows, length,
                             made.drafter.target_layer_ids);
    const DraftModel draft(ranks, made.drafter, draft_tensors, rows, sequences,
                           length + made.drafter.block_size);
    MemoryOptions options{.tensor_parallel_size = size};
    options.max_model_len = length;
    options.max_num_seqs = sequences;
    const MemoryPlan plan =
        plan_memory(made.config, tensors, &made.drafter, &draft_tensors, options);
    const auto vocab = made.config.vocab_size / size;
    const auto taps = static_cast<int64_t>(made.drafter.target_layer_ids.size());
    const int64_t of_engine = 4 * (128 * vocab * (size > 1 ? 1 + size : 1) +
                                   sequences * (made.drafter.block_size - 1) * vocab +
                                   sequences * length * taps * made.config.hidden_size);
    EXPECT_EQ(plan.workspace, backend.bytes + of_engine);
  }
}

}  // namespace
}  // namespace kdt::test

KDT_TEST_MAIN
