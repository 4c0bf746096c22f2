// Products with f32, bf16 and int4 weights.
#include "op_test.h"

namespace kdt::test {
namespace {

constexpr DType kDTypes[] = {DType::kFloat32, DType::kBFloat16, DType::kInt32};

Floats run_linear(Backend& b, const Floats& x, int64_t rows, const LinearWeight& weight) {
  const Buffer out = output(b, {rows, weight.out_features});
  b.linear(upload(b, x, {rows, weight.in_features}).tensor, weight, out.tensor);
  return download(b, out.tensor);
}

// Activations that lose nothing where the back end rounds them to bf16, so that what is compared is
// the product alone.
Floats inputs(DType dtype, Floats x) {
  return on_cpu() || dtype == DType::kFloat32 ? x : to_bf16_values(std::move(x));
}

KDT_TEST(int4_bundle) {
  Backend& b = backend();
  const KdtrFile file = bundle("int4_linear");
  const KdtrArray& packed = file.at("packed");
  const int64_t out = packed.shape[0], in = packed.shape[1] * 8;
  const auto weight =
      b.prepare_linear({{packed.data, file.at("scale").data, DType::kInt32, out, in}});
  EXPECT_EQ(weight->out_features, out);
  EXPECT_EQ(weight->in_features, in);
  const Floats x = values<float>(file.at("x"));
  const Floats result = run_linear(b, x, file.at("x").shape[0], *weight);
  const std::vector<double> expected = values<double>(file.at("out"));
  if (on_cpu()) EXPECT(max_error(result, expected) < 1e-6);
  const RelativeError error = relative_error(result, expected);
  EXPECT(error.worst < 1e-2);
  EXPECT(error.norm < 2e-3);
}

KDT_TEST(any_shape_against_a_plain_loop) {
  Backend& b = backend();
  for (DType dtype : kDTypes) {
    for (int64_t out : {1, 31, 33, 80}) {
      for (int64_t in : {32, 96, 160}) {
        const Matrix matrix = random_matrix(dtype, out, in, out * 1000 + in);
        const auto weight = b.prepare_linear({matrix.host()});
        for (int64_t rows : {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 65}) {
          const Floats x = inputs(dtype, Random(rows).floats(rows * in));
          const double error = max_error(run_linear(b, x, rows, *weight), product(x, matrix));
          if (!(error < 3e-5)) {
            report(__FILE__, __LINE__,
                   join(dtype_name(dtype), " [", out, ", ", in, "], ", rows, " rows: ", error));
          }
        }
      }
    }
  }
}

KDT_TEST(odd_inputs_of_float_weights) {
  Backend& b = backend();
  for (DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    for (int64_t in : {1, 7, 33, 129}) {
      const Matrix matrix = random_matrix(dtype, 45, in, in);
      const Floats x = inputs(dtype, Random(in).floats(9 * in));
      EXPECT(max_error(run_linear(b, x, 9, *b.prepare_linear({matrix.host()})),
                       product(x, matrix)) < 3e-5);
    }
  }
}

KDT_TEST(stacked_matrices_lie_side_by_side) {
  Backend& b = backend();
  for (DType dtype : kDTypes) {
    for (int64_t rows : {1, 5, 40}) {
      const Matrix parts[] = {random_matrix(dtype, 33, 96, 1), random_matrix(dtype, 1, 96, 2),
                              random_matrix(dtype, 64, 96, 3)};
      const Floats x = Random(4).floats(rows * 96);
      const auto stacked = b.prepare_linear({parts[0].host(), parts[1].host(), parts[2].host()});
      EXPECT_EQ(stacked->out_features, 98);
      const Floats result = run_linear(b, x, rows, *stacked);
      int64_t column = 0;
      for (const Matrix& part : parts) {
        const Floats alone = run_linear(b, x, rows, *b.prepare_linear({part.host()}));
        for (int64_t r = 0; r < rows; ++r) {
          EXPECT(same_bits(slice(result, r * 98 + column, part.out),
                           slice(alone, r * part.out, part.out)));
        }
        column += part.out;
      }
    }
  }
}

KDT_TEST(head_linear_applies_a_matrix_a_head) {
  Backend& b = backend();
  constexpr int64_t kHeads = 5, kIn = 64, kOut = 40;
  for (DType dtype : kDTypes) {
    std::vector<Matrix> matrices;
    std::vector<HostMatrix> hosts;
    for (int64_t h = 0; h < kHeads; ++h) matrices.push_back(random_matrix(dtype, kOut, kIn, h));
    for (const Matrix& matrix : matrices) hosts.push_back(matrix.host());
    const auto weight = b.prepare_linear(hosts);
    for (int64_t rows : {1, 7, 33}) {
      const Floats x = inputs(dtype, Random(rows).floats(rows * kHeads * kIn));
      const Buffer out = output(b, {rows, kHeads, kOut});
      b.head_linear(upload(b, x, {rows, kHeads, kIn}).tensor, *weight, out.tensor);
      const Floats result = download(b, out.tensor);
      for (int64_t i = 0; i < rows * kHeads; ++i) {
        const auto expected = product(slice(x, i * kIn, kIn), matrices[i % kHeads]);
        EXPECT(max_error(slice(result, i * kOut, kOut), expected) < 1e-5);
      }
    }
  }
  const Matrix one = random_matrix(DType::kFloat32, 40, 64, 1);
  EXPECT_THROWS("head_linear: 1 matrices for 2 heads",
                b.head_linear(output(b, {1, 2, 64}).tensor, *b.prepare_linear({one.host()}),
                              output(b, {1, 2, 20}).tensor));
}

// The bits of a row: the same for every number of rows, of threads, and for both of the fused
// instruction sets.
KDT_TEST(row_independence) {
  if (!on_cpu()) return;  // below
  constexpr int64_t kMaxRows = 70, kIn = 96;
  for (DType dtype : kDTypes) {
    const Matrix first = random_matrix(dtype, 47, kIn, 11),
                 second = random_matrix(dtype, 33, kIn, 12);
    const int64_t out = first.out + second.out;
    const Floats x = Random(13).floats(kMaxRows * kIn);
    std::vector<std::pair<std::string, Floats>> of_isa;
    for (const char* isa : {"portable", "avx2", "avx512"}) {
      Floats expected;
      for (int threads : {1, 2, 3}) {
        const std::unique_ptr<Backend> b = backend_with(isa, threads);
        if (b == nullptr) break;
        const auto weight = b->prepare_linear({first.host(), second.host()});
        if (expected.empty()) {
          for (int64_t r = 0; r < kMaxRows; ++r) {
            const Floats row = run_linear(*b, slice(x, r * kIn, kIn), 1, *weight);
            expected.insert(expected.end(), row.begin(), row.end());
          }
          of_isa.emplace_back(isa, expected);
        }
        for (int64_t rows = 1; rows <= kMaxRows; ++rows) {
          const Floats result = run_linear(*b, slice(x, 0, rows * kIn), rows, *weight);
          if (!same_bits(result, slice(expected, 0, rows * out))) {
            report(
                __FILE__, __LINE__,
                join(dtype_name(dtype), ", ", isa, ": ", rows, " rows on ", threads, " threads"));
          }
        }
      }
    }
    EXPECT(!of_isa.empty());
    for (const auto& [isa, result] : of_isa) {
      if (isa != of_isa.back().first && isa == "avx2")
        EXPECT(same_bits(result, of_isa.back().second));
    }
  }
}

KDT_TEST(long_products_are_shared_without_a_change) {
  // Wide enough that every thread gets several tasks.
  if (!on_cpu()) return;
  for (DType dtype : kDTypes) {
    const Matrix matrix = random_matrix(dtype, 700, 512, 21);
    for (int64_t rows : {1, 2, 3, 7, 8, 30}) {
      const Floats x = Random(22).floats(rows * 512);
      Floats expected;
      for (int threads : {1, 2, 3, 4}) {
        const auto b = make_backend("cpu", threads);
        const Floats result = run_linear(*b, x, rows, *b->prepare_linear({matrix.host()}));
        if (threads == 1) {
          expected = result;
          EXPECT(max_error(result, product(x, matrix)) < 1e-4);
        }
        EXPECT(same_bits(result, expected));
      }
    }
  }
}

// Row r of a call of many rows has the bits it has alone, whatever the shape makes of the weights
// and at every number of rows where a back end might change its way. And it is right.
KDT_TEST(a_row_does_not_depend_on_the_others) {
  Backend& b = backend();
  for (DType dtype : kDTypes) {
    for (int64_t in : {64, 288, 544, 1056}) {
      const Matrix first = random_matrix(dtype, 47, in, in),
                   second = random_matrix(dtype, 33, in, 2);
      const auto weight = b.prepare_linear({first.host(), second.host()});
      constexpr int64_t kMaxRows = 73, kOut = 80;
      const Floats x = inputs(dtype, Random(in + 1).floats(kMaxRows * in));
      std::vector<std::pair<int64_t, Floats>> alone;
      for (int64_t r : {0, 1, 7, 8, 31, 32, 64, 72}) {
        alone.emplace_back(r, run_linear(b, slice(x, r * in, in), 1, *weight));
        std::vector<double> expected = product(slice(x, r * in, in), first);
        append(expected, product(slice(x, r * in, in), second));
        EXPECT(relative_error(alone.back().second, expected).worst < 1e-5);
      }
      for (int64_t rows : {2, 8, 9, 31, 32, 33, 64, 65, 72, 73}) {
        const Floats result = run_linear(b, slice(x, 0, rows * in), rows, *weight);
        for (const auto& [r, row] : alone) {
          if (r < rows && !same_bits(slice(result, r * kOut, kOut), row))
            report(__FILE__, __LINE__,
                   join(dtype_name(dtype), ", in ", in, ": row ", r, " of ", rows));
        }
      }
    }
  }
}

KDT_TEST(columns_around_the_sizes_of_tiles) {
  Backend& b = backend();
  for (DType dtype : kDTypes) {
    for (int64_t out : {15, 16, 17, 127, 128, 129}) {
      const Matrix matrix = random_matrix(dtype, out, 64, out);
      const auto weight = b.prepare_linear({matrix.host()});
      for (int64_t rows : {1, 9, 33}) {
        const Floats x = inputs(dtype, Random(rows).floats(rows * 64));
        EXPECT(relative_error(run_linear(b, x, rows, *weight), product(x, matrix)).worst < 1e-5);
      }
    }
  }
}

// Scales from 1e-6 to 1e3 in one row, and activations of 1e4: nothing overflows or is lost on the
// way.
KDT_TEST(scales_and_activations_of_all_sizes) {
  Backend& b = backend();
  for (const double magnitude : {1e-6, 1.0, 1e3}) {
    Matrix matrix = random_matrix(DType::kInt32, 40, 256, 5);
    for (int64_t i = 0; i < 40 * 8; ++i) {
      const uint16_t bits = float_to_bf16(static_cast<float>(magnitude * (i % 8 + 1)));
      std::memcpy(matrix.scale.data() + 2 * i, &bits, 2);
      for (int64_t k = 0; k < 32; ++k) {
        uint32_t word;
        std::memcpy(&word, matrix.data.data() + (i * 32 + k) / 8 * 4, 4);
        matrix.values[i * 32 + k] = (static_cast<int>(word >> 4 * (k % 8) & 15) - 8) *
                                    static_cast<double>(bf16_to_float(bits));
      }
    }
    const auto weight = b.prepare_linear({matrix.host()});
    for (const float size : {1e-4f, 1.0f, 1e4f}) {
      const Floats x = inputs(DType::kInt32, Random(6).floats(9 * 256, size));
      EXPECT(relative_error(run_linear(b, x, 9, *weight), product(x, matrix)).worst < 1e-5);
    }
  }
}

// Rows share instructions; a row of NaN or of infinities must stay alone.
KDT_TEST(what_is_no_number_stays_in_its_row) {
  Backend& b = backend();
  for (DType dtype : kDTypes) {
    const Matrix matrix = random_matrix(dtype, 33, 96, 7);
    const auto weight = b.prepare_linear({matrix.host()});
    for (int64_t rows : {5, 20, 40}) {
      Floats x = Random(8).floats(rows * 96);
      const Floats clean = run_linear(b, x, rows, *weight);
      x[3 * 96 + 17] = kNan;
      x[4 * 96 + 50] = kInfinity;
      const Floats result = run_linear(b, x, rows, *weight);
      for (int64_t r = 0; r < rows; ++r) {
        const Floats row = slice(result, r * 33, 33);
        if (r == 3 || r == 4) {
          EXPECT(std::none_of(row.begin(), row.end(), [](float v) { return std::isfinite(v); }));
        } else {
          EXPECT(same_bits(row, slice(clean, r * 33, 33)));
        }
      }
    }
  }
}

// The sizes of K2.6's projections: many units for every block, 64-bit offsets of weights.
KDT_TEST(large_products_repeat_to_the_bit) {
  if (!large_cases()) return;
  Backend& b = backend();
  for (const auto& [dtype, out, in] : {std::tuple{DType::kBFloat16, 2112, 7168},
                                       {DType::kBFloat16, 20480, 7168},
                                       {DType::kBFloat16, 7168, 1024},
                                       {DType::kBFloat16, 384, 7168},
                                       {DType::kInt32, 4096, 7168}}) {
    const Matrix matrix = random_matrix(dtype, out, in, 1);
    const auto weight = b.prepare_linear({matrix.host()});
    constexpr int64_t kRows = 200;
    const Floats x = inputs(dtype, Random(2).floats(kRows * in));
    const Floats all = run_linear(b, x, kRows, *weight);
    EXPECT(relative_error(slice(all, 0, 2 * out), product(slice(x, 0, 2 * in), matrix)).worst <
           1e-5);
    for (int64_t rows : {1, 8, 16, 65}) {
      const Floats first = run_linear(b, slice(x, 0, rows * in), rows, *weight);
      EXPECT(same_bits(first, slice(all, 0, rows * out)));
      for (int i = 0; i < 25; ++i)
        EXPECT(same_bits(run_linear(b, slice(x, 0, rows * in), rows, *weight), first));
    }
  }
}

KDT_TEST(wrong_shapes_are_refused) {
  Backend& b = backend();
  const Matrix matrix = random_matrix(DType::kFloat32, 8, 32, 1),
               other = random_matrix(DType::kFloat32, 8, 64, 1);
  const auto weight = b.prepare_linear({matrix.host()});
  EXPECT_THROWS("linear: x f32[2, 31], weight [8, 32]",
                b.linear(output(b, {2, 31}).tensor, *weight, output(b, {2, 8}).tensor));
  EXPECT_THROWS("linear:", b.linear(output(b, {2, 32}).tensor, *weight, output(b, {3, 8}).tensor));
  EXPECT_THROWS("make_linear: no matrix", b.prepare_linear({}));
  EXPECT_THROWS("in_features 64 beside 32", b.prepare_linear({matrix.host(), other.host()}));
  HostMatrix int4 = matrix.host();
  int4.dtype = DType::kInt32;
  EXPECT_THROWS("int4 weight: no scale", b.prepare_linear({int4}));
  int4.in_features = 48;
  EXPECT_THROWS("in_features 48 is not a multiple of 32", b.prepare_linear({int4}));
  HostMatrix f16 = matrix.host();
  f16.dtype = DType::kFloat16;
  EXPECT_THROWS("weight: dtype f16", b.prepare_linear({f16}));
}

}  // namespace
}  // namespace kdt::test

KDT_OP_TEST_MAIN
