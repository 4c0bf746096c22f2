// Drawing the target's token from its distribution.
//
// A draw is a function of the row's logits, the request's options, its seed and the token's
// position, never of the tree: so every tree gives the tokens of plain decoding, even one that was
// drafted with the same noise (docs/adr/0022).
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "engine/request.h"

namespace kdt {

// Among so many of a row's likeliest tokens noise of their own decides. Part of what a seed means:
// with another number it gives other texts.
inline constexpr int64_t kSampleHead = 64;

// Throws std::invalid_argument naming an option that is out of its range.
void check_sampling(const RequestOptions& options);

// The random numbers of one position of a text: outputs of SplitMix64 (Steele, Lea, Flood 2014).
class Noise {
 public:
  Noise(int64_t seed, int64_t position);

  // In [0, 1).
  double uniform() const;
  // Of the standard Gumbel distribution, independent of uniform() and of other tokens'.
  double gumbel(int32_t token) const;

 private:
  uint64_t key_;
};

// The token drawn from the likeliest, whose log-probabilities over the whole vocabulary descend; -1
// when there is no distribution (the greatest is not finite). Kept are the first top_k, of those
// the ones at least min_p times as probable as the first, of those the fewest that have top_p of
// their mass. Should the first whose cumulative mass exceeds noise.uniform() of all that is left
// come after the first kSampleHead, then it is drawn; else the one of these with the greatest
// log-probability + noise.gumbel(id). Nothing when more tokens than given must be known for that;
// at least kSampleHead are given, or all there are, which is told by `complete`.
std::optional<int32_t> draw(std::span<const float> logprobs, std::span<const int32_t> ids,
                            bool complete, const RequestOptions& options, const Noise& noise);

// A row of logits as `draw` takes it: equals by lower id. NaN counts as -inf.
struct SortedRow {
  SortedRow(std::span<const float> logits, double temperature);

  std::vector<int32_t> ids;
  std::vector<float> logprobs;
};

// Drafted tokens' log-probabilities, given the noise that the target will be drawn with; sorted
// again, equals by lower id.
void add_noise(std::span<float> logprobs, std::span<int32_t> ids, const RequestOptions& options,
               const Noise& noise);

}  // namespace kdt
