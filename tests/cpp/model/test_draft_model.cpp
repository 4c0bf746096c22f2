// The drafter on tiny checkpoints.
#include "tiny_models.h"

namespace kdt::test {
namespace {

constexpr int64_t kVocab = 512, kBlock = 8, kFeatures = 128;

class Drafter {
 public:
  Drafter(Target& target, const std::string& preset)
      : target_(target),
        files_(preset_folder(preset) + "/drafter"),
        model_({target.backend()}, load_draft_config(preset_folder(preset) + "/drafter"), files_,
               64, 4, 256),
        batch_(target.backend(), 64, 4, 8),
        cache_(model_.make_cache(32, 32)) {
    load_checkpoint(*model_.take_plan(), {});
  }

  const DraftConfig& config() const { return model_.config(); }

  // Rows behind `prefix_len` cached ones of sequence s.
  void extend(int64_t s, int64_t prefix_len, const Floats& features) {
    const auto rows = static_cast<int64_t>(features.size()) / kFeatures;
    batch_.clear();
    batch_.begin_sequence(prefix_len, Target::blocks(s));
    batch_.add_chain(Ints(rows, 0).data(), rows, prefix_len);
    batch_.upload();
    model_.extend_context(batch_, upload(target_.backend(), features, {rows, kFeatures}).tensor,
                          *cache_);
  }

  // [sequences * depth, vocab_size]; a sequence is (s, context length, root token).
  Floats draft(const std::vector<std::array<int32_t, 3>>& sequences, int64_t depth = kBlock - 1) {
    batch_.clear();
    for (const auto& [s, context, root] : sequences) {
      model_.add_block(batch_, context, Target::blocks(s), root, depth);
    }
    batch_.upload();
    const Buffer logits =
        output(target_.backend(), {static_cast<int64_t>(sequences.size()) * depth, kVocab});
    model_.draft(batch_, target_.model(), *cache_, logits.tensor);
    return download(target_.backend(), logits.tensor);
  }

 private:
  Target& target_;
  SafetensorsFolder files_;
  DraftModel model_;
  RowBatch batch_;
  std::unique_ptr<KvCache> cache_;
};

KDT_TEST(model_bundles) {
  for (const char* preset : {"tiny", "kimi_groups", "plain"}) {
    const KdtrFile file = bundle(std::string("model_") + preset);
    expect_weights_of(file, preset);
    Target target(backend(), preset, {0, 1});
    Drafter drafter(target, preset);
    EXPECT(drafter.config().target_layer_ids == std::vector<int64_t>({0, 1}));
    const Ints tokens = values<int32_t>(file.at("token_ids"));
    const auto length = static_cast<int32_t>(tokens.size());
    target.run(0, 0, tokens);
    drafter.extend(0, 0, target.features());
    const Floats logits = drafter.draft({{0, length, scalar<int32_t>(file, "root_token")}});
    EXPECT(are_close(logits, values<double>(file.at("draft_logits")), kVocab));
  }
}

KDT_TEST(golden_results_of_transformers) {
  const KdtrFile file = bundle("golden_dflash");
  expect_weights_of(file, "tiny");
  Target target(backend(), "tiny", {0, 1});
  Drafter drafter(target, "tiny");
  drafter.extend(0, 0, values<float>(file.at("features")));
  const Floats logits = drafter.draft({{0, 20, 7}});
  // The bundle has hidden states: the target's head makes logits of them.
  const Floats hidden = values<float>(file.at("hidden"));
  const Buffer memory = upload(backend(), slice(hidden, 64, 7 * 64), {7, 64});
  const Buffer expected = output(backend(), {7, kVocab});
  target.model().lm_head(memory.tensor, expected.tensor);
  EXPECT(are_close(logits, download(backend(), expected.tensor), kVocab));
}

KDT_TEST(context_in_chunks_of_any_size_gives_equal_bits) {
  const Floats features = Random(1).floats(50 * kFeatures);
  for (const char* preset : {"tiny", "kimi_groups"}) {  // full layers; a sliding one
    Floats expected;
    for (int threads : {1, 2, 3}) {
      if (threads > 1 && !on_cpu()) continue;
      const auto b = make_backend(device(), threads);
      Target target(*b, preset, {0, 1});
      Drafter drafter(target, preset);
      for (int64_t chunk : {50, 7, 1}) {
        for (int64_t begin = 0; begin < 50; begin += chunk) {
          const int64_t count = std::min<int64_t>(chunk, 50 - begin);
          drafter.extend(chunk % 4, begin, slice(features, begin * kFeatures, count * kFeatures));
          // A block behind the context so far must leave no trace.
          if (chunk == 7) drafter.draft({{3, static_cast<int32_t>(begin + count), 9}});
        }
        const Floats logits = drafter.draft({{static_cast<int32_t>(chunk % 4), 50, 11}});
        if (expected.empty()) expected = logits;
        EXPECT(same_bits(logits, expected));
      }
    }
  }
}

KDT_TEST(blocks_of_one_draft_do_not_touch_each_other) {
  Target target(backend(), "kimi_groups", {0, 1});
  Drafter drafter(target, "kimi_groups");
  Random random(2);
  drafter.extend(0, 0, random.floats(33 * kFeatures));
  drafter.extend(1, 0, random.floats(3 * kFeatures));
  const Floats both = drafter.draft({{0, 33, 5}, {1, 3, 6}, {2, 0, 7}});  // the last has no context
  constexpr int64_t kSize = 7 * kVocab;
  EXPECT(same_bits(drafter.draft({{0, 33, 5}}), slice(both, 0, kSize)));
  EXPECT(same_bits(drafter.draft({{1, 3, 6}}), slice(both, kSize, kSize)));
  EXPECT(same_bits(drafter.draft({{2, 0, 7}}), slice(both, 2 * kSize, kSize)));
  for (int64_t depth : {1, 4}) {
    const Floats shallow = drafter.draft({{0, 33, 5}, {1, 3, 6}}, depth);
    for (int64_t s = 0; s < 2; ++s) {
      EXPECT(same_bits(slice(shallow, s * depth * kVocab, depth * kVocab),
                       slice(both, s * kSize, depth * kVocab)));
    }
  }
  EXPECT_THROWS("draft: depth 8 of a block of 8", drafter.draft({{0, 33, 5}}, 8));
  EXPECT_THROWS("draft: depth 0", drafter.draft({{0, 33, 5}}, 0));
}

}  // namespace
}  // namespace kdt::test

KDT_MODEL_TEST_MAIN
