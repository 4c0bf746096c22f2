// Faults planted in small kernels, each of which the emulator must catch. A kernel comes without
// its fault too, and must pass.
#include <algorithm>
#include <cmath>

#include "emulator_test.h"

namespace kdt::test {
namespace {

// Rows of n values in two stages of shared memory, each thread 16 bytes of a row; then a sum over
// each column, by a thread for eight columns it did not load.
enum class PipelineFault { kNone, kWait, kFirstBarrier, kSecondBarrier };
constexpr int kPipelineRows = 6;

template <PipelineFault kFault>
void pipeline_kernel(const Params p) {
  auto* stages = reinterpret_cast<uint16_t*>(shared_memory());  // [2, kThreads * 8]
  const auto* from = reinterpret_cast<const Aligned*>(p.in);
  const auto load = [&](int row) {
    if (row < kPipelineRows)
      cp_async_16(shared_address(stages + (row % 2 * kThreads + threadIdx.x) * 8),
                  from + row * kThreads + threadIdx.x, row != 3);
    cp_async_commit();
  };
  float sums[8] = {};
  load(0);
  for (int row = 0; row < kPipelineRows; ++row) {
    load(row + 1);
    cp_async_wait<kFault == PipelineFault::kWait ? 2 : 1>();
    if constexpr (kFault != PipelineFault::kFirstBarrier) __syncthreads();
    const int piece = (static_cast<int>(threadIdx.x) + 37) % kThreads;
    for (int i = 0; i < 8; ++i) sums[i] += bf16_value(stages[(row % 2 * kThreads + piece) * 8 + i]);
    if constexpr (kFault != PipelineFault::kSecondBarrier) __syncthreads();
  }
  cp_async_wait<0>();
  for (int i = 0; i < 8; ++i) p.out[threadIdx.x * 8 + i] = sums[i];
}

KDT_TEST(a_pipeline_of_asynchronous_copies) {
  const Values values = small_numbers(kPipelineRows * kThreads * 8, 4);
  const std::vector<Aligned> in = as_bf16(values);
  Values want(kThreads * 8, 0.0f);
  for (int t = 0; t < kThreads; ++t)
    for (int i = 0; i < 8; ++i)
      for (int row = 0; row < kPipelineRows; ++row)
        if (row != 3) want[t * 8 + i] += values[(row * kThreads + (t + 37) % kThreads) * 8 + i];
  const Params p{.in = reinterpret_cast<const float*>(in.data())};
  constexpr int64_t kShared = 2 * kThreads * 16;
  using enum PipelineFault;
  expect_always<pipeline_kernel<kNone>>("pipeline", p, want, kShared);
  expect_wrong_numbers<pipeline_kernel<kWait>>("a wait one stage short", p, want, kShared);
  expect_wrong_numbers<pipeline_kernel<kFirstBarrier>>("no barrier after the wait", p, want,
                                                       kShared);
  expect_wrong_numbers<pipeline_kernel<kSecondBarrier>>("no barrier before the next load", p, want,
                                                        kShared);
}

template <bool kFault>
void exchange(const Params p) {
  auto* shared = reinterpret_cast<float*>(shared_memory());
  shared[threadIdx.x] = p.in[threadIdx.x];
  if constexpr (!kFault) __syncthreads();
  p.out[threadIdx.x] = shared[(threadIdx.x + 1) % kThreads];
}

// Two rounds through the same memory, with no barrier between reading and writing again.
template <bool kFault>
void exchange_twice(const Params p) {
  auto* shared = reinterpret_cast<float*>(shared_memory());
  float x = p.in[threadIdx.x];
  for (int round = 0; round < 2; ++round) {
    shared[threadIdx.x] = x;
    __syncthreads();
    x = shared[(threadIdx.x + 1) % kThreads];
    if constexpr (!kFault) __syncthreads();
  }
  p.out[threadIdx.x] = x;
}

// The half that writes again has done much by then, so it must be far ahead of the half that reads.
template <bool kFault>
void far_ahead(const Params p) {
  auto* shared = reinterpret_cast<float*>(shared_memory());
  const bool writes = threadIdx.x < kThreads / 2;
  shared[threadIdx.x] = p.in[threadIdx.x];
  __syncthreads();
  float x = writes ? 0.0f : shared[threadIdx.x - kThreads / 2];
  for (int i = 0; i < 200; ++i) x = __shfl_xor_sync(kAll, x, 1);
  if constexpr (!kFault) __syncthreads();
  if (writes) shared[threadIdx.x] = -1;
  p.out[threadIdx.x] = x;
}

Values shifted(const Values& in, int by) {
  Values out(in.size());
  for (size_t i = 0; i < in.size(); ++i) out[i] = in[(i + by) % in.size()];
  return out;
}

KDT_TEST(a_missing_barrier_gives_wrong_numbers) {
  const Values in = small_numbers(kThreads, 5);
  const Params p{.in = in.data()};
  constexpr int64_t kShared = kThreads * sizeof(float);
  expect_always<exchange<false>>("exchange", p, shifted(in, 1), kShared);
  expect_wrong_numbers<exchange<true>>("exchange", p, shifted(in, 1), kShared);
  expect_always<exchange_twice<false>>("twice", p, shifted(in, 2), kShared);
  expect_wrong_numbers<exchange_twice<true>>("twice", p, shifted(in, 2), kShared);
  Values want(kThreads, 0.0f);
  std::copy(in.begin(), in.begin() + kThreads / 2, want.begin() + kThreads / 2);
  expect_always<far_ahead<false>>("far ahead", p, want, kShared);
  expect_wrong_numbers<far_ahead<true>>("far ahead", p, want, kShared);
}

template <bool kFault>
void read_everything(const Params p) {
  auto* shared = reinterpret_cast<float*>(shared_memory());
  if (!kFault || threadIdx.x != 50) shared[threadIdx.x] = 1;
  __syncthreads();
  float sum = 0;
  for (int i = 0; i < kThreads; ++i) sum += shared[i];
  p.out[threadIdx.x] = sum;
}

KDT_TEST(shared_memory_that_nobody_wrote_is_nan) {
  const Values want(kThreads, static_cast<float>(kThreads));
  constexpr int64_t kShared = kThreads * sizeof(float);
  expect_always<read_everything<false>>("all written", {}, want, kShared);
  for (uint32_t seed = 0; seed < kSeeds; ++seed) {
    emulator::set_seed(seed);
    for (const float sum : run<read_everything<true>>({}, kThreads, kShared))
      EXPECT(std::isnan(sum));
  }
}

KDT_TEST(device_memory_that_nobody_wrote_is_nan) {
  void* memory = nullptr;
  EXPECT_EQ(cudaMalloc(&memory, 400), cudaSuccess);
  for (int i = 0; i < 100; ++i) EXPECT(std::isnan(static_cast<float*>(memory)[i]));
  cudaFree(memory);
}

// Loads one row past the shared memory.
template <bool kFault>
void ldmatrix_out_of_range(const Params p) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  uint32_t r[4];
  ldmatrix_x4(r, shared_address(shared_memory()) + (lane + (kFault ? 1 : 0)) * 16);
  p.out[threadIdx.x] = static_cast<float>(r[0] & 1);
}

template <bool kFault>
void copy_out_of_range(const Params p) {
  cp_async_16(shared_address(shared_memory()) + (threadIdx.x + (kFault ? 1 : 0)) * 16, p.in, false);
  cp_async_commit();
  cp_async_wait<0>();
  p.out[threadIdx.x] = 0;
}

template <bool kFault>
void address_out_of_range(const Params p) {
  p.out[threadIdx.x] =
      static_cast<float>(shared_address(shared_memory() + (kFault && threadIdx.x == 77 ? -16 : 0)));
}

KDT_TEST(shared_addresses_out_of_range) {
  expect_error<ldmatrix_out_of_range<false>, ldmatrix_out_of_range<true>>(
      "ldmatrix", {}, Values(kThreads, 1.0f), 512, "shared bytes [512, +16) of 512");
  expect_error<copy_out_of_range<false>, copy_out_of_range<true>>(
      "cp.async", {}, Values(kThreads, 0.0f), kThreads * 16, "shared bytes [2048, +16) of 2048");
  expect_error<address_out_of_range<false>, address_out_of_range<true>>(
      "address", {}, Values(kThreads, 0.0f), 512, "a pointer outside the shared memory");
}

template <bool kFault>
void ldmatrix_misaligned(const Params p) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  uint32_t r[4];
  ldmatrix_x4(r, shared_address(shared_memory()) + lane * 16 + (kFault && lane == 3 ? 8 : 0));
  p.out[threadIdx.x] = static_cast<float>(r[0] & 1);
}

