// Routing of tokens to experts, and the experts' products.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "backend/checks.h"
#include "cpu/cpu_backend.h"

namespace kdt::cpu {

void CpuBackend::moe_route(const MoeRouteArgs& args) {
  check_moe_route(args);
  const int64_t experts = args.logits.dim(1), top_k = args.ids.dim(1);
  const int64_t group_size = experts / args.n_group;
  constexpr float kExcluded = -std::numeric_limits<float>::infinity();
  std::vector<float>& memory = shared_.floats;
  memory.resize(std::max<size_t>(memory.size(), 2 * experts + args.n_group));
  float* score = memory.data();
  float* biased = score + experts;
  float* group_score = biased + experts;

  for (int64_t row = 0; row < args.logits.dim(0); ++row) {
    const float* logits = args.logits.data<float>() + row * experts;
    for (int64_t e = 0; e < experts; ++e) {
      score[e] = 1.0f / (1.0f + std::exp(-logits[e]));
      // A logit that is no number ranks behind every other.
      biased[e] = std::isnan(score[e]) ? kExcluded : score[e] + args.bias.data<float>()[e];
    }
    if (args.topk_group < args.n_group) {
      // A group's score is the sum of its two best biased scores.
      for (int64_t g = 0; g < args.n_group; ++g) {
        float best = kExcluded, second = kExcluded;
        for (int64_t e = g * group_size; e < (g + 1) * group_size; ++e) {
          if (biased[e] > best) {
            second = best;
            best = biased[e];
          } else if (biased[e] > second) {
            second = biased[e];
          }
        }
        group_score[g] = group_size > 1 ? best + second : best;
      }
      for (int64_t g = 0; g < args.n_group; ++g) {
        int64_t better = 0;
        for (int64_t other = 0; other < args.n_group; ++other) {
          better += group_score[other] > group_score[g] ||
                    (group_score[other] == group_score[g] && other < g);
        }
        if (better >= args.topk_group)
          std::fill(biased + g * group_size, biased + (g + 1) * group_size, kExcluded);
      }
    }
    int32_t* ids = args.ids.data<int32_t>() + row * top_k;
    float* weights = args.weights.data<float>() + row * top_k;
    float sum = 0;
    for (int64_t k = 0; k < top_k; ++k) {
      int64_t best = -1;
      for (int64_t e = 0; e < experts; ++e) {
        if (biased[e] != kExcluded && (best < 0 || biased[e] > biased[best])) best = e;
      }
      // Without a number left, the id stays invalid and adds nothing.
      ids[k] = static_cast<int32_t>(best);
      weights[k] = best < 0 ? 0.0f : score[best];
      sum += weights[k];
      if (best >= 0) biased[best] = kExcluded;
    }
    const float factor = args.norm_topk_prob ? args.routed_scaling_factor / (sum + 1e-20f)
                                             : args.routed_scaling_factor;
    for (int64_t k = 0; k < top_k; ++k) weights[k] *= factor;
  }
}

void CpuBackend::moe_experts(const MoeExpertsArgs& args) {
  check_moe_experts(args);
  const auto& weight = static_cast<const CpuExperts&>(*args.experts);
  const int64_t tokens = args.x.dim(0), top_k = args.ids.dim(1), slots = tokens * top_k;
  const int64_t hidden = weight.hidden_size, inter = weight.intermediate_size;
  const int32_t* ids = args.ids.data<int32_t>();
  const auto expert_of = [&](int64_t slot) { return ids[slot] - args.first_expert; };
  const auto valid = [&](int64_t slot) {
    return expert_of(slot) >= 0 && expert_of(slot) < weight.num_experts;
  };

  // Rows of the gathered arrays are sorted by expert: expert e's are [begin[e], begin[e + 1]).
  std::vector<int32_t>& begin = shared_.ints;
  begin.assign(weight.num_experts + 1, 0);
  for (int64_t s = 0; s < slots; ++s) {
    if (valid(s)) ++begin[expert_of(s) + 1];
  }
  std::vector<int32_t>& lists =
      shared_.more_ints;  // row of each slot, then the experts that have rows
  lists.resize(std::max<size_t>(lists.size(), slots + 2 * weight.num_experts));
  int32_t* row_of_slot = lists.data();
  int32_t* next = row_of_slot + slots;
  int32_t* used = next + weight.num_experts;
  int64_t num_used = 0;
  for (int64_t e = 0; e < weight.num_experts; ++e) {
    if (begin[e + 1] > 0) used[num_used++] = static_cast<int32_t>(e);
    begin[e + 1] += begin[e];
    next[e] = begin[e];
  }
  std::vector<float>& memory = shared_.floats;
  const int64_t rows = begin[weight.num_experts];
  memory.resize(std::max<size_t>(memory.size(), rows * (2 * hidden + 3 * inter)));
  float* gathered = memory.data();
  float* gate = gathered + rows * hidden;
  float* up = gate + rows * inter;
  float* activated = up + rows * inter;
  float* result = activated + rows * inter;
  for (int64_t s = 0; s < slots; ++s) {
    if (!valid(s)) continue;
    row_of_slot[s] = next[expert_of(s)]++;
    std::memcpy(gathered + row_of_slot[s] * hidden, args.x.data<float>() + s / top_k * hidden,
                hidden * sizeof(float));
  }

  // When few experts are used each is cut, so that every thread has several parts to take.
  const auto for_panels = [&](int64_t out_features, const auto& body) {
    const int64_t panels = ceil_div(out_features, kPanel);
    const int64_t parts = std::min<int64_t>(
        panels, std::max<int64_t>(1, ceil_div(4 * num_threads(), std::max<int64_t>(num_used, 1))));
    const auto task_body = [&](int64_t task, int) {
      const int64_t e = used[task / parts], part = task % parts;
      const int64_t panel = panels * part / parts;
      body(weight.experts[e], begin[e], begin[e + 1] - begin[e], panel,
           panels * (part + 1) / parts - panel);
    };
    run(rows * hidden * inter, num_used * parts, task_body);
  };
  for_panels(inter, [&](const CpuExperts::Expert& expert, int64_t row, int64_t count, int64_t panel,
                        int64_t panels) {
    const float* x = gathered + row * hidden;
    multiply(x, hidden, count, expert.gate, panel, panels, gate + row * inter, inter);
    multiply(x, hidden, count, expert.up, panel, panels, up + row * inter, inter);
    const int64_t column = panel * kPanel, columns = std::min(panels * kPanel, inter - column);
    for (int64_t r = row; r < row + count; ++r) {
      const int64_t at = r * inter + column;
      kernels_.silu_mul(gate + at, up + at, columns, activated + at);
    }
  });
  for_panels(hidden, [&](const CpuExperts::Expert& expert, int64_t row, int64_t count,
                         int64_t panel, int64_t panels) {
    multiply(activated + row * inter, inter, count, expert.down, panel, panels,
             result + row * hidden, hidden);
  });
  for_rows(tokens, top_k * hidden, [&](int64_t t) {
    for (int64_t s = t * top_k; s < (t + 1) * top_k; ++s) {
      if (!valid(s)) continue;
      kernels_.add_scaled(args.weights.data<float>()[s], result + row_of_slot[s] * hidden, hidden,
                          args.out.data<float>() + t * hidden);
    }
  });
}

}  // namespace kdt::cpu
