#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <set>
#include <thread>
#include <type_traits>

#include "check.h"
#include "core/dtype.h"
#include "io/safetensors.h"
#include "io/xxh64.h"
#include "model/synth.h"
#include "model/weights.h"

using namespace kdt;
using Part = SynthSource::Part;

namespace {

// It points into itself.
static_assert(!std::is_copy_constructible_v<SynthSource> &&
              !std::is_copy_assignable_v<SynthSource>);

SynthSource target(const SynthOptions& options, uint64_t seed = 0) {
  return SynthSource(make_synth_model(options), Part::kTarget, seed);
}

std::vector<uint8_t> bytes_of(const SynthSource& source, const std::string& name) {
  const SafetensorsView& view = source.tensors().at(name);
  std::vector<uint8_t> bytes(view.bytes);
  source.read(view, bytes.data());
  return bytes;
}

template <typename T>
std::vector<T> values_of(const SynthSource& source, const std::string& name) {
  const std::vector<uint8_t> bytes = bytes_of(source, name);
  std::vector<T> values(bytes.size() / sizeof(T));
  std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}

std::vector<float> floats_of(const SynthSource& source, const std::string& name) {
  if (source.tensors().at(name).dtype == "F32") return values_of<float>(source, name);
  std::vector<float> floats;
  for (const uint16_t bits : values_of<uint16_t>(source, name))
    floats.push_back(bf16_to_float(bits));
  return floats;
}

struct Moments {
  double mean = 0, deviation = 0;
};

Moments moments(const std::vector<float>& values) {
  double sum = 0, squares = 0;
  for (const float value : values) {
    sum += value;
    squares += double{value} * value;
  }
  const double n = static_cast<double>(values.size()), mean = sum / n;
  return {mean, std::sqrt(squares / n - mean * mean)};
}

// e4m3 as the OCP 8-bit floating point specification 1.0, section 5.3, has it.
float from_e4m3(uint8_t bits) {
  const int exponent = bits >> 3 & 15, mantissa = bits & 7;
  const double size = exponent == 0 ? mantissa / 8.0 * std::pow(2.0, -6)
                                    : (1 + mantissa / 8.0) * std::pow(2.0, exponent - 7);
  return static_cast<float>(bits & 0x80 ? -size : size);
}

const std::string kLayer = "language_model.model.layers.1.";

}  // namespace

// ------------------------------------------------------------------ what is in a checkpoint

KDT_TEST(kimi_k26_has_the_real_count_and_size) {
  const SynthSource source = target({.like = "kimi-k2.6"});
  EXPECT_EQ(source.tensors().size(), size_t{208215});
  EXPECT_EQ(source.total_bytes(), uint64_t{594205904896});
  EXPECT_EQ(source.shards().size(), size_t{62});
  EXPECT_EQ(source.shards().front().file, "model-00001-of-000062.safetensors");
  uint64_t parts = 0, end = 0;
  for (const auto& [part, bytes] : source.bytes_by_part()) parts += bytes;
  EXPECT_EQ(parts, source.total_bytes());
  for (const SynthShard& shard : source.shards()) {
    EXPECT_EQ(shard.offset, end);
    end += shard.bytes;
  }
  EXPECT_EQ(end, source.total_bytes());
  // The last shard: embedding, head and final norm.
  EXPECT_EQ(source.shards().back().bytes, uint64_t{2 * 2 * 163840 + 2} * 7168);
  // An expert has exactly 4.5 bits a weight.
  EXPECT_EQ(source.tensors().at(kLayer + "mlp.experts.383.down_proj.weight_packed").bytes +
                source.tensors().at(kLayer + "mlp.experts.383.down_proj.weight_scale").bytes,
            uint64_t{7168} * 2048 * 9 / 16);
}

