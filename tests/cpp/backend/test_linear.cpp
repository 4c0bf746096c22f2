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
  EXPECT(max_error(run_linear(b, x, file.at("x").shape[0], *weight),
                   values<double>(file.at("out"))) < 1e-6);
}

KDT_TEST(any_shape_against_a_plain_loop) {
  Backend& b = backend();
  for (DType dtype : kDTypes) {
    for (int64_t out : {1, 31, 33, 80}) {
      for (int64_t in : {32, 96, 160}) {
        const Matrix matrix = random_matrix(dtype, out, in, out * 1000 + in);
        const auto weight = b.prepare_linear({matrix.host()});
        for (int64_t rows : {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 65}) {
          const Floats x = Random(rows).floats(rows * in);
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
      const Floats x = Random(in).floats(9 * in);
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
      const Floats x = Random(rows).floats(rows * kHeads * kIn);
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
  constexpr int64_t kMaxRows = 70, kIn = 96;
  for (DType dtype : kDTypes) {
    const Matrix first = random_matrix(dtype, 47, kIn, 11),
                 second = random_matrix(dtype, 33, kIn, 12);
    const int64_t out = first.out + second.out;
    const Floats x = Random(13).floats(kMaxRows * kIn);
    std::vector<std::pair<std::string, Floats>> of_isa;
    std::vector<const char*> sets = {"portable", "avx2", "avx512"};
    if (device() != "cpu") sets = {""};
    for (const char* isa : sets) {
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
  if (device() != "cpu") return;
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

KDT_TEST(wrong_shapes_are_refused) {
  Backend& b = backend();
  const Matrix matrix = random_matrix(DType::kFloat32, 8, 32, 1),
               other = random_matrix(DType::kFloat32, 8, 64, 1);
  const auto weight = b.prepare_linear({matrix.host()});
  EXPECT_THROWS("linear: x f32[2, 31], weight [8, 32]",
                b.linear(output(b, {2, 31}).tensor, *weight, output(b, {2, 8}).tensor));
  EXPECT_THROWS("linear:", b.linear(output(b, {2, 32}).tensor, *weight, output(b, {3, 8}).tensor));
  EXPECT_THROWS("prepare_linear: no matrix", b.prepare_linear({}));
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
