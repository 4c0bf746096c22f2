// Draws from a few tokens by hand; the engine's draws are compared with numpy's in
// test_sampling.py.
#include <cmath>
#include <limits>
#include <string>

#include "check.h"
#include "engine/sampler.h"

namespace kdt::test {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

// Of tokens with these probabilities: what is drawn, "more" when that cannot be told.
std::string drawn(const std::vector<double>& probabilities, bool complete,
                  const RequestOptions& options, double uniform) {
  std::vector<float> logprobs;
  for (const double p : probabilities) logprobs.push_back(static_cast<float>(std::log(p)));
  const auto index = draw(logprobs, complete, options, uniform);
  return index ? std::to_string(*index) : "more";
}

// The first outputs of SplitMix64 are known: of the state 1234567, 6457827717110365317.
KDT_TEST(uniforms_are_those_of_the_reference) {
  EXPECT_EQ(uniform_at(0, 0), 0.6524484863740322);
  EXPECT_EQ(uniform_at(0, 1), 0.7012121095215252);
  EXPECT_EQ(uniform_at(1, 0), 0.36818951565166946);
  EXPECT_EQ(uniform_at(INT64_MAX, int64_t{1} << 24), 0.02745434838252181);
}

KDT_TEST(the_first_whose_mass_exceeds_the_uniform) {
  const std::vector<double> p = {0.5, 0.25, 0.125, 0.125};
  const RequestOptions o{.temperature = 1};
  EXPECT_EQ(drawn(p, true, o, 0), "0");
  EXPECT_EQ(drawn(p, true, o, 0.49), "0");
  EXPECT_EQ(drawn(p, true, o, 0.51), "1");
  EXPECT_EQ(drawn(p, true, o, 0.76), "2");
  EXPECT_EQ(drawn(p, true, o, std::nextafter(1.0, 0.0)), "3");
}

KDT_TEST(what_is_cut_off_is_never_drawn) {
  const std::vector<double> p = {0.5, 0.25, 0.125, 0.125};
  const double last = std::nextafter(1.0, 0.0);
  EXPECT_EQ(drawn(p, true, {.temperature = 1, .top_k = 1}, last), "0");
  EXPECT_EQ(drawn(p, true, {.temperature = 1, .top_k = 3}, last), "2");
  EXPECT_EQ(drawn(p, true, {.temperature = 1, .top_p = 0.7}, last), "1");
  EXPECT_EQ(drawn(p, true, {.temperature = 1, .top_p = 1e-9}, last), "0");
  EXPECT_EQ(drawn(p, true, {.temperature = 1, .min_p = 0.4}, last), "1");
  EXPECT_EQ(drawn(p, true, {.temperature = 1, .min_p = 1}, last), "0");
  // Of the two that top_k leaves, the first has two thirds: enough for top_p.
  EXPECT_EQ(drawn(p, true, {.temperature = 1, .top_k = 2, .top_p = 0.6}, last), "0");
  EXPECT_EQ(drawn(p, true, {.temperature = 1, .top_p = 0.6, .min_p = 0.4}, last), "0");
}

// Two thirds of what is left, not of the whole.
KDT_TEST(what_is_left_is_scaled_to_one) {
  const std::vector<double> p = {0.5, 0.25, 0.125, 0.125};
  for (const RequestOptions& o : {RequestOptions{.temperature = 1, .top_k = 2},
                                  RequestOptions{.temperature = 1, .top_p = 0.74},
                                  RequestOptions{.temperature = 1, .min_p = 0.49}}) {
    EXPECT_EQ(drawn(p, true, o, 0.66), "0");
    EXPECT_EQ(drawn(p, true, o, 0.67), "1");
  }
}

KDT_TEST(likeliest_tokens_may_be_too_few) {
  const std::vector<double> p = {0.5, 0.25};  // of more
  EXPECT_EQ(drawn(p, false, {.temperature = 1}, 0.74), "1");
  EXPECT_EQ(drawn(p, false, {.temperature = 1}, 0.76), "more");
  EXPECT_EQ(drawn(p, false, {.temperature = 1, .top_p = 0.7}, 0.99), "1");
  EXPECT_EQ(drawn(p, false, {.temperature = 1, .top_p = 0.8}, 0.1), "more");
  EXPECT_EQ(drawn(p, false, {.temperature = 1, .top_k = 2}, 0.99), "1");
  EXPECT_EQ(drawn(p, false, {.temperature = 1, .top_k = 3}, 0.1), "more");
  EXPECT_EQ(drawn(p, false, {.temperature = 1, .min_p = 0.6}, 0.99), "0");
  EXPECT_EQ(drawn(p, false, {.temperature = 1, .min_p = 0.4}, 0.1), "more");
}

KDT_TEST(no_distribution) {
  EXPECT_EQ(*draw(std::vector<float>{-kInf, -kInf}, false, {.temperature = 1}, 0.5), -1);
  EXPECT_EQ(*draw({}, true, {.temperature = 1}, 0.5), -1);
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
