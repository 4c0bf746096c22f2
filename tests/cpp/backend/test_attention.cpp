// Attention over block caches: against the reference, and node by node against plain steps.
#include "cache_test.h"

namespace kdt::test {
namespace {

KDT_TEST(mla_bundles) {
  for (const char* name :
       {"h8_p0_b8", "h16_p2048_b16", "h64_p128_b32", "h64_p512_b8", "h8_p0_b1", "h8_p37_b65"}) {
    const KdtrFile file = bundle(std::string("attention_") + name);
    const Shape& shape = file.at("q_latent").shape;
    const int64_t slots = shape[0], heads = shape[1], rank = shape[2],
                  rope_dim = file.at("q_rope").shape[2];
    const Floats q_latent = values<float>(file.at("q_latent")),
                 q_rope = values<float>(file.at("q_rope"));
    Floats query;
    for (int64_t i = 0; i < slots * heads; ++i) {
      append(query, slice(q_latent, i * rank, rank));
      append(query, slice(q_rope, i * rope_dim, rope_dim));
    }
    for (float& q : query) q *= scalar<float>(file, "scale");
    const Floats latent = values<float>(file.at("latent"));
    const int64_t rows = file.at("latent").shape[0];
    for (int64_t block_size : {32, 64, 128}) {
      if (!on_cpu() && !large_cases() && block_size != 64) continue;
      const int64_t used = (rows + block_size - 1) / block_size;
      const Ints blocks = permuted_blocks(used, used + 2, block_size);
      MlaCache cache(backend(), rank, rope_dim, used + 2, block_size, 2);
      cache.store(latent, 0, blocks);
      const Rows tree(backend(), rows - slots, blocks, values<int32_t>(file.at("parents")));
      const double error =
          max_error(cache.attend(query, heads, tree, 1), values<double>(file.at("out")));
      if (!(error < (on_cpu() ? 5e-6 : 2e-2)))
        report(__FILE__, __LINE__, join(name, ", blocks of ", block_size, ": ", error));
    }
  }
}

// Each node of a tree must get the bits that a plain step gets behind its own path.
void expect_plain_bits(Backend& b, const Ints& parents, int64_t prefix, int64_t heads,
                       int64_t block_size) {
  constexpr int64_t kRank = 32, kRope = 16, kWidth = kRank + kRope;
  const auto slots = static_cast<int64_t>(parents.size());
  const int64_t used = (prefix + slots + block_size - 1) / block_size;
  Random random(prefix * 7 + slots);
  const Floats latent = random.floats((prefix + slots) * kWidth),
               query = random.floats(slots * heads * kWidth);

  MlaCache tree(b, kRank, kRope, used + 2, block_size),
      plain(b, kRank, kRope, used + 3, block_size);
  const Ints blocks = permuted_blocks(used, used + 2, 1),
             other_blocks = permuted_blocks(used, used + 3, 2);
  tree.store(latent, 0, blocks);
  const Floats result = tree.attend(query, heads, Rows(b, prefix, blocks, parents));
  plain.store(slice(latent, 0, prefix * kWidth), 0, other_blocks);
  for (int64_t slot = 0; slot < slots; ++slot) {
    const Ints path = path_to(parents, slot);
    const auto length = static_cast<int64_t>(path.size());
    Floats own;
    for (int32_t s : path) append(own, slice(latent, (prefix + s) * kWidth, kWidth));
    append(own, Floats((slots - length) * kWidth, kNan));
    plain.store(own, prefix, other_blocks);
    const Floats step = plain.attend(slice(query, slot * heads * kWidth, heads * kWidth), heads,
                                     Rows(b, prefix + length - 1, other_blocks, {-1}));
    if (!same_bits(step, slice(result, slot * heads * kRank, heads * kRank))) {
      report(__FILE__, __LINE__,
             join("prefix ", prefix, ", ", slots, " slots, ", heads, " heads: slot ", slot));
    }
  }
}

KDT_TEST(tree_nodes_get_the_bits_of_plain_steps) {
  for (int64_t prefix : {0, 1, 63, 64, 65, 130}) {
    expect_plain_bits(backend(), random_tree(40, prefix), prefix, 4, 64);
    expect_plain_bits(backend(), random_tree(33, prefix + 100), prefix, 3, 32);
  }
  expect_plain_bits(backend(), random_tree(65, 5), 20, 20, 32);
}

KDT_TEST(chains_get_the_bits_of_plain_steps) {
  for (int64_t prefix : {0, 1, 63, 64, 65}) expect_plain_bits(backend(), chain(70), prefix, 4, 32);
  expect_plain_bits(backend(), Ints{-1, 0, 0, 0, 0, 0, 0, 0, 0}, 30, 8, 32);  // a star
}

KDT_TEST(threads_do_not_change_bits) {
  const Ints parents = random_tree(48, 77);
  const Floats latent = Random(1).floats((100 + 48) * 48), query = Random(2).floats(48 * 8 * 48);
  Floats expected;
  for (int threads : {1, 2, 3}) {
    const auto b = make_backend(device(), threads);
    MlaCache cache(*b, 32, 16, 5, 32);
    const Ints blocks = {4, 0, 2, 1, 3};
    cache.store(latent, 0, blocks);
    const Floats result = cache.attend(query, 8, Rows(*b, 100, blocks, parents));
    if (expected.empty()) expected = result;
    EXPECT(same_bits(result, expected));
  }
}

KDT_TEST(sequences_of_one_call_do_not_touch_each_other) {
  Backend& b = backend();
  constexpr int64_t kWidth = 24, kRank = 16, kHeads = 3;
  MlaCache cache(b, kRank, kWidth - kRank, 8, 32);
  const std::vector<Ints> blocks = {{5, 1}, {7}, {0, 6, 3}};
  const Ints prefix = {40, 0, 70}, counts = {9, 1, 17};
  std::vector<Ints> trees;
  Ints row_begin = {0}, parents;
  Random random(4);
  for (int s = 0; s < 3; ++s) {
    cache.store(random.floats((prefix[s] + counts[s]) * kWidth), 0, blocks[s]);
    trees.push_back(random_tree(counts[s], s));
    append(parents, trees.back());
    row_begin.push_back(row_begin.back() + counts[s]);
  }
  const Floats query = random.floats(row_begin.back() * kHeads * kWidth);
  const Floats together = cache.attend(query, kHeads, Rows(b, row_begin, prefix, blocks, parents));
  for (int s = 0; s < 3; ++s) {
    const Floats alone =
        cache.attend(slice(query, row_begin[s] * kHeads * kWidth, counts[s] * kHeads * kWidth),
                     kHeads, Rows(b, prefix[s], blocks[s], trees[s]));
    EXPECT(same_bits(alone,
                     slice(together, row_begin[s] * kHeads * kRank, counts[s] * kHeads * kRank)));
  }
}

KDT_TEST(large_scores_do_not_overflow) {
  Backend& b = backend();
  MlaCache cache(b, 8, 8, 2, 32);
  Floats latent(3 * 16, 0.0f);
  for (int i = 0; i < 3; ++i) latent[i * 16] = static_cast<float>(i + 1);
  cache.store(latent, 0, {1, 0});
  Floats query(2 * 16, 0.0f);
  query[0] = 1e4f;
  query[16] = -1e4f;
  const Floats out = cache.attend(query, 2, Rows(b, 2, {1, 0}, {-1}));
  EXPECT_EQ(out[0], 3.0f);  // all on the greatest key
  EXPECT_EQ(out[8], 1.0f);
}

// mla_query: W_UK, rotation, scale.

KDT_TEST(mla_query_against_the_rope_bundles) {
  Backend& b = backend();
  constexpr int64_t kNope = 40, kRank = 37;
  for (const char* name : {"rope_interleaved", "rope_half_split", "rope_yarn"}) {
    const KdtrFile file = bundle(name);
    const Shape& shape = file.at("x").shape;
    const int64_t rows = shape[0], heads = shape[1], dim = shape[2];
    const Floats x = values<float>(file.at("x"));
    const auto rotated = values<double>(file.at("out"));
    std::vector<Matrix> matrices;
    std::vector<HostMatrix> hosts;
    for (int64_t h = 0; h < heads; ++h)
      matrices.push_back(random_matrix(DType::kBFloat16, kRank, kNope, h));
    for (const Matrix& matrix : matrices) hosts.push_back(matrix.host());
    const auto w_uk = b.prepare_linear(hosts);
    const float scale = 0.3f;
    Floats q;
    std::vector<double> expected;
    Random random(8);
    for (int64_t i = 0; i < rows * heads; ++i) {
      const Floats nope = random.floats(kNope);
      append(q, nope);
      append(q, slice(x, i * dim, dim));
      for (double value : product(nope, matrices[i % heads])) expected.push_back(value * scale);
      for (int64_t d = 0; d < dim; ++d) expected.push_back(rotated[i * dim + d] * scale);
    }
    const Buffer table = upload(b, file.at("cos_sin")), out = output(b, {rows, heads, kRank + dim});
    const Buffer memory = upload(b, q, {rows, heads, kNope + dim}),
                 positions = upload(b, file.at("positions"));
    MlaQueryArgs args{.q = memory.tensor,
                      .w_uk = w_uk.get(),
                      .rope = {table.tensor, scalar<bool>(file, "interleaved")},
                      .positions = positions.tensor,
                      .scale = scale,
                      .out = out.tensor};
    b.mla_query(args);
    EXPECT(max_error(download(b, out.tensor), expected) < (on_cpu() ? 2e-6 : 2e-2));
    if (on_cpu()) {
      const Buffer outside = upload(b, Ints(rows, 128));
      args.positions = outside.tensor;
      EXPECT_THROWS("mla_query: position 128 is outside the rope table of 128", b.mla_query(args));
    }
  }
}

KDT_TEST(mla_store_normalises_and_rotates) {
  // Two positions with equal latents, told apart by their rotated keys alone.
  Backend& b = backend();
  const KdtrFile file = bundle("rope_interleaved");
  const Floats x = values<float>(file.at("x"));
  const auto rotated = values<double>(file.at("out"));
  constexpr int64_t kRank = 4, kDim = 32, kColumn = 2;
  Random random(1);
  const Floats weight = random.floats(kRank);
  Floats kv;
  std::vector<double> latents;
  for (int64_t t = 0; t < 2; ++t) {
    append(kv, Floats(kColumn, kNan));
    const Floats row = random.floats(kRank);
    double squares = 1e-6 * kRank;
    for (float v : row) squares += static_cast<double>(v) * v;
    for (int64_t i = 0; i < kRank; ++i)
      latents.push_back(row[i] / std::sqrt(squares / kRank) * weight[i]);
    append(kv, row);
    append(kv, slice(x, t * 3 * kDim, kDim));  // the first of three heads
  }
  MlaCache cache(b, kRank, kDim, 1, 32);
  const Buffer memory = upload(b, kv, {2, kColumn + kRank + kDim}), norm = upload(b, weight);
  const Buffer table = upload(b, file.at("cos_sin"));
  const Buffer positions = upload(b, slice(values<int32_t>(file.at("positions")), 0, 2));
  const Rows rows(b, 0, {0}, chain(2));
  b.mla_store({.kv = memory.tensor,
               .column = kColumn,
               .norm_weight = norm.tensor,
               .eps = 1e-6f,
               .rope = {table.tensor, true},
               .positions = positions.tensor,
               .cache = &cache.cache(),
               .rows = rows.rows});
  for (int64_t d = 0; d < kDim; ++d) {
    Floats query(kRank + kDim, 0.0f);
    query[kRank + d] = 1;
    const double a = std::exp(rotated[d]), c = std::exp(rotated[3 * kDim + d]);
    const Floats out = cache.attend(query, 1, Rows(b, 1, {0}, {-1}));
    for (int64_t i = 0; i < kRank; ++i) {
      EXPECT_NEAR(out[i], (a * latents[i] + c * latents[kRank + i]) / (a + c),
                  on_cpu() ? 2e-6 : 1e-2);
    }
  }
}

// The drafter's attention.

KDT_TEST(gqa_bundles) {
  Backend& b = backend();
  for (const char* name : {"full", "causal", "window", "causal_window", "no_context"}) {
    const KdtrFile file = bundle(std::string("gqa_") + name);
    const Shape &q = file.at("q").shape, &k = file.at("k").shape;
    const int64_t context = scalar<int32_t>(file, "context_len");
    GqaCache cache(b, k[1], k[2], 3, 32, 2);
    const Ints blocks = {2, 0};
    cache.store(values<float>(file.at("k")), values<float>(file.at("v")), 0, blocks);
    const Floats out =
        cache.attend(values<float>(file.at("q")), q[1], Rows(b, context, blocks, chain(q[0])),
                     scalar<float>(file, "scale"), scalar<bool>(file, "causal"),
                     scalar<int32_t>(file, "window"), 1);
    const auto expected = values<double>(file.at("out"));
    if (on_cpu()) EXPECT(max_error(out, expected) < 2e-6);
    // Its keys and values are rounded to bf16 here, which the bundle's are not.
    EXPECT(relative_error(out, expected).worst < 2e-2);
    EXPECT(relative_error(out, expected).norm < 1e-2);
  }
}

std::vector<double> gqa_reference(const Floats& q, const Floats& k, const Floats& v, int64_t heads,
                                  int64_t kv_heads, int64_t dim, int64_t context, double scale,
                                  bool causal, int64_t window) {
  const int64_t rows = static_cast<int64_t>(q.size()) / (heads * dim);
  std::vector<double> out(q.size());
  for (int64_t i = 0; i < rows * heads; ++i) {
    const int64_t position = context + i / heads, group = i % heads / (heads / kv_heads);
    double sum = 0;
    for (int64_t j = 0; j < context + rows; ++j) {
      if ((causal && j > position) || (window > 0 && position - j >= window)) continue;
      double score = 0;
      for (int64_t d = 0; d < dim; ++d)
        score += static_cast<double>(q[i * dim + d]) * k[(j * kv_heads + group) * dim + d];
      const double weight = std::exp(score * scale);
      sum += weight;
      for (int64_t d = 0; d < dim; ++d)
        out[i * dim + d] += weight * v[(j * kv_heads + group) * dim + d];
    }
    for (int64_t d = 0; d < dim; ++d) out[i * dim + d] /= sum;
  }
  return out;
}

void check_gqa(int64_t heads, int64_t kv_heads, int64_t dim, int64_t rows, int64_t context) {
  Backend& b = backend();
  Random random(context);
  Floats k = random.floats((context + rows) * kv_heads * dim), v = random.floats(k.size());
  if (!on_cpu()) {
    k = to_bf16_values(std::move(k));
    v = to_bf16_values(std::move(v));
  }
  const float scale = 0.9f / std::sqrt(static_cast<float>(dim));
  const Floats q = random.floats(rows * heads * dim, 2);
  const int64_t blocks_needed = (context + rows + 31) / 32;
  GqaCache cache(b, kv_heads, dim, blocks_needed + 1, 32);
  const Ints blocks = permuted_blocks(blocks_needed, blocks_needed + 1, context);
  cache.store(k, v, 0, blocks);
  for (bool causal : {false, true}) {
    for (int64_t window : {0, 1, 5, 12, 64, 200}) {
      const Floats out =
          cache.attend(q, heads, Rows(b, context, blocks, chain(rows)), scale, causal, window);
      const auto expected =
          gqa_reference(q, k, v, heads, kv_heads, dim, context, scale, causal, window);
      const RelativeError error = relative_error(out, expected);
      // Where bf16 is: the query, the weights, the cache.
      if (!(error.worst < (on_cpu() ? 5e-6 : 2e-2) && error.norm < (on_cpu() ? 2e-6 : 4e-3))) {
        report(__FILE__, __LINE__,
               join("dim ", dim, ", context ", context, ", window ", window, ": ", error.worst,
                    ", in the norm ", error.norm));
      }
    }
  }
}

KDT_TEST(gqa_windows_and_block_boundaries) {
  for (int64_t context : {0, 1, 31, 63, 64, 65, 100}) check_gqa(6, 2, 20, 9, context);
}

// Sizes that a GPU has kernels of their own for.
KDT_TEST(gqa_heads_of_64_and_128) {
  for (int64_t context : {0, 15, 33, 100}) check_gqa(4, 2, 64, 16, context);
  check_gqa(8, 1, 128, 17, 40);
  check_gqa(9, 1, 64, 3, 300);
  if (!large_cases()) return;
  for (int64_t context : {255, 256, 257, 2048, 9000}) check_gqa(16, 2, 128, 16, context);
}

KDT_TEST(gqa_sequences_and_threads_do_not_change_bits) {
  constexpr int64_t kHeads = 4, kKvHeads = 2, kDim = 32, kRows = 8;
  Floats expected;
  for (int threads : {1, 2, 3}) {
    const auto b = make_backend(device(), threads);
    GqaCache cache(*b, kKvHeads, kDim, 6, 32);
    const std::vector<Ints> blocks = {{3, 1}, {0, 5, 4}};
    const Ints context = {33, 70};
    Random random(1);
    for (int s = 0; s < 2; ++s) {
      const int64_t n = (context[s] + kRows) * kKvHeads * kDim;
      const Floats k = random.floats(n), v = random.floats(n);
      cache.store(k, v, 0, blocks[s]);
    }
    const Floats q = random.floats(2 * kRows * kHeads * kDim);
    Ints parents = chain(kRows);
    append(parents, chain(kRows));
    const Floats both = cache.attend(
        q, kHeads, Rows(*b, {0, kRows, 2 * kRows}, context, blocks, parents), 0.2f, true, 12);
    if (expected.empty()) expected = both;
    EXPECT(same_bits(both, expected));
    for (int64_t s = 0; s < 2; ++s) {
      constexpr int64_t kSize = kRows * kHeads * kDim;
      EXPECT(same_bits(cache.attend(slice(q, s * kSize, kSize), kHeads,
                                    Rows(*b, context[s], blocks[s], chain(kRows)), 0.2f, true, 12),
                       slice(both, s * kSize, kSize)));
    }
  }
}

// Compaction.

KDT_TEST(kv_compact_equals_linear_feeding) {
  Backend& b = backend();
  constexpr int64_t kRank = 16, kRope = 8, kWidth = kRank + kRope, kHeads = 3, kKvHeads = 2,
                    kDim = 24;
  constexpr int64_t kSlots = 50, kLayers = 3;
  for (int64_t prefix : {0, 1, 20, 31, 32, 63, 64}) {
    const Ints parents = random_tree(kSlots, prefix + 3), path = path_to(parents, kSlots - 1);
    const auto length = static_cast<int64_t>(path.size());
    Random random(prefix);
    const Floats latent = random.floats((prefix + kSlots) * kWidth), next = random.floats(kWidth);
    const Floats k = random.floats((prefix + kSlots) * kKvHeads * kDim),
                 v = random.floats(k.size());
    const Floats query = random.floats(kHeads * kWidth), q = random.floats(4 * kDim);
    const Floats next_k = random.floats(kKvHeads * kDim), next_v = random.floats(kKvHeads * kDim);
    const Ints blocks = permuted_blocks(5, 6, prefix);
    MlaCache tree(b, kRank, kRope, 6, 32, kLayers), plain(b, kRank, kRope, 6, 32, kLayers);
    GqaCache draft(b, kKvHeads, kDim, 6, 32, kLayers),
        plain_draft(b, kKvHeads, kDim, 6, 32, kLayers);
    tree.store(latent, 0, blocks);
    draft.store(k, v, 0, blocks);
    Ints from, to;
    Floats linear = slice(latent, 0, prefix * kWidth);
    Floats linear_k = slice(k, 0, prefix * kKvHeads * kDim),
           linear_v = slice(v, 0, prefix * kKvHeads * kDim);
    for (int64_t i = 0; i < length; ++i) {
      from.push_back(static_cast<int32_t>(prefix) + path[i]);
      to.push_back(static_cast<int32_t>(prefix + i));
      append(linear, slice(latent, from.back() * kWidth, kWidth));
      append(linear_k, slice(k, from.back() * kKvHeads * kDim, kKvHeads * kDim));
      append(linear_v, slice(v, from.back() * kKvHeads * kDim, kKvHeads * kDim));
    }
    const Buffer table = upload(b, blocks), from_memory = upload(b, from),
                 to_memory = upload(b, to);
    b.kv_compact(tree.cache(), table.tensor, from_memory.tensor, to_memory.tensor);
    b.kv_compact(draft.cache(), table.tensor, from_memory.tensor, to_memory.tensor);
    plain.store(linear, 0, blocks);
    plain_draft.store(linear_k, linear_v, 0, blocks);
    const int64_t end = prefix + length;
    for (MlaCache* cache : {&tree, &plain}) cache->store(next, end, blocks);
    for (GqaCache* cache : {&draft, &plain_draft}) cache->store(next_k, next_v, end, blocks);
    const Rows step(b, end, blocks, {-1});
    for (int64_t layer = 0; layer < kLayers; ++layer) {
      EXPECT(same_bits(tree.attend(query, kHeads, step, layer),
                       plain.attend(query, kHeads, step, layer)));
      EXPECT(same_bits(draft.attend(q, 4, step, 0.2f, true, 0, layer),
                       plain_draft.attend(q, 4, step, 0.2f, true, 0, layer)));
    }
  }
}

KDT_TEST(kv_compact_refuses_moves_that_lose_rows) {
  if (device() != "cpu") return;
  Backend& b = backend();
  MlaCache cache(b, 8, 8, 2, 32);
  const auto compact = [&](const Ints& blocks, const Ints& from, const Ints& to) {
    const Buffer table = upload(b, blocks), from_memory = upload(b, from),
                 to_memory = upload(b, to);
    b.kv_compact(cache.cache(), table.tensor, from_memory.tensor, to_memory.tensor);
  };
  compact({0, 1}, {}, {});
  compact({0, 1}, {5, 63}, {5, 6});
  EXPECT_THROWS("kv_compact: row 5 to 6", compact({0, 1}, {5}, {6}));
  EXPECT_THROWS("kv_compact: row 64 to 6", compact({0, 1}, {64}, {6}));
  EXPECT_THROWS("kv_compact: row 5 to -1", compact({0, 1}, {5}, {-1}));
  EXPECT_THROWS("kv_compact: row 7 to 2", compact({0, 1}, {8, 7}, {1, 2}));
  EXPECT_THROWS("kv_compact: from", compact({0, 1}, {8, 9}, {1}));
  EXPECT_THROWS("kv_compact: block 2 of 2", compact({0, 2}, {40}, {6}));
  EXPECT_THROWS("kv_compact: block -1 of 2", compact({-1, 1}, {40}, {6}));
}

// Faults.

KDT_TEST(sequences_that_do_not_fit_are_refused) {
  if (device() != "cpu") return;
  Backend& b = backend();
  MlaCache cache(b, 8, 8, 4, 32);
  const auto attend = [&](const Rows& rows) {
    cache.attend(Floats(rows.num_rows * 16, 0.0f), 1, rows);
  };
  EXPECT_THROWS("needs 33 cached rows, its block table holds 32", attend(Rows(b, 32, {1}, {-1})));
  EXPECT_THROWS("mla_attention: block 4 of 4", attend(Rows(b, 0, {4}, {-1})));
  EXPECT_THROWS("mla_attention: block -1 of 4", attend(Rows(b, 32, {1, -1}, {-1})));
  EXPECT_THROWS("mla_attention: sequence 0 has rows", attend(Rows(b, -1, {1}, {-1})));
  EXPECT_THROWS("mla_attention: parent 1 of slot 1", attend(Rows(b, 0, {1}, {-1, 1})));
  EXPECT_THROWS("mla_attention: parent -2 of slot 0", attend(Rows(b, 0, {1}, {-2})));
  Rows moved(b, 3, {1}, {-1, 0});
  moved.positions = upload(b, Ints{3, 5});
  EXPECT_THROWS("mla_attention: position 5 of slot 1, want 4", attend(moved));
  EXPECT_THROWS("layer 1", cache.attend(Floats(16, 0.0f), 1, Rows(b, 0, {1}, {-1}), 1));
  EXPECT_THROWS("block_size 48 is not a multiple of 32", b.make_mla_cache(1, 1, 48, 8, 8));
}

KDT_TEST(queries_without_heads_are_refused) {
  Backend& b = backend();
  const Rows rows(b, 0, {1}, {-1, 0});
  MlaCache mla(b, 8, 8, 4, 32);
  EXPECT_THROWS("mla_attention: query f32[2, 0, 16]", mla.attend({}, 0, rows));
  GqaCache gqa(b, 2, 8, 4, 32);
  EXPECT_THROWS("gqa_attention: q f32[2, 0, 8]", gqa.attend({}, 0, rows, 1.0f, true, 0));
  EXPECT_THROWS(on_cpu() ? "gqa_attention: q f32[2, 3, 8] for 2 key-value heads"
                         : "gqa_attention: q f32[2, 3, 8] for a cache of 16 keys a row",
                gqa.attend(Floats(48, 1.0f), 3, rows, 1.0f, true, 0));
}

}  // namespace
}  // namespace kdt::test

KDT_OP_TEST_MAIN
