#include "engine/auto_budget.h"

#include <algorithm>
#include <cmath>

namespace kdt {

void CostModel::set_verify(std::vector<std::pair<int64_t, double>> points) {
  // A pass over more rows is not cheaper: noise that says so would draw the choice to it.
  for (size_t i = 1; i < points.size(); ++i) points[i].second = std::max(points[i].second, points[i - 1].second);
  verify_ = std::move(points);
}

double CostModel::verify_ms(int64_t rows) const {
  const auto after = std::find_if(verify_.begin(), verify_.end(), [&](const auto& p) { return p.first >= rows; });
  if (after == verify_.begin()) return after->second * scale_;
  if (after == verify_.end()) {
    return verify_.back().second * scale_ * static_cast<double>(rows) / static_cast<double>(verify_.back().first);
  }
  const auto before = after - 1;
  const double part =
      static_cast<double>(rows - before->first) / static_cast<double>(after->first - before->first);
  return (before->second + part * (after->second - before->second)) * scale_;
}

void CostModel::observe_verify(int64_t rows, double ms) {
  const double ratio = ms / verify_ms(rows);
  // A pass that was interrupted says nothing about the next.
  if (ratio < 3.0) scale_ *= 1.0 + 0.05 * (ratio - 1.0);
}

void CostModel::observe_draft(double ms) {
  const double ratio = ms / draft_ms();
  if (ratio < 3.0) draft_ms_ *= 1.0 + 0.05 * (ratio - 1.0);
}

bool AutoBudget::should_draft(const CostModel& costs) {
  if (skip_ > 0) {
    --skip_;
    return false;
  }
  const bool pays = ms_ == 0 || tokens_ / ms_ >= 1.0 / costs.verify_ms(1);
  if (pays) {
    interval_ = 8;
    return true;
  }
  // This round tries; the rounds after it go without.
  skip_ = interval_;
  interval_ = std::min<int64_t>(interval_ * 2, 64);
  return true;
}

int64_t AutoBudget::choose_slots(const std::vector<double>& logw, const CostModel& costs) const {
  // How often nodes of this request's trees were accepted, against what the drafter promised.
  const double honesty = std::clamp(accepted_ / expected_, 0.25, 2.0);
  int64_t best = 1;
  double best_rate = 1.0 / (costs.draft_ms() + costs.verify_ms(1));
  double expected = 0;
  // The cost curve has steps, so the whole of it is searched: a fall may be followed by a rise.
  for (int64_t slots = 2; slots <= static_cast<int64_t>(logw.size()); ++slots) {
    expected += std::exp(logw[slots - 1]);
    const double rate = (1.0 + honesty * expected) / (costs.draft_ms() + costs.verify_ms(slots));
    if (rate > best_rate) {
      best_rate = rate;
      best = slots;
    }
  }
  return best;
}

void AutoBudget::observe(const std::vector<double>& logw, int64_t committed, const CostModel& costs) {
  constexpr double kKeep = 0.95;
  double expected = 0;
  for (size_t slot = 1; slot < logw.size(); ++slot) expected += std::exp(logw[slot]);
  expected_ = kKeep * expected_ + expected;
  accepted_ = kKeep * accepted_ + static_cast<double>(committed - 1);
  tokens_ = kKeep * tokens_ + static_cast<double>(committed);
  ms_ = kKeep * ms_ + costs.draft_ms() + costs.verify_ms(static_cast<int64_t>(logw.size()));
}

}  // namespace kdt