template <bool kFault>
void copy_to_misaligned(const Params p) {
  const int off = kFault && threadIdx.x == 3 ? 4 : 0;
  cp_async_16(shared_address(shared_memory()) + threadIdx.x * 16 + off, p.in);
  cp_async_commit();
  cp_async_wait<0>();
  p.out[threadIdx.x] = reinterpret_cast<float*>(shared_memory())[threadIdx.x * 4];
}

template <bool kFault>
void copy_from_misaligned(const Params p) {
  const int off = kFault && threadIdx.x == 3 ? 1 : 0;
  cp_async_16(shared_address(shared_memory()) + threadIdx.x * 16, p.in + off);
  cp_async_commit();
  cp_async_wait<0>();
  p.out[threadIdx.x] = reinterpret_cast<float*>(shared_memory())[threadIdx.x * 4];
}

template <bool kFault>
void load_misaligned(const Params p) {
  p.out[threadIdx.x] = __uint_as_float(load_16(p.in + (kFault && threadIdx.x == 3 ? 2 : 0)).x);
}

KDT_TEST(misaligned_addresses_of_16_bytes) {
  alignas(16) const float in[8] = {5, 5, 5, 5, 5, 5, 5, 5};
  const Params p{.in = in};
  const Values fives(kThreads, 5.0f);
  expect_error<ldmatrix_misaligned<false>, ldmatrix_misaligned<true>>(
      "ldmatrix", {}, Values(kThreads, 1.0f), 1024, "shared address 56 is no multiple of 16");
  expect_error<copy_to_misaligned<false>, copy_to_misaligned<true>>(
      "to", p, fives, kThreads * 16 + 16, "shared address 52 is no multiple of 16");
  expect_error<copy_from_misaligned<false>, copy_from_misaligned<true>>(
      "from", p, fives, kThreads * 16, "is no multiple of 16");
  expect_error<load_misaligned<false>, load_misaligned<true>>("load_16", p, fives, 0,
                                                              "is no multiple of 16");
}

