// The native vector of one instruction set. This header is compiled once for each set, in an
// unnamed namespace: it must not include anything that holds inline functions with external
// linkage, or code for a newer set could be linked into the portable path.
#pragma once

#include <stdint.h>
#include <string.h>

#if defined(KDT_ISA_AVX512) || defined(KDT_ISA_AVX2)
#include <immintrin.h>
#endif

namespace {

#if defined(KDT_ISA_AVX512)

constexpr int kLanes = 16;
constexpr int kRegisters = 32;
using Vec = __m512;
using Words = __m512i;

inline Vec load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, Vec v) { _mm512_storeu_ps(p, v); }
inline Vec broadcast(float x) { return _mm512_set1_ps(x); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
inline Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
inline Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
inline Vec div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
inline Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
inline Vec min(Vec a, Vec b) { return _mm512_min_ps(a, b); }
inline Vec round(Vec a) {
  return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
inline Words load_words(const uint32_t* p) { return _mm512_loadu_si512(p); }
inline Vec low_bf16(Words w) { return _mm512_castsi512_ps(_mm512_slli_epi32(w, 16)); }
inline Vec high_bf16(Words w) {
  return _mm512_castsi512_ps(_mm512_and_si512(w, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
}
// 2^n for integral n in the normal range.
inline Vec exp2_int(Vec n) {
  const Words i = _mm512_cvtps_epi32(n);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(i, _mm512_set1_epi32(127)), 23));
}
// vpermps looks only at the low four bits of an index: no mask is needed.
struct NibbleTable {
  Vec values = _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
  template <int kNibble>
  Vec get(Words w) const {
    return _mm512_permutexvar_ps(_mm512_srli_epi32(w, 4 * kNibble), values);
  }
};

#elif defined(KDT_ISA_AVX2)

constexpr int kLanes = 8;
constexpr int kRegisters = 16;
using Vec = __m256;
using Words = __m256i;

inline Vec load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, Vec v) { _mm256_storeu_ps(p, v); }
inline Vec broadcast(float x) { return _mm256_set1_ps(x); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
inline Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
inline Vec sub(Vec a, Vec b) { return _mm256_sub_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
inline Vec div(Vec a, Vec b) { return _mm256_div_ps(a, b); }
inline Vec max(Vec a, Vec b) { return _mm256_max_ps(a, b); }
inline Vec min(Vec a, Vec b) { return _mm256_min_ps(a, b); }
inline Vec round(Vec a) {
  return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
inline Words load_words(const uint32_t* p) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}
inline Vec low_bf16(Words w) { return _mm256_castsi256_ps(_mm256_slli_epi32(w, 16)); }
inline Vec high_bf16(Words w) {
  return _mm256_castsi256_ps(_mm256_and_si256(w, _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
}
inline Vec exp2_int(Vec n) {
  const Words i = _mm256_cvtps_epi32(n);
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(i, _mm256_set1_epi32(127)), 23));
}
struct NibbleTable {
  template <int kNibble>
  Vec get(Words w) const {
    const Words q = _mm256_and_si256(_mm256_srli_epi32(w, 4 * kNibble), _mm256_set1_epi32(15));
    return _mm256_cvtepi32_ps(_mm256_sub_epi32(q, _mm256_set1_epi32(8)));
  }
};

#else

// Vector extensions of the compiler: SSE2 on x86-64, NEON on aarch64. A product is rounded before
// the sum.
constexpr int kLanes = 4;
constexpr int kRegisters = 16;
typedef float Vec __attribute__((vector_size(16)));
typedef uint32_t Words __attribute__((vector_size(16)));
typedef int32_t Ints __attribute__((vector_size(16)));

inline Vec load(const float* p) {
  Vec v;
  memcpy(&v, p, sizeof(v));
  return v;
}
inline void store(float* p, Vec v) { memcpy(p, &v, sizeof(v)); }
inline Vec broadcast(float x) { return Vec{x, x, x, x}; }
inline Vec fma(Vec a, Vec b, Vec c) { return a * b + c; }
inline Vec add(Vec a, Vec b) { return a + b; }
inline Vec sub(Vec a, Vec b) { return a - b; }
inline Vec mul(Vec a, Vec b) { return a * b; }
inline Vec div(Vec a, Vec b) { return a / b; }
inline Vec max(Vec a, Vec b) { return a > b ? a : b; }
inline Vec min(Vec a, Vec b) { return a < b ? a : b; }
// Adding 1.5 * 2^23 leaves the nearest integer in the low bits; exact for |a| < 2^22.
inline Vec round(Vec a) {
  const Vec magic = broadcast(12582912.0f);
  return (a + magic) - magic;
}
inline Words load_words(const uint32_t* p) {
  Words v;
  memcpy(&v, p, sizeof(v));
  return v;
}
inline Vec low_bf16(Words w) { return reinterpret_cast<Vec>(w << 16); }
inline Vec high_bf16(Words w) { return reinterpret_cast<Vec>(w & 0xffff0000u); }
inline Vec exp2_int(Vec n) {
  const Ints i = __builtin_convertvector(n, Ints);
  return reinterpret_cast<Vec>((i + 127) << 23);
}
struct NibbleTable {
  template <int kNibble>
  Vec get(Words w) const {
    const Ints q = reinterpret_cast<Ints>((w >> (4 * kNibble)) & 15u) - 8;
    return __builtin_convertvector(q, Vec);
  }
};

#endif

// The lanes' sum in a fixed order: halves are added until one lane is left.
inline float reduce_add(Vec v) {
  float lanes[kLanes];
  store(lanes, v);
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  }
  return lanes[0];
}

inline float reduce_max(Vec v) {
  float lanes[kLanes];
  store(lanes, v);
  float best = lanes[0];
  for (int i = 1; i < kLanes; ++i) best = lanes[i] > best ? lanes[i] : best;
  return best;
}

// e^x to about 2 units in the last place for x in [-87, 88], the end's value outside. Of two
// operands the second is taken when one is NaN, so that NaN comes out as NaN.
inline Vec exp(Vec x) {
  x = max(broadcast(-87.0f), min(broadcast(88.0f), x));
  const Vec n = round(mul(x, broadcast(1.44269504f)));
  // ln 2 in two parts keeps the reduced argument exact.
  Vec r = fma(n, broadcast(-0.693359375f), x);
  r = fma(n, broadcast(2.12194440e-4f), r);
  // Taylor's series: |r| <= 0.3466, so the eighth term is below half a unit in the last place.
  Vec p = broadcast(1.0f / 5040.0f);
  p = fma(p, r, broadcast(1.0f / 720.0f));
  p = fma(p, r, broadcast(1.0f / 120.0f));
  p = fma(p, r, broadcast(1.0f / 24.0f));
  p = fma(p, r, broadcast(1.0f / 6.0f));
  p = fma(p, r, broadcast(0.5f));
  p = fma(p, r, broadcast(1.0f));
  p = fma(p, r, broadcast(1.0f));
  return mul(p, exp2_int(n));
}

}  // namespace
