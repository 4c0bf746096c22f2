#include "engine/auto_budget.h"

#include <algorithm>
#include <cmath>

namespace kdt {
namespace {

constexpr int64_t kLastInterval = 1024;

double expected_nodes(const std::vector<double>& logw) {
  double sum = 0;
  for (size_t slot = 1; slot < logw.size(); ++slot) sum += std::exp(logw[slot]);
  return sum;
}

// Whether the last tokens stand in the text before too.
bool repeats(const std::vector<int32_t>& ids) {
  constexpr int64_t kSuffix = 8;
  const auto size = static_cast<int64_t>(ids.size());
  for (int64_t end = size - 1; end >= kSuffix; --end) {
    if (std::equal(ids.end() - kSuffix, ids.end(), ids.begin() + (end - kSuffix))) return true;
  }
  return false;
}

// Moves a measured time towards an observed one. A pass that was interrupted says nothing about the
// next.
void follow(double& ms, double observed_ratio, double weight) {
  if (observed_ratio < 3.0) ms *= 1.0 + 0.1 * weight * (observed_ratio - 1.0);
}

}  // namespace

void CostModel::set_verify(std::vector<std::pair<int64_t, double>> points) {
  for (size_t i = 1; i < points.size(); ++i) {
    auto& [rows, ms] = points[i];
    // It takes no more than several passes over fewer rows: what says so was disturbed.
    for (size_t fewer = 0; fewer < i; ++fewer) {
      const int64_t passes = (rows + points[fewer].first - 1) / points[fewer].first;
      ms = std::min(ms, static_cast<double>(passes) * points[fewer].second);
    }
    // Nor is it cheaper than fewer: noise that says so would draw the choice to it.
    ms = std::max(ms, points[i - 1].second);
  }
  verify_ = std::move(points);
}

std::pair<int64_t, double> CostModel::place(int64_t rows) const {
  const auto after = std::find_if(verify_.begin(), verify_.end() - 1,
                                  [&](const auto& p) { return p.first >= rows; });
  if (after == verify_.begin() || after->first <= rows) return {after - verify_.begin(), 0.0};
  const auto before = after - 1;
  return {after - verify_.begin(), static_cast<double>(after->first - rows) /
                                       static_cast<double>(after->first - before->first)};
}

double CostModel::verify_ms(int64_t rows) const {
  const auto [after, weight] = place(rows);
  const auto [points, ms] = verify_[after];
  if (rows > points) return ms * static_cast<double>(rows) / static_cast<double>(points);
  return weight == 0 ? ms : weight * verify_[after - 1].second + (1 - weight) * ms;
}

void CostModel::observe_verify(int64_t rows, double ms) {
  // Past the last point the curve is a guess, which says nothing about the point.
  if (rows > verify_.back().first) return;
  const double ratio = ms / verify_ms(rows);
  const auto [after, weight] = place(rows);
  follow(verify_[after].second, ratio, 1 - weight);
  if (weight > 0) follow(verify_[after - 1].second, ratio, weight);
}

void CostModel::observe_draft(double ms) { follow(draft_ms_, ms / draft_ms_, 1.0); }

double AutoBudget::honesty() const { return std::clamp(accepted_ / expected_, 0.25, 1.5); }

double AutoBudget::rate(const CostModel& costs) const {
  const double plain = 1.0 / costs.verify_ms(1);
  return ms_ == 0 ? plain : std::max(plain, tokens_ / ms_);
}

bool AutoBudget::should_draft(const CostModel& costs, const std::vector<int32_t>& token_ids) {
  if (skip_ > 0) {
    skip_ -= repeats(token_ids) ? 8 : 1;
    return skip_ <= 0;
  }
  // The margin keeps a draw from being paid for in both directions.
  const bool pays = ms_ == 0 || tokens_ / ms_ >= 1.03 / costs.verify_ms(1);
  if (pays) {
    interval_ = kFirstInterval;
    return true;
  }
  skip_ = interval_;
  interval_ = std::min(interval_ * 4, kLastInterval);
  return false;
}

// A round of s slots takes T(s) ms in which other rounds would have made rate * T(s) tokens. The
// best s leaves the most above that, which makes the most tokens a millisecond in the long run (the
// draft is paid for already).
int64_t AutoBudget::choose_slots(const std::vector<double>& logw, const CostModel& costs) const {
  const double honest = honesty();
  const double tokens_per_ms = rate(costs);
  int64_t best = 1;
  double best_gain = 1.0 - tokens_per_ms * costs.verify_ms(1);
  double expected = 0;
  // The cost curve has steps, so all of it is searched: a fall may be followed by a rise.
  for (int64_t slots = 2; slots <= static_cast<int64_t>(logw.size()); ++slots) {
    expected += std::exp(logw[slots - 1]);
    const double gain = 1.0 + honest * expected - tokens_per_ms * costs.verify_ms(slots);
    if (gain > best_gain) {
      best_gain = gain;
      best = slots;
    }
  }
  return best;
}

void AutoBudget::observe(const std::vector<double>& logw, int64_t committed,
                         const CostModel& costs) {
  // Honesty is a trait of the drafter, so it is remembered long; whether drafting pays changes with
  // the text.
  constexpr double kKeepHonesty = 0.97;
  constexpr double kKeepRate = 0.6;
  const double expected = expected_nodes(logw);
  const auto accepted = static_cast<double>(committed - 1);
  expected_ = kKeepHonesty * expected_ + expected;
  accepted_ = kKeepHonesty * accepted_ + accepted;
  // What was expected tells as much of the next rounds as what came, with less chance in it.
  tokens_ = kKeepRate * tokens_ + 1.0 + 0.5 * (accepted + honesty() * expected);
  depth_ = committed > kFirstDepth ? std::numeric_limits<int64_t>::max() : kFirstDepth;
  ms_ = kKeepRate * ms_ + costs.draft_ms() + costs.verify_ms(static_cast<int64_t>(logw.size()));
}

}  // namespace kdt