template <bool kFault>
void write_behind(const Params p) {
  auto* shared = reinterpret_cast<volatile float*>(shared_memory());
  shared[threadIdx.x + (kFault ? 1 : 0)] = 1;
  p.out[threadIdx.x] = 1;
}

template <bool kFault>
void write_before(const Params p) {
  auto* shared = reinterpret_cast<volatile float*>(shared_memory());
  if (threadIdx.x == 0) shared[kFault ? -1 : 0] = 1;
  p.out[threadIdx.x] = 1;
}

KDT_TEST(writes_outside_the_shared_memory) {
  const Values ones(kThreads, 1.0f);
  constexpr int64_t kShared = kThreads * sizeof(float);
  expect_error<write_behind<false>, write_behind<true>>(
      "behind", {}, ones, kShared, "a write outside the 512 bytes of shared memory");
  expect_error<write_before<false>, write_before<true>>(
      "before", {}, ones, kShared, "a write outside the 512 bytes of shared memory");
}

template <bool kFault>
void half_skips_barrier(const Params p) {
  if (!kFault || threadIdx.x < kThreads / 2) __syncthreads();
  p.out[threadIdx.x] = 1;
  __syncthreads();
}

// Half of each warp ends before the barrier.
template <bool kFault>
void half_warps_end(const Params p) {
  p.out[threadIdx.x] = 1;
  if (kFault && threadIdx.x % 2 == 0) return;
  __syncthreads();
}