KDT_TEST(kimi_k2_instruct_has_the_real_count_and_size) {
  const SynthSource source = target({.like = "kimi-k2-instruct"});
  EXPECT_EQ(source.tensors().size(), size_t{139644});
  EXPECT_NEAR(static_cast<double>(source.total_bytes()) / (1 << 30), 958.49, 0.005);
  EXPECT_EQ(source.shards().size(), size_t{61});
  EXPECT_EQ(source.shards()[1].file, "model-2-of-61.safetensors");
  const auto view = [&](const std::string& name) { return source.tensors().at("model." + name); };
  EXPECT_EQ(view("layers.5.self_attn.rotary_emb.inv_freq").shape[0], int64_t{56});
  EXPECT_EQ(view("layers.5.self_attn.kv_a_proj_with_mqa.weight").dtype, "F8_E4M3");
  const auto scale = view("layers.5.self_attn.kv_a_proj_with_mqa.weight_scale_inv");
  EXPECT(scale.dtype == "F32" && scale.shape == std::vector<int64_t>({5, 56}));
  for (const char* name : {"embed_tokens.weight", "layers.5.mlp.gate.weight",
                           "layers.5.self_attn.q_a_layernorm.weight"})
    EXPECT_EQ(view(name).dtype, "BF16");
  EXPECT(source.tensors().contains("lm_head.weight"));
}

KDT_TEST(drafter_has_the_real_count) {
  const SynthModel model = make_synth_model({.like = "kimi-k2.6"});
  EXPECT_EQ(SynthSource(model, Part::kDrafter, 0).tensors().size(), size_t{69});
  EXPECT(model.drafter.target_layer_ids == std::vector<int64_t>({1, 12, 24, 35, 47, 58}));
  EXPECT_EQ(model.drafter.mask_token_id, 163838);
}

// The loader's list of what a checkpoint must hold was written apart from the generator's.
KDT_TEST(the_loaders_contract_is_met) {
  for (const SynthOptions& options : {SynthOptions{.like = "kimi-k2.6"},
                                      {.like = "kimi-k2.6", .layers = 1},
                                      {.like = "tiny", .layers = 7, .experts = 33}}) {
    SynthModel model = make_synth_model(options);
    const SynthSource source(model, Part::kTarget, 0), drafter(model, Part::kDrafter, 0);
    model.drafter.tensor_prefix = find_draft_prefix(drafter);
    for (const WeightFaults& faults :
         {check_weights(target_weight_specs(model.config, source), source),
          check_weights(draft_weight_specs(model.drafter), drafter)}) {
      EXPECT_EQ(faults.count, size_t{0});
      for (const std::string& fault : faults.faults) test::report(__FILE__, __LINE__, fault);
    }
  }
}

KDT_TEST(headers_describe_the_data) {
  for (const char* like : {"tiny", "kimi-k2-instruct"}) {
    const SynthSource source = target({.like = like, .layers = 2, .hidden = 160, .vocab = 600});
    std::set<std::string> names;
    for (const SynthShard& shard : source.shards()) {
      const std::string header = source.header(shard);
      const auto tensors =
          parse_safetensors([&](uint64_t offset, uint64_t bytes,
                                void* out) { std::memcpy(out, header.data() + offset, bytes); },
                            header.size() + shard.bytes, shard.file);
      for (const auto& [name, view] : tensors) {
        const SafetensorsView& made = source.tensors().at(name);
        EXPECT(view.dtype == made.dtype && view.shape == made.shape && view.bytes == made.bytes);
        EXPECT_EQ(view.offset - header.size() + shard.offset, made.offset);
        EXPECT(names.insert(name).second);
      }
    }
    EXPECT_EQ(names.size(), source.tensors().size());
  }
}

KDT_TEST(any_number_of_layers_makes_a_model) {
  for (int64_t layers = 1; layers <= 12; ++layers) {
    const SynthModel model = make_synth_model({.like = "tiny", .layers = layers});
    EXPECT_EQ(model.config.num_hidden_layers, layers);
    EXPECT_EQ(model.drafter.num_target_layers, layers);
  }
}

KDT_TEST(impossible_options_are_refused_by_name) {
  const auto make = [](const SynthOptions& options) { return make_synth_model(options); };
  EXPECT_THROWS("like is 'llama'; want kimi-k2.6", make({.like = "llama"}));
  EXPECT_THROWS("layers is 1025; want 1 to 1024", make({.like = "tiny", .layers = 1025}));
  EXPECT_THROWS("layers is -1", make({.like = "tiny", .layers = -1}));
  EXPECT_THROWS("experts is 3; want 4 to", make({.like = "tiny", .experts = 3}));
  EXPECT_THROWS("experts is 7; want 8 to", make({.like = "kimi-k2.6", .experts = 7}));
  EXPECT_THROWS("hidden is 100; want a multiple of 32", make({.like = "tiny", .hidden = 100}));
  EXPECT_THROWS("vocab is 511; want 512", make({.like = "tiny", .vocab = 511}));
  EXPECT_THROWS("which in 1024 layers is", make({.like = "tiny", .layers = 1024, .experts = 2000}));
}

