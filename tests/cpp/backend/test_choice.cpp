// Top-k log-probabilities and argmax.
#include <numeric>

#include "op_test.h"

namespace kdt::test {
namespace {

struct Top {
  Floats logprobs;
  Ints ids;
};

Top topk(Backend& b, const Floats& logits, int64_t rows, int64_t k, float temperature = 1) {
  const auto vocab = static_cast<int64_t>(logits.size()) / rows;
  const Buffer memory = upload(b, logits, {rows, vocab}), logprobs = output(b, {rows, k}),
               ids = int_output(b, {rows, k});
  b.topk_logprobs({.logits = memory.tensor,
                   .temperature = temperature,
                   .logprobs = logprobs.tensor,
                   .ids = ids.tensor});
  return {download(b, logprobs.tensor), download<int32_t>(b, ids.tensor)};
}

Ints argmax(Backend& b, const Floats& logits, int64_t rows) {
  const Buffer memory = upload(b, logits, {rows, static_cast<int64_t>(logits.size()) / rows}),
               ids = int_output(b, {rows});
  b.argmax({.logits = memory.tensor, .ids = ids.tensor});
  return download<int32_t>(b, ids.tensor);
}

KDT_TEST(bundles) {
  Backend& b = backend();
  for (const char* name : {"plain", "temperature", "ties", "masked"}) {
    const KdtrFile file = bundle(std::string("topk_") + name);
    const Floats logits = values<float>(file.at("logits"));
    const int64_t rows = file.at("logits").shape[0], k = scalar<int32_t>(file, "k");
    const Top top = topk(b, logits, rows, k, scalar<float>(file, "temperature"));
    const Floats expected = values<float>(file.at("logprobs"));
    const Ints ids = values<int32_t>(file.at("ids")), best = values<int32_t>(file.at("argmax"));
    for (int64_t r = 0; r < rows; ++r) {
      if (slice(top.ids, r * k, k) != slice(ids, r * k, k))
        report(__FILE__, __LINE__, join(name, ": ids of row ", r));
      double scale = 1;
      for (int64_t i = r * k; i < (r + 1) * k; ++i) {
        if (std::isfinite(expected[i])) scale = std::max<double>(scale, std::fabs(expected[i]));
      }
      const double error = max_error(slice(top.logprobs, r * k, k), slice(expected, r * k, k));
      if (!(error <= 2e-6 * scale))
        report(__FILE__, __LINE__, join(name, ": row ", r, " differs by ", error));
    }
    EXPECT(argmax(b, logits, rows) == best);
  }
}

Top reference(const Floats& logits, int64_t k) {
  Ints order(logits.size());
  std::iota(order.begin(), order.end(), 0);
  const auto value = [&](int32_t i) { return std::isnan(logits[i]) ? -kInfinity : logits[i]; };
  std::stable_sort(order.begin(), order.end(),
                   [&](int32_t x, int32_t y) { return value(x) > value(y); });
  double sum = 0;
  for (size_t i = 0; i < logits.size(); ++i)
    sum += std::exp(static_cast<double>(value(i)) - value(order[0]));
  Top top;
  for (int64_t i = 0; i < k; ++i) {
    top.ids.push_back(order[i]);
    top.logprobs.push_back(static_cast<float>(value(order[i]) - value(order[0]) - std::log(sum)));
  }
  return top;
}

KDT_TEST(any_k_up_to_the_vocabulary) {
  Backend& b = backend();
  for (int64_t vocab : {1, 5, 31, 32, 33, 64, 1000, 4099}) {
    for (int64_t k : {int64_t{1}, int64_t{2}, int64_t{8}, vocab / 2, vocab - 1, vocab}) {
      if (k < 1 || k > vocab) continue;
      for (bool coarse : {false, true}) {
        Floats logits = Random(vocab + k).floats(3 * vocab, 8);
        if (coarse) {
          for (float& x : logits) x = std::round(x);  // many equals
        }
        const Top top = topk(b, logits, 3, k);
        for (int64_t r = 0; r < 3; ++r) {
          const Top expected = reference(slice(logits, r * vocab, vocab), k);
          if (slice(top.ids, r * k, k) != expected.ids)
            report(__FILE__, __LINE__, join("ids of ", k, " of ", vocab));
          EXPECT(max_error(slice(top.logprobs, r * k, k), expected.logprobs) < 5e-6);
        }
      }
    }
  }
}

// Row by row against the reference; logits are rows of one length.
void expect_topk(const Floats& logits, int64_t rows, int64_t k, const std::string& what) {
  const auto vocab = static_cast<int64_t>(logits.size()) / rows;
  const Top top = topk(backend(), logits, rows, k);
  for (int64_t r = 0; r < rows; ++r) {
    const Top expected = reference(slice(logits, r * vocab, vocab), k);
    if (slice(top.ids, r * k, k) != expected.ids)
      report(__FILE__, __LINE__, join(what, ": ids of row ", r));
    const double error = max_error(slice(top.logprobs, r * k, k), expected.logprobs);
    if (!(error < 2e-5)) report(__FILE__, __LINE__, join(what, ": row ", r, " differs by ", error));
  }
}

KDT_TEST(rows_of_many_chunks) {
  // 12003 is no multiple of 4, so rows begin at any address.
  std::vector<int64_t> vocabs = {2048, 2049, 12003, 20000};
  if (large_cases()) vocabs.push_back(163840);
  for (int64_t vocab : vocabs) {
    for (int64_t k : {1, 64, 256, 300}) {
      Random random(vocab * k);
      Floats logits = random.floats(3 * vocab, 9);
      for (int64_t i = vocab; i < 2 * vocab; ++i)  // as they come from a model: many equals
        logits[i] = bf16_to_float(float_to_bf16(logits[i]));
      for (int64_t i = 2 * vocab; i < 3 * vocab; ++i) {  // few numbers beside a masked tail
        if (i % 97 != 0) logits[i] = random.below(50) == 0 ? kNan : -kInfinity;
      }
      expect_topk(logits, 3, k, join(k, " of ", vocab));
    }
    expect_topk(Floats(vocab, 0.25f), 1, 256, join("equal logits of ", vocab));
    Floats same(vocab, -1.0f);  // the greatest are equal and more than k
    for (int64_t i = 5; i < vocab; i += 4) same[i] = 3;
    expect_topk(same, 1, 100, join("equal greatest of ", vocab));
  }
}

KDT_TEST(one_row_of_each_size) {
  std::vector<int64_t> vocabs = {1, 31, 1000};
  if (large_cases()) vocabs.push_back(163840);
  for (int64_t vocab : vocabs) {
    const Floats logits = Random(vocab).floats(vocab, 12);
    expect_topk(logits, 1, std::min<int64_t>(vocab, 64), join("vocabulary of ", vocab));
    EXPECT_EQ(argmax(backend(), logits, 1)[0], reference(logits, 1).ids[0]);
  }
}

KDT_TEST(equals_and_missing_numbers) {
  Backend& b = backend();
  Top top = topk(b, {1, 1, 1, 1, 1}, 1, 5);
  EXPECT(top.ids == Ints({0, 1, 2, 3, 4}));
  EXPECT(max_error(top.logprobs, Floats(5, std::log(0.2f))) < 1e-6);

  // NaN counts as -inf, so its id takes its turn among them.
  top = topk(b, {-kInfinity, kNan, 2, -kInfinity, kNan}, 1, 5);
  EXPECT(top.ids == Ints({2, 0, 1, 3, 4}));
  EXPECT_EQ(top.logprobs[0], 0.0f);
  for (int i = 1; i < 5; ++i) EXPECT_EQ(top.logprobs[i], -kInfinity);

  for (float value : {-kInfinity, kNan}) {
    for (int64_t vocab : {3, 64, 1000}) {
      top = topk(b, Floats(vocab, value), 1, 3);
      EXPECT(top.ids == Ints({0, 1, 2}));
      EXPECT(top.logprobs == Floats(3, -kInfinity));
    }
  }
}

KDT_TEST(an_infinite_logit_is_no_distribution) {
  for (int64_t vocab : {4, 100}) {
    Floats logits(vocab, 0.5f);
    logits[2] = kInfinity;
    const Top top = topk(backend(), logits, 1, 3);
    EXPECT(top.ids == Ints({2, 0, 1}));
    EXPECT(top.logprobs == Floats(3, -kInfinity));
  }
}

KDT_TEST(rows_do_not_depend_on_their_number) {
  constexpr int64_t kRows = 40, kVocab = 3000, kK = 20;
  const Floats logits = Random(3).floats(kRows * kVocab, 5);
  for (int threads : {1, 2, 3}) {
    const auto b = make_backend(device(), threads);
    const Top all = topk(*b, logits, kRows, kK);
    const Ints best = argmax(*b, logits, kRows);
    for (int64_t r = 0; r < kRows; r += 7) {
      const Top one = topk(*b, slice(logits, r * kVocab, kVocab), 1, kK);
      EXPECT(one.ids == slice(all.ids, r * kK, kK));
      EXPECT(same_bits(one.logprobs, slice(all.logprobs, r * kK, kK)));
      EXPECT_EQ(best[r], one.ids[0]);
    }
  }
}

KDT_TEST(argmax_takes_the_first_of_equals) {
  Backend& b = backend();
  for (int64_t vocab : {1, 2, 15, 16, 17, 33, 100}) {
    for (int64_t first = 0; first < vocab; ++first) {
      Floats logits(vocab, -1.0f);
      for (int64_t i = first; i < vocab; i += 3) logits[i] = 2;
      EXPECT_EQ(argmax(b, logits, 1)[0], first);
      if (first > 0) {
        logits[first - 1] = kNan;
        EXPECT_EQ(argmax(b, logits, 1)[0], first);
      }
    }
    EXPECT_EQ(argmax(b, Floats(vocab, kNan), 1)[0], -1);
    Floats logits(vocab, kNan);
    logits[vocab - 1] = -kInfinity;  // the only number
    EXPECT_EQ(argmax(b, logits, 1)[0], vocab - 1);
  }
  EXPECT(argmax(b, {0.0f, -0.0f, -0.0f, 0.0f}, 2) == Ints({0, 0}));
  EXPECT(argmax(b, {1, kInfinity, kNan, kInfinity}, 1) == Ints({1}));
}

KDT_TEST(argmax_of_many_chunks) {
  Backend& b = backend();
  const int64_t vocab = large_cases() ? 163840 : 5001, rows = large_cases() ? 65 : 7;
  Floats logits = Random(8).floats(rows * vocab, 5);
  Ints expected;
  for (int64_t r = 0; r < rows; ++r) {
    float* row = logits.data() + r * vocab;
    const int64_t first = r * 613 % vocab;
    row[first] = row[std::min(first + 2100, vocab - 1)] = 7;  // equals in two chunks
    if (r == 3) std::fill(row, row + vocab, -kInfinity);
    if (r == 4) std::fill(row, row + vocab, kNan);
    if (r == 5) std::fill(row, row + 3000, kNan);
    if (r == 5) std::fill(row + 3000, row + vocab, -kInfinity);
    expected.push_back(r == 3 ? 0 : r == 4 ? -1 : r == 5 ? 3000 : static_cast<int32_t>(first));
  }
  EXPECT(argmax(b, logits, rows) == expected);
  for (int64_t r = 0; r < rows; r += 3)
    EXPECT_EQ(argmax(b, slice(logits, r * vocab, vocab), 1)[0], expected[r]);
}

KDT_TEST(impossible_choices_are_refused) {
  Backend& b = backend();
  EXPECT_THROWS("topk_logprobs: k 6 of 5", topk(b, Floats(5, 0.0f), 1, 6));
  EXPECT_THROWS("topk_logprobs: temperature 0", topk(b, Floats(5, 0.0f), 1, 2, 0));
  EXPECT_THROWS("topk_logprobs: temperature nan", topk(b, Floats(5, 0.0f), 1, 2, kNan));
}

}  // namespace
}  // namespace kdt::test

KDT_OP_TEST_MAIN
