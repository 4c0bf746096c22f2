// Tables of the rotary embedding, against the reference's.
#include "backend/op_test.h"
#include "model/rope.h"

namespace kdt::test {
namespace {

KDT_TEST(tables_of_the_bundles) {
  RopeConfig plain, yarn;
  plain.rope_theta = yarn.rope_theta = 50000.0;
  yarn.yarn = true;
  yarn.factor = 4;
  yarn.mscale = 1;
  yarn.mscale_all_dim = 0.5;
  yarn.original_max_position_embeddings = 128;
  for (const auto& [name, config] :
       {std::pair{"rope_interleaved", plain}, {"rope_half_split", plain}, {"rope_yarn", yarn}}) {
    const Floats expected = values<float>(bundle(name).at("cos_sin"));
    EXPECT(max_error(rope_table(config, 32, 128), expected) < 1.5e-7);
  }
  EXPECT_EQ(yarn_softmax_factor(plain), 1.0);
  EXPECT_NEAR(yarn_softmax_factor(yarn), std::pow(0.05 * std::log(4.0) + 1, 2), 1e-15);
  yarn.mscale_all_dim = 0;
  EXPECT_EQ(yarn_softmax_factor(yarn), 1.0);
}

KDT_TEST(yarn_keeps_fast_turns_and_stretches_slow_ones) {
  // Kimi K2's numbers.
  RopeConfig plain, yarn;
  plain.rope_theta = yarn.rope_theta = 50000.0;
  yarn.yarn = true;
  yarn.factor = 32;
  yarn.mscale = yarn.mscale_all_dim = 1;
  yarn.beta_fast = yarn.beta_slow = 1;
  yarn.original_max_position_embeddings = 4096;
  constexpr int64_t kDim = 64, kPositions = 5000;
  const Floats a = rope_table(plain, kDim, kPositions), b = rope_table(yarn, kDim, kPositions);
  for (int64_t p : {0, 1, 77, 4999}) {
    for (int64_t i : {0, 5, 15}) EXPECT_EQ(a[p * kDim + i], b[p * kDim + i]);
    for (int64_t i : {25, 31}) {
      const double angle = static_cast<double>(p) * std::pow(50000.0, -2.0 * i / kDim);
      EXPECT_NEAR(a[p * kDim + i], std::cos(angle), 1e-7);
      EXPECT_NEAR(b[p * kDim + i], std::cos(angle / 32), 1e-7);
      EXPECT_NEAR(b[p * kDim + kDim / 2 + i], std::sin(angle / 32), 1e-7);
    }
  }
}

}  // namespace
}  // namespace kdt::test

KDT_TEST_MAIN
