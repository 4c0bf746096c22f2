// Bodies of the kernels over simd.h, compiled once for each instruction set by kernels_*.cpp.
#pragma once

#include "cpu/kernels.h"
#include "cpu/simd.h"

namespace {

using kdt::cpu::Kernels;
using kdt::cpu::kGroup;
using kdt::cpu::kPanel;

constexpr int kMaxRows = 6;  // rows of a tile
constexpr int kMaxUnits = 4;
// From this many rows on a tile asks for what the next one reads: arithmetic leaves the time, and
// the processor's own prefetch starts anew at each page. Fewer rows are bound by the transfer
// itself.
constexpr int kPrefetchRows = 3;

// Units of outputs worked on beside `rows` rows, so that accumulators, weights and one value fit
// the registers.
constexpr int units_for(int rows, int vectors_per_unit) {
  const int units = (kRegisters - 1) / ((rows + 1) * vectors_per_unit);
  return units > kMaxUnits ? kMaxUnits : units < 1 ? 1 : units;
}

template <int kUnitsPerPanel>
constexpr int ceil_panels(int units) {
  return (units + kUnitsPerPanel - 1) / kUnitsPerPanel;
}

// Writes the lanes of `value` that fall before `columns`.
inline void store_lanes(float* row, int64_t column, int64_t columns, Vec value) {
  if (column + kLanes <= columns) {
    store(row + column, value);
  } else if (column < columns) {
    float lanes[kLanes];
    store(lanes, value);
    for (int i = 0; column + i < columns; ++i) row[column + i] = lanes[i];
  }
}

inline Vec load_lanes(const float* row, int64_t column, int64_t columns) {
  if (column + kLanes <= columns) return load(row + column);
  float lanes[kLanes] = {};
  for (int i = 0; column + i < columns; ++i) lanes[i] = row[column + i];
  return load(lanes);
}

// A unit is what one vector of words holds: 2 * kLanes outputs.
struct Bf16Weights {
  static constexpr int kVectors = 2;
  static constexpr int kUnitsPerPanel = 16 / kLanes;
  const uint32_t* panels;
  int64_t k;

  template <int R, int S>
  void tile(const float* x, int64_t ldx, int64_t unit, float* out, int64_t ldo,
            int64_t columns) const {
    const uint32_t* w[S];
    for (int s = 0; s < S; ++s) {
      const int64_t u = unit + s;
      w[s] = panels + (u / kUnitsPerPanel) * k * 16 + (u % kUnitsPerPanel) * kLanes;
    }
    Vec low[R][S], high[R][S];
    for (int r = 0; r < R; ++r)
      for (int s = 0; s < S; ++s) low[r][s] = high[r][s] = broadcast(0.0f);
    for (int64_t i = 0; i < k; ++i) {
      Vec weight_low[S], weight_high[S];
      for (int s = 0; s < S; ++s) {
        if constexpr (R >= kPrefetchRows)
          __builtin_prefetch(w[s] + (ceil_panels<kUnitsPerPanel>(S) * k + i) * 16, 0, 2);
        const Words words = load_words(w[s] + i * 16);
        weight_low[s] = low_bf16(words);
        weight_high[s] = high_bf16(words);
      }
      for (int r = 0; r < R; ++r) {
        const Vec value = broadcast(x[r * ldx + i]);
        for (int s = 0; s < S; ++s) {
          low[r][s] = fma(value, weight_low[s], low[r][s]);
          high[r][s] = fma(value, weight_high[s], high[r][s]);
        }
      }
    }
    for (int s = 0; s < S; ++s) {
      const int64_t u = unit + s;
      const int64_t column = (u / kUnitsPerPanel) * kPanel + (u % kUnitsPerPanel) * kLanes;
      for (int r = 0; r < R; ++r) {
        store_lanes(out + r * ldo, column, columns, low[r][s]);
        store_lanes(out + r * ldo, column + 16, columns, high[r][s]);
      }
    }
  }
};

struct F32Weights {
  static constexpr int kVectors = 1;
  static constexpr int kUnitsPerPanel = kPanel / kLanes;
  const float* w;
  int64_t panel_stride, row_stride, k;
  bool accumulate;

