// Choices over a vocabulary that is cut into parts, against those over the whole of it.
#include <cmath>

#include "op_test.h"

namespace kdt::test {
namespace {

struct Top {
  Floats logprobs;
  Ints ids;
  Floats log_sums;
};

Top topk(Backend& b, const Floats& logits, int64_t rows, int64_t k, float temperature = 1,
         bool is_part = false, int64_t first_id = 0) {
  const auto vocab = static_cast<int64_t>(logits.size()) / rows;
  const Buffer memory = upload(b, logits, {rows, vocab}), logprobs = output(b, {rows, k}),
               ids = int_output(b, {rows, k}), log_sums = output(b, {rows});
  b.topk_logprobs({.logits = memory.tensor,
                   .temperature = temperature,
                   .logprobs = logprobs.tensor,
                   .ids = ids.tensor,
                   .log_sums = is_part ? log_sums.tensor : Tensor(),
                   .first_id = first_id});
  return {download(b, logprobs.tensor), download<int32_t>(b, ids.tensor),
          download(b, log_sums.tensor)};
}

// part.logprobs, .ids: [N, R, k'].
Top merge(Backend& b, const Top& parts, int64_t num_parts, int64_t rows, int64_t k) {
  const int64_t count = static_cast<int64_t>(parts.ids.size()) / num_parts;
  Ints words;
  for (int64_t p = 0; p < num_parts; ++p) {
    append(words, bits(slice(parts.logprobs, p * count, count)));
    append(words, slice(parts.ids, p * count, count));
    append(words, bits(slice(parts.log_sums, p * rows, rows)));
  }
  const Buffer memory = upload(b, words, {num_parts, 2 * count + rows}),
               logprobs = output(b, {rows, k}), ids = int_output(b, {rows, k});
  b.merge_topk({.parts = memory.tensor, .logprobs = logprobs.tensor, .ids = ids.tensor});
  return {download(b, logprobs.tensor), download<int32_t>(b, ids.tensor), {}};
}

// Columns [begin, begin + width) of each row.
Floats columns(const Floats& x, int64_t rows, int64_t begin, int64_t width) {
  const auto n = static_cast<int64_t>(x.size()) / rows;
  Floats out;
  for (int64_t r = 0; r < rows; ++r) append(out, slice(x, r * n + begin, width));
  return out;
}

Top topk_by_parts(Backend& b, const Floats& logits, int64_t rows, int64_t k, int64_t num_parts,
                  float temperature) {
  const int64_t width = static_cast<int64_t>(logits.size()) / rows / num_parts;
  Top parts;
  for (int64_t p = 0; p < num_parts; ++p) {
    const Top part = topk(b, columns(logits, rows, p * width, width), rows, std::min(k, width),
                          temperature, true, p * width);
    append(parts.logprobs, part.logprobs);
    append(parts.ids, part.ids);
    append(parts.log_sums, part.log_sums);
  }
  return merge(b, parts, num_parts, rows, k);
}

// Rows of every kind that a model or a mask gives; `vocab` is a multiple of 8.
constexpr int64_t kRows = 11;
Floats every_kind_of_row(int64_t vocab, uint64_t seed) {
  Random random(seed);
  Floats logits = random.floats(kRows * vocab, 6);
  const auto row = [&](int64_t r) { return logits.data() + r * vocab; };
  for (int64_t i = 0; i < vocab; ++i) {
    row(1)[i] = bf16_to_float(float_to_bf16(row(1)[i]));  // many equals in all parts
    row(2)[i] = std::round(row(2)[i]);                    // few numbers
    row(3)[i] = 0.25f;
    if (random.below(8) != 0) row(4)[i] = random.below(3) == 0 ? kNan : -kInfinity;
    row(5)[i] = -kInfinity;
    row(6)[i] = i % 3 == 0 ? kNan : -kInfinity;
    if (i != vocab - 1) row(7)[i] = i % 2 == 0 ? kNan : -kInfinity;  // one number, in the last part
    if (i / (vocab / 8) % 2 == 0) row(8)[i] = kNan;                  // parts of NaN
    row(10)[i] = i % 2 == 0 ? 0.0f : -0.0f;
  }
  row(9)[vocab / 2 + 1] = kInfinity;  // no distribution
  // Equals on both sides of each border, the greatest of all.
  for (int64_t border = vocab / 8; border < vocab; border += vocab / 8)
    row(0)[border - 1] = row(0)[border] = 6.5f;
  return logits;
}

KDT_TEST(parts_give_the_top_k_of_the_whole) {
  Backend& b = backend();
  std::vector<int64_t> vocabs = {8, 72, 4096};
  if (large_cases()) vocabs.push_back(163840);
  for (const int64_t vocab : vocabs) {
    for (const int64_t most : {1, 2, 7, 64, 256}) {
      const int64_t k = std::min(most, vocab);
      for (const float temperature : {1.0f, 0.6f}) {
        if (temperature != 1 && k != 7) continue;
        const Floats logits = every_kind_of_row(vocab, vocab + k);
        const Top whole = topk(b, logits, kRows, k, temperature);
        for (const int64_t parts : {1, 2, 4, 8}) {
          const Top merged = topk_by_parts(b, logits, kRows, k, parts, temperature);
          for (int64_t r = 0; r < kRows; ++r) {
            const auto what = [&] { return join(k, " of ", vocab, ", ", parts, ", row ", r); };
            if (slice(merged.ids, r * k, k) != slice(whole.ids, r * k, k))
              report(__FILE__, __LINE__, join(what(), ": ids"));
            double scale = 1;
            for (int64_t i = r * k; i < (r + 1) * k; ++i) {
              if (std::isfinite(whole.logprobs[i]))
                scale = std::max<double>(scale, std::fabs(whole.logprobs[i]));
            }
            const double error =
                max_error(slice(merged.logprobs, r * k, k), slice(whole.logprobs, r * k, k));
            if (!(error <= 1e-6 * scale))
              report(__FILE__, __LINE__, join(what(), ": differs by ", error));
          }
          if (parts == 1) EXPECT(same_bits(merged.logprobs, whole.logprobs));
        }
      }
    }
  }
}

KDT_TEST(a_part_gives_its_logits_and_their_sum) {
  Backend& b = backend();
  const Top part = topk(b, {1, 3, kNan, -kInfinity, 3, 2}, 1, 6, 0.5f, true, 100);
  EXPECT(part.ids == Ints({101, 104, 105, 100, 102, 103}));
  EXPECT(part.logprobs == Floats({6, 6, 4, 2, -kInfinity, -kInfinity}));
  EXPECT_NEAR(part.log_sums[0], std::log(2 * std::exp(6.0) + std::exp(4.0) + std::exp(2.0)), 1e-6);
  const Top others = topk(
      b, {kNan, -kInfinity, kNan, -kInfinity, -kInfinity, -kInfinity, kInfinity, 1, kNan, 1, 1, 1},
      2, 1, 1, true);
  EXPECT(others.log_sums == Floats({-kInfinity, kInfinity}));
  EXPECT(others.logprobs == Floats({-kInfinity, kInfinity}));
  EXPECT(others.ids == Ints({0, 0}));
}

KDT_TEST(parts_are_merged) {
  Backend& b = backend();
  const auto log = [](double x) { return static_cast<float>(std::log(x)); };
  const float none = -kInfinity;
  // Of weights: 2 + 1 + 1, nothing, and 4 + 2 + 6 that are not among its three.
  const Top parts = {{log(2), log(1), log(1), none, none, none, log(4), log(2), none},
                     {7, 3, 9, 10, 11, 12, 25, 21, 20},
                     {log(4), none, log(12)}};
  const Top all = merge(b, parts, 3, 1, 9);
  EXPECT(all.ids == Ints({25, 7, 21, 3, 9, 10, 11, 12, 20}));
  const double sum = 16;
  EXPECT(max_error(all.logprobs, std::vector<double>({std::log(4 / sum), std::log(2 / sum),
                                                      std::log(2 / sum), std::log(1 / sum),
                                                      std::log(1 / sum), none, none, none, none})) <
         1e-6);
  EXPECT(merge(b, parts, 3, 1, 2).ids == Ints({25, 7}));
  const Top nothing = merge(b, {Floats(4, none), {1, 2, 5, 6}, Floats(2, none)}, 2, 1, 3);
  EXPECT(nothing.ids == Ints({1, 2, 5}));
  EXPECT(nothing.logprobs == Floats(3, none));
}

// As many parts as a group may have ranks, and more candidates than a block has threads.
KDT_TEST(many_parts_and_rows_are_merged_one_by_one) {
  Backend& b = backend();
  constexpr int64_t kVocab = 64 * 24, kMany = 5, kK = 256;
  const Floats logits = Random(4).floats(kMany * kVocab, 3);
  for (const int64_t parts : {3, 64}) {
    const Top merged = topk_by_parts(b, logits, kMany, kK, parts, 1);
    EXPECT(merged.ids == topk(b, logits, kMany, kK).ids);
    for (int64_t r = 0; r < kMany; ++r) {
      const Top one = topk_by_parts(b, slice(logits, r * kVocab, kVocab), 1, kK, parts, 1);
      EXPECT(one.ids == slice(merged.ids, r * kK, kK));
      EXPECT(same_bits(one.logprobs, slice(merged.logprobs, r * kK, kK)));
    }
  }
}

KDT_TEST(merges_are_the_same_on_every_back_end) {
  const auto cpu = make_backend("cpu", 1);
  constexpr int64_t kVocab = 2048, kK = 64, kParts = 8;
  Top parts;
  for (int64_t p = 0; p < kParts; ++p) {
    const Top part = topk(*cpu, Random(p).floats(3 * kVocab, 7), 3, kK, 1, true, p * kVocab);
    append(parts.logprobs, part.logprobs);
    append(parts.ids, part.ids);
    append(parts.log_sums, part.log_sums);
  }
  const Top here = merge(backend(), parts, kParts, 3, kK),
            there = merge(*cpu, parts, kParts, 3, kK);
  EXPECT(here.ids == there.ids);
  EXPECT(same_bits(here.logprobs, there.logprobs));
}

// Argmax.

struct Greatest {
  Ints ids;
  Floats values;
};

Greatest argmax(Backend& b, const Floats& logits, int64_t rows, int64_t first_id) {
  const Buffer memory = upload(b, logits, {rows, static_cast<int64_t>(logits.size()) / rows}),
               ids = int_output(b, {rows}), values = output(b, {rows});
  b.argmax(
      {.logits = memory.tensor, .ids = ids.tensor, .values = values.tensor, .first_id = first_id});
  return {download<int32_t>(b, ids.tensor), download(b, values.tensor)};
}

KDT_TEST(parts_give_the_argmax_of_the_whole) {
  Backend& b = backend();
  for (const int64_t vocab : {8, 72, 4096}) {
    const Floats logits = every_kind_of_row(vocab, vocab);
    const Greatest whole = argmax(b, logits, kRows, 0);
    EXPECT_EQ(whole.ids[0], vocab / 8 - 1);
    EXPECT_EQ(whole.ids[5], 0);
    EXPECT_EQ(whole.ids[7], vocab - 1);
    for (int64_t r = 0; r < kRows; ++r)
      EXPECT_EQ(whole.values[r], logits[r * vocab + whole.ids[r]]);
    for (const int64_t parts : {1, 2, 4, 8}) {
      Greatest best = {Ints(kRows, -1), Floats(kRows, -kInfinity)};
      for (int64_t p = 0; p < parts; ++p) {
        const int64_t width = vocab / parts;
        const Greatest part = argmax(b, columns(logits, kRows, p * width, width), kRows, p * width);
        for (int64_t r = 0; r < kRows; ++r) {
          if (part.ids[r] < 0) EXPECT_EQ(part.values[r], -kInfinity);
          if (part.ids[r] < 0 || (best.ids[r] >= 0 && part.values[r] <= best.values[r])) continue;
          best.ids[r] = part.ids[r];
          best.values[r] = part.values[r];
        }
      }
      EXPECT(best.ids == whole.ids);
      EXPECT(best.values == whole.values);
    }
  }
  const Greatest none = argmax(b, {kNan, kNan, -kInfinity, kNan, 2, kNan}, 3, 1000);
  EXPECT(none.ids == Ints({-1, 1000, 1000}));
  EXPECT(none.values == Floats({-kInfinity, -kInfinity, 2}));
}

KDT_TEST(impossible_parts_are_refused) {
  Backend& b = backend();
  EXPECT_THROWS("topk_logprobs: first_id -1", topk(b, {1, 2}, 1, 1, 1, true, -1));
  EXPECT_THROWS("argmax: first_id 2147483646 for 2 logits", argmax(b, {1, 2}, 1, 2147483646));
  EXPECT_THROWS("merge_topk: k 5 of 2 parts with 2 each",
                merge(b, {{1, 0, 1, 0}, {0, 1, 2, 3}, {1, 1}}, 2, 1, 5));
  const auto merged = [&](const Buffer& parts, int64_t rows) {
    const Buffer logprobs = output(b, {rows, 2}), ids = int_output(b, {rows, 2});
    b.merge_topk({.parts = parts.tensor, .logprobs = logprobs.tensor, .ids = ids.tensor});
  };
  EXPECT_THROWS("merge_topk: parts is i32[2, 6], want 1 * (2 k' + 1) columns",
                merged(int_output(b, {2, 6}), 1));
  EXPECT_THROWS("merge_topk: parts is i32[2, 11], want 2 * (2 k' + 1) columns",
                merged(int_output(b, {2, 11}), 2));
  EXPECT_THROWS("merge_topk: parts is i32[2, 1], want 2 * (2 k' + 1) columns",
                merged(int_output(b, {2, 1}), 2));
  EXPECT_THROWS("merge_topk: k 2 of 2 parts with 0 each", merged(int_output(b, {2, 2}), 2));
  EXPECT_THROWS("merge_topk: parts is f32[2, 3], want i32[2, 3]", merged(output(b, {2, 3}), 1));
  const Buffer sums = output(b, {1, 2}), logprobs = output(b, {1, 3}), out = int_output(b, {1, 3});
  EXPECT_THROWS("topk_logprobs: log_sums is f32[1, 2], want f32[1]",
                b.topk_logprobs({.logits = logprobs.tensor,
                                 .logprobs = logprobs.tensor,
                                 .ids = out.tensor,
                                 .log_sums = sums.tensor}));
}

}  // namespace
}  // namespace kdt::test

KDT_OP_TEST_MAIN
