// Choosing tokens from logits.
#include <algorithm>
#include <cmath>
#include <limits>

#include "backend/checks.h"
#include "cpu/cpu_backend.h"

namespace kdt::cpu {
namespace {

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

// The logarithm of the sum of exp(log_sums[part * stride]); not finite where there is no
// distribution.
float merged_log_sum(const float* log_sums, int64_t parts, int64_t stride) {
  float top = kMinusInfinity;
  for (int64_t part = 0; part < parts; ++part) {
    const float x = log_sums[part * stride];
    if (!(x < std::numeric_limits<float>::infinity())) return x;
    top = std::max(top, x);
  }
  if (top == kMinusInfinity) return top;
  double sum = 0;
  for (int64_t part = 0; part < parts; ++part)
    sum += std::exp(static_cast<double>(log_sums[part * stride]) - top);
  return static_cast<float>(top + std::log(sum));
}

}  // namespace

void CpuBackend::topk_logprobs(const TopkLogprobsArgs& args) {
  check_topk_logprobs(args);
  const int64_t vocab = args.logits.dim(1), k = args.logprobs.dim(1);
  const int64_t blocks = ceil_div(vocab, kPanel);
  const bool is_part = args.log_sums.defined();
  const auto body = [&](int64_t row, int thread) {
    const float* logits = args.logits.data<float>() + row * vocab;
    std::vector<float>& maxima = scratch_[thread].floats;
    std::vector<int32_t>& candidates = scratch_[thread].ints;
    maxima.resize(std::max<size_t>(maxima.size(), 2 * blocks));
    const float scale = 1.0f / args.temperature;
    const float lse = kernels_.log_sum_exp(logits, vocab, scale, maxima.data());
    const bool has_distribution = std::isfinite(lse);
    const float subtracted = is_part ? 0.0f : lse;

    // k blocks hold an element not below the k-th greatest block maximum, so nothing below it is
    // chosen.
    float threshold = kMinusInfinity;
    if (k <= blocks) {
      float* sorted = maxima.data() + blocks;
      std::copy(maxima.data(), maxima.data() + blocks, sorted);
      std::nth_element(sorted, sorted + (k - 1), sorted + blocks, std::greater<float>());
      threshold = sorted[k - 1];
    }
    candidates.clear();
    for (int64_t block = 0; block < blocks; ++block) {
      if (maxima[block] < threshold) continue;
      for (int64_t i = block * kPanel; i < std::min((block + 1) * kPanel, vocab); ++i) {
        // With the lowest threshold NaN must come too, so that k elements are there.
        if (logits[i] >= threshold || threshold == kMinusInfinity)
          candidates.push_back(static_cast<int32_t>(i));
      }
    }
    const auto value = [&](int32_t id) {
      return std::isnan(logits[id]) ? kMinusInfinity : logits[id];
    };
    std::partial_sort(candidates.begin(), candidates.begin() + k, candidates.end(),
                      [&](int32_t a, int32_t b) {
                        return value(a) > value(b) || (value(a) == value(b) && a < b);
                      });
    for (int64_t i = 0; i < k; ++i) {
      const float logit = value(candidates[i]);
      args.ids.data<int32_t>()[row * k + i] = static_cast<int32_t>(args.first_id + candidates[i]);
      args.logprobs.data<float>()[row * k + i] =
          (is_part || has_distribution) && logit != kMinusInfinity ? logit * scale - subtracted
                                                                   : kMinusInfinity;
    }
    if (is_part) {
      args.log_sums.data<float>()[row] =
          has_distribution || lse == kMinusInfinity ? lse : std::numeric_limits<float>::infinity();
    }
  };
  run(args.logits.numel() * 8, args.logits.dim(0), body);
}

void CpuBackend::merge_topk(const MergeTopkArgs& args) {
  check_merge_topk(args);
  const int64_t parts = args.parts.dim(0), stride = args.parts.dim(1), rows = args.ids.dim(0),
                part_k = args.part_k(), k = args.ids.dim(1);
  const float* part_logprobs = args.parts.data<float>();
  const int32_t* part_ids = args.parts.data<int32_t>() + rows * part_k;
  const float* log_sums = args.parts.data<float>() + 2 * rows * part_k;
  std::vector<int32_t>& next = shared_.ints;
  for (int64_t row = 0; row < rows; ++row) {
    const float log_sum = merged_log_sum(log_sums + row, parts, stride);
    const auto at = [&](int64_t part) { return part * stride + row * part_k + next[part]; };
    const auto value = [&](int64_t part) {
      const float x = part_logprobs[at(part)];
      return std::isnan(x) ? kMinusInfinity : x;
    };
    next.assign(parts, 0);
    for (int64_t i = 0; i < k; ++i) {
      int64_t best = -1;
      for (int64_t part = 0; part < parts; ++part) {
        if (next[part] < part_k && (best < 0 || value(part) > value(best))) best = part;
      }
      args.ids.data<int32_t>()[row * k + i] = part_ids[at(best)];
      args.logprobs.data<float>()[row * k + i] =
          std::isfinite(log_sum) && value(best) != kMinusInfinity ? value(best) - log_sum
                                                                  : kMinusInfinity;
      ++next[best];
    }
  }
}

void CpuBackend::argmax(const ArgmaxArgs& args) {
  check_argmax(args);
  const int64_t vocab = args.logits.dim(1);
  for_rows(args.logits.dim(0), vocab, [&](int64_t row) {
    const float* logits = args.logits.data<float>() + row * vocab;
    const int64_t best = kernels_.argmax(logits, vocab);
    args.ids.data<int32_t>()[row] = static_cast<int32_t>(best < 0 ? -1 : args.first_id + best);
    if (args.values.defined())
      args.values.data<float>()[row] = best < 0 ? kMinusInfinity : logits[best];
  });
}

}  // namespace kdt::cpu
