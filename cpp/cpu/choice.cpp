// Choosing tokens from logits.
#include <algorithm>
#include <cmath>
#include <limits>

#include "backend/checks.h"
#include "cpu/cpu_backend.h"

namespace kdt::cpu {
namespace {

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

}  // namespace

void CpuBackend::topk_logprobs(const TopkLogprobsArgs& args) {
  check_topk_logprobs(args);
  const int64_t vocab = args.logits.dim(1), k = args.logprobs.dim(1);
  const int64_t blocks = ceil_div(vocab, kPanel);
  const auto body = [&](int64_t row, int thread) {
    const float* logits = args.logits.data<float>() + row * vocab;
    std::vector<float>& maxima = scratch_[thread].floats;
    std::vector<int32_t>& candidates = scratch_[thread].ints;
    maxima.resize(std::max<size_t>(maxima.size(), 2 * blocks));
    const float scale = 1.0f / args.temperature;
    const float lse = kernels_.log_sum_exp(logits, vocab, scale, maxima.data());
    const bool has_distribution = std::isfinite(lse);

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
      args.ids.data<int32_t>()[row * k + i] = candidates[i];
      args.logprobs.data<float>()[row * k + i] =
          has_distribution && logit != kMinusInfinity ? logit * scale - lse : kMinusInfinity;
    }
  };
  run(args.logits.numel() * 8, args.logits.dim(0), body);
}

void CpuBackend::argmax(const Tensor& logits, const Tensor& ids) {
  check_argmax(logits, ids);
  const int64_t vocab = logits.dim(1);
  for_rows(logits.dim(0), vocab, [&](int64_t row) {
    ids.data<int32_t>()[row] =
        static_cast<int32_t>(kernels_.argmax(logits.data<float>() + row * vocab, vocab));
  });
}

}  // namespace kdt::cpu
