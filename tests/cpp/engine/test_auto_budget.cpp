#include <cmath>
#include <limits>

#include "check.h"
#include "engine/auto_budget.h"

using kdt::AutoBudget;
using kdt::CostModel;

namespace {

CostModel costs(double draft_ms, std::vector<std::pair<int64_t, double>> points) {
  CostModel model;
  model.set_verify(std::move(points));
  model.set_draft(draft_ms);
  return model;
}

// A best-first tree whose nodes have these probabilities.
std::vector<double> tree(const std::vector<double>& probabilities) {
  std::vector<double> logw = {0.0};
  for (const double p : probabilities) logw.push_back(std::log(p));
  return logw;
}

std::vector<int32_t> distinct_tokens(int32_t count) {
  std::vector<int32_t> ids;
  for (int32_t i = 0; i < count; ++i) ids.push_back(i);
  return ids;
}

KDT_TEST(interpolates_between_measured_sizes_and_extends_past_them) {
  const CostModel model = costs(1, {{1, 2.0}, {3, 4.0}, {9, 10.0}});
  EXPECT_NEAR(model.verify_ms(1), 2.0, 1e-12);
  EXPECT_NEAR(model.verify_ms(2), 3.0, 1e-12);
  EXPECT_NEAR(model.verify_ms(9), 10.0, 1e-12);
  EXPECT_NEAR(model.verify_ms(18), 20.0, 1e-12);
}

KDT_TEST(a_dip_in_the_measured_costs_is_taken_for_noise) {
  const CostModel model = costs(1, {{1, 2.0}, {2, 1.0}, {4, 5.0}});
  EXPECT_NEAR(model.verify_ms(2), 2.0, 1e-12);
}

// Seen on a busy machine: one size was held up each time, and all larger ones took its cost.
KDT_TEST(a_size_takes_no_more_than_several_passes_over_fewer_rows) {
  const CostModel model = costs(1, {{1, 0.5}, {2, 0.8}, {3, 30.8}, {4, 1.2}, {9, 2.0}, {17, 40.0}});
  EXPECT_NEAR(model.verify_ms(3), 1.5, 1e-12);
  EXPECT_NEAR(model.verify_ms(4), 1.5, 1e-12);
  EXPECT_NEAR(model.verify_ms(9), 2.0, 1e-12);
  EXPECT_NEAR(model.verify_ms(17), 4.0, 1e-12);
}

KDT_TEST(follows_what_rounds_take_but_not_an_interruption) {
  CostModel model = costs(1, {{1, 2.0}, {3, 4.0}});
  for (int i = 0; i < 200; ++i) model.observe_verify(1, 3.0);
  EXPECT_NEAR(model.verify_ms(1), 3.0, 0.01);
  EXPECT_NEAR(model.verify_ms(3), 4.0, 1e-12);
  model.observe_verify(1, 300.0);
  EXPECT_NEAR(model.verify_ms(1), 3.0, 0.01);
  for (int i = 0; i < 200; ++i) model.observe_draft(2.0);
  EXPECT_NEAR(model.draft_ms(), 2.0, 0.01);
}

KDT_TEST(rounds_of_more_rows_than_were_measured_do_not_spoil_the_last_point) {
  CostModel model = costs(1, {{1, 1.0}, {65, 2.0}});
  for (int i = 0; i < 200; ++i) model.observe_verify(257, 2.1);
  EXPECT_NEAR(model.verify_ms(65), 2.0, 1e-12);
}

KDT_TEST(free_rows_are_all_verified) {
  const CostModel model = costs(0.5, {{1, 1.0}, {65, 1.0}});
  EXPECT_EQ(AutoBudget().choose_slots(tree({0.5, 0.2, 0.1, 0.01}), model), 5);
}

KDT_TEST(rows_that_cost_a_whole_step_are_verified_only_when_nearly_certain) {
  const CostModel model = costs(0.0, {{1, 1.0}, {65, 65.0}});
  EXPECT_EQ(AutoBudget().choose_slots(tree({0.9, 0.8, 0.7}), model), 1);
}

KDT_TEST(looks_past_a_step_in_the_cost_curve) {
  // The second node costs as much as a plain step, the eight after it nothing.
  const CostModel model = costs(0.0, {{1, 1.0}, {2, 2.0}, {10, 2.0}});
  const std::vector<double> logw = tree({0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1});
  EXPECT_EQ(AutoBudget().choose_slots(logw, model), 10);
}

KDT_TEST(drafts_first_and_stops_when_it_does_not_pay) {
  const CostModel model = costs(5.0, {{1, 1.0}, {65, 10.0}});
  const std::vector<int32_t> text = distinct_tokens(100);
  AutoBudget budget;
  EXPECT(budget.should_draft(model, text));
  budget.observe(tree({0.1}), 1, model);
  int64_t plain = 0;
  while (plain < 10000 && !budget.should_draft(model, text)) ++plain;
  EXPECT(plain >= 32 && plain < 10000);
  budget.observe(tree({0.1}), 1, model);
  int64_t later = 0;
  while (later < 10000 && !budget.should_draft(model, text)) ++later;
  EXPECT(later > plain);
}

KDT_TEST(tries_sooner_when_the_text_repeats_itself) {
  const CostModel model = costs(5.0, {{1, 1.0}, {65, 10.0}});
  std::vector<int32_t> loop;
  for (int32_t i = 0; i < 100; ++i) loop.push_back(i % 10);
  const auto plain_steps = [&](const std::vector<int32_t>& text) {
    AutoBudget budget;
    budget.should_draft(model, text);
    budget.observe(tree({0.1}), 1, model);
    int64_t steps = 0;
    while (steps < 10000 && !budget.should_draft(model, text)) ++steps;
    return steps;
  };
  EXPECT(plain_steps(loop) * 4 < plain_steps(distinct_tokens(100)));
}

KDT_TEST(goes_on_while_it_pays) {
  const CostModel model = costs(0.1, {{1, 1.0}, {65, 2.0}});
  const std::vector<int32_t> text = distinct_tokens(100);
  AutoBudget budget;
  for (int i = 0; i < 50; ++i) {
    EXPECT(budget.should_draft(model, text));
    budget.observe(tree({0.9, 0.8, 0.7}), 4, model);
  }
}

KDT_TEST(a_drafter_that_promises_too_much_is_believed_less) {
  const CostModel model = costs(0.1, {{1, 1.0}, {65, 17.0}});
  const std::vector<double> logw = tree({0.9, 0.8, 0.7, 0.6, 0.5, 0.4});
  AutoBudget trusted, doubted;
  for (int i = 0; i < 100; ++i) {
    trusted.observe(logw, 5, model);
    doubted.observe(logw, 1, model);
  }
  EXPECT(doubted.choose_slots(logw, model) < trusted.choose_slots(logw, model));
}

KDT_TEST(asks_for_depth_once_trees_are_accepted_whole) {
  const CostModel model = costs(0.1, {{1, 1.0}, {65, 2.0}});
  AutoBudget budget;
  EXPECT_EQ(budget.depth(), 8);
  budget.observe(tree({0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9}), 9, model);
  EXPECT_EQ(budget.depth(), std::numeric_limits<int64_t>::max());
  budget.observe(tree({0.9}), 1, model);
  EXPECT_EQ(budget.depth(), 8);
}

}  // namespace

KDT_TEST_MAIN
