// FP8 codes and blocks.
#include <array>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "check.h"
#include "core/dtype.h"
#include "core/error.h"
#include "model/fp8.h"

namespace kdt::test {
namespace {

// Non-negative codes 0x00 to 0x7e in 512ths, counted up from the format's definition: each exponent
// has eight values, and the step doubles from the third on.
std::vector<double> counted_values() {
  std::vector<double> values;
  double value = 0, step = 1;
  for (int code = 0; code < 0x7f; ++code) {
    values.push_back(value / 512);
    value += step;
    if (code >= 15 && code % 8 == 7) step *= 2;
  }
  return values;
}

std::vector<uint16_t> widen(const std::vector<uint8_t>& codes, const std::vector<float>& scales,
                            int64_t rows, int64_t columns, int64_t begin, int64_t end) {
  // One byte off, as in a file.
  std::vector<uint8_t> unaligned(1 + scales.size() * 4);
  std::memcpy(unaligned.data() + 1, scales.data(), scales.size() * 4);
  std::vector<uint16_t> out((end - begin) * columns);
  widen_fp8({codes.data(), unaligned.data() + 1, rows, columns}, begin, end, out.data());
  return out;
}

KDT_TEST(all_codes) {
  const std::vector<double> values = counted_values();
  EXPECT_EQ(values[0x08], std::ldexp(1.0, -6));  // the smallest normal number
  EXPECT_EQ(values[0x38], 1.0);
  EXPECT_EQ(values[0x7e], 448.0);
  std::vector<uint8_t> codes;
  for (int code = 0; code < 256; ++code) {
    if ((code & 0x7f) != 0x7f) codes.push_back(static_cast<uint8_t>(code));
  }
  const auto count = static_cast<int64_t>(codes.size());
  const auto out = widen(codes, {1.0f, 1.0f}, 1, count, 0, 1);
  for (int64_t i = 0; i < count; ++i) {
    const double value = values[codes[i] & 0x7f];
    EXPECT_EQ(bf16_to_float(out[i]), static_cast<float>(codes[i] >= 128 ? -value : value));
    EXPECT_EQ(std::signbit(bf16_to_float(out[i])), codes[i] >= 128);  // -0 too
  }
}

KDT_TEST(blocks_of_ragged_matrices_in_slices) {
  const std::vector<double> values = counted_values();
  std::mt19937 random(11);
  std::uniform_real_distribution<float> factor(-3, 3);
  const std::vector<std::array<int64_t, 2>> shapes = {{1, 1},     {128, 128}, {129, 127},
                                                      {300, 260}, {576, 96},  {40, 513}};
  for (const auto& [rows, columns] : shapes) {
    std::vector<uint8_t> codes(rows * columns);
    for (uint8_t& code : codes) {
      do code = static_cast<uint8_t>(random());
      while ((code & 0x7f) == 0x7f);
    }
    const int64_t across = (columns + 127) / 128;
    std::vector<float> scales((rows + 127) / 128 * across);
    for (float& scale : scales) scale = std::exp2(factor(random)) * 1e-3f;
    std::vector<uint16_t> expected(rows * columns);
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < columns; ++c) {
        const uint8_t code = codes[r * columns + c];
        const auto value = static_cast<float>(values[code & 0x7f]) * (code >= 128 ? -1.0f : 1.0f);
        expected[r * columns + c] = float_to_bf16(value * scales[r / 128 * across + c / 128]);
      }
    }
    for (int64_t begin = 0; begin < rows; begin += 128) {
      for (int64_t end : {std::min(rows, begin + 50), std::min(rows, begin + 128), rows}) {
        const auto out = widen(codes, scales, rows, columns, begin, end);
        EXPECT(std::memcmp(out.data(), expected.data() + begin * columns, out.size() * 2) == 0);
      }
    }
  }
}

KDT_TEST(no_numbers_are_refused) {
  std::vector<uint8_t> codes(200 * 150, 0x38);
  std::vector<float> scales(4, 1.0f);
  const auto run = [&] { return widen(codes, scales, 200, 150, 0, 200); };
  run();
  for (const uint8_t code : {uint8_t{0x7f}, uint8_t{0xff}}) {
    codes[170 * 150 + 140] = code;
    EXPECT_THROWS("weight[170, 140] is NaN", run());
    codes[170 * 150 + 140] = 0;
  }
  for (const float scale : {NAN, INFINITY, -INFINITY, 1e37f}) {
    scales[2] = scale;
    EXPECT_THROWS("weight_scale_inv[1, 0] is ", run());
  }
}

}  // namespace
}  // namespace kdt::test

KDT_TEST_MAIN
