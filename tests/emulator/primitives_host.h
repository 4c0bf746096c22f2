// The primitives of cuda/primitives.cuh for the emulator.
#pragma once

#include <atomic>
#include <bit>
#include <chrono>
#include <cmath>
#include <cstring>

#include "core/dtype.h"
#include "cuda_runtime.h"

namespace kdt::cuda {

inline unsigned char* shared_memory() { return emulator::shared_memory(); }
inline uint32_t shared_address(const void* pointer) { return emulator::shared_offset(pointer); }

inline void cp_async_16(uint32_t to, const void* from, bool valid = true) {
  emulator::copy_async(to, from, valid);
}
inline void cp_async_commit() { emulator::commit_async(); }
template <int kPending>
void cp_async_wait() {
  emulator::wait_async(kPending);
}

namespace detail {

template <bool kTransposed>
void ldmatrix(uint32_t (&r)[4], uint32_t row, emulator::Where where) {
  emulator::meet_warp(
      kTransposed ? "ldmatrix_x4_trans" : "ldmatrix_x4", &row, 1, r, 4,
      [](const emulator::Table& in, emulator::Table& out) {
        for (int m = 0; m < 4; ++m) {
          uint16_t matrix[8][8];
          for (int i = 0; i < 8; ++i)
            std::memcpy(matrix[i], emulator::shared_at(in[m * 8 + i][0], 16, 16), 16);
          for (int l = 0; l < 32; ++l) {
            const int a = l / 4, b = l % 4 * 2;
            const uint16_t low = kTransposed ? matrix[b][a] : matrix[a][b];
            const uint16_t high = kTransposed ? matrix[b + 1][a] : matrix[a][b + 1];
            out[l][m] = low | static_cast<uint32_t>(high) << 16;
          }
        }
      },
      where);
}

inline float half_of(uint32_t pair, int i) {
  return bf16_to_float(static_cast<uint16_t>(i == 0 ? pair : pair >> 16));
}

}  // namespace detail

inline void ldmatrix_x4(uint32_t (&r)[4], uint32_t row,
                        emulator::Where where = emulator::Where::current()) {
  detail::ldmatrix<false>(r, row, where);
}
inline void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t row,
                              emulator::Where where = emulator::Where::current()) {
  detail::ldmatrix<true>(r, row, where);
}

// Sums in the order of k, in f32.
inline void mma_bf16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                     emulator::Where where = emulator::Where::current()) {
  using Row = float __attribute__((vector_size(32)));
  uint32_t in[10] = {a[0], a[1], a[2], a[3], b0, b1}, out[4];
  std::memcpy(in + 6, c, sizeof(c));
  emulator::meet_warp(
      "mma_bf16", in, 10, out, 4,
      [](const emulator::Table& lanes, emulator::Table& result) {
        float a_matrix[16][16];
        Row b_matrix[16], sums[16];
        for (int l = 0; l < 32; ++l) {
          const int g = l / 4, t = l % 4;
          for (int i = 0; i < 2; ++i) {
            for (int part = 0; part < 4; ++part)
              a_matrix[g + part % 2 * 8][2 * t + i + part / 2 * 8] =
                  detail::half_of(lanes[l][part], i);
            b_matrix[2 * t + i][g] = detail::half_of(lanes[l][4], i);
            b_matrix[2 * t + i + 8][g] = detail::half_of(lanes[l][5], i);
          }
          for (int i = 0; i < 4; ++i)
            sums[g + i / 2 * 8][2 * t + i % 2] = std::bit_cast<float>(lanes[l][6 + i]);
        }
        for (int row = 0; row < 16; ++row)
          for (int k = 0; k < 16; ++k) sums[row] += a_matrix[row][k] * b_matrix[k];
        for (int l = 0; l < 32; ++l) {
          const int g = l / 4, t = l % 4;
          for (int i = 0; i < 4; ++i)
            result[l][i] = std::bit_cast<uint32_t>(sums[g + i / 2 * 8][2 * t + i % 2]);
        }
      },
      where);
  std::memcpy(c, out, sizeof(c));
}

inline uint32_t pack_bf16(float low, float high) {
  return float_to_bf16(low) | static_cast<uint32_t>(float_to_bf16(high)) << 16;
}
inline uint32_t sub_bf16x2(uint32_t a, uint32_t b) {
  return pack_bf16(detail::half_of(a, 0) - detail::half_of(b, 0),
                   detail::half_of(a, 1) - detail::half_of(b, 1));
}
inline void wait_for_previous_kernel() {}
inline void start_next_kernel() {}
inline void follow_previous_kernel() {}
inline uint32_t and_or(uint32_t a, uint32_t mask, uint32_t bits) { return (a & mask) | bits; }
inline float exp2_approx(float x) { return std::exp2(x); }

namespace detail {
template <typename Choose>
uint32_t redux(const char* name, uint32_t x, const Choose& choose) {
  emulator::meet_warp(name, &x, 1, &x, 1, [&](const emulator::Table& in, emulator::Table& out) {
    uint32_t all = in[0][0];
    for (int l = 1; l < 32; ++l) all = choose(all, in[l][0]);
    for (int l = 0; l < 32; ++l) out[l][0] = all;
  });
  return x;
}
}  // namespace detail
inline uint32_t redux_max(uint32_t x) {
  return detail::redux("redux_max", x, [](uint32_t a, uint32_t b) { return a > b ? a : b; });
}
inline uint32_t redux_min(uint32_t x) {
  return detail::redux("redux_min", x, [](uint32_t a, uint32_t b) { return a < b ? a : b; });
}

inline void store_release_system(uint64_t* at, uint64_t value) {
  std::atomic_ref(*at).store(value, std::memory_order_release);
}
inline uint64_t load_acquire_system(const uint64_t* at) {
  if (emulator::skip_waits) return ~uint64_t{0};
  return std::atomic_ref(*const_cast<uint64_t*>(at)).load(std::memory_order_acquire);
}
inline void store_system(uint32_t* at, uint32_t value) {
  std::atomic_ref(*at).store(value, std::memory_order_relaxed);
}
inline uint32_t load_system(const uint32_t* at) {
  return std::atomic_ref(*const_cast<uint32_t*>(at)).load(std::memory_order_relaxed);
}
inline uint64_t nanoseconds() {
  return static_cast<uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count());
}
inline void let_others_run() { emulator::let_others_run(); }

inline unsigned forget(unsigned x) { return x; }

inline uint4 load_16(const void* from) {
  if (reinterpret_cast<uintptr_t>(from) % 16 != 0)
    emulator::fail("load_16 of an address that is no multiple of 16");
  uint4 value;
  std::memcpy(&value, from, sizeof(value));
  return value;
}

}  // namespace kdt::cuda
