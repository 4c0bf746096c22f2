#include "engine/sampler.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "backend/checks.h"

namespace kdt {
namespace {

constexpr uint64_t kGolden = 0x9e3779b97f4a7c15;

uint64_t mix(uint64_t x) {
  x += kGolden;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

}  // namespace

void check_sampling(const RequestOptions& o) {
  // Comparisons that a NaN fails.
  KDT_CHECK_ARGUMENT(o.temperature == 0 || (o.temperature >= 1e-3 && o.temperature <= 1e3),
                     "temperature is ", o.temperature, "; want 0 (greedy) or 0.001 to 1000");
  KDT_CHECK_ARGUMENT(o.top_k >= 0, "top_k is ", o.top_k, "; want at least 1, or 0 for all");
  KDT_CHECK_ARGUMENT(o.top_p > 0 && o.top_p <= 1, "top_p is ", o.top_p,
                     "; want above 0, at most 1");
  KDT_CHECK_ARGUMENT(o.min_p >= 0 && o.min_p <= 1, "min_p is ", o.min_p, "; want 0 to 1");
  KDT_CHECK_ARGUMENT(o.seed >= 0, "seed is ", o.seed, "; want at least 0");
}

Noise::Noise(int64_t seed, int64_t position)
    : key_(mix(mix(static_cast<uint64_t>(seed)) + static_cast<uint64_t>(position) * kGolden)) {}

double Noise::uniform() const { return static_cast<double>(key_ >> 11) * 0x1p-53; }

double Noise::gumbel(int32_t token) const {
  // 52 bits and a half are a double, and never 0 or 1.
  const uint64_t bits = mix(key_ + (static_cast<uint64_t>(token) + 1) * kGolden) >> 12;
  return -std::log(-std::log((static_cast<double>(bits) + 0.5) * 0x1p-52));
}

std::optional<int32_t> draw(std::span<const float> logprobs, std::span<const int32_t> ids,
                            bool complete, const RequestOptions& o, const Noise& noise) {
  if (logprobs.empty() || !std::isfinite(logprobs[0])) return -1;
  const auto known = static_cast<int64_t>(logprobs.size());
  const int64_t most = o.top_k > 0 ? std::min(o.top_k, known) : known;
  const double least = o.min_p * std::exp(static_cast<double>(logprobs[0]));
  std::vector<double> mass;  // of the first tokens that are kept
  for (const float logprob : logprobs.first(most)) {
    const double p = std::exp(static_cast<double>(logprob));
    if (p < least) break;
    mass.push_back(p + (mass.empty() ? 0 : mass.back()));
  }
  auto left = static_cast<int64_t>(mass.size());
  const bool total_known = complete || left < most || (o.top_k > 0 && o.top_k <= known);
  const bool uncut = o.top_k == 0 && o.min_p == 0;
  if (!total_known && !uncut) return std::nullopt;

  double total = total_known ? mass.back() : 1;
  // With top_p 1 the sum says nothing: rounding may bring it to 1 early.
  if (o.top_p < 1) {
    const auto end = std::lower_bound(mass.begin(), mass.end(), o.top_p * total);
    if (end == mass.end()) return std::nullopt;
    left = end - mass.begin() + 1;
    total = *end;
  }
  const int64_t index =
      std::upper_bound(mass.begin(), mass.begin() + left, noise.uniform() * total) - mass.begin();
  if (index == left) return std::nullopt;
  const int64_t head = std::min(left, kSampleHead);
  if (index >= head) return ids[index];
  int32_t best = -1;
  double best_value = 0;
  for (int64_t i = 0; i < head; ++i) {
    const double value = logprobs[i] + noise.gumbel(ids[i]);
    if (best >= 0 && value <= best_value) continue;
    best = ids[i];
    best_value = value;
  }
  return best;
}

SortedRow::SortedRow(std::span<const float> logits, double temperature)
    : ids(logits.size()), logprobs(logits.size()) {
  std::vector<float> values(logits.begin(), logits.end());
  for (float& value : values) {
    if (std::isnan(value)) value = -std::numeric_limits<float>::infinity();
  }
  std::iota(ids.begin(), ids.end(), 0);
  std::stable_sort(ids.begin(), ids.end(),
                   [&](int32_t a, int32_t b) { return values[a] > values[b]; });
  const double top = values[ids[0]];
  double sum = 0;
  for (const int32_t id : ids) sum += std::exp((values[id] - top) / temperature);
  const double log_sum = std::log(sum);
  for (size_t i = 0; i < ids.size(); ++i) {
    logprobs[i] = static_cast<float>((values[ids[i]] - top) / temperature - log_sum);
  }
}

void add_noise(std::span<float> logprobs, std::span<int32_t> ids, const RequestOptions& options,
               const Noise& noise) {
  // Were the drafter's distribution the target's, all of the noise would tell the token. Part of it
  // is what the drafter does not know; this share was accepted most (docs/adr/0022).
  constexpr double kNoiseShare = 0.7;
  const double scale = kNoiseShare * options.temperature / options.draft_temperature;
  std::vector<std::pair<double, int32_t>> noisy;
  double others = 1;  // the mass of tokens that are not given, which stays
  for (size_t i = 0; i < ids.size(); ++i) {
    others -= std::exp(static_cast<double>(logprobs[i]));
    noisy.emplace_back(logprobs[i] + scale * noise.gumbel(ids[i]), ids[i]);
  }
  std::sort(noisy.begin(), noisy.end(), [](const auto& a, const auto& b) {
    return a.first != b.first ? a.first > b.first : a.second < b.second;
  });
  const double top = std::max(0.0, noisy[0].first);
  double sum = std::max(0.0, others) * std::exp(-top);
  for (const auto& [value, id] : noisy) sum += std::exp(value - top);
  const double log_sum = top + std::log(sum);
  for (size_t i = 0; i < ids.size(); ++i) {
    logprobs[i] = static_cast<float>(noisy[i].first - log_sum);
    ids[i] = noisy[i].second;
  }
}

}  // namespace kdt
