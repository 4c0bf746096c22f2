// The rows of a pass, as they reach the back end.
#include "backend/op_test.h"
#include "model/row_batch.h"

namespace kdt::test {
namespace {

Ints fetched(const Tensor& tensor) { return download<int32_t>(backend(), tensor); }

Shape shape(const Tensor& tensor) {
  Shape sizes;
  for (int i = 0; i < tensor.ndim(); ++i) sizes.push_back(tensor.dim(i));
  return sizes;
}

// Where all lists are.
std::vector<void*> places(const RowBatch& batch) {
  return {batch.token_ids().raw(),       batch.positions().raw(),
          batch.chosen_rows().raw(),     batch.rows().row_begin.raw(),
          batch.rows().prefix_len.raw(), batch.rows().block_table.raw(),
          batch.rows().parents.raw()};
}

KDT_TEST(sequences_lie_one_behind_another) {
  RowBatch batch(backend(), 50, 4, 3);
  for (int round = 0; round < 2; ++round) {  // what a round adds, the next has forgotten
    batch.clear();
    batch.begin_sequence(7, {4, 2, 9});
    batch.add_row(100, 7, -1);
    batch.add_row(101, 8, 0);
    batch.add_row(102, 8, 0);
    batch.begin_sequence(0, {5});
    const Ints chain = {200, 201, 202, 203, 204, 205, 206, 207, 208,
                        209, 210, 211, 212, 213, 214, 215, 216};
    batch.add_chain(chain.data(), 17, 0);
    batch.begin_sequence(33, {});
    batch.add_row(300, 33, -1);
    batch.add_chain(chain.data(), 2, 34);
    for (const int64_t row : {22, 0, 5}) batch.choose_row(row);
    batch.upload();
    EXPECT_EQ(batch.num_rows(), 23);
    EXPECT_EQ(batch.num_sequences(), 3);
    EXPECT_EQ(batch.num_chosen(), 3);
    Ints ids = {100, 101, 102}, positions = {7, 8, 8}, parents = {-1, 0, 0};
    for (int32_t i = 0; i < 17; ++i) {
      ids.push_back(200 + i);
      positions.push_back(i);
      parents.push_back(i - 1);
    }
    append(ids, {300, 200, 201});
    append(positions, {33, 34, 35});
    append(parents, {-1, 0, 1});
    EXPECT(fetched(batch.token_ids()) == ids);
    EXPECT(fetched(batch.positions()) == positions);
    EXPECT(fetched(batch.rows().parents) == parents);
    EXPECT(fetched(batch.chosen_rows()) == Ints({22, 0, 5}));
    EXPECT(fetched(batch.rows().row_begin) == Ints({0, 3, 20, 23}));
    EXPECT(fetched(batch.rows().prefix_len) == Ints({7, 0, 33}));
    EXPECT(shape(batch.rows().block_table) == Shape({3, 3}));
    EXPECT(fetched(batch.rows().block_table) == Ints({4, 2, 9, 5, -1, -1, -1, -1, -1}));
  }
}

KDT_TEST(a_full_batch_has_room) {
  for (const int64_t rows : {16, 17, 33}) {
    for (const int64_t sequences : {1, 15, 16}) {
      RowBatch batch(backend(), rows, sequences, 5);
      Ints ids, positions, parents, chosen, row_begin = {0}, prefix_len, blocks;
      for (int32_t s = 0; s < sequences; ++s) {
        const int32_t begin = row_begin.back();
        const auto end = static_cast<int32_t>(s + 1 == sequences ? rows : begin + 1);
        batch.begin_sequence(s + 40, {s, s + 1, s + 2, s + 3, s + 4});
        append(blocks, {s, s + 1, s + 2, s + 3, s + 4});
        for (int32_t row = begin; row < end; ++row) {
          batch.add_row(1000 + row, 2000 + row, row - begin - 1);
          batch.choose_row(rows - 1 - row);
          ids.push_back(1000 + row);
          positions.push_back(2000 + row);
          parents.push_back(row - begin - 1);
          chosen.push_back(static_cast<int32_t>(rows) - 1 - row);
        }
        row_begin.push_back(end);
        prefix_len.push_back(s + 40);
      }
      batch.upload();
      EXPECT(fetched(batch.token_ids()) == ids);
      EXPECT(fetched(batch.positions()) == positions);
      EXPECT(fetched(batch.chosen_rows()) == chosen);
      EXPECT(fetched(batch.rows().parents) == parents);
      EXPECT(fetched(batch.rows().row_begin) == row_begin);
      EXPECT(fetched(batch.rows().prefix_len) == prefix_len);
      EXPECT(fetched(batch.rows().block_table) == blocks);
    }
  }
}

KDT_TEST(the_shapes_alone_decide_where_lists_are) {
  RowBatch batch(backend(), 64, 3, 4);
  const auto fill = [&](int32_t seed, const Ints& rows_of, int64_t num_chosen) {
    batch.clear();
    for (const int32_t rows : rows_of) {
      batch.begin_sequence(seed * 3, Ints(static_cast<size_t>(seed % 4), seed));
      for (int32_t row = 0; row < rows; ++row) batch.add_row(seed + row, seed * 5 + row, row - 1);
    }
    for (int64_t i = 0; i < num_chosen; ++i) batch.choose_row((seed + i) % 7);
    batch.upload();
    return places(batch);
  };
  const std::vector<void*> first = fill(1, {20, 3}, 2);
  EXPECT(fill(2, {60, 1, 2}, 50) != first);
  EXPECT(fill(6, {4, 19}, 2) == first);  // as many rows, sequences and chosen ones
  EXPECT(fetched(batch.rows().row_begin) == Ints({0, 4, 23}));
}

KDT_TEST(an_empty_batch_can_be_uploaded) {
  RowBatch batch(backend(), 8, 2, 2);
  batch.upload();
  EXPECT_EQ(batch.num_rows() + batch.num_sequences() + batch.num_chosen(), 0);
  EXPECT(shape(batch.token_ids()) == Shape({0}));
  EXPECT(shape(batch.rows().block_table) == Shape({0, 2}));
  EXPECT(fetched(batch.rows().row_begin) == Ints({0}));
}

KDT_TEST(what_does_not_fit_is_refused) {
  RowBatch batch(backend(), 3, 2, 4);
  EXPECT_THROWS("batch: 5 blocks, at most 4", batch.begin_sequence(0, {1, 2, 3, 4, 5}));
  EXPECT_EQ(batch.num_sequences(), 0);
  batch.begin_sequence(0, {1, 2, 3, 4});
  batch.begin_sequence(0, {1});
  EXPECT_THROWS("batch: more than 2 sequences", batch.begin_sequence(0, {1}));
  const Ints ids = {1, 2, 3, 4};
  EXPECT_THROWS("batch: more than 3 rows", batch.add_chain(ids.data(), 4, 0));
  EXPECT_THROWS("batch: more than 3 rows", batch.add_row(1, 3, 2));
  for (const int64_t row : {0, 1, 1}) batch.choose_row(row);
  EXPECT_THROWS("batch: more than 3 chosen rows", batch.choose_row(2));
  // What fitted is there.
  batch.upload();
  EXPECT(fetched(batch.token_ids()) == Ints({1, 2, 3}));
  EXPECT(fetched(batch.rows().row_begin) == Ints({0, 0, 3}));
  EXPECT(fetched(batch.rows().block_table) == Ints({1, 2, 3, 4, 1, -1, -1, -1}));
  EXPECT(fetched(batch.chosen_rows()) == Ints({0, 1, 1}));
}

}  // namespace
}  // namespace kdt::test

KDT_OP_TEST_MAIN
