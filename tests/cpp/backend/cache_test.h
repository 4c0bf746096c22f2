// Caches filled with given rows, for the tests of attention.
//
// The ops that store rows normalise and rotate them. With eps 2^60 and weights 2^30 the norm leaves
// a row's bits as they are (mean + 2^60 rounds to 2^60 and all else is a power of two), and at
// position 0 so does the rotation.
#pragma once

#include "op_test.h"

namespace kdt::test {

inline constexpr float kKeepEps = 0x1p60f;

inline Buffer keep_weight(Backend& on, int64_t n) { return upload(on, Floats(n, 0x1p30f)); }

inline RopeTable no_rotation(Backend& on, int64_t dim, Buffer& memory) {
  Floats table(dim, 0.0f);
  std::fill(table.begin(), table.begin() + dim / 2, 1.0f);
  memory = upload(on, table, {1, dim});
  return {.cos_sin = memory.tensor, .interleaved = true};
}

// The sequences of a call, with the memory that holds their arrays.
struct Rows {
  Rows(Backend& on, const Ints& row_begin, const Ints& prefix_len,
       const std::vector<Ints>& block_tables, const Ints& parents) {
    size_t blocks = 0;
    for (const Ints& table : block_tables) blocks = std::max(blocks, table.size());
    Ints tables;
    for (const Ints& table : block_tables) {
      tables.insert(tables.end(), table.begin(), table.end());
      tables.resize(tables.size() + blocks - table.size(), -1);
    }
    Ints at;
    for (size_t s = 0; s < prefix_len.size(); ++s) {
      for (int32_t row = row_begin[s]; row < row_begin[s + 1]; ++row) {
        const int32_t slot = row - row_begin[s], parent = parents[row];
        at.push_back(parent >= 0 && parent < slot ? at[row_begin[s] + parent] + 1 : prefix_len[s]);
      }
    }
    positions = upload(on, at);
    memory = {upload(on, row_begin), upload(on, prefix_len),
              upload(on, tables,
                     {static_cast<int64_t>(block_tables.size()), static_cast<int64_t>(blocks)}),
              upload(on, parents)};
    rows = {memory[0].tensor, memory[1].tensor, memory[2].tensor, memory[3].tensor};
    num_rows = row_begin.back();
  }
  // One sequence.
  Rows(Backend& on, int64_t prefix_len, const Ints& block_table, const Ints& parents)
      : Rows(on, {0, static_cast<int32_t>(parents.size())}, {static_cast<int32_t>(prefix_len)},
             {block_table}, parents) {}

  std::vector<Buffer> memory;
  Buffer positions;
  SequenceRows rows;
  int64_t num_rows = 0;
};

inline Ints chain(int64_t n) {
  Ints parents(n);
  for (int64_t i = 0; i < n; ++i) parents[i] = static_cast<int32_t>(i) - 1;
  return parents;
}

inline Ints random_tree(int64_t n, uint64_t seed) {
  Random random(seed);
  Ints parents(n, -1);
  // Mostly near the end, so that paths get long.
  for (int64_t i = 1; i < n; ++i) {
    parents[i] = static_cast<int32_t>(
        random.below(3) == 0 ? random.below(i) : std::max<int64_t>(0, i - 1 - random.below(3)));
  }
  return parents;
}

// The slots from the root to `slot`.
inline Ints path_to(const Ints& parents, int64_t slot) {
  Ints path;
  for (auto s = static_cast<int32_t>(slot); s >= 0; s = parents[s]) path.insert(path.begin(), s);
  return path;
}

inline Ints permuted_blocks(int64_t count, int64_t of, uint64_t seed) {
  Random random(seed);
  Ints all(of);
  for (int64_t i = 0; i < of; ++i) all[i] = static_cast<int32_t>(i);
  for (int64_t i = of - 1; i > 0; --i) std::swap(all[i], all[random.below(i + 1)]);
  all.resize(count);
  return all;
}

// A cache of latents whose every row is NaN at first.
class MlaCache {
 public:
  MlaCache(Backend& on, int64_t rank, int64_t rope_dim, int64_t num_blocks, int64_t block_size,
           int64_t layers = 1)
      : on_(on),
        rank_(rank),
        rope_dim_(rope_dim),
        layers_(layers),
        weight_(keep_weight(on, rank)),
        rope_(no_rotation(on, rope_dim, rope_memory_)),
        cache_(on.make_mla_cache(layers, num_blocks, block_size, rank, rope_dim)) {
    Ints every(num_blocks);
    for (int64_t i = 0; i < num_blocks; ++i) every[i] = static_cast<int32_t>(i);
    const int64_t rows = num_blocks * block_size;
    store(Floats(rows * width(), kNan), 0, every);
  }

  int64_t width() const { return rank_ + rope_dim_; }
  KvCache& cache() { return *cache_; }