  template <int R, int S>
  void tile(const float* x, int64_t ldx, int64_t unit, float* out, int64_t ldo,
            int64_t columns) const {
    const float* p[S];
    Vec sum[R][S];
    for (int s = 0; s < S; ++s) {
      const int64_t u = unit + s;
      p[s] = w + (u / kUnitsPerPanel) * panel_stride + (u % kUnitsPerPanel) * kLanes;
      for (int r = 0; r < R; ++r) {
        sum[r][s] = accumulate ? load_lanes(out + r * ldo, u * kLanes, columns) : broadcast(0.0f);
      }
    }
    for (int64_t i = 0; i < k; ++i) {
      Vec weight[S];
      for (int s = 0; s < S; ++s) weight[s] = load(p[s] + i * row_stride);
      for (int r = 0; r < R; ++r) {
        const Vec value = broadcast(x[r * ldx + i]);
        for (int s = 0; s < S; ++s) sum[r][s] = fma(value, weight[s], sum[r][s]);
      }
    }
    for (int s = 0; s < S; ++s)
      for (int r = 0; r < R; ++r)
        store_lanes(out + r * ldo, (unit + s) * kLanes, columns, sum[r][s]);
  }
};

struct Int4Weights {
  static constexpr int kVectors = 2;  // the group's sum and the total
  static constexpr int kUnitsPerPanel = kPanel / kLanes;
  const uint32_t* panels;
  const uint32_t* scales;
  int64_t k;

  template <int kNibble, int R, int S>
  static void nibble(const NibbleTable& table, const Words (&words)[S], const float* x, int64_t ldx,
                     Vec (&group)[R][S]) {
    Vec weight[S];
    for (int s = 0; s < S; ++s) weight[s] = table.get<kNibble>(words[s]);
    for (int r = 0; r < R; ++r) {
      const Vec value = broadcast(x[r * ldx + kNibble]);
      for (int s = 0; s < S; ++s) group[r][s] = fma(value, weight[s], group[r][s]);
    }
  }

