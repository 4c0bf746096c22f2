// What the tests of the emulator share: kernels of one block, run for many orders of its threads.
#pragma once

#include <string>
#include <vector>

#include "check.h"
#include "core/dtype.h"
#include "launch.cuh"
#include "primitives.cuh"

namespace kdt::test {
using namespace kdt::cuda;

inline constexpr unsigned kAll = 0xFFFFFFFFu;
inline constexpr int kThreads = 128;
inline constexpr int kSeeds = 20;

struct Params {
  const float* in = nullptr;
  float* out = nullptr;
};

using Values = std::vector<float>;

// Multiples of 1/8 that bf16 holds exactly.
inline Values small_numbers(int n, uint32_t seed) {
  Values x(n);
  for (float& v : x) {
    seed = seed * 1664525u + 1013904223u;
    v = static_cast<float>(static_cast<int>(seed >> 28) - 8) / 8.0f;
  }
  return x;
}

struct alignas(16) Aligned {
  uint16_t bits[8];
};
inline std::vector<Aligned> as_bf16(const Values& x) {
  std::vector<Aligned> to(x.size() / 8);
  for (size_t i = 0; i < x.size(); ++i) to[i / 8].bits[i % 8] = float_to_bf16(x[i]);
  return to;
}

// One block of a kernel: what it writes to `out`, or what it throws.
template <auto kKernel>
Values run(const Params& params, int num_out, int64_t shared_bytes, int num_threads = kThreads) {
  Values out(num_out, -1.0f);
  Params p = params;
  p.out = out.data();
  launch<kKernel>(dim3(1), num_threads, shared_bytes, nullptr, p);
  return out;
}

// Right for all seeds.
template <auto kKernel>
void expect_always(const char* name, const Params& params, const Values& want, int64_t shared_bytes,
                   int num_threads = kThreads) {
  for (uint32_t seed = 0; seed < kSeeds; ++seed) {
    emulator::set_seed(seed);
    const Values got =
        run<kKernel>(params, static_cast<int>(want.size()), shared_bytes, num_threads);
    for (size_t i = 0; i < want.size(); ++i) {
      if (got[i] == want[i]) continue;
      report(name, static_cast<int>(i), join("seed ", seed, ": ", got[i], " != ", want[i]));
      return;
    }
  }
}

// Wrong numbers for some seed, without an error.
template <auto kKernel>
void expect_wrong_numbers(const char* name, const Params& params, const Values& want,
                          int64_t shared_bytes, int num_threads = kThreads) {
  for (uint32_t seed = 0; seed < kSeeds; ++seed) {
    emulator::set_seed(seed);
    if (run<kKernel>(params, static_cast<int>(want.size()), shared_bytes, num_threads) != want)
      return;
  }
  report(name, 0, "the planted fault gave right numbers for all seeds");
}

// The kernel without its fault gives `want`, the one with it throws `message` for every seed.
template <auto kKernel, auto kFaulty>
void expect_error(const char* name, const Params& params, const Values& want, int64_t shared_bytes,
                  const std::string& message) {
  expect_always<kKernel>(name, params, want, shared_bytes);
  for (uint32_t seed = 0; seed < kSeeds; ++seed) {
    emulator::set_seed(seed);
    expect_throws(name, static_cast<int>(seed), message,
                  [&] { run<kFaulty>(params, static_cast<int>(want.size()), shared_bytes); });
  }
}

}  // namespace kdt::test
