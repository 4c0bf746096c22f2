// The inner loops of the selected instruction set, against float64 and against the portable set.
//
// KDT_ISA chooses the set; the program is skipped where the processor lacks it.
#include "backend/op_test.h"
#include "cpu/kernels.h"

namespace kdt::test {
namespace {

using cpu::Kernels;
using cpu::kPanel;

const Kernels& selected() {
  static const Kernels& kernels = cpu::select_kernels();
  return kernels;
}

// Panels as kernels.h describes them.

std::vector<uint32_t> bf16_panels(const uint16_t* bits, int64_t rows, int64_t columns) {
  std::vector<uint32_t> words((rows + kPanel - 1) / kPanel * columns * 16, 0);
  for (int64_t n = 0; n < rows; ++n) {
    for (int64_t k = 0; k < columns; ++k) {
      words[(n / kPanel * columns + k) * 16 + n % 16] |=
          static_cast<uint32_t>(bits[n * columns + k]) << (n % kPanel < 16 ? 0 : 16);
    }
  }
  return words;
}

template <typename T>
std::vector<T> panels(const T* values, int64_t rows, int64_t columns) {
  std::vector<T> result((rows + kPanel - 1) / kPanel * columns * kPanel, T{0});
  for (int64_t n = 0; n < rows; ++n) {
    for (int64_t k = 0; k < columns; ++k) {
      result[(n / kPanel * columns + k) * kPanel + n % kPanel] = values[n * columns + k];
    }
  }
  return result;
}

// x [rows, in + 3] with stride in + 3; the result with stride out + 5, whose gaps must stay as they
// were.
Floats gemm(const Kernels& kernels, const Matrix& m, const Floats& x, int64_t rows) {
  const int64_t ldx = m.in + 3, ldo = m.out + 5;
  Floats out(rows * ldo, -777.0f);
  const int count = static_cast<int>(rows);
  if (m.dtype == DType::kFloat32) {
    const auto w = panels(reinterpret_cast<const float*>(m.data.data()), m.out, m.in);
    kernels.gemm_f32(x.data(), ldx, count, w.data(), m.in * kPanel, kPanel, m.in, out.data(), ldo,
                     m.out, false);
  } else if (m.dtype == DType::kBFloat16) {
    const auto w = bf16_panels(reinterpret_cast<const uint16_t*>(m.data.data()), m.out, m.in);
    kernels.gemm_bf16(x.data(), ldx, count, w.data(), m.in, out.data(), ldo, m.out);
  } else {
    const auto w = panels(reinterpret_cast<const uint32_t*>(m.data.data()), m.out, m.in / 8);
    const auto scales =
        bf16_panels(reinterpret_cast<const uint16_t*>(m.scale.data()), m.out, m.in / 32);
    kernels.gemm_int4(x.data(), ldx, count, w.data(), scales.data(), m.in, out.data(), ldo, m.out);
  }
  Floats result;
  for (int64_t r = 0; r < rows; ++r) {
    append(result, slice(out, r * ldo, m.out));
    EXPECT(slice(out, r * ldo + m.out, 5) == Floats(5, -777.0f));
  }
  return result;
}

KDT_TEST(the_set_is_the_one_asked_for) {
  const char* asked = std::getenv("KDT_ISA");
  if (asked != nullptr && *asked != '\0') EXPECT_EQ(std::string(selected().isa), asked);
  std::printf("%s\n", selected().isa);
  const std::string saved = asked == nullptr ? "" : asked;
  setenv("KDT_ISA", "sse9", 1);
  EXPECT_THROWS("KDT_ISA is 'sse9'", cpu::select_kernels());
  saved.empty() ? unsetenv("KDT_ISA") : setenv("KDT_ISA", saved.c_str(), 1);
}

KDT_TEST(products_against_float64_and_portable) {
  for (DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kInt32}) {
    for (int64_t out : {1, 15, 16, 17, 31, 32, 33, 63, 80, 130, 200}) {
      for (int64_t in : {32, 64, 160}) {
        const Matrix m = random_matrix(dtype, out, in, out + in);
        for (int64_t rows : {1, 2, 3, 4, 5, 6, 7, 12, 13, 14, 15, 16, 23, 37}) {
          Floats padded, x;
          Random random(rows);
          for (int64_t r = 0; r < rows; ++r) {
            const Floats row = random.floats(in);
            append(x, row);
            append(padded, row);
            append(padded, Floats(3, kNan));
          }
          const Floats result = gemm(selected(), m, padded, rows);
          const double error = max_error(result, product(x, m));
          const double beside = max_error(result, gemm(cpu::portable_kernels(), m, padded, rows));
          if (!(error < 3e-5 && beside < 4e-5)) {
            report(__FILE__, __LINE__,
                   join(dtype_name(dtype), " [", out, ", ", in, "], ", rows, " rows: ", error,
                        ", beside portable ", beside));
          }
        }
      }
    }
  }
}

KDT_TEST(a_product_goes_on_from_what_is_there) {
  // A chain cut in two has the bits of the whole chain.
  const Matrix m = random_matrix(DType::kFloat32, 45, 70, 1);
  const auto w = panels(reinterpret_cast<const float*>(m.data.data()), 45, 70);
  for (int rows : {1, 6, 11, 20}) {
    const Floats x = Random(rows).floats(rows * 70);
    Floats whole(rows * 45), parts(rows * 45, 0.0f);
    selected().gemm_f32(x.data(), 70, rows, w.data(), 70 * kPanel, kPanel, 70, whole.data(), 45, 45,
                        false);
    selected().gemm_f32(x.data(), 70, rows, w.data(), 70 * kPanel, kPanel, 23, parts.data(), 45, 45,
                        true);
    selected().gemm_f32(x.data() + 23, 70, rows, w.data() + 23 * kPanel, 70 * kPanel, kPanel, 47,
                        parts.data(), 45, 45, true);
    EXPECT(same_bits(whole, parts));
  }
}

KDT_TEST(softmax_and_exp) {
  for (int64_t n : {1, 2, 7, 8, 15, 16, 17, 33, 1000}) {
    Floats scores = Random(n).floats(n, 40);
    scores[n / 2] = 41;
    Floats memory = scores;
    memory.insert(memory.end(), 4, kNan);  // behind the end
    const float sum = selected().softmax(memory.data(), n);
    double expected_sum = 0;
    for (int64_t i = 0; i < n; ++i) {
      const double expected = std::exp(static_cast<double>(scores[i]) - 41);
      expected_sum += expected;
      // Two units in the last place, and what rounding the difference to f32 costs.
      EXPECT_NEAR(memory[i], expected, expected * (2.5e-7 + 41 * 0x1p-23));
    }
    EXPECT_NEAR(sum, expected_sum, expected_sum * 2e-6);
    EXPECT(std::isnan(memory[n]));
  }
}

KDT_TEST(exp_to_two_units) {
  // Beside a greatest score of zero the others are exact arguments.
  double worst = 0;
  for (int64_t begin = 0; begin < 87 * 64; begin += 100) {
    Floats scores(101, 0.0f);
    for (int64_t i = 1; i <= 100; ++i) scores[i] = -static_cast<float>(begin + i) / 64.5f;
    Floats result = scores;
    selected().softmax(result.data(), 101);
    EXPECT_EQ(result[0], 1.0f);
    for (int64_t i = 1; i <= 100; ++i) {
      if (scores[i] < -87) break;
      const double expected = std::exp(static_cast<double>(scores[i]));
      worst = std::max(worst, std::fabs(result[i] - expected) / expected);
    }
  }
  EXPECT(worst < 2 * 0x1p-23);
  Floats far = {0, -88, -1000, -kInfinity};
  selected().softmax(far.data(), 4);
  for (int i = 1; i < 4; ++i) EXPECT(far[i] >= 0 && far[i] < 2e-38f);
}

KDT_TEST(log_sum_exp) {
  for (int64_t n : {1, 3, 31, 32, 33, 200, 5000}) {
    for (float scale : {1.0f, 0.5f, 2.0f}) {
      Floats x = Random(n).floats(n, 20);
      if (n > 3) x[1] = kNan, x[2] = -kInfinity;
      double sum = 0;
      Floats maxima((n + 31) / 32, -kInfinity), result(maxima.size(), kNan);
      for (int64_t i = 0; i < n; ++i) {
        if (std::isnan(x[i])) continue;
        maxima[i / 32] = std::max(maxima[i / 32], x[i]);
        sum += std::exp(static_cast<double>(x[i]) * scale);
      }
      EXPECT_NEAR(selected().log_sum_exp(x.data(), n, scale, result.data()), std::log(sum), 4e-6);
      EXPECT(result == maxima);
    }
  }
  float maximum = 0;
  for (float value : {kNan, -kInfinity}) {
    const Floats none(20, value);
    EXPECT_EQ(selected().log_sum_exp(none.data(), 20, 1, &maximum), -kInfinity);
    EXPECT_EQ(maximum, -kInfinity);
  }
}

KDT_TEST(argmax) {
  for (int64_t n : {1, 5, 16, 17, 100}) {
    for (int64_t at = 0; at < n; ++at) {
      Floats x(n, 1.0f);
      x[at] = x[n - 1] = 3;
      for (int64_t i = 0; i < at; ++i) x[i] = i % 2 == 0 ? kNan : 2;
      EXPECT_EQ(selected().argmax(x.data(), n), at);
    }
    EXPECT_EQ(selected().argmax(Floats(n, kNan).data(), n), -1);
    EXPECT_EQ(selected().argmax(Floats(n, -kInfinity).data(), n), 0);
  }
}

KDT_TEST(rows_against_portable) {
  const Kernels& portable = cpu::portable_kernels();
  for (int64_t n : {1, 4, 9, 31, 64, 1000}) {
    Random random(n);
    const Floats x = random.floats(n, 9), y = random.floats(n);
    const auto both = [&](const auto& run) {
      Floats a(n + 1, 0.25f), b(n + 1, 0.25f);
      run(selected(), a.data());
      run(portable, b.data());
      EXPECT_EQ(a[n], 0.25f);
      EXPECT(max_error(a, b) < 4e-6);
    };
    both([&](const Kernels& k, float* out) { k.rms_norm(x.data(), y.data(), n, 1e-6f, out); });
    both([&](const Kernels& k, float* out) { k.silu_mul(x.data(), y.data(), n, out); });
    both([&](const Kernels& k, float* out) { k.add_scaled(0.75f, x.data(), n, out); });
  }
}

KDT_TEST(measuring_kernels) {
  int64_t multiply_adds = 0;
  EXPECT(std::isfinite(selected().fma_rounds(100, &multiply_adds)));
  EXPECT(multiply_adds >= 100);
  EXPECT_NEAR(selected().read_all(Floats(1024, 0.5f).data(), 1024), 512, 0);
}

}  // namespace
}  // namespace kdt::test

KDT_OP_TEST_MAIN