  template <int R, int S>
  void tile(const float* x, int64_t ldx, int64_t unit, float* out, int64_t ldo,
            int64_t columns) const {
    const NibbleTable table;
    const uint32_t* w[S];
    const uint32_t* scale[S];
    bool is_high[S];
    Vec total[R][S];
    for (int s = 0; s < S; ++s) {
      const int64_t panel = (unit + s) / kUnitsPerPanel;
      const int column = static_cast<int>((unit + s) % kUnitsPerPanel) * kLanes;
      w[s] = panels + panel * (k / 8) * kPanel + column;
      scale[s] = scales + panel * (k / kGroup) * 16 + column % 16;
      is_high[s] = column >= 16;
      for (int r = 0; r < R; ++r) total[r][s] = broadcast(0.0f);
    }
    for (int64_t g = 0; g < k / kGroup; ++g) {
      Vec group[R][S];
      for (int r = 0; r < R; ++r)
        for (int s = 0; s < S; ++s) group[r][s] = broadcast(0.0f);
      for (int64_t i = g * (kGroup / 8); i < (g + 1) * (kGroup / 8); ++i) {
        Words words[S];
        for (int s = 0; s < S; ++s) {
          __builtin_prefetch(w[s] + (ceil_panels<kUnitsPerPanel>(S) * (k / 8) + i) * kPanel, 0, 2);
          words[s] = load_words(w[s] + i * kPanel);
        }
        const float* values = x + i * 8;
        nibble<0>(table, words, values, ldx, group);
        nibble<1>(table, words, values, ldx, group);
        nibble<2>(table, words, values, ldx, group);
        nibble<3>(table, words, values, ldx, group);
        nibble<4>(table, words, values, ldx, group);
        nibble<5>(table, words, values, ldx, group);
        nibble<6>(table, words, values, ldx, group);
        nibble<7>(table, words, values, ldx, group);
      }
      for (int s = 0; s < S; ++s) {
        const Words pair = load_words(scale[s] + g * 16);
        const Vec factor = is_high[s] ? high_bf16(pair) : low_bf16(pair);
        for (int r = 0; r < R; ++r) total[r][s] = fma(factor, group[r][s], total[r][s]);
      }
    }
    for (int s = 0; s < S; ++s)
      for (int r = 0; r < R; ++r)
        store_lanes(out + r * ldo, (unit + s) * kLanes, columns, total[r][s]);
  }
};

template <typename Weights, int R, int S>
void run_units(const Weights& weights, const float* x, int64_t ldx, float* out, int64_t ldo,
               int64_t columns, int64_t unit, int64_t end) {
  for (; unit + S <= end; unit += S) weights.template tile<R, S>(x, ldx, unit, out, ldo, columns);
  if constexpr (S > 1) {
    if (unit < end) run_units<Weights, R, S - 1>(weights, x, ldx, out, ldo, columns, unit, end);
  }
}

template <typename Weights, int R>
void run_rows(const Weights& weights, const float* x, int64_t ldx, int rows, float* out,
              int64_t ldo, int64_t columns, int64_t unit, int64_t end) {
  if (rows == R) {
    run_units<Weights, R, units_for(R, Weights::kVectors)>(weights, x, ldx, out, ldo, columns, unit,
                                                           end);
  } else if constexpr (R > 1) {
    run_rows<Weights, R - 1>(weights, x, ldx, rows, out, ldo, columns, unit, end);
  }
}

// Rows are cut into tiles of nearly equal height. Panels are the outer loop of a few at a time, so
// that their weights stay in the nearest cache while all rows pass over them.
template <typename Weights>
void run_gemm(const Weights& weights, const float* x, int64_t ldx, int rows, float* out,
              int64_t ldo, int64_t columns) {
  constexpr int64_t kStep = 2 * Weights::kUnitsPerPanel;
  const int64_t units = (columns + kPanel - 1) / kPanel * Weights::kUnitsPerPanel;
  const int tiles = (rows + kMaxRows - 1) / kMaxRows;
  const int64_t step = tiles == 1 ? units : kStep;
  for (int64_t unit = 0; unit < units; unit += step) {
    const int64_t end = unit + step < units ? unit + step : units;
    for (int t = 0; t < tiles; ++t) {
      const int begin = static_cast<int>(static_cast<int64_t>(rows) * t / tiles);
      const int count = static_cast<int>(static_cast<int64_t>(rows) * (t + 1) / tiles) - begin;
      run_rows<Weights, kMaxRows>(weights, x + begin * ldx, ldx, count, out + begin * ldo, ldo,
                                  columns, unit, end);
    }
  }
}

void gemm_bf16(const float* x, int64_t ldx, int rows, const uint32_t* panels, int64_t k, float* out,
               int64_t ldo, int64_t columns) {
  run_gemm(Bf16Weights{panels, k}, x, ldx, rows, out, ldo, columns);
}

void gemm_f32(const float* x, int64_t ldx, int rows, const float* w, int64_t panel_stride,
              int64_t row_stride, int64_t k, float* out, int64_t ldo, int64_t columns,
              bool accumulate) {
  run_gemm(F32Weights{w, panel_stride, row_stride, k, accumulate}, x, ldx, rows, out, ldo, columns);
}

void gemm_int4(const float* x, int64_t ldx, int rows, const uint32_t* panels,
               const uint32_t* scales, int64_t k, float* out, int64_t ldo, int64_t columns) {
  run_gemm(Int4Weights{panels, scales, k}, x, ldx, rows, out, ldo, columns);
}

constexpr float kMinusInfinity = -__builtin_inff();

// The vector of elements [i, i + kLanes), `fill` past n.
inline Vec load_filled(const float* x, int64_t i, int64_t n, float fill) {
  if (i + kLanes <= n) return load(x + i);
  float lanes[kLanes];
  for (int j = 0; j < kLanes; ++j) lanes[j] = i + j < n ? x[i + j] : fill;
  return load(lanes);
}

float softmax(float* scores, int64_t n) {
  Vec best = broadcast(kMinusInfinity);
  for (int64_t i = 0; i < n; i += kLanes)
    best = max(best, load_filled(scores, i, n, kMinusInfinity));
  const Vec top = broadcast(reduce_max(best));
  Vec sum = broadcast(0.0f);
  for (int64_t i = 0; i < n; i += kLanes) {
    Vec value = exp(sub(load_filled(scores, i, n, kMinusInfinity), top));
    store_lanes(scores, i, n, value);
    // Lanes past the end must add exactly nothing.
    if (i + kLanes > n) value = load_filled(scores, i, n, 0.0f);
    sum = add(sum, value);
  }
  return reduce_add(sum);
}

void rms_norm(const float* x, const float* weight, int64_t n, float eps, float* out) {
  Vec sum = broadcast(0.0f);
  for (int64_t i = 0; i < n; i += kLanes) {
    const Vec value = load_filled(x, i, n, 0.0f);
    sum = fma(value, value, sum);
  }
  const float mean = reduce_add(sum) / static_cast<float>(n);
  const Vec factor = broadcast(1.0f / __builtin_sqrtf(mean + eps));
  for (int64_t i = 0; i < n; i += kLanes) {
    const Vec value = mul(load_filled(x, i, n, 0.0f), factor);
    store_lanes(out, i, n, mul(value, load_filled(weight, i, n, 0.0f)));
  }
}

void silu_mul(const float* gate, const float* up, int64_t n, float* out) {
  const Vec one = broadcast(1.0f);
  for (int64_t i = 0; i < n; i += kLanes) {
    const Vec g = load_filled(gate, i, n, 0.0f);
    const Vec silu = div(g, add(one, exp(sub(broadcast(0.0f), g))));
    store_lanes(out, i, n, mul(silu, load_filled(up, i, n, 0.0f)));
  }
}

void add_scaled(float a, const float* x, int64_t n, float* out) {
  const Vec factor = broadcast(a);
  for (int64_t i = 0; i < n; i += kLanes) {
    store_lanes(out, i, n, fma(factor, load_filled(x, i, n, 0.0f), load_filled(out, i, n, 0.0f)));
  }
}

float log_sum_exp(const float* x, int64_t n, float scale, float* maximum) {
  // max(value, so far) keeps "so far" when the value is NaN: x86 returns the second operand, and
  // the portable comparison is false.
  Vec best = broadcast(kMinusInfinity);
  for (int64_t block = 0; block * kPanel < n; ++block) {
    Vec block_best = broadcast(kMinusInfinity);
    const int64_t end = (block + 1) * kPanel < n ? (block + 1) * kPanel : n;
    for (int64_t i = block * kPanel; i < end; i += kLanes) {
      block_best = max(load_filled(x, i, n, kMinusInfinity), block_best);
    }
    maximum[block] = reduce_max(block_best);
    best = max(block_best, best);
  }
  const float top = reduce_max(best);
  if (top == kMinusInfinity) return kMinusInfinity;
  const Vec shift = broadcast(top);
  const Vec factor = broadcast(scale);
  Vec sum = broadcast(0.0f);
  for (int64_t i = 0; i < n; i += kLanes) {
    // A NaN becomes -inf, whose exponential is negligible beside the maximum's 1.
    const Vec value = max(load_filled(x, i, n, kMinusInfinity), broadcast(kMinusInfinity));
    sum = add(sum, exp(mul(sub(value, shift), factor)));
  }
  return __builtin_logf(reduce_add(sum)) + top * scale;
}

int64_t argmax(const float* x, int64_t n) {
  Vec best = broadcast(kMinusInfinity);
  for (int64_t i = 0; i < n; i += kLanes) best = max(load_filled(x, i, n, kMinusInfinity), best);
  const float top = reduce_max(best);
  for (int64_t i = 0; i < n; ++i) {
    if (x[i] == top) return i;
  }
  return -1;
}

float fma_rounds(int64_t rounds, int64_t* multiply_adds) {
  constexpr int kChains = 10;  // two a cycle with a latency of four or five
  Vec chains[kChains];
  for (int i = 0; i < kChains; ++i) chains[i] = broadcast(static_cast<float>(i));
  const Vec a = broadcast(0.5f), b = broadcast(1.0f);
  for (int64_t round = 0; round < rounds; ++round) {
    for (int i = 0; i < kChains; ++i) chains[i] = fma(chains[i], a, b);
  }
  Vec sum = chains[0];
  for (int i = 1; i < kChains; ++i) sum = add(sum, chains[i]);
  *multiply_adds = rounds * kChains * kLanes;
  return reduce_add(sum);
}

float read_all(const float* x, int64_t n) {
  constexpr int kChains = 8;
  Vec chains[kChains];
  for (int i = 0; i < kChains; ++i) chains[i] = broadcast(0.0f);
  for (int64_t i = 0; i + kChains * kLanes <= n; i += kChains * kLanes) {
    for (int j = 0; j < kChains; ++j) chains[j] = add(chains[j], load(x + i + j * kLanes));
  }
  Vec sum = chains[0];
  for (int i = 1; i < kChains; ++i) sum = add(sum, chains[i]);
  return reduce_add(sum);
}

constexpr Kernels kKernels = {
    KDT_ISA_NAME, gemm_bf16,  gemm_f32,    gemm_int4, softmax,    rms_norm,
    silu_mul,     add_scaled, log_sum_exp, argmax,    fma_rounds, read_all,
};

}  // namespace