// A warp waits for the other's lanes, which wait for the warp.
template <bool kFault>
void barrier_against_shuffle(const Params p) {
  p.out[threadIdx.x] = 1;
  if (kFault && threadIdx.x % 32 == 31) __syncthreads();
  __shfl_xor_sync(kAll, 1.0f, 1);
  if (!kFault || threadIdx.x % 32 != 31) __syncthreads();
}

KDT_TEST(a_barrier_that_not_all_reach) {
  const Values ones(kThreads, 1.0f);
  expect_error<half_skips_barrier<false>, half_skips_barrier<true>>(
      "half of the block", {}, ones, 0,
      "threads of one block are at __syncthreads (test_emulator_faults.cpp:");
  expect_error<half_warps_end<false>, half_warps_end<true>>("half of each warp", {}, ones, 0,
                                                            "has ended, the others are at");
  expect_error<barrier_against_shuffle<false>, barrier_against_shuffle<true>>(
      "barrier and shuffle", {}, ones, 0,
      "threads wait for others that never come: 4 at __syncthreads (test_emulator_faults.cpp:");
}

template <bool kFault>
void lane_skips_shuffle(const Params p) {
  float x = 1;
  if (!kFault || threadIdx.x != 40) x = __shfl_xor_sync(kAll, x, 1);
  p.out[threadIdx.x] = x;
}

template <bool kFault>
void lane_is_one_shuffle_ahead(const Params p) {
  float x = 1;
  if (!kFault || threadIdx.x != 40) x = __shfl_xor_sync(kAll, x, 1);
  x = __shfl_xor_sync(kAll, x, 2);
  p.out[threadIdx.x] = x;
}

template <bool kFault>
void part_of_a_warp(const Params p) {
  p.out[threadIdx.x] = __shfl_xor_sync(kFault ? 0xFFFFu : kAll, 1.0f, 1);
}

KDT_TEST(a_shuffle_that_a_lane_skips) {
  const Values ones(kThreads, 1.0f);
  expect_error<lane_skips_shuffle<false>, lane_skips_shuffle<true>>(
      "skips", {}, ones, 0, "31 lanes of warp 1 at __shfl_xor_sync (test_emulator_faults.cpp:");
  expect_error<lane_is_one_shuffle_ahead<false>, lane_is_one_shuffle_ahead<true>>(
      "ahead", {}, ones, 0, "lanes of one warp are at");
  expect_error<part_of_a_warp<false>, part_of_a_warp<true>>("mask", {}, ones, 0,
                                                            "a collective of a part of a warp");
}

template <bool kFault>
void copy_never_awaited(const Params p) {
  cp_async_16(shared_address(shared_memory()) + threadIdx.x * 16, p.in);
  cp_async_commit();
  if (!kFault) cp_async_wait<0>();
  p.out[threadIdx.x] = 1;
}

KDT_TEST(a_copy_that_nobody_awaits) {
  alignas(16) const float in[4] = {};
  expect_error<copy_never_awaited<false>, copy_never_awaited<true>>(
      "copy", {.in = in}, Values(kThreads, 1.0f), kThreads * 16,
      "a thread ended with asynchronous copies under way");
}

KDT_TEST(errors_tell_where_and_leave_the_emulator_usable) {
  emulator::set_seed(7);
  EXPECT_THROWS("(block 0, 0, 0, thread ", run<lane_skips_shuffle<true>>({}, kThreads, 0));
  EXPECT_THROWS("KDT_EMULATOR_SEED=7)", run<lane_skips_shuffle<true>>({}, kThreads, 0));
  EXPECT_THROWS("a block of 33 threads", run<exchange<false>>({}, kThreads, 0, 33));
  expect_always<lane_skips_shuffle<false>>("afterwards", {}, Values(kThreads, 1.0f), 0);
}

}  // namespace
}  // namespace kdt::test

KDT_TEST_MAIN
