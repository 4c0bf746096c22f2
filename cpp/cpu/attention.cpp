// Attention over the block cache, and the ops that fill and move its rows.
//
// Keys lie transposed in panels of 32 positions and values as rows, so both products of attention
// are gemm_f32: scores = query x keys, out = probabilities x values. Each output's chain runs in
// position order over the slot's own path, so a tree node gets the bits a plain step would
// (docs/adr/0005).
#include <algorithm>
#include <cstring>

#include "backend/checks.h"
#include "cpu/cpu_backend.h"

namespace kdt::cpu {
namespace {

// Rotates `x` in place by one position's cosines and sines.
void rotate(float* x, int64_t dim, const RopeTable& rope, int64_t position) {
  const float* cosines = rope.cos_sin.data<float>() + position * dim;
  const float* sines = cosines + dim / 2;
  for (int64_t i = 0; i < dim / 2; ++i) {
    float& a = rope.interleaved ? x[2 * i] : x[i];
    float& b = rope.interleaved ? x[2 * i + 1] : x[i + dim / 2];
    const float rotated = a * cosines[i] - b * sines[i];
    b = b * cosines[i] + a * sines[i];
    a = rotated;
  }
}

void check_positions(const char* op, const Tensor& positions, const RopeTable& rope) {
  for (int64_t t = 0; t < positions.numel(); ++t) {
    const int32_t position = positions.data<int32_t>()[t];
    KDT_CHECK(position >= 0 && position < rope.cos_sin.dim(0), op, ": position ", position,
              " is outside the rope table of ", rope.cos_sin.dim(0));
  }
}

// One sequence of a call: its rows and where position p of its cache is.
struct Sequence {
  int64_t row_begin, num_rows, prefix_len;
  const int32_t* blocks;
  int64_t num_blocks, block_size;

