// The emulator of tests/emulator: its primitives against plain code.
#include <algorithm>

#include "emulator_test.h"

namespace kdt::test {
namespace {

// Lane l reads row l of 32 rows of 8 values.
template <bool kTransposed>
void ldmatrix_kernel(const Params p) {
  auto* rows = reinterpret_cast<uint16_t*>(shared_memory());
  const int lane = static_cast<int>(threadIdx.x);
  for (int i = 0; i < 8; ++i) rows[lane * 8 + i] = float_to_bf16(p.in[lane * 8 + i]);
  __syncwarp();
  uint32_t r[4];
  const uint32_t row = shared_address(rows + lane * 8);
  kTransposed ? ldmatrix_x4_trans(r, row) : ldmatrix_x4(r, row);
  for (int m = 0; m < 4; ++m) {
    p.out[(m * 32 + lane) * 2] = bf16_low(r[m]);
    p.out[(m * 32 + lane) * 2 + 1] = bf16_high(r[m]);
  }
}

KDT_TEST(ldmatrix_distributes_the_rows_of_four_matrices) {
  const Values in = small_numbers(256, 1);
  Values plain(256), transposed(256);
  for (int m = 0; m < 4; ++m) {
    for (int lane = 0; lane < 32; ++lane) {
      for (int i = 0; i < 2; ++i) {
        const int a = lane / 4, b = lane % 4 * 2 + i;
        plain[(m * 32 + lane) * 2 + i] = in[m * 64 + a * 8 + b];
        transposed[(m * 32 + lane) * 2 + i] = in[m * 64 + b * 8 + a];
      }
    }
  }
  expect_always<ldmatrix_kernel<false>>("ldmatrix_x4", {.in = in.data()}, plain, 512, 32);
  expect_always<ldmatrix_kernel<true>>("ldmatrix_x4_trans", {.in = in.data()}, transposed, 512, 32);
}

// out [16, 8] = in [16, 16] times in + 256 [8, 16] transposed, plus 1.
void mma_kernel(const Params p) {
  const int g = static_cast<int>(threadIdx.x) / 4, t = static_cast<int>(threadIdx.x) % 4;
  const auto pair = [&](int row, int column) {
    return pack_bf16(p.in[row * 16 + column], p.in[row * 16 + column + 1]);
  };
  const uint32_t a[4] = {pair(g, 2 * t), pair(g + 8, 2 * t), pair(g, 2 * t + 8),
                         pair(g + 8, 2 * t + 8)};
  float c[4] = {1, 1, 1, 1};
  mma_bf16(c, a, pair(16 + g, 2 * t), pair(16 + g, 2 * t + 8));
  for (int i = 0; i < 4; ++i) p.out[(g + i / 2 * 8) * 8 + 2 * t + i % 2] = c[i];
}

KDT_TEST(mma_is_a_product) {
  const Values in = small_numbers(16 * 16 + 8 * 16, 2);
  Values want(16 * 8, 1.0f);
  for (int m = 0; m < 16; ++m)
    for (int n = 0; n < 8; ++n)
      for (int k = 0; k < 16; ++k) want[m * 8 + n] += in[m * 16 + k] * in[256 + n * 16 + k];
  expect_always<mma_kernel>("mma_bf16", {.in = in.data()}, want, 0, 32);
}

void warp_kernel(const Params p) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const float x = p.in[threadIdx.x];
  float* out = p.out + threadIdx.x * 10;
  out[0] = __shfl_xor_sync(kAll, x, 5);
  out[1] = __shfl_down_sync(kAll, x, 3);
  out[2] = __shfl_up_sync(kAll, x, 7);
  out[3] = __shfl_sync(kAll, x, (lane * 11 + 40) % 64);  // its source modulo 32
  out[4] = static_cast<float>(__popc(__ballot_sync(kAll, x > 0)));
  out[5] = static_cast<float>(__any_sync(kAll, lane == 9));
  out[6] = static_cast<float>(__all_sync(kAll, lane != 9));
  out[7] = warp_sum(x);
  out[8] = warp_max(x);
  const auto wide = static_cast<int64_t>(lane) << 40;
  out[9] = static_cast<float>(__shfl_xor_sync(kAll, wide, 1) >> 40);
}

KDT_TEST(shuffles_and_votes) {
  const Values in = small_numbers(kThreads, 3);
  Values want(kThreads * 10);
  for (int t = 0; t < kThreads; ++t) {
    const float* warp = in.data() + t / 32 * 32;
    const int lane = t % 32;
    float positive = 0, sum = 0, most = warp[0];
    for (int l = 0; l < 32; ++l) {
      positive += warp[l] > 0;
      sum += warp[l];  // exact, so the order does not matter
      most = std::max(most, warp[l]);
    }
    const Values row = {warp[lane ^ 5],
                        warp[lane + 3 < 32 ? lane + 3 : lane],
                        warp[lane >= 7 ? lane - 7 : lane],
                        warp[(lane * 11 + 40) % 32],
                        positive,
                        1,
                        0,
                        sum,
                        most,
                        static_cast<float>(lane ^ 1)};
    std::copy(row.begin(), row.end(), want.begin() + t * 10);
  }
  expect_always<warp_kernel>("warp_kernel", {.in = in.data()}, want, 0);
}

// The last to come leaves its number.
void last_thread(const Params p) {
  __syncthreads();
  p.out[0] = static_cast<float>(threadIdx.x);
}

KDT_TEST(a_run_is_repeated_by_its_seed) {
  Values first;
  for (int i = 0; i < 3; ++i) {
    Values order;
    for (uint32_t seed = 0; seed < kSeeds; ++seed) {
      emulator::set_seed(seed);
      order.push_back(run<last_thread>({}, 1, 0)[0]);
    }
    if (i == 0) first = order;
    EXPECT(order == first);
  }
  EXPECT(std::count(first.begin(), first.end(), first[0]) < kSeeds);
}

}  // namespace
}  // namespace kdt::test

KDT_TEST_MAIN
