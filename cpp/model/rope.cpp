#include "model/rope.h"

#include <algorithm>
#include <cmath>

namespace kdt {
namespace {

double yarn_mscale(double factor, double mscale) {
  return factor <= 1.0 ? 1.0 : 0.1 * mscale * std::log(factor) + 1.0;
}

}  // namespace

double yarn_softmax_factor(const RopeConfig& config) {
  if (!config.yarn || config.mscale_all_dim == 0.0) return 1.0;
  const double mscale = yarn_mscale(config.factor, config.mscale_all_dim);
  return mscale * mscale;
}

// Yarn (Peng et al. 2023, section 3): frequencies that turn more than beta_fast times over the
// original context stay, those that turn less than beta_slow times are divided by the factor, with
// a linear ramp between.
std::vector<float> rope_table(const RopeConfig& config, int64_t rotary_dim, int64_t positions) {
  const int64_t half = rotary_dim / 2;
  const auto dim = static_cast<double>(rotary_dim);
  std::vector<double> inverse(half);
  for (int64_t i = 0; i < half; ++i)
    inverse[i] = std::pow(config.rope_theta, -2.0 * static_cast<double>(i) / dim);
  double multiplier = 1.0;
  if (config.yarn) {
    const auto original = static_cast<double>(config.original_max_position_embeddings);
    const auto index_of_turns = [&](double turns) {
      return dim * std::log(original / (turns * 2.0 * M_PI)) / (2.0 * std::log(config.rope_theta));
    };
    double low = index_of_turns(config.beta_fast), high = index_of_turns(config.beta_slow);
    if (config.truncate) {
      low = std::floor(low);
      high = std::ceil(high);
    }
    low = std::max(low, 0.0);
    high = std::min(high, dim - 1.0);
    const double span = high == low ? 0.001 : high - low;
    for (int64_t i = 0; i < half; ++i) {
      const double ramp = std::clamp((static_cast<double>(i) - low) / span, 0.0, 1.0);
      inverse[i] *= 1.0 - ramp + ramp / config.factor;
    }
    multiplier = config.attention_factor != 0.0
                     ? config.attention_factor
                     : yarn_mscale(config.factor, config.mscale) /
                           yarn_mscale(config.factor, config.mscale_all_dim);
  }
  std::vector<float> table(positions * rotary_dim);
  for (int64_t p = 0; p < positions; ++p) {
    for (int64_t i = 0; i < half; ++i) {
      const double angle = static_cast<double>(p) * inverse[i];
      table[p * rotary_dim + i] = static_cast<float>(std::cos(angle) * multiplier);
      table[p * rotary_dim + half + i] = static_cast<float>(std::sin(angle) * multiplier);
    }
  }
  return table;
}

}  // namespace kdt
