// Attention over latent rows at the sizes that have kernels of their own on a GPU: rank 512 or 128
// with 64 rotated dimensions. Small sizes without a GPU, which is emulated; all with
// KDT_LARGE_CASES=1.
#include "cache_test.h"

namespace kdt::test {
namespace {

constexpr int64_t kRope = 64;

Ints star(int64_t n) {
  Ints parents(n, 0);
  parents[0] = -1;
  return parents;
}

// A tree no deeper than a drafter's.
Ints bushy_tree(int64_t n, uint64_t seed) {
  Random random(seed);
  Ints parents(n, -1), depths(n, 0);
  for (int64_t i = 1; i < n; ++i) {
    do {
      parents[i] = static_cast<int32_t>(random.below(2) == 0 ? i - 1 : random.below(i));
    } while (depths[parents[i]] >= 30);
    depths[i] = depths[parents[i]] + 1;
  }
  return parents;
}

// As deep as a tree may be, with a leaf beside each node, so that no path is a run of slots.
Ints comb() {
  Ints parents = {-1};
  for (int32_t i = 0; i < 64; ++i) {
    parents.push_back(2 * i);
    parents.push_back(2 * i);
  }
  return parents;
}

Floats rounded(Floats x) {
  for (float& v : x) v = bf16_to_float(float_to_bf16(v));
  return x;
}

// What each row of a sequence sees, by cache position: the prefix, then its path.
std::vector<Ints> visible(const Ints& parents, int64_t prefix) {
  std::vector<Ints> seen;
  for (size_t slot = 0; slot < parents.size(); ++slot) {
    Ints own;
    if (parents[slot] >= 0) {
      own = seen[parents[slot]];
    } else {
      for (int64_t i = 0; i < prefix; ++i) own.push_back(static_cast<int32_t>(i));
    }
    own.push_back(static_cast<int32_t>(prefix) + static_cast<int32_t>(slot));
    seen.push_back(std::move(own));
  }
  return seen;
}

// In float64. On a GPU the query is rounded to bf16 in units of log2, as the kernel does, so that
// what remains is the rounding of weights and sums.
std::vector<double> reference(const Floats& query, const Floats& latent, const Ints& parents,
                              int64_t prefix, int64_t heads, int64_t rank) {
  const int64_t width = rank + kRope;
  const std::vector<Ints> seen = visible(parents, prefix);
  std::vector<double> out(parents.size() * heads * rank, 0.0), q(width);
  for (size_t pair = 0; pair < parents.size() * heads; ++pair) {
    for (int64_t d = 0; d < width; ++d) {
      const float value = query[pair * width + d];
      q[d] = on_cpu() ? value * 1.4426950408889634
                      : static_cast<double>(bf16_to_float(float_to_bf16(value * 1.44269504f)));
    }
    const Ints& keys = seen[pair / heads];
    std::vector<double> scores;
    double top = -1e300, sum = 0;
    for (int32_t key : keys) {
      double score = 0;
      for (int64_t d = 0; d < width; ++d) score += q[d] * latent[key * width + d];
      scores.push_back(score);
      top = std::max(top, score);
    }
    for (size_t i = 0; i < keys.size(); ++i) {
      const double weight = std::exp2(scores[i] - top);
      sum += weight;
      for (int64_t d = 0; d < rank; ++d)
        out[pair * rank + d] += weight * latent[keys[i] * width + d];
    }
    for (int64_t d = 0; d < rank; ++d) out[pair * rank + d] /= sum;
  }
  return out;
}

// A cache with a sequence in permuted blocks; every other row is NaN.
struct Sequence {
  Sequence(Backend& on, int64_t rank, const Floats& latent, int64_t block_size = 64,
           int64_t table_blocks = 0)
      : count(static_cast<int64_t>(latent.size()) / (rank + kRope)),
        used((count + block_size - 1) / block_size),
        blocks(permuted_blocks(used, used + 2, static_cast<uint64_t>(count))),
        cache(on, rank, kRope, used + 2, block_size) {
    cache.store(latent, 0, blocks);
    blocks.resize(std::max(table_blocks, used), -1);
  }
  int64_t count, used;
  Ints blocks;
  MlaCache cache;
};

struct Tree {
  std::string name;
  Ints parents;
};
std::vector<Tree> trees(int64_t n) {
  return {{"star", star(n)}, {"chain", chain(n)}, {"tree", bushy_tree(n, n)}};
}

// With all scores 0 a row's output is the mean of the values it sees; with value j one-hot it
// counts them.
void expect_counts(const Tree& tree, int64_t prefix, int64_t heads, int64_t rank) {
  const auto slots = static_cast<int64_t>(tree.parents.size());
  KDT_CHECK(slots < rank, "test: ", slots, " slots for ", rank, " columns");
  // Slots have a column each, the prefix the last.
  Floats latent((prefix + slots) * (rank + kRope), 0.0f);
  for (int64_t i = 0; i < prefix + slots; ++i)
    latent[i * (rank + kRope) + (i < prefix ? rank - 1 : i - prefix)] = 1;
  Sequence s(backend(), rank, latent);
  const Floats out = s.cache.attend(Floats(slots * heads * (rank + kRope), 0.0f), heads,
                                    Rows(backend(), prefix, s.blocks, tree.parents));
  double worst = 0;
  for (int64_t slot = 0; slot < slots; ++slot) {
    const Ints path = path_to(tree.parents, slot);
    const auto total = static_cast<double>(prefix + static_cast<int64_t>(path.size()));
    std::vector<double> expected(rank, 0.0);
    expected[rank - 1] = prefix / total;
    for (int32_t p : path) expected[p] = 1 / total;
    for (int64_t h = 0; h < heads; ++h) {
      const double error = max_error(slice(out, (slot * heads + h) * rank, rank), expected);
      worst = std::max(worst, error * total);
    }
  }
  // A key more or less changes a count by 1.
  if (!(worst < 0.02)) {
    report(__FILE__, __LINE__,
           join(tree.name, " of ", slots, ", prefix ", prefix, ", ", heads, " heads of ", rank,
                ": a count is off by ", worst));
  }
}

KDT_TEST(counts_of_visible_keys) {
  for (int64_t prefix : {0, 1, 15, 16, 17, 63, 64, 65, 127, 255, 256, 257})
    for (const Tree& tree : trees(5)) expect_counts(tree, prefix, 3, 128);
  for (const Tree& tree : trees(65)) expect_counts(tree, 60, 2, 128);
  for (const Tree& tree : trees(9)) expect_counts(tree, 600, 8, 512);
  expect_counts({"root", {-1}}, 1300, 8, 512);
  for (int64_t prefix : {0, 96, 127}) expect_counts({"comb", comb()}, prefix, 1, 512);
  if (!large_cases()) return;
  for (int64_t n : {1, 2, 17, 64, 65, 257}) {
    for (int64_t prefix : {0, 1, 15, 16, 17, 63, 64, 65, 127, 255, 256, 257, 2048, 20000, 65536}) {
      if (prefix > 2048 && n != 1 && n != 65) continue;
      for (const Tree& tree : trees(n)) expect_counts(tree, prefix, prefix > 2048 ? 8 : 16, 512);
    }
  }
  for (const Tree& tree : trees(65)) expect_counts(tree, 130000, 8, 512);
}

void expect_close(const Ints& parents, int64_t prefix, int64_t heads, int64_t rank, float scale) {
  const auto slots = static_cast<int64_t>(parents.size());
  const int64_t width = rank + kRope;
  Random random(prefix * 31 + slots);
  const Floats latent = rounded(random.floats((prefix + slots) * width));
  const Floats query = random.floats(slots * heads * width, scale);
  Sequence s(backend(), rank, latent);
  const Floats out = s.cache.attend(query, heads, Rows(backend(), prefix, s.blocks, parents));
  const std::vector<double> expected = reference(query, latent, parents, prefix, heads, rank);
  double difference = 0, norm = 0, greatest = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    difference += (out[i] - expected[i]) * (out[i] - expected[i]);
    norm += expected[i] * expected[i];
    greatest = std::max(greatest, std::fabs(expected[i]));
  }
  const double relative = std::sqrt(difference / norm), worst = max_error(out, expected) / greatest;
  if (!(relative < (on_cpu() ? 1e-5 : 2e-3) && worst < (on_cpu() ? 1e-4 : 2e-2))) {
    report(__FILE__, __LINE__,
           join(slots, " slots, prefix ", prefix, ", ", heads, " heads of ", rank, ", scale ",
                scale, ": ", relative, " in the norm, at worst ", worst));
  }
}

KDT_TEST(against_float64) {
  for (float scale : {0.05f, 1.0f, 6.0f}) {  // from flat to sharp distributions
    expect_close(bushy_tree(12, 1), 40, 8, 128, scale);
    expect_close(bushy_tree(7, 2), 333, 3, 128, scale);
    expect_close({-1}, 515, 8, 512, scale);
    expect_close(bushy_tree(9, 3), 200, 20, 512, scale);
    expect_close(star(3), 130, 70, 128, scale);
  }
  if (!large_cases()) return;
  for (int64_t heads : {1, 8, 64}) {
    for (int64_t prefix : {64, 128, 192, 256, 2048}) {
      expect_close(bushy_tree(65, prefix), prefix, heads, 512, 0.1f);
    }
  }
  expect_close(bushy_tree(17, 5), 17000, 8, 512, 0.3f);
}

// Each node of a tree gets the bits of a plain step behind its own path, and of any other tree that
// holds the path.
void expect_plain_bits(const Ints& parents, int64_t prefix, int64_t heads, int64_t rank,
                       int64_t block_size) {
  Backend& b = backend();
  const int64_t width = rank + kRope;
  const auto slots = static_cast<int64_t>(parents.size());
  Random random(prefix * 7 + slots);
  const Floats latent = random.floats((prefix + slots) * width),
               query = random.floats(slots * heads * width, 0.3f);
  Sequence s(b, rank, latent, block_size);
  const Floats result = s.cache.attend(query, heads, Rows(b, prefix, s.blocks, parents));
  const int64_t used = (prefix + slots + 31) / 32;
  const Ints other_blocks = permuted_blocks(used, used + 3, 2);
  MlaCache plain(b, rank, kRope, used + 3, 32);
  plain.store(slice(latent, 0, prefix * width), 0, other_blocks);
  for (int64_t slot = 0; slot < slots; ++slot) {
    const Ints path = path_to(parents, slot);
    const auto length = static_cast<int64_t>(path.size());
    Floats own;
    for (int32_t i : path) append(own, slice(latent, (prefix + i) * width, width));
    append(own, Floats((slots - length) * width, kNan));
    plain.store(own, prefix, other_blocks);
    const Floats step = plain.attend(slice(query, slot * heads * width, heads * width), heads,
                                     Rows(b, prefix + length - 1, other_blocks, {-1}));
    if (!same_bits(step, slice(result, slot * heads * rank, heads * rank))) {
      report(__FILE__, __LINE__,
             join("prefix ", prefix, ", ", slots, " slots, ", heads, " heads of ", rank, ": slot ",
                  slot));
    }
  }
}

KDT_TEST(tree_nodes_get_the_bits_of_plain_steps) {
  // Depths around the positions where the path's first key moves.
  for (int64_t prefix : {0, 120, 127, 190})
    expect_plain_bits(bushy_tree(12, 9), prefix, 4, 128, 64);
  expect_plain_bits(chain(70), 70, 2, 128, 32);
  expect_plain_bits(star(20), 250, 8, 128, 96);
  expect_plain_bits(bushy_tree(9, 4), 380, 8, 512, 64);
  if (!large_cases()) return;
  for (int64_t prefix : {0, 63, 64, 130, 255, 2048, 5000}) {
    expect_plain_bits(bushy_tree(65, prefix), prefix, 8, 512, 64);
    expect_plain_bits(bushy_tree(257, prefix), prefix, 4, 128, 64);
  }
}

KDT_TEST(chunks_of_any_size_give_the_same_bits) {
  Backend& b = backend();
  const int64_t rank = large_cases() ? 512 : 128, heads = large_cases() ? 8 : 2,
                width = rank + kRope, rows = large_cases() ? 700 : 150;
  Random random(6);
  const Floats query = random.floats(rows * heads * width, 0.3f);
  Sequence s(b, rank, random.floats(rows * width));
  const auto in_chunks_of = [&](int64_t size) {
    Floats out;
    for (int64_t begin = 0; begin < rows; begin += size) {
      const int64_t count = std::min(size, rows - begin);
      append(out, s.cache.attend(slice(query, begin * heads * width, count * heads * width), heads,
                                 Rows(b, begin, s.blocks, chain(count))));
    }
    return out;
  };
  const Floats all = in_chunks_of(rows);
  for (int64_t size : {1, 7, 64}) EXPECT(same_bits(in_chunks_of(size), all));
}

KDT_TEST(what_a_row_does_not_see_does_not_matter) {
  Backend& b = backend();
  constexpr int64_t kRank = 128, kWidth = kRank + kRope, kHeads = 8, kPrefix = 130;
  const Ints parents = {-1, 0, 0, 1, 2, 3};
  Random random(3);
  Floats latent = random.floats((kPrefix + 6) * kWidth);
  const Floats query = random.floats(6 * kHeads * kWidth, 0.3f);
  const auto attend = [&](int64_t table_blocks) {
    Sequence s(b, kRank, latent, 32, table_blocks);
    return s.cache.attend(query, kHeads, Rows(b, kPrefix, s.blocks, parents));
  };
  const Floats before = attend(0);
  EXPECT(same_bits(attend(4096), before));  // room for 131072 keys
  // Slot 1 and with it its descendants.
  std::fill_n(latent.begin() + (kPrefix + 1) * kWidth, kWidth, kNan);
  const Floats after = attend(0);
  constexpr int64_t kRow = kHeads * kRank;
  for (int64_t slot : {0, 2, 4})
    EXPECT(same_bits(slice(after, slot * kRow, kRow), slice(before, slot * kRow, kRow)));
  for (int64_t slot : {1, 3, 5}) EXPECT(std::isnan(after[slot * kRow]));
}

KDT_TEST(sequences_of_one_call) {
  Backend& b = backend();
  constexpr int64_t kRank = 128, kWidth = kRank + kRope, kHeads = 4;
  // More than a warp looks at at a time, one of them without rows.
  Ints prefix = {40, 300, 0}, counts = {5, 0, 17};
  for (int32_t i = 0; i < 34; ++i) {
    prefix.push_back(i);
    counts.push_back(1 + i % 2);
  }
  MlaCache cache(b, kRank, kRope, 64, 64);
  std::vector<Ints> blocks, trees;
  Ints row_begin = {0}, parents;
  Random random(4);
  int32_t next_block = 0;
  for (size_t s = 0; s < prefix.size(); ++s) {
    Ints own;
    for (int32_t i = 0; i < prefix[s] + counts[s]; i += 64) own.push_back(next_block++);
    std::reverse(own.begin(), own.end());
    cache.store(random.floats((prefix[s] + counts[s]) * kWidth), 0, own);
    blocks.push_back(own);
    trees.push_back(bushy_tree(counts[s], s));
    append(parents, trees.back());
    row_begin.push_back(row_begin.back() + counts[s]);
  }
  const Floats query = random.floats(row_begin.back() * kHeads * kWidth, 0.3f);
  const Floats together = cache.attend(query, kHeads, Rows(b, row_begin, prefix, blocks, parents));
  for (size_t s = 0; s < prefix.size(); ++s) {
    if (counts[s] == 0) continue;
    const Floats alone =
        cache.attend(slice(query, row_begin[s] * kHeads * kWidth, counts[s] * kHeads * kWidth),
                     kHeads, Rows(b, prefix[s], blocks[s], trees[s]));
    if (!same_bits(alone,
                   slice(together, row_begin[s] * kHeads * kRank, counts[s] * kHeads * kRank))) {
      report(__FILE__, __LINE__, join("sequence ", s));
    }
  }
}

KDT_TEST(more_rows_than_partial_results_have_room_for) {
  // 64 heads of over a hundred partial results each fill 256 MiB in less than 72 rows.
  Backend& b = backend();
  constexpr int64_t kRank = 128, kWidth = kRank + kRope, kHeads = 64, kRows = 72;
  Random random(8);
  Sequence s(b, kRank, random.floats(kRows * kWidth), 64, 2050);
  const Floats query = random.floats(kRows * kHeads * kWidth, 0.3f);
  const auto attend = [&](int64_t begin, int64_t count) {
    return s.cache.attend(slice(query, begin * kHeads * kWidth, count * kHeads * kWidth), kHeads,
                          Rows(b, begin, s.blocks, chain(count)));
  };
  Floats halves = attend(0, kRows / 2);
  append(halves, attend(kRows / 2, kRows / 2));
  EXPECT(same_bits(attend(0, kRows), halves));
}

KDT_TEST(repeats_give_the_same_bits) {
  if (!large_cases()) return;
  Backend& b = backend();
  constexpr int64_t kRank = 512, kWidth = kRank + kRope, kHeads = 64, kSlots = 65;
  for (int64_t prefix : {64, 128, 192, 256, 4000}) {
    Random random(prefix);
    Sequence s(b, kRank, random.floats((prefix + kSlots) * kWidth));
    const Floats query = random.floats(kSlots * kHeads * kWidth, 0.3f);
    const Rows rows(b, prefix, s.blocks, bushy_tree(kSlots, 1));
    const Floats first = s.cache.attend(query, kHeads, rows);
    for (int i = 0; i < 20; ++i) EXPECT(same_bits(s.cache.attend(query, kHeads, rows), first));
  }
}

KDT_TEST(wrong_values_are_reported) {
  if (on_cpu()) return;  // test_attention.cpp
  Backend& b = backend();
  for (int64_t rank : {128, 32}) {
    const int64_t width = rank + kRope;
    Sequence s(b, rank, Floats(70 * width, 0.5f), 32);
    const auto attend = [&](const Rows& rows) {
      s.cache.attend(Floats(rows.num_rows * width, 0.1f), 1, rows);
    };
    const Ints two = {s.blocks[0], s.blocks[1]};
    EXPECT_THROWS("parent 1 at row 1", attend(Rows(b, 0, two, {-1, 1})));
    EXPECT_THROWS("parent -2 at row 0", attend(Rows(b, 0, two, {-2})));
    EXPECT_THROWS("parent 7 at row 2", attend(Rows(b, 30, two, {-1, 0, 7, 1})));
    EXPECT_THROWS("block 99 at row 0", attend(Rows(b, 40, {two[0], 99}, {-1})));
    EXPECT_THROWS("block -1 at row 0", attend(Rows(b, 40, {-1, two[1]}, {-1})));
    EXPECT_THROWS("rows of sequence 64 at row 0", attend(Rows(b, 64, two, {-1})));
    for (int32_t wrong : {-5, 9, 13, 1 << 30}) {
      Rows moved(b, 10, two, {-1, 0});
      moved.positions = upload(b, Ints{10, wrong});
      EXPECT_THROWS(join("position ", wrong, " at row 1"), attend(moved));
    }
    // Within reach of the slot, but not where its parents lead.
    Rows moved(b, 10, two, {-1, 0, 1});
    moved.positions = upload(b, Ints{10, 11, 11});
    EXPECT_THROWS("position 11 at row 2", attend(moved));
    attend(Rows(b, 10, two, {-1, 0}));  // and all is well again
  }
}

}  // namespace
}  // namespace kdt::test

KDT_OP_TEST_MAIN
