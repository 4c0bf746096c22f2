// Drawing the target's token from its distribution.
//
// A draw is a function of the row's logits, the request's options, its seed and the token's
// position, never of the tree: so a tree, chosen without a look at the draws, gives the tokens of
// plain decoding (docs/adr/0022).
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "engine/request.h"

namespace kdt {

// Throws std::invalid_argument naming an option that is out of its range.
void check_sampling(const RequestOptions& options);

// In [0, 1). The output of SplitMix64 (Steele, Lea, Flood 2014) number `position` from a state that
// is `seed` mixed once.
double uniform_at(int64_t seed, int64_t position);

// Which of the likeliest tokens is drawn: an index into `logprobs`, which descend and are over the
// whole vocabulary; -1 when there is no distribution (the greatest is not finite). Kept are the
// first top_k, of those the ones at least min_p times as probable as the first, of those the
// fewest that have top_p of their mass. Drawn is the first whose cumulative mass exceeds `uniform`
// times all that is left. Nothing when more than these tokens must be known for that; `complete`:
// there are no more.
std::optional<int64_t> draw(std::span<const float> logprobs, bool complete,
                            const RequestOptions& options, double uniform);

// A row of logits as `draw` takes it: its ids and log-probabilities, equals by lower id. NaN counts
// as -inf.
struct SortedRow {
  SortedRow(std::span<const float> logits, double temperature);

  std::vector<int32_t> ids;
  std::vector<float> logprobs;
};

}  // namespace kdt
