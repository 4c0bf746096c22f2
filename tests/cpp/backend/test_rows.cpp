// Ops that work on each row alone, against plain loops in float64.
#include "op_test.h"

namespace kdt::test {
namespace {

std::vector<double> rms_norm(const Floats& x, int64_t columns, int64_t column, const Floats& weight,
                             double eps) {
  const auto n = static_cast<int64_t>(weight.size());
  std::vector<double> out;
  for (size_t begin = 0; begin < x.size(); begin += columns) {
    double squares = 0;
    for (int64_t i = 0; i < n; ++i)
      squares += static_cast<double>(x[begin + column + i]) * x[begin + column + i];
    for (int64_t i = 0; i < n; ++i) {
      out.push_back(x[begin + column + i] / std::sqrt(squares / n + eps) * weight[i]);
    }
  }
  return out;
}

KDT_TEST(rms_norm_of_any_width) {
  Backend& b = backend();
  for (int64_t n : {1, 3, 7, 8, 15, 16, 17, 31, 33, 64, 257, 1536}) {
    Random random(n);
    const Floats x = random.floats(5 * n, 3), weight = random.floats(n);
    const Buffer out = output(b, {5, n});
    b.rms_norm({.x = upload(b, x, {5, n}).tensor,
                .weight = upload(b, weight).tensor,
                .out = out.tensor,
                .eps = 1e-5f});
    EXPECT(max_error(download(b, out.tensor), rms_norm(x, n, 0, weight, 1e-5)) < 2e-6);
  }
}

KDT_TEST(rms_norm_of_some_columns) {
  Backend& b = backend();
  for (const auto& [columns, column, n] :
       {std::tuple{40, 3, 17}, {40, 0, 17}, {40, 23, 17}, {1088, 5, 1024}}) {
    Random random(column);
    const Floats x = random.floats(4 * columns), weight = random.floats(n);
    const Buffer out = output(b, {4, n}), memory = upload(b, x, {4, columns}),
                 norm = upload(b, weight);
    b.rms_norm({.x = memory.tensor,
                .weight = norm.tensor,
                .out = out.tensor,
                .eps = 1e-6f,
                .column = column});
    EXPECT(max_error(download(b, out.tensor), rms_norm(x, columns, column, weight, 1e-6)) < 2e-6);
    EXPECT_THROWS("rms_norm: weight has", b.rms_norm({.x = memory.tensor,
                                                      .weight = norm.tensor,
                                                      .out = out.tensor,
                                                      .eps = 1e-6f,
                                                      .column = columns - n + 1}));
    EXPECT_THROWS("rms_norm: weight has",
                  b.rms_norm({.x = memory.tensor,
                              .weight = norm.tensor,
                              .out = out.tensor,
                              .eps = 1e-6f,
                              .column = std::numeric_limits<int64_t>::max() - n + 1}));
  }
}

KDT_TEST(rms_norm_of_zeros_and_large_values) {
  Backend& b = backend();
  const Floats weight(24, 1.5f);
  Floats x(48, 0.0f);
  std::fill(x.begin() + 24, x.end(), -1e15f);
  const Buffer out = output(b, {2, 24});
  b.rms_norm({.x = upload(b, x, {2, 24}).tensor,
              .weight = upload(b, weight).tensor,
              .out = out.tensor,
              .eps = 1e-6f});
  Floats expected(48, 0.0f);
  std::fill(expected.begin() + 24, expected.end(), -1.5f);
  EXPECT(max_error(download(b, out.tensor), expected) < 1e-6);
}

KDT_TEST(add_rms_norm_is_a_sum_then_a_norm) {
  Backend& b = backend();
  for (int64_t n : {5, 64, 100}) {
    Random random(n);
    const Floats residual = random.floats(13 * n), delta = random.floats(13 * n),
                 weight = random.floats(n);
    Floats sum(residual);
    for (size_t i = 0; i < sum.size(); ++i) sum[i] += delta[i];
    const Buffer r = upload(b, residual, {13, n}), d = upload(b, delta, {13, n}),
                 w = upload(b, weight);
    const Buffer out = output(b, {13, n}), plain = output(b, {13, n});
    b.add_rms_norm(r.tensor, d.tensor, w.tensor, 1e-5f, out.tensor);
    EXPECT(same_bits(download(b, r.tensor), sum));
    EXPECT(same_bits(download(b, d.tensor), delta));
    EXPECT(max_error(download(b, out.tensor), rms_norm(sum, n, 0, weight, 1e-5)) < 2e-6);
    b.rms_norm({.x = r.tensor, .weight = w.tensor, .out = plain.tensor, .eps = 1e-5f});
    EXPECT(same_bits(download(b, out.tensor), download(b, plain.tensor)));
  }
  EXPECT_THROWS("add_rms_norm: delta",
                b.add_rms_norm(output(b, {2, 8}).tensor, output(b, {3, 8}).tensor,
                               output(b, {8}).tensor, 1e-5f, output(b, {2, 8}).tensor));
}

KDT_TEST(fill_zero_writes_its_rows_alone) {
  Backend& b = backend();
  Random random(9);
  Floats x = random.floats(7 * 33);
  const Buffer memory = upload(b, x, {7, 33});
  b.fill_zero(memory.tensor.rows(2, 3));
  std::fill(x.begin() + 66, x.begin() + 165, 0.0f);
  EXPECT(same_bits(download(b, memory.tensor), x));
}

KDT_TEST(silu_mul) {
  Backend& b = backend();
  for (int64_t n : {1, 17, 32, 63, 128}) {
    Random random(n);
    Floats gate_up = random.floats(6 * 2 * n, 12);
    gate_up[0] = -1000;  // silu is 0 to rounding, without overflow
    gate_up[2 * n] = 1000;
    std::vector<double> expected;
    for (int64_t r = 0; r < 6; ++r) {
      for (int64_t i = 0; i < n; ++i) {
        const double gate = gate_up[r * 2 * n + i];
        expected.push_back(gate / (1 + std::exp(-gate)) * gate_up[r * 2 * n + n + i]);
      }
    }
    const Buffer out = output(b, {6, n});
    b.silu_mul(upload(b, gate_up, {6, 2 * n}).tensor, out.tensor);
    const Floats result = download(b, out.tensor);
    for (size_t i = 0; i < result.size(); ++i) {
      EXPECT_NEAR(result[i], expected[i], 1e-6 + 1e-6 * std::fabs(expected[i]));
    }
  }
}

KDT_TEST(embed_f32_and_bf16) {
  Backend& b = backend();
  Random random(3);
  const Floats table = random.floats(11 * 24);
  std::vector<uint16_t> bits(table.size());
  Floats rounded(table.size());
  for (size_t i = 0; i < table.size(); ++i)
    rounded[i] = bf16_to_float(bits[i] = float_to_bf16(table[i]));
  const Ints ids = {0, 10, 4, 4, 9};
  const auto rows_of = [&](const Floats& from) {
    Floats rows;
    for (int32_t id : ids)
      rows.insert(rows.end(), from.begin() + id * 24, from.begin() + (id + 1) * 24);
    return rows;
  };
  const Buffer out = output(b, {5, 24}), ids_memory = upload(b, ids);
  const Buffer f32 = upload(b, table, {11, 24}), bf16 = upload(b, bits, {11, 24});
  const auto embed = [&](const Buffer& table) {
    b.embed({.table = table.tensor, .token_ids = ids_memory.tensor, .out = out.tensor});
  };
  embed(f32);
  EXPECT(same_bits(download(b, out.tensor), rows_of(table)));
  embed(bf16);
  EXPECT(same_bits(download(b, out.tensor), rows_of(rounded)));
}

KDT_TEST(parts_of_a_vocabulary_add_up_to_its_rows) {
  Backend& b = backend();
  constexpr int64_t kVocab = 12, kWidth = 300;
  const Floats table = Random(4).floats(kVocab * kWidth);
  std::vector<uint16_t> bits;
  for (float x : table) bits.push_back(float_to_bf16(x));
  const Ints ids = {0, 11, 3, 4, 2, 8, 7, 3};
  const auto rows = static_cast<int64_t>(ids.size());
  const Buffer id_memory = upload(b, ids);
  const auto embed = [&](const Tensor& part, int64_t first_id) {
    const Buffer out = output(b, {rows, kWidth});
    b.embed({.table = part,
             .token_ids = id_memory.tensor,
             .out = out.tensor,
             .first_id = first_id,
             .vocab_size = kVocab});
    return download(b, out.tensor);
  };
  const Buffer f32 = upload(b, table, {kVocab, kWidth}), bf16 = upload(b, bits, {kVocab, kWidth});
  for (const Tensor& whole : {f32.tensor, bf16.tensor}) {
    const Floats expected = embed(whole, 0);
    for (int64_t width : {12, 6, 4, 1}) {
      Floats sum(expected.size(), 0.0f);
      for (int64_t first = 0; first < kVocab; first += width) {
        const Floats part = embed(whole.rows(first, width), first);
        for (int64_t i = 0; i < rows * kWidth; ++i) {
          const int32_t id = ids[i / kWidth];
          const bool here = id >= first && id < first + width;
          EXPECT_EQ(part[i], here ? expected[i] : 0.0f);
          sum[i] += part[i];
        }
      }
      EXPECT(same_bits(sum, expected));
    }
  }
}

KDT_TEST(embed_refuses_ids_outside) {
  Backend& b = backend();
  const Buffer part = output(b, {4, 4}), row = output(b, {1, 4});
  const auto embed_part = [&](int32_t id, int64_t first_id, int64_t vocab_size) {
    const Buffer ids = upload(b, Ints{id});
    b.embed({.table = part.tensor,
             .token_ids = ids.tensor,
             .out = row.tensor,
             .first_id = first_id,
             .vocab_size = vocab_size});
    b.synchronize();
  };
  embed_part(9, 4, 10);
  EXPECT(download(b, row.tensor) == Floats(4, 0.0f));
  for (const int32_t id : {10, -1})
    EXPECT_THROWS(join("token id ", id, " at row 0 is out"), embed_part(id, 4, 10));
  EXPECT_THROWS("embed: first_id -1 of a vocabulary of 10", embed_part(0, -1, 10));
  EXPECT_THROWS("embed: first_id 4 of a vocabulary of 0", embed_part(0, 4, 0));
  if (device() != "cpu") return;  // only the host sees the values before the op starts
  const Buffer table = output(b, {11, 4}), out = output(b, {1, 4});
  const auto embed = [&](int32_t id) {
    const Buffer ids = upload(b, Ints{id});
    b.embed({.table = table.tensor, .token_ids = ids.tensor, .out = out.tensor});
  };
  EXPECT_THROWS("embed: token id 11 at row 0 is outside the vocabulary of 11", embed(11));
  EXPECT_THROWS("embed: token id -1", embed(-1));
}

KDT_TEST(gather_rows) {
  Backend& b = backend();
  Random random(5);
  const Floats from = random.floats(9 * 7);
  const Ints rows = {8, 0, 3, 3};
  Floats expected;
  for (int32_t row : rows)
    expected.insert(expected.end(), from.begin() + row * 7, from.begin() + (row + 1) * 7);
  const Buffer memory = upload(b, from, {9, 7}), to = output(b, {4, 7});
  b.gather_rows(memory.tensor, upload(b, rows).tensor, to.tensor);
  EXPECT(same_bits(download(b, to.tensor), expected));
  if (device() == "cpu") {
    EXPECT_THROWS("gather_rows: row 9 of 9",
                  b.gather_rows(memory.tensor, upload(b, Ints{9}).tensor, to.tensor.rows(0, 1)));
  }
  EXPECT_THROWS("gather_rows: to",
                b.gather_rows(memory.tensor, upload(b, Ints{1}).tensor, to.tensor));
}

KDT_TEST(copy_columns) {
  Backend& b = backend();
  Random random(6);
  const Floats from = random.floats(3 * 10), to = random.floats(3 * 8);
  Floats expected(to);
  for (int r = 0; r < 3; ++r) {
    for (int i = 0; i < 5; ++i) expected[r * 8 + 2 + i] = from[r * 10 + 4 + i];
  }
  const Buffer source = upload(b, from, {3, 10}), target = upload(b, to, {3, 8});
  b.copy_columns(source.tensor, 4, target.tensor, 2, 5);
  EXPECT(same_bits(download(b, target.tensor), expected));
  EXPECT_THROWS("copy_columns: 5 columns from 6",
                b.copy_columns(source.tensor, 6, target.tensor, 2, 5));
  EXPECT_THROWS("copy_columns", b.copy_columns(source.tensor, 0, target.tensor, 4, 5));
}

KDT_TEST(rows_do_not_depend_on_their_number) {
  // 70 rows are shared among threads, one is not.
  Backend& b = backend();
  constexpr int64_t kRows = 70, kWidth = 2050;
  Random random(7);
  const Floats x = random.floats(kRows * 2 * kWidth), weight = random.floats(2 * kWidth);
  const Buffer memory = upload(b, x, {kRows, 2 * kWidth}), norm = upload(b, weight);
  const Buffer normed = output(b, {kRows, 2 * kWidth}), activated = output(b, {kRows, kWidth});
  b.rms_norm({.x = memory.tensor, .weight = norm.tensor, .out = normed.tensor, .eps = 1e-5f});
  b.silu_mul(memory.tensor, activated.tensor);
  const Floats all_normed = download(b, normed.tensor),
               all_activated = download(b, activated.tensor);
  for (int64_t r = 0; r < kRows; ++r) {
    const Buffer one = output(b, {1, 2 * kWidth}), one_activated = output(b, {1, kWidth});
    b.rms_norm(
        {.x = memory.tensor.rows(r, 1), .weight = norm.tensor, .out = one.tensor, .eps = 1e-5f});
    b.silu_mul(memory.tensor.rows(r, 1), one_activated.tensor);
    EXPECT(same_bits(download(b, one.tensor), slice(all_normed, r * 2 * kWidth, 2 * kWidth)));
    EXPECT(same_bits(download(b, one_activated.tensor), slice(all_activated, r * kWidth, kWidth)));
  }
}

KDT_TEST(tensors_of_the_wrong_type_are_refused) {
  Backend& b = backend();
  const Buffer ints = int_output(b, {2, 8}), floats = output(b, {2, 8});
  EXPECT_THROWS("silu_mul: gate_up is i32[2, 8]",
                b.silu_mul(ints.tensor, output(b, {2, 4}).tensor));
  EXPECT_THROWS("embed: table is i32", b.embed({.table = ints.tensor,
                                                .token_ids = upload(b, Ints{0}).tensor,
                                                .out = floats.tensor.rows(0, 1)}));
  EXPECT_THROWS("device is 'tpu'; want 'auto', 'cpu', 'cuda', 'cuda:N' or 'check:A,B'",
                make_backend("tpu", 1));
  EXPECT_THROWS("num_threads is -1", make_backend("cpu", -1));
}

}  // namespace
}  // namespace kdt::test

KDT_OP_TEST_MAIN