  int64_t block(int64_t position) const { return blocks[position / block_size]; }
};

Sequence sequence_at(const char* op, const SequenceRows& rows, int64_t s, const KvCache& cache,
                     int64_t total_rows) {
  Sequence sequence;
  sequence.row_begin = rows.row_begin.data<int32_t>()[s];
  sequence.num_rows = rows.row_begin.data<int32_t>()[s + 1] - sequence.row_begin;
  sequence.prefix_len = rows.prefix_len.data<int32_t>()[s];
  sequence.num_blocks = rows.block_table.dim(1);
  sequence.blocks = rows.block_table.data<int32_t>() + s * sequence.num_blocks;
  sequence.block_size = cache.block_size;
  KDT_CHECK(sequence.row_begin >= 0 && sequence.num_rows >= 0 && sequence.prefix_len >= 0 &&
                sequence.row_begin + sequence.num_rows <= total_rows,
            op, ": sequence ", s, " has rows [", sequence.row_begin, ", +", sequence.num_rows,
            ") of ", total_rows);
  const int64_t end = sequence.prefix_len + sequence.num_rows;
  KDT_CHECK(end <= sequence.num_blocks * cache.block_size, op, ": sequence ", s, " needs ", end,
            " cached rows, its block table holds ", sequence.num_blocks * cache.block_size);
  for (int64_t i = 0; i * cache.block_size < end; ++i) {
    KDT_CHECK(sequence.blocks[i] >= 0 && sequence.blocks[i] < cache.num_blocks, op, ": block ",
              sequence.blocks[i], " of ", cache.num_blocks);
  }
  return sequence;
}

template <typename Body>
void for_sequences(const char* op, const SequenceRows& rows, const KvCache& cache,
                   int64_t total_rows, const Body& body) {
  for (int64_t s = 0; s < rows.prefix_len.numel(); ++s)
    body(sequence_at(op, rows, s, cache, total_rows));
}

// Writes keys and values of a sequence's rows to one group, from slot 0 on. keys: rows of
// `key_stride`; values likewise.
void store_rows(const CpuKvCache& cache, const Sequence& sequence, int64_t layer, int64_t group,
                const float* keys, int64_t key_stride, const float* values, int64_t value_stride) {
  for (int64_t row = 0; row < sequence.num_rows;) {
    // Positions that share a panel lie side by side, so the panel is written dimension by
    // dimension.
    const int64_t position = sequence.prefix_len + row;
    const int64_t within = position % cache.block_size;
    const int64_t count = std::min(sequence.num_rows - row, kPanel - position % kPanel);
    float* panel = cache.keys(layer, sequence.block(position), group) + cache.key_index(within, 0);
    const float* from = keys + row * key_stride;
    for (int64_t d = 0; d < cache.key_dim; ++d) {
      for (int64_t i = 0; i < count; ++i) panel[d * kPanel + i] = from[i * key_stride + d];
    }
    float* to = cache.values(layer, sequence.block(position), group) + within * cache.value_stride;
    for (int64_t i = 0; i < count; ++i) {
      std::memcpy(to + i * cache.value_stride, values + (row + i) * value_stride,
                  cache.value_dim * sizeof(float));
    }
    row += count;
  }
}

// The slots a row sees besides the prefix, ascending.
struct VisibleSlots {
  const int32_t* slots;
  int64_t count;
};

// Attention of `num_queries` queries over one group. Queries [i * per_row, (i + 1) * per_row)
// belong to row i, which sees the cached positions [begin(i), prefix_len) and visible(i)'s slots.
template <typename Begin, typename Visible>
void attend(const Kernels& kernels, const CpuKvCache& cache, const Sequence& sequence,
            int64_t layer, int64_t group, const float* query, int64_t num_queries, int64_t per_row,
            const Begin& begin, const Visible& visible, std::vector<float>& scratch, float* out) {
  const int64_t prefix_len = sequence.prefix_len;
  const int64_t block_size = cache.block_size;
  const int64_t num_rows = num_queries / per_row;
  int64_t num_slots = 0;
  for (int64_t i = 0; i < num_rows; ++i) {
    const VisibleSlots v = visible(i);
    num_slots = std::max<int64_t>(num_slots, v.count == 0 ? 0 : v.slots[v.count - 1] + 1);
  }
  const int64_t num_keys = prefix_len + num_slots;
  const int64_t stride = ceil_div(num_keys, kPanel) * kPanel;
  scratch.resize(std::max<size_t>(scratch.size(), num_queries * (stride + 1)));
  float* scores = scratch.data();
  float* sums = scores + num_queries * stride;

  for (int64_t position = 0; position < num_keys; position += block_size) {
    kernels.gemm_f32(query, cache.key_dim, static_cast<int>(num_queries),
                     cache.keys(layer, sequence.block(position), group), cache.key_dim * kPanel,
                     kPanel, cache.key_dim, scores + position, stride,
                     std::min(block_size, num_keys - position), false);
  }
  for (int64_t q = 0; q < num_queries; ++q) {
    const int64_t row = q / per_row;
    const VisibleSlots v = visible(row);
    float* s = scores + q * stride;
    // Closing the gaps between the path's slots gives the scores in position order. A path is
    // ascending, so slot >= index.
    for (int64_t i = 0; i < v.count; ++i) s[prefix_len + i] = s[prefix_len + v.slots[i]];
    const int64_t first = begin(row);
    sums[q] = kernels.softmax(s + first, prefix_len + v.count - first);
    std::fill(s, s + first, 0.0f);
  }

  std::memset(out, 0, num_queries * cache.value_dim * sizeof(float));
  const auto accumulate = [&](int64_t first_query, int64_t queries, int64_t score, int64_t position,
                              int64_t count) {
    const float* values = cache.values(layer, sequence.block(position), group) +
                          position % block_size * cache.value_stride;
    kernels.gemm_f32(scores + first_query * stride + score, stride, static_cast<int>(queries),
                     values, kPanel, cache.value_stride, count, out + first_query * cache.value_dim,
                     cache.value_dim, cache.value_dim, true);
  };
  for (int64_t position = 0; position < prefix_len; position += block_size) {
    accumulate(0, num_queries, position, position, std::min(block_size, prefix_len - position));
  }
  for (int64_t row = 0; row < num_rows; ++row) {
    const VisibleSlots v = visible(row);
    // Neighbouring slots of one block go together.
    for (int64_t i = 0; i < v.count;) {
      const int64_t position = prefix_len + v.slots[i];
      int64_t count = 1;
      while (i + count < v.count && v.slots[i + count] == v.slots[i] + count &&
             (position + count) % block_size != 0) {
        ++count;
      }
      accumulate(row * per_row, per_row, prefix_len + i, position, count);
      i += count;
    }
  }
  for (int64_t q = 0; q < num_queries; ++q) {
    // A row sees at least itself, so its sum is at least 1.
    const float factor = 1.0f / sums[q];
    for (int64_t d = 0; d < cache.value_dim; ++d) out[q * cache.value_dim + d] *= factor;
  }
}

// Queries of one task of attention: enough to fill the product's tiles.
constexpr int64_t kQueriesPerTask = 12;

}  // namespace

void CpuBackend::mla_query(const MlaQueryArgs& args) {
  check_mla_query(args);
  check_positions("mla_query", args.positions, args.rope);
  const auto& w_uk = static_cast<const CpuLinear&>(*args.w_uk);
  const int64_t rows = args.q.dim(0), heads = args.q.dim(1), head_dim = args.q.dim(2);
  const int64_t nope = w_uk.in_features, rope_dim = head_dim - nope;
  const int64_t width = args.out.dim(2), rank = width - rope_dim;
  KDT_CHECK(static_cast<int64_t>(w_uk.packed.matrices.size()) == heads, "mla_query: W_UK has ",
            w_uk.packed.matrices.size(), " matrices for ", heads, " heads");
  const auto body = [&](int64_t head, int) {
    const float* q = args.q.data<float>() + head * head_dim;
    float* out = args.out.data<float>() + head * width;
    multiply(q, heads * head_dim, rows, w_uk.packed.matrices[head], 0, ceil_div(rank, kPanel), out,
             heads * width);
    for (int64_t t = 0; t < rows; ++t) {
      float* row = out + t * heads * width;
      std::memcpy(row + rank, q + t * heads * head_dim + nope, rope_dim * sizeof(float));
      rotate(row + rank, rope_dim, args.rope, args.positions.data<int32_t>()[t]);
      for (int64_t i = 0; i < width; ++i) row[i] *= args.scale;
    }
  };
  run(rows * heads * nope * rank, heads, body);
}

void CpuBackend::mla_store(const MlaStoreArgs& args) {
  check_mla_store(args);
  check_positions("mla_store", args.positions, args.rope);
  const auto& cache = static_cast<const CpuKvCache&>(*args.cache);
  const int64_t rank = args.norm_weight.numel(), rope_dim = args.rope.cos_sin.dim(1);
  KDT_CHECK(cache.value_dim == rank && cache.key_dim == rank + rope_dim, "mla_store: a cache of ",
            cache.key_dim, " + ", cache.value_dim, " for a latent of ", rank, " + ", rope_dim);
  const int64_t width = rank + rope_dim;
  shared_.floats.resize(std::max<size_t>(shared_.floats.size(), args.kv.dim(0) * width));
  for_sequences("mla_store", args.rows, cache, args.kv.dim(0), [&](const Sequence& sequence) {
    float* latent = shared_.floats.data();
    for_rows(sequence.num_rows, width * 8, [&](int64_t i) {
      const int64_t row = sequence.row_begin + i;
      const float* kv = args.kv.data<float>() + row * args.kv.dim(1) + args.column;
      kernels_.rms_norm(kv, args.norm_weight.data<float>(), rank, args.eps, latent + i * width);
      float* key = latent + i * width + rank;
      std::memcpy(key, kv + rank, rope_dim * sizeof(float));
      rotate(key, rope_dim, args.rope, args.positions.data<int32_t>()[row]);
    });
    store_rows(cache, sequence, args.layer, 0, latent, width, latent, width);
  });
}

void CpuBackend::mla_attention(const MlaAttentionArgs& args) {
  check_mla_attention(args);
  const auto& cache = static_cast<const CpuKvCache&>(*args.cache);
  const int64_t heads = args.query.dim(1);
  KDT_CHECK(args.query.dim(2) == cache.key_dim && args.out.dim(2) == cache.value_dim,
            "mla_attention: query ", args.query.to_string(), " and out ", args.out.to_string(),
            " for a cache of ", cache.key_dim, " + ", cache.value_dim);
  for_sequences(
      "mla_attention", args.rows, cache, args.query.dim(0), [&](const Sequence& sequence) {
        // Every slot's path, root first, one after another: path i is path_slots[path_begin[i],
        // path_begin[i + 1]).
        std::vector<int32_t>& path_begin = shared_.ints;
        std::vector<int32_t>& path_slots = shared_.more_ints;
        const int32_t* parents = args.rows.parents.data<int32_t>() + sequence.row_begin;
        path_begin.assign(1, 0);
        path_slots.clear();
        for (int32_t slot = 0; slot < sequence.num_rows; ++slot) {
          const int32_t parent = parents[slot];
          KDT_CHECK(parent >= -1 && parent < slot, "mla_attention: parent ", parent, " of slot ",
                    slot);
          if (parent >= 0) {
            const int32_t begin = path_begin[parent], end = path_begin[parent + 1];
            for (int32_t i = begin; i < end; ++i) path_slots.push_back(path_slots[i]);
          }
          path_slots.push_back(slot);
          const auto end = static_cast<int32_t>(path_slots.size());
          const int64_t position = sequence.prefix_len + end - path_begin.back() - 1;
          const int32_t given = args.positions.data<int32_t>()[sequence.row_begin + slot];
          KDT_CHECK(given == position, "mla_attention: position ", given, " of slot ", slot,
                    ", want ", position);
          path_begin.push_back(end);
        }
        // A task is a few whole rows, or a few heads of one row.
        const int64_t heads_per_task =
            std::min(heads, std::max<int64_t>(1, sequence.num_rows >= num_threads()
                                                     ? kQueriesPerTask
                                                     : ceil_div(heads, num_threads())));
        const int64_t rows_per_task =
            heads_per_task < heads
                ? 1
                : std::max<int64_t>(1, std::min(kQueriesPerTask / heads,
                                                ceil_div(sequence.num_rows, num_threads())));
        const int64_t head_tasks = ceil_div(heads, heads_per_task);
        const int64_t row_tasks = ceil_div(sequence.num_rows, rows_per_task);
        const auto body = [&](int64_t task, int thread) {
          const int64_t slot = task / head_tasks * rows_per_task;
          const int64_t head = task % head_tasks * heads_per_task;
          const int64_t per_row = std::min(heads_per_task, heads - head);
          const int64_t rows = std::min(rows_per_task, sequence.num_rows - slot);
          const int64_t first = (sequence.row_begin + slot) * heads + head;
          attend(
              kernels_, cache, sequence, args.layer, 0,
              args.query.data<float>() + first * cache.key_dim, rows * per_row, per_row,
              [](int64_t) { return int64_t{0}; },
              [&](int64_t row) {
                const int64_t begin = path_begin[slot + row];
                return VisibleSlots{path_slots.data() + begin, path_begin[slot + row + 1] - begin};
              },
              scratch_[thread].floats, args.out.data<float>() + first * cache.value_dim);
        };
        const int64_t keys = sequence.prefix_len + sequence.num_rows;
        run(sequence.num_rows * heads * keys * (cache.key_dim + cache.value_dim),
            row_tasks * head_tasks, body);
      });
}

void CpuBackend::gqa_store(const GqaStoreArgs& args) {
  check_gqa_store(args);
  check_positions("gqa_store", args.positions, args.rope);
  const auto& cache = static_cast<const CpuKvCache&>(*args.cache);
  const int64_t dim = args.k_norm.numel(), kv_heads = cache.num_groups;
  KDT_CHECK(cache.key_dim == dim && detail::holds_columns(args.kv, args.column, 2 * kv_heads * dim),
            "gqa_store: kv ", args.kv.to_string(), " from column ", args.column, " for ", kv_heads,
            " heads of ", cache.key_dim);
  const int64_t width = kv_heads * dim;
  shared_.floats.resize(std::max<size_t>(shared_.floats.size(), args.kv.dim(0) * width));
  for_sequences("gqa_store", args.rows, cache, args.kv.dim(0), [&](const Sequence& sequence) {
    float* keys = shared_.floats.data();
    const float* kv = args.kv.data<float>() + sequence.row_begin * args.kv.dim(1) + args.column;
    for_rows(sequence.num_rows, width * 8, [&](int64_t i) {
      for (int64_t head = 0; head < kv_heads; ++head) {
        float* key = keys + i * width + head * dim;
        kernels_.rms_norm(kv + i * args.kv.dim(1) + head * dim, args.k_norm.data<float>(), dim,
                          args.eps, key);
        rotate(key, dim, args.rope, args.positions.data<int32_t>()[sequence.row_begin + i]);
      }
    });
    for (int64_t head = 0; head < kv_heads; ++head) {
      store_rows(cache, sequence, args.layer, head, keys + head * dim, width,
                 kv + width + head * dim, args.kv.dim(1));
    }
  });
}

void CpuBackend::gqa_attention(const GqaAttentionArgs& args) {
  check_gqa_attention(args);
  check_positions("gqa_attention", args.positions, args.rope);
  const auto& cache = static_cast<const CpuKvCache&>(*args.cache);
  const int64_t heads = args.q.dim(1), dim = args.q.dim(2), kv_heads = cache.num_groups;
  KDT_CHECK(cache.key_dim == dim && heads % kv_heads == 0, "gqa_attention: q ", args.q.to_string(),
            " for ", kv_heads, " key-value heads of ", cache.key_dim);
  const int64_t per_row = heads / kv_heads;
  for_sequences("gqa_attention", args.rows, cache, args.q.dim(0), [&](const Sequence& sequence) {
    const int64_t rows = sequence.num_rows;
    std::vector<int32_t>& slots = shared_.ints;
    slots.resize(rows);
    for (int64_t i = 0; i < rows; ++i) slots[i] = static_cast<int32_t>(i);
    // A task is a run of rows of one key-value head.
    const int64_t rows_per_task = std::max<int64_t>(1, kQueriesPerTask / per_row);
    const int64_t row_tasks = ceil_div(rows, rows_per_task);
    const auto body = [&](int64_t task, int thread) {
      const int64_t group = task % kv_heads;
      const int64_t first = task / kv_heads * rows_per_task;
      const int64_t count = std::min(rows_per_task, rows - first);
      std::vector<float>& staged = scratch_[thread].more_floats;
      staged.resize(std::max<size_t>(staged.size(), 2 * count * per_row * dim));
      float* query = staged.data();
      float* out = query + count * per_row * dim;
      for (int64_t i = 0; i < count * per_row; ++i) {
        const int64_t row = sequence.row_begin + first + i / per_row;
        const float* q = args.q.data<float>() + (row * heads + group * per_row + i % per_row) * dim;
        kernels_.rms_norm(q, args.q_norm.data<float>(), dim, args.eps, query + i * dim);
        rotate(query + i * dim, dim, args.rope, args.positions.data<int32_t>()[row]);
        for (int64_t d = 0; d < dim; ++d) query[i * dim + d] *= args.scale;
      }
      // A window counts positions back from the query's own, prefix_len + its slot.
      const auto oldest = [&](int64_t i) {
        return args.window == 0 ? 0 : sequence.prefix_len + first + i - args.window + 1;
      };
      attend(
          kernels_, cache, sequence, args.layer, group, query, count * per_row, per_row,
          [&](int64_t i) { return std::clamp<int64_t>(oldest(i), 0, sequence.prefix_len); },
          [&](int64_t i) {
            const int64_t skip = std::max<int64_t>(0, oldest(i) - sequence.prefix_len);
            const int64_t end = args.causal ? first + i + 1 : rows;
            return VisibleSlots{slots.data() + skip, end - skip};
          },
          scratch_[thread].floats, out);
      for (int64_t i = 0; i < count * per_row; ++i) {
        const int64_t row = sequence.row_begin + first + i / per_row;
        std::memcpy(args.out.data<float>() + (row * heads + group * per_row + i % per_row) * dim,
                    out + i * dim, dim * sizeof(float));
      }
    };
    run(rows * heads * (sequence.prefix_len + rows) * 2 * dim, row_tasks * kv_heads, body);
  });
}

void CpuBackend::kv_compact(KvCache& kv_cache, const Tensor& block_table, const Tensor& from,
                            const Tensor& to) {
  const auto& cache = static_cast<const CpuKvCache&>(kv_cache);
  check_kv_compact(block_table, from, to);
  const int64_t capacity = block_table.numel() * cache.block_size;
  for (int64_t i = 0; i < from.numel(); ++i) {
    const int64_t source = from.data<int32_t>()[i], target = to.data<int32_t>()[i];
    // Ascending and never forward: a row is read before anything is written over it.
    KDT_CHECK(target >= 0 && target <= source && source < capacity &&
                  (i == 0 ||
                   (source > from.data<int32_t>()[i - 1] && target > to.data<int32_t>()[i - 1])),
              "kv_compact: row ", source, " to ", target, " in a cache of ", capacity);
    if (source == target) continue;
    const int64_t source_block = block_table.data<int32_t>()[source / cache.block_size];
    const int64_t target_block = block_table.data<int32_t>()[target / cache.block_size];
    for (int64_t block : {source_block, target_block}) {
      KDT_CHECK(block >= 0 && block < cache.num_blocks, "kv_compact: block ", block, " of ",
                cache.num_blocks);
    }
    const int64_t source_row = source % cache.block_size, target_row = target % cache.block_size;
    for (int64_t layer = 0; layer < cache.num_layers; ++layer) {
      for (int64_t group = 0; group < cache.num_groups; ++group) {
        const float* keys = cache.keys(layer, source_block, group);
        float* new_keys = cache.keys(layer, target_block, group);
        for (int64_t d = 0; d < cache.key_dim; ++d) {
          new_keys[cache.key_index(target_row, d)] = keys[cache.key_index(source_row, d)];
        }
        std::memcpy(cache.values(layer, target_block, group) + target_row * cache.value_stride,
                    cache.values(layer, source_block, group) + source_row * cache.value_stride,
                    cache.value_dim * sizeof(float));
      }
    }
  }
}

}  // namespace kdt::cpu
