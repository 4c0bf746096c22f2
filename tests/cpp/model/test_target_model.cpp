// The target on tiny checkpoints: against the reference and transformers, and against itself bit
// for bit.
#include "tiny_models.h"

namespace kdt::test {
namespace {

constexpr int64_t kVocab = 512;

int32_t argmax(const Floats& logits, int64_t row) {
  const auto begin = logits.begin() + row * kVocab;
  return static_cast<int32_t>(std::max_element(begin, begin + kVocab) - begin);
}

KDT_TEST(model_bundles) {
  for (const char* preset : {"tiny", "kimi_groups", "plain"}) {
    const KdtrFile file = bundle(std::string("model_") + preset);
    expect_weights_of(file, preset);
    Target target(backend(), preset);
    const Ints tokens = values<int32_t>(file.at("token_ids"));
    const auto length = static_cast<int64_t>(tokens.size());
    const Floats logits = target.run(0, 0, tokens);
    EXPECT(are_close(logits, values<double>(file.at("logits")), kVocab));
    const Floats tree = target.run(0, length, values<int32_t>(file.at("tree_tokens")),
                                   values<int32_t>(file.at("tree_parents")));
    EXPECT(are_close(tree, values<double>(file.at("tree_logits")), kVocab));
    if (on_gpu()) continue;  // near ties of random logits fall another way
    // The rows of the tree are written over.
    const Ints greedy = values<int32_t>(file.at("greedy"));
    Ints generated = {argmax(logits, length - 1)};
    while (generated.size() < greedy.size()) {
      const int64_t position = length + static_cast<int64_t>(generated.size()) - 1;
      generated.push_back(argmax(target.run(0, position, {generated.back()}), 0));
    }
    EXPECT(generated == greedy);
  }
}

KDT_TEST(golden_results_of_transformers) {
  for (const auto& [name, preset] : {std::pair{"golden_deepseek_v3", "tiny"},
                                     {"golden_deepseek_v3_groups", "groups"},
                                     {"golden_deepseek_v3_plain", "plain"}}) {
    const KdtrFile file = bundle(name);
    expect_weights_of(file, preset);
    Target target(backend(), preset, {0, 1});
    const Ints tokens = values<int32_t>(file.at("token_ids"));
    EXPECT(are_close(target.run(0, 0, tokens), values<float>(file.at("logits")), kVocab));
    EXPECT(are_close(target.features(), values<float>(file.at("features")), 128));
    const Floats tree =
        target.run(0, static_cast<int64_t>(tokens.size()), values<int32_t>(file.at("tree_tokens")),
                   values<int32_t>(file.at("tree_parents")));
    EXPECT(are_close(tree, values<float>(file.at("tree_logits")), kVocab));
  }
}

KDT_TEST(the_nested_layout_is_the_same_model) {
  Target flat(backend(), "kimi_groups"), nested(backend(), "nested");
  const Ints tokens = random_tokens(20, 1);
  EXPECT(same_bits(flat.run(0, 0, tokens), nested.run(0, 0, tokens)));
}

KDT_TEST(prefill_in_chunks_of_any_size_gives_equal_bits) {
  const int64_t length = is_slow() ? 70 : 150;
  const Ints tokens = random_tokens(length, 2);
  Floats expected, expected_features;
  for (int threads : {1, 2}) {
    if (threads > 1 && !on_cpu()) continue;
    const auto b = make_backend(device(), threads);
    Target target(*b, "kimi_groups", {0, 2});
    for (int64_t chunk : {150, 64, 7, 1}) {
      Floats logits, features;
      const int64_t sequence = chunk % 4;  // other blocks each time
      for (int64_t begin = 0; begin < length; begin += chunk) {
        const int64_t count = std::min<int64_t>(chunk, length - begin);
        append(logits, target.run(sequence, begin, slice(tokens, begin, count)));
        append(features, target.features());
      }
      if (expected.empty()) {
        expected = logits;
        expected_features = features;
      }
      EXPECT(same_bits(logits, expected));
      EXPECT(same_bits(features, expected_features));
    }
  }
}

KDT_TEST(tree_rows_get_the_bits_of_plain_decoding) {
  for (const char* preset : {"tiny", "plain"}) {
    Target target(backend(), preset);
    for (int64_t prefix : {0, 1, 31, 40, 64}) {
      if (is_slow() && prefix != 1 && prefix != 64) continue;
      const Ints prompt = random_tokens(prefix, 3), parents = random_tree(40, prefix);
      const Ints tokens = random_tokens(40, 4);
      if (prefix > 0) {
        target.run(0, 0, prompt);
        target.run(1, 0, prompt);
      }
      const Floats tree = target.run(0, prefix, tokens, parents);
      for (int64_t slot = 0; slot < 40; slot += is_slow() ? 13 : 3) {
        // Plain decoding: one token a step along the slot's path.
        Floats step;
        int64_t position = prefix;
        for (int32_t s : path_to(parents, slot)) step = target.run(1, position++, {tokens[s]});
        if (!same_bits(step, slice(tree, slot * kVocab, kVocab))) {
          report(__FILE__, __LINE__, join(preset, ", prefix ", prefix, ": slot ", slot));
        }
      }
    }
  }
}

KDT_TEST(an_accepted_path_continues_as_plain_decoding) {
  Backend& b = backend();
  Target target(b, "tiny");
  const Ints prompt = random_tokens(29, 5), tokens = random_tokens(30, 6),
             parents = random_tree(30, 7);
  target.run(0, 0, prompt);
  target.run(0, 29, tokens, parents);
  const Ints path = path_to(parents, 29);
  Ints from, to, linear = prompt;
  for (size_t i = 0; i < path.size(); ++i) {
    from.push_back(29 + path[i]);
    to.push_back(29 + static_cast<int32_t>(i));
    linear.push_back(tokens[path[i]]);
  }
  const Buffer table = upload(b, Target::blocks(0)), from_memory = upload(b, from);
  b.kv_compact(target.cache(), table.tensor, from_memory.tensor, upload(b, to).tensor);
  target.run(1, 0, linear);
  const auto length = static_cast<int64_t>(linear.size());
  EXPECT(same_bits(target.run(0, length, {77}), target.run(1, length, {77})));
}

KDT_TEST(sequences_of_one_batch_do_not_touch_each_other) {
  Target target(backend(), "tiny");
  const Ints prompts[] = {random_tokens(33, 8), random_tokens(5, 9), random_tokens(64, 10)};
  const Ints trees[] = {random_tree(12, 1), random_tree(1, 2), random_tree(20, 3)};
  target.clear();
  for (int s = 0; s < 3; ++s) {
    target.add(s, 0, prompts[s], chain(static_cast<int64_t>(prompts[s].size())));
  }
  const Floats prefill = target.run();
  target.clear();
  for (int s = 0; s < 3; ++s) {
    target.add(s, static_cast<int64_t>(prompts[s].size()),
               random_tokens(static_cast<int64_t>(trees[s].size()), s), trees[s]);
  }
  const Floats verify = target.run();
  int64_t prefill_row = 0, verify_row = 0;
  for (int s = 0; s < 3; ++s) {
    const auto length = static_cast<int64_t>(prompts[s].size());
    const auto slots = static_cast<int64_t>(trees[s].size());
    EXPECT(same_bits(target.run(3, 0, prompts[s]),
                     slice(prefill, prefill_row * kVocab, length * kVocab)));
    EXPECT(same_bits(target.run(3, length, random_tokens(slots, s), trees[s]),
                     slice(verify, verify_row * kVocab, slots * kVocab)));
    prefill_row += length;
    verify_row += slots;
  }
}

KDT_TEST(batches_that_do_not_fit_are_refused) {
  Target target(backend(), "tiny");
  EXPECT_THROWS("batch: more than 160 rows", target.run(0, 0, random_tokens(161, 1)));
  RowBatch batch(target.backend(), 4, 1, 8);
  batch.begin_sequence(0, Target::blocks(0));
  batch.add_row(1, 0, -1);
  batch.add_row(2, 1, 1);
  batch.upload();
  if (on_gpu()) {
    EXPECT_THROWS("token id 512 at row 0 is out of range", target.run(0, 0, {512}));
    EXPECT_THROWS("is out of range", target.run(0, 255, {1, 2}));
    EXPECT_THROWS("300 at row 0 is out of range", target.run(0, 300, {1}));
    target.model().forward(batch, target.cache());
    EXPECT_THROWS("parent 1 at row 1 is out of range", target.backend().synchronize());
    // No fault is left over, and the target is as it was.
    Target fresh(backend(), "tiny");
    const Ints tokens = random_tokens(9, 1);
    EXPECT(same_bits(target.run(0, 0, tokens), fresh.run(0, 0, tokens)));
    return;
  }
  EXPECT_THROWS("embed: token id 512", target.run(0, 0, {512}));
  EXPECT_THROWS("needs 257 cached rows", target.run(0, 255, {1, 2}));
  EXPECT_THROWS("position 300 is outside the rope table of 300", target.run(0, 300, {1}));
  EXPECT_THROWS("parent 1 of slot 1", target.model().forward(batch, target.cache()));
}

}  // namespace
}  // namespace kdt::test

KDT_MODEL_TEST_MAIN
