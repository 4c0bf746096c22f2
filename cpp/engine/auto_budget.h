// The draft budget of a round, chosen from measured costs and expected acceptance (docs/adr/0009).
#pragma once

#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

namespace kdt {

// Times of the target's and the drafter's passes, measured once and followed since.
class CostModel {
 public:
  // (rows, milliseconds), ascending rows.
  void set_verify(std::vector<std::pair<int64_t, double>> points);
  void set_draft(double ms) { draft_ms_ = ms; }

  // Milliseconds of a target pass over `rows` rows: interpolated between the measured points.
  double verify_ms(int64_t rows) const;
  double draft_ms() const { return draft_ms_; }
  const std::vector<std::pair<int64_t, double>>& points() const { return verify_; }

  // What a round really took: contexts grow, and machines get busy.
  void observe_verify(int64_t rows, double ms);
  void observe_draft(double ms);

 private:
  // Index of the first point with at least `rows` rows, and the weight of the point before it.
  std::pair<int64_t, double> place(int64_t rows) const;

  std::vector<std::pair<int64_t, double>> verify_;
  double draft_ms_ = 0;
};

// An engine's experience with drafting, over all its requests: whether it pays depends on the
// processor and the drafter more than on the request, and what one request has tried at a loss the
// next need not try again.
class AutoBudget {
 public:
  // Whether this round should draft at all. While drafting does not pay it is tried again at
  // growing intervals, sooner when the text repeats itself.
  bool should_draft(const CostModel& costs, const std::vector<int32_t>& token_ids);
  // How deep to draft: a depth costs a row of the target's head, so deep ones are asked for once
  // trees are accepted whole.
  int64_t depth() const { return depth_; }
  // The slots, root included, to verify of a tree in best-first order.
  int64_t choose_slots(const std::vector<double>& logw, const CostModel& costs) const;
  // After a drafted round: `logw` of the verified slots and the tokens it committed.
  void observe(const std::vector<double>& logw, int64_t committed, const CostModel& costs);

 private:
  static constexpr int64_t kFirstInterval = 64;
  static constexpr int64_t kFirstDepth = 8;

  // Accepted nodes a promised one, lately.
  double honesty() const;
  // Tokens a millisecond that the next rounds will make, drafting or not.
  double rate(const CostModel& costs) const;

  double expected_ = 2,
         accepted_ = 2;         // decaying sums of nodes' probabilities and of accepted nodes
  double tokens_ = 0, ms_ = 0;  // decaying sums over drafted rounds
  int64_t interval_ = kFirstInterval;  // plain steps before drafting is tried again
  int64_t skip_ = 0;                   // of them still to go
  int64_t depth_ = kFirstDepth;
};

}  // namespace kdt
