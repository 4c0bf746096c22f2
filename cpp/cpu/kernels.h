// The inner loops of the CPU back end, one set for each instruction set, chosen at run time.
//
// A product is one chain of multiply-adds over ascending k that starts at zero, with the
// outputs in the vector's lanes (docs/adr/0005). So the bits of an output depend on its row and its
// weights alone: not on how many rows there are, how they are tiled, which thread works on them or
// how wide a vector is.
#pragma once

#include <stdint.h>

namespace kdt::cpu {

// Weights lie in panels of this many outputs, so that a vector load takes one k of several outputs.
constexpr int kPanel = 32;
// Columns of k that share a scale in int4 weights.
constexpr int kGroup = 32;

struct Kernels {
  const char* isa;

  // out[r, n] = sum over k of x[r, k] * w[n, k] for `columns` outputs from the first panel on.
  // x: rows of stride ldx; out: rows of stride ldo.
  // panels: [columns / 32, k, 16] words; word j holds output j (low half) and output 16 + j (high
  // half).
  void (*gemm_bf16)(const float* x, int64_t ldx, int rows, const uint32_t* panels, int64_t k,
                    float* out, int64_t ldo, int64_t columns);
  // w: element (k, n) at (n / 32) * panel_stride + k * row_stride + n % 32, readable to whole
  // vectors. With `accumulate` the chain goes on from out's values.
  void (*gemm_f32)(const float* x, int64_t ldx, int rows, const float* w, int64_t panel_stride,
                   int64_t row_stride, int64_t k, float* out, int64_t ldo, int64_t columns,
                   bool accumulate);
  // panels: [columns / 32, k / 8, 32] words of eight nibbles, ascending k from the lowest; a nibble
  // is code + 8. scales: [columns / 32, k / 32, 16] words of two bf16, paired as in gemm_bf16. A
  // group's sum is scaled once.
  void (*gemm_int4)(const float* x, int64_t ldx, int rows, const uint32_t* panels,
                    const uint32_t* scales, int64_t k, float* out, int64_t ldo, int64_t columns);

  // scores[i] = exp(scores[i] - max) for i < n; returns their sum. Element i sits in lane i % width
  // in every call.
  float (*softmax)(float* scores, int64_t n);
  // out[i] = x[i] / sqrt(mean(x^2) + eps) * weight[i]
  void (*rms_norm)(const float* x, const float* weight, int64_t n, float eps, float* out);
  // out[i] = silu(gate[i]) * up[i]
  void (*silu_mul)(const float* gate, const float* up, int64_t n, float* out);
  // out[i] += a * x[i]
  void (*add_scaled)(float a, const float* x, int64_t n, float* out);
  // log of the sum of exp(x[i] * scale); maximum[b] = max of x over elements [32 b, 32 b + 32). NaN
  // counts as -inf; -inf when nothing is finite.
  float (*log_sum_exp)(const float* x, int64_t n, float scale, float* maximum);
  // Index of the greatest element, the first of equals; -1 when every element is NaN.
  int64_t (*argmax)(const float* x, int64_t n);

  // For measuring the processor: `rounds` of ten independent chains of multiply-adds, and one read
  // of n floats. The results only keep the work from being left out.
  float (*fma_rounds)(int64_t rounds, int64_t* multiply_adds);
  float (*read_all)(const float* x, int64_t n);
};

const Kernels& portable_kernels();
#if defined(__x86_64__)
const Kernels& avx2_kernels();
const Kernels& avx512_kernels();
#endif

// The widest set this processor runs; KDT_ISA=portable|avx2|avx512 asks for a narrower one.
// Throws std::invalid_argument for another value and Error when the processor lacks the set.
const Kernels& select_kernels();

}  // namespace kdt::cpu