// ------------------------------------------------------------------ values

KDT_TEST(bytes_depend_on_seed_and_name_alone) {
  const SynthSource source = target({.like = "tiny"}), same = target({.like = "tiny"}),
                    other = target({.like = "tiny"}, 1),
                    longer = target({.like = "tiny", .layers = 6});
  std::set<uint64_t> seen;
  for (const auto& [name, view] : source.tensors()) {
    const std::vector<uint8_t> bytes = bytes_of(source, name);
    EXPECT(bytes == bytes_of(same, name));
    EXPECT(bytes == bytes_of(longer, name));
    const bool is_shape = name.ends_with("weight_shape");
    EXPECT_EQ(bytes == bytes_of(other, name), is_shape);
    EXPECT(is_shape ||
           seen.insert(xxh64(bytes.data(), bytes.size())).second);  // no two tensors alike
  }
}

KDT_TEST(parts_in_any_order_by_several_threads_make_the_whole) {
  for (const char* like : {"tiny", "kimi-k2-instruct"}) {
    const SynthSource source =
        target({.like = like, .layers = 2, .experts = 9, .hidden = 32, .vocab = 512});
    const uint64_t end = std::min<uint64_t>(source.total_bytes(), 3 << 20);
    std::vector<uint8_t> whole(end), pieces(end);
    source.read_range(nullptr, 0, end, whole.data());
    // Odd lengths, so that pieces begin and end anywhere in a group.
    const auto piece = [](uint64_t index) { return 1 + index * 37 % 4099; };
    const auto work = [&](uint64_t parity) {
      uint64_t at = 0;
      for (uint64_t i = 0; at < end; ++i) {
        const uint64_t bytes = std::min(piece(i), end - at);
        if (i % 2 == parity) source.read_range(nullptr, at, bytes, pieces.data() + at);
        at += bytes;
      }
    };
    std::thread odd([&] { work(1); });
    work(0);
    odd.join();
    EXPECT(whole == pieces);
  }
  const SynthSource source = target({.like = "tiny"});
  source.read_range(nullptr, source.total_bytes(), 0, nullptr);
  uint8_t byte;
  EXPECT_THROWS("there are", source.read_range(nullptr, source.total_bytes(), 1, &byte));
}

KDT_TEST(int4_groups_reach_seven_and_weights_are_as_wide_as_planned) {
  const SynthSource source = target({.like = "tiny"});
  const std::string module = kLayer + "mlp.experts.3.down_proj";
  const std::vector<uint8_t> packed = bytes_of(source, module + ".weight_packed");
  const std::vector<float> scales = floats_of(source, module + ".weight_scale");
  EXPECT(values_of<int32_t>(source, module + ".weight_shape") == std::vector<int32_t>({256, 256}));
  EXPECT_EQ(packed.size(), 16 * scales.size());
  std::vector<float> weights;
  std::set<int> codes;
  for (size_t group = 0; group < scales.size(); ++group) {
    float largest = 0;
    for (int k = 0; k < 32; ++k) {
      const int code = (packed[16 * group + k / 2] >> (k % 2 * 4) & 15) - 8;
      codes.insert(code);
      weights.push_back(static_cast<float>(code) * scales[group]);
      largest = std::max(largest, std::abs(weights.back()));
    }
    EXPECT_EQ(largest, 7 * scales[group]);
  }
  EXPECT_EQ(codes.size(), size_t{15});
  EXPECT(*codes.begin() == -7 && *codes.rbegin() == 7);
  EXPECT_NEAR(moments(weights).mean * 16, 0, 0.02);
  EXPECT_NEAR(moments(weights).deviation * 16, 1, 0.02);  // 1/sqrt(256)
}

KDT_TEST(fp8_weights_are_as_wide_as_planned) {
  const SynthSource source =
      target({.like = "kimi-k2-instruct", .layers = 1, .hidden = 256, .vocab = 512});
  const std::string module = "model.layers.0.self_attn.q_b_proj";  // [12288, 1536]
  const std::vector<uint8_t> codes = bytes_of(source, module + ".weight");
  const std::vector<float> scales = floats_of(source, module + ".weight_scale_inv");
  EXPECT_EQ(scales.size(), size_t{96 * 12});
  std::vector<float> weights;
  float largest = 0;
  for (size_t i = 0; i < codes.size(); ++i) {
    EXPECT((codes[i] & 0x7F) != 0x7F);  // NaN
    largest = std::max(largest, std::abs(from_e4m3(codes[i])));
    weights.push_back(from_e4m3(codes[i]) * scales[i / 1536 / 128 * 12 + i % 1536 / 128]);
  }
  EXPECT_EQ(largest, 448.0f);
  EXPECT_NEAR(moments(weights).deviation * std::sqrt(1536), 1, 0.02);
}

