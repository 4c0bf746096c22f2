// Draws from a few tokens by hand; the engine's draws are compared with numpy's in
// test_sampling.py.
#include <cmath>
#include <limits>
#include <numeric>
#include <set>
#include <string>
#include <utility>

#include "check.h"
#include "engine/sampler.h"

namespace kdt::test {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

// What positions 0 to 999 of a text draw from tokens of these probabilities, whose ids are 10, 11
// and so on; "more" when it cannot be told.
std::set<std::string> drawn(const std::vector<double>& probabilities, bool complete,
                            const RequestOptions& options) {
  std::vector<float> logprobs;
  std::vector<int32_t> ids;
  for (const double p : probabilities) {
    ids.push_back(10 + static_cast<int32_t>(ids.size()));
    logprobs.push_back(static_cast<float>(std::log(p)));
  }
  std::set<std::string> found;
  for (int64_t position = 0; position < 1000; ++position) {
    const auto token = draw(logprobs, ids, complete, options, Noise(options.seed, position));
    found.insert(token ? std::to_string(*token) : "more");
  }
  return found;
}

using Names = std::set<std::string>;

KDT_TEST(noise_is_that_of_the_reference) {
  EXPECT_EQ(Noise(0, 0).uniform(), 0.6524484863740322);
  EXPECT_EQ(Noise(INT64_MAX, int64_t{1} << 24).uniform(), 0.02745434838252181);
  EXPECT_NEAR(Noise(0, 0).gumbel(0), 3.5293597414235305, 1e-12);
  EXPECT_NEAR(Noise(0, 1).gumbel(7), 1.4676082311040304, 1e-12);
  EXPECT_NEAR(Noise(1, 0).gumbel(163839), 0.40235592077162863, 1e-12);
  EXPECT_NEAR(Noise(INT64_MAX, int64_t{1} << 24).gumbel(5), 3.0049739983523724, 1e-12);
}

KDT_TEST(what_is_cut_off_is_never_drawn) {
  const std::vector<double> p = {0.5, 0.25, 0.125, 0.125};
  EXPECT(drawn(p, true, {.temperature = 1}) == Names({"10", "11", "12", "13"}));
  EXPECT(drawn(p, true, {.temperature = 1, .top_k = 1}) == Names({"10"}));
  EXPECT(drawn(p, true, {.temperature = 1, .top_k = 3}) == Names({"10", "11", "12"}));
  EXPECT(drawn(p, true, {.temperature = 1, .top_p = 0.7}) == Names({"10", "11"}));
  EXPECT(drawn(p, true, {.temperature = 1, .top_p = 1e-9}) == Names({"10"}));
  EXPECT(drawn(p, true, {.temperature = 1, .min_p = 0.4}) == Names({"10", "11"}));
  EXPECT(drawn(p, true, {.temperature = 1, .min_p = 1}) == Names({"10"}));
  // Of the two that are left, the first has two thirds: enough for top_p.
  EXPECT(drawn(p, true, {.temperature = 1, .top_k = 2, .top_p = 0.6}) == Names({"10"}));
  EXPECT(drawn(p, true, {.temperature = 1, .top_p = 0.6, .min_p = 0.4}) == Names({"10"}));
}

// The likeliest 64 tokens of more, of which the first has half of the mass, the others a quarter.
KDT_TEST(likeliest_tokens_may_be_too_few) {
  const auto needs_more = [](double first, double rest, const RequestOptions& options) {
    std::vector<double> p(64, rest / 63);
    p[0] = first;
    const Names found = drawn(p, false, options);
    return std::make_pair(found.contains("more"), found.size() > 1);
  };
  using Some = std::pair<bool, bool>;  // whether some draws need more, and some do not
  EXPECT(needs_more(0.5, 0.25, {.temperature = 1}) == Some(true, true));
  EXPECT(needs_more(0.5, 0.25, {.temperature = 1, .top_p = 0.7}) == Some(false, true));
  EXPECT(needs_more(0.5, 0.25, {.temperature = 1, .top_p = 0.8}) == Some(true, false));
  EXPECT(needs_more(0.5, 0.25, {.temperature = 1, .top_k = 64}) == Some(false, true));
  EXPECT(needs_more(0.5, 0.25, {.temperature = 1, .top_k = 65}) == Some(true, false));
  EXPECT(needs_more(0.5, 0.25, {.temperature = 1, .min_p = 1e-4}) == Some(true, false));
  EXPECT(drawn({0.5, 0.25}, false, {.temperature = 1, .min_p = 0.6}) == Names({"10"}));
}

KDT_TEST(a_whole_row_is_drawn_from_as_its_head_is) {
  // 100 tokens that are likely alike: what 64 of them can tell, all of them tell too.
  const std::vector<float> logprobs(100, static_cast<float>(-std::log(100.0)));
  std::vector<int32_t> ids(100);
  std::iota(ids.begin(), ids.end(), 0);
  int64_t from_head = 0;
  for (int64_t position = 0; position < 1000; ++position) {
    const Noise noise(7, position);
    const RequestOptions o{.temperature = 1};
    const auto all = draw(logprobs, ids, true, o, noise);
    const auto head =
        draw(std::span(logprobs).first(64), std::span(ids).first(64), false, o, noise);
    if (head) EXPECT_EQ(*head, *all);
    EXPECT_EQ(*all < 64, head.has_value());
    from_head += head ? 1 : 0;
  }
  EXPECT(from_head > 580 && from_head < 700);
}

// A log-probability of a large logit / temperature is off by more than what is left of the mass.
KDT_TEST(rounding_cuts_nothing_off) {
  std::vector<float> logprobs(64, -50.0f);
  logprobs[0] = 0;
  logprobs[1] = std::log(0.00125f);
  std::vector<int32_t> ids(64);
  std::iota(ids.begin(), ids.end(), 0);
  int seconds = 0;
  for (int64_t position = 0; position < 100000; ++position)
    seconds += draw(logprobs, ids, false, {.temperature = 0.001}, Noise(1, position)) == 1;
  EXPECT(seconds > 70 && seconds < 190);
}

KDT_TEST(no_distribution) {
  const std::vector<int32_t> ids = {4, 5};
  const Noise noise(0, 0);
  EXPECT_EQ(*draw(std::vector<float>{-kInf, -kInf}, ids, false, {.temperature = 1}, noise), -1);
  EXPECT_EQ(*draw({}, {}, true, {.temperature = 1}, noise), -1);
}

// Made with kdtree_engine.reference.sampling.add_noise and a scale of 0.7 * 5 / 2.
KDT_TEST(drafts_with_noise_are_those_of_the_reference) {
  const RequestOptions o{.draft_temperature = 2, .temperature = 5};
  std::vector<int32_t> ids = {8, 1, 6};
  std::vector<float> logprobs = {std::log(0.4f), std::log(0.3f), std::log(0.2f)};
  add_noise(logprobs, ids, o, Noise(3, 4));
  EXPECT(ids == std::vector<int32_t>({6, 8, 1}));
  const double expected[] = {-0.004312791, -6.337153990, -6.399515376};
  for (size_t i = 0; i < 3; ++i) EXPECT_NEAR(logprobs[i], expected[i], 1e-6);
  // A row without a distribution stays one.
  logprobs.assign(3, -kInf);
  add_noise(logprobs, ids, o, Noise(3, 4));
  EXPECT(logprobs == std::vector<float>(3, -kInf));
}

KDT_TEST(a_row_is_sorted_with_equals_by_lower_id) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const SortedRow row(std::vector<float>{1, nan, 3, 1, 3}, 2);
  EXPECT(row.ids == std::vector<int32_t>({2, 4, 0, 3, 1}));
  const double sum = 2 + 2 * std::exp(-1.0);
  EXPECT_NEAR(row.logprobs[0], -std::log(sum), 1e-6);
  EXPECT_NEAR(row.logprobs[3], -1 - std::log(sum), 1e-6);
  EXPECT_EQ(row.logprobs[4], -kInf);
}

KDT_TEST(options_out_of_range_are_named) {
  const double nan = std::nan("");
  EXPECT_THROWS("temperature is -1;", check_sampling({.temperature = -1}));
  EXPECT_THROWS("temperature is nan;", check_sampling({.temperature = nan}));
  EXPECT_THROWS("temperature is 1e-05;", check_sampling({.temperature = 1e-5}));
  EXPECT_THROWS("top_k is -1;", check_sampling({.top_k = -1}));
  EXPECT_THROWS("top_p is 0;", check_sampling({.top_p = 0}));
  EXPECT_THROWS("top_p is nan;", check_sampling({.top_p = nan}));
  EXPECT_THROWS("top_p is 1.0000000000000002;",
                check_sampling({.top_p = std::nextafter(1.0, 2.0)}));
  EXPECT_THROWS("min_p is 1.5;", check_sampling({.min_p = 1.5}));
  EXPECT_THROWS("seed is -3;", check_sampling({.seed = -3}));
  check_sampling({.temperature = 0, .top_k = 5, .top_p = 0.5, .min_p = 0.5, .seed = 5});
}

}  // namespace
}  // namespace kdt::test

KDT_TEST_MAIN
