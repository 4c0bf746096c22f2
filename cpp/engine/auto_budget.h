// The draft budget of a round, chosen from measured costs and expected acceptance (docs/adr/0009).
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

namespace kdt {

// Times of the target's and the drafter's passes, measured once and followed since.
class CostModel {
 public:
  bool measured() const { return !verify_.empty(); }
  // (rows, milliseconds), ascending rows.
  void set_verify(std::vector<std::pair<int64_t, double>> points);
  void set_draft(double ms) { draft_ms_ = ms; }

  // Milliseconds of a target pass over `rows` rows: interpolated between the measured points.
  double verify_ms(int64_t rows) const;
  double draft_ms() const { return draft_ms_ * scale_; }
  const std::vector<std::pair<int64_t, double>>& points() const { return verify_; }

  // What a round really took. Longer contexts and a busy machine slow all passes alike.
  void observe_verify(int64_t rows, double ms);
  void observe_draft(double ms);

 private:
  std::vector<std::pair<int64_t, double>> verify_;
  double draft_ms_ = 0;
  double scale_ = 1;
};

// One request's experience with drafting.
class AutoBudget {
 public:
  // Whether this round should draft at all. While drafting does not pay, it is tried again at growing intervals.
  bool should_draft(const CostModel& costs);
  // The slots, root included, to verify of a tree in best-first order: those that make the most expected tokens a millisecond.
  int64_t choose_slots(const std::vector<double>& logw, const CostModel& costs) const;
  // After a drafted round: `logw` of the verified slots and the tokens it committed.
  void observe(const std::vector<double>& logw, int64_t committed, const CostModel& costs);

 private:
  double expected_ = 1, accepted_ = 1;  // decaying sums of nodes' probabilities and of accepted nodes
  double tokens_ = 0, ms_ = 0;          // decaying sums over drafted rounds
  int64_t interval_ = 8;                // plain steps before drafting is tried again
  int64_t skip_ = 0;                    // of them still to go
};

}  // namespace kdt