KDT_TEST(matrices_and_norms_are_as_wide_as_planned) {
  const SynthSource source = target({.like = "tiny"});
  const Moments q = moments(floats_of(source, kLayer + "self_attn.o_proj.weight"));
  EXPECT_NEAR(q.deviation * std::sqrt(512), 1, 0.02);
  EXPECT_NEAR(q.mean * std::sqrt(512), 0, 0.02);
  EXPECT_NEAR(moments(floats_of(source, "language_model.lm_head.weight")).deviation * 16, 4, 0.05);
  const Moments norm = moments(floats_of(source, kLayer + "input_layernorm.weight"));
  EXPECT_NEAR(norm.mean, 1, 0.03);
  EXPECT_NEAR(norm.deviation, 0.1, 0.03);
}

// ------------------------------------------------------------------ experts

namespace {

// Numbers near the standard normal distribution, of no library's making.
std::vector<double> noise(size_t count, uint64_t& state) {
  std::vector<double> values;
  for (size_t i = 0; i < count; ++i) {
    double sum = 0;
    for (int term = 0; term < 12; ++term) {
      state = state * 6364136223846793005u + 1442695040888963407u;
      sum += static_cast<double>(state >> 11) / (uint64_t{1} << 53);
    }
    values.push_back(sum - 6);
  }
  return values;
}

// Mean number of different experts among the choices of `rows` rows, which share the part `shared`
// of their variance.
double distinct_experts(const SynthSource& source, const ModelConfig& c, int rows, double shared) {
  constexpr int kTrials = 20;
  const std::vector<float> gate = floats_of(source, kLayer + "mlp.gate.weight");
  const std::vector<float> bias = floats_of(source, kLayer + "mlp.gate.e_score_correction_bias");
  uint64_t state = 1;
  size_t total = 0;
  for (int trial = 0; trial < kTrials; ++trial) {
    const std::vector<double> common = noise(c.hidden_size, state);
    std::set<int64_t> chosen;
    for (int row = 0; row < rows; ++row) {
      const std::vector<double> own = noise(c.hidden_size, state);
      std::vector<std::pair<double, int64_t>> scores;
      for (int64_t e = 0; e < c.n_routed_experts; ++e) {
        double z = 0;
        for (int64_t i = 0; i < c.hidden_size; ++i) {
          z += gate[e * c.hidden_size + i] *
               (std::sqrt(shared) * common[i] + std::sqrt(1 - shared) * own[i]);
        }
        scores.push_back({-(1 / (1 + std::exp(-z)) + bias[e]), e});
      }
      std::partial_sort(scores.begin(), scores.begin() + c.num_experts_per_tok, scores.end());
      for (int64_t k = 0; k < c.num_experts_per_tok; ++k) chosen.insert(scores[k].second);
    }
    total += chosen.size();
  }
  return static_cast<double>(total) / kTrials;
}

}  // namespace

KDT_TEST(rows_choose_fewer_experts_than_independent_uniform_ones) {
  const SynthModel model =
      make_synth_model({.like = "kimi-k2.6", .layers = 2, .hidden = 256, .vocab = 512});
  const SynthSource source(model, Part::kTarget, 0);
  const double experts = 384, share = 8 / experts;
  for (const int rows : {8, 16, 65}) {
    const double uniform = experts * (1 - std::pow(1 - share, rows));
    const double alone = distinct_experts(source, model.config, rows, 0);
    const double tree = distinct_experts(source, model.config, rows, 0.3);
    std::printf("%d rows: %.1f experts if uniform, %.1f (%.2f) of these, %.1f (%.2f) in one tree\n",
                rows, uniform, alone, alone / uniform, tree, tree / uniform);
    // Popular experts cost something, the common part of a tree's rows much more.
    EXPECT(alone < 0.99 * uniform && alone > 0.8 * uniform);
    EXPECT(tree < 0.9 * alone && tree > 0.5 * uniform);
  }
}

KDT_TEST_MAIN
