// Draws from a few tokens by hand; the engine's draws are compared with numpy's in
// test_sampling.py.
#include <cmath>
#include <limits>
#include <map>
#include <numeric>
#include <set>
#include <string>

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
  EXPECT_NEAR(Noise(0, 0).gumbel(0), 3.529359741423534, 1e-12);
  EXPECT_NEAR(Noise(0, 1).gumbel(7), 1.4676082311040297, 1e-12);
  EXPECT_NEAR(Noise(1, 0).gumbel(163839), 0.4023559207716283, 1e-12);
  EXPECT_NEAR(Noise(INT64_MAX, int64_t{1} << 24).gumbel(5), 3.004973998352375, 1e-12);
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

KDT_TEST(likeliest_tokens_may_be_too_few) {
  const std::vector<double> p = {0.5, 0.25};  // of more
  EXPECT(drawn(p, false, {.temperature = 1}) == Names({"10", "11", "more"}));
  EXPECT(drawn(p, false, {.temperature = 1, .top_p = 0.7}) == Names({"10", "11"}));
  EXPECT(drawn(p, false, {.temperature = 1, .top_p = 0.8}) == Names({"more"}));
  EXPECT(drawn(p, false, {.temperature = 1, .top_k = 2}) == Names({"10", "11"}));
  EXPECT(drawn(p, false, {.temperature = 1, .top_k = 3}) == Names({"more"}));
  EXPECT(drawn(p, false, {.temperature = 1, .min_p = 0.6}) == Names({"10"}));
  EXPECT(drawn(p, false, {.temperature = 1, .min_p = 0.4}) == Names({"more"}));
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

KDT_TEST(no_distribution) {
  const std::vector<int32_t> ids = {4, 5};
  const Noise noise(0, 0);
  EXPECT_EQ(*draw(std::vector<float>{-kInf, -kInf}, ids, false, {.temperature = 1}, noise), -1);
  EXPECT_EQ(*draw({}, {}, true, {.temperature = 1}, noise), -1);
}

KDT_TEST(drafts_with_noise_are_sorted_and_keep_the_mass_of_others) {
  const Noise noise(3, 4);
  const RequestOptions o{.draft_temperature = 2, .temperature = 5};
  std::vector<int32_t> ids = {8, 1, 6};
  std::vector<float> logprobs = {std::log(0.4f), std::log(0.3f), std::log(0.2f)};
  std::map<int32_t, double> mass;
  double sum = 0.1;
  for (size_t i = 0; i < 3; ++i)
    sum += mass[ids[i]] = std::exp(logprobs[i] + 0.7 * 5 / 2 * noise.gumbel(ids[i]));
  add_noise(logprobs, ids, o, noise);
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_NEAR(std::exp(logprobs[i]), mass[ids[i]] / sum, 1e-5);
    if (i > 0) EXPECT(logprobs[i] <= logprobs[i - 1]);
  }
  EXPECT(ids != std::vector<int32_t>({8, 1, 6}));
  // A row without a distribution stays one.
  logprobs.assign(3, -kInf);
  add_noise(logprobs, ids, o, noise);
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
  EXPECT_THROWS("min_p is 1.5;", check_sampling({.min_p = 1.5}));
  EXPECT_THROWS("seed is -3;", check_sampling({.seed = -3}));
  check_sampling({.temperature = 0, .top_k = 5, .top_p = 0.5, .min_p = 0.5, .seed = 5});
}

}  // namespace
}  // namespace kdt::test

KDT_TEST_MAIN