  // latent [n, rank + rope]: rows prefix_len, ... of the sequence, the same in every layer.
  void store(const Floats& latent, int64_t prefix_len, const Ints& blocks) {
    const int64_t n = static_cast<int64_t>(latent.size()) / width();
    if (n == 0) return;
    const Rows rows(on_, prefix_len, blocks, chain(n));
    const Buffer kv = upload(on_, latent, {n, width()}), positions = upload(on_, Ints(n, 0));
    for (int64_t layer = 0; layer < layers_; ++layer) {
      on_.mla_store({.kv = kv.tensor,
                     .norm_weight = weight_.tensor,
                     .eps = kKeepEps,
                     .rope = rope_,
                     .positions = positions.tensor,
                     .cache = cache_.get(),
                     .layer = layer,
                     .rows = rows.rows});
    }
  }

  // query [T, heads, rank + rope], scaled
  Floats attend(const Floats& query, int64_t heads, const Rows& rows, int64_t layer = 0) {
    const Buffer out = output(on_, {rows.num_rows, heads, rank_});
    on_.mla_attention({.query = upload(on_, query, {rows.num_rows, heads, width()}).tensor,
                       .cache = cache_.get(),
                       .layer = layer,
                       .rows = rows.rows,
                       .positions = rows.positions.tensor,
                       .out = out.tensor});
    return download(on_, out.tensor);
  }

 private:
  Backend& on_;
  int64_t rank_, rope_dim_, layers_;
  Buffer weight_, rope_memory_;
  RopeTable rope_;
  std::unique_ptr<KvCache> cache_;
};

// The same for a drafter's keys and values, [n, kv_heads, dim] each.
class GqaCache {
 public:
  GqaCache(Backend& on, int64_t kv_heads, int64_t dim, int64_t num_blocks, int64_t block_size,
           int64_t layers = 1)
      : on_(on),
        kv_heads_(kv_heads),
        dim_(dim),
        layers_(layers),
        weight_(keep_weight(on, dim)),
        rope_(no_rotation(on, dim, rope_memory_)),
        cache_(on.make_gqa_cache(layers, num_blocks, block_size, kv_heads, dim)) {
    Ints every(num_blocks);
    for (int64_t i = 0; i < num_blocks; ++i) every[i] = static_cast<int32_t>(i);
    const Floats nan(num_blocks * block_size * width(), kNan);
    store(nan, nan, 0, every);
  }

  int64_t width() const { return kv_heads_ * dim_; }
  KvCache& cache() { return *cache_; }

  void store(const Floats& keys, const Floats& values, int64_t prefix_len, const Ints& blocks) {
    const int64_t n = static_cast<int64_t>(keys.size()) / width();
    constexpr int64_t kColumn = 3;  // what lies before the keys is not read
    Floats kv;
    for (int64_t i = 0; i < n; ++i) {
      kv.insert(kv.end(), kColumn, kNan);
      kv.insert(kv.end(), keys.begin() + i * width(), keys.begin() + (i + 1) * width());
      kv.insert(kv.end(), values.begin() + i * width(), values.begin() + (i + 1) * width());
    }
    const Rows rows(on_, prefix_len, blocks, chain(n));
    const Buffer memory = upload(on_, kv, {n, kColumn + 2 * width()}),
                 positions = upload(on_, Ints(n, 0));
    for (int64_t layer = 0; layer < layers_; ++layer) {
      on_.gqa_store({.kv = memory.tensor,
                     .column = kColumn,
                     .k_norm = weight_.tensor,
                     .eps = kKeepEps,
                     .rope = rope_,
                     .positions = positions.tensor,
                     .cache = cache_.get(),
                     .layer = layer,
                     .rows = rows.rows});
    }
  }

  // q [T, heads, dim]
  Floats attend(const Floats& q, int64_t heads, const Rows& rows, float scale, bool causal,
                int64_t window, int64_t layer = 0) {
    const Buffer out = output(on_, {rows.num_rows, heads, dim_});
    const Buffer positions = upload(on_, Ints(rows.num_rows, 0));
    on_.gqa_attention({.q = upload(on_, q, {rows.num_rows, heads, dim_}).tensor,
                       .q_norm = weight_.tensor,
                       .eps = kKeepEps,
                       .rope = rope_,
                       .positions = positions.tensor,
                       .scale = scale,
                       .causal = causal,
                       .window = window,
                       .cache = cache_.get(),
                       .layer = layer,
                       .rows = rows.rows,
                       .out = out.tensor});
    return download(on_, out.tensor);
  }

 private:
  Backend& on_;
  int64_t kv_heads_, dim_, layers_;
  Buffer weight_, rope_memory_;
  RopeTable rope_;
  std::unique_ptr<KvCache> cache_;
};

}  // namespace kdt::test
