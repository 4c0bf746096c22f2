// The caches, and the ops that fill and move their rows.
#include "kernels/cache.h"

#include "backend/checks.h"
#include "cuda_backend.h"
#include "linear.h"

namespace kdt::cuda {
namespace {

std::unique_ptr<KvCache> make_cache(int64_t num_layers, int64_t num_blocks, int64_t block_size,
                                    int64_t width, int64_t value_begin) {
  KDT_CHECK(num_layers > 0 && num_blocks > 0 && block_size > 0 && width > 0, "cuda: a cache of ",
            num_layers, " layers, ", num_blocks, " blocks of ", block_size, " rows of ", width);
  auto cache = std::make_unique<CudaKvCache>();
  cache->num_layers = num_layers;
  cache->num_blocks = num_blocks;
  cache->block_size = block_size;
  cache->width = width;
  cache->row_stride = ceil_div(width, 8) * 8;
  cache->value_begin = value_begin;
  const int64_t bytes = num_layers * num_blocks * block_size * cache->row_stride * 2;
  cache->memory = device_memory(bytes);
  KDT_CUDA_CHECK(cudaMemset(cache->memory.get(), 0, bytes));
  return cache;
}

}  // namespace

RopeParams rope_params(const RopeTable& rope, const Tensor& positions) {
  return {.cos_sin = rope.cos_sin.data<float>(),
          .positions = positions.data<int32_t>(),
          .num_positions = rope.cos_sin.dim(0),
          .dim = static_cast<int32_t>(rope.cos_sin.dim(1)),
          .interleaved = rope.interleaved};
}

Sequences sequences_of(const SequenceRows& rows, const KvCache& cache, int64_t num_rows,
                       Fault* fault) {
  return {.row_begin = rows.row_begin.data<int32_t>(),
          .prefix_len = rows.prefix_len.data<int32_t>(),
          .block_table = rows.block_table.data<int32_t>(),
          .parents = rows.parents.data<int32_t>(),
          .num_rows = num_rows,
          .num_blocks = cache.num_blocks,
          .num_sequences = static_cast<int32_t>(rows.prefix_len.numel()),
          .blocks_per_sequence = static_cast<int32_t>(rows.block_table.dim(1)),
          .block_size = static_cast<int32_t>(cache.block_size),
          .fault = fault};
}

std::unique_ptr<KvCache> CudaBackend::make_mla_cache(int64_t num_layers, int64_t num_blocks,
                                                     int64_t block_size, int64_t kv_lora_rank,
                                                     int64_t rope_dim) {
  return make_cache(num_layers, num_blocks, block_size, kv_lora_rank + rope_dim, 0);
}

std::unique_ptr<KvCache> CudaBackend::make_gqa_cache(int64_t num_layers, int64_t num_blocks,
                                                     int64_t block_size, int64_t kv_heads,
                                                     int64_t head_dim) {
  return make_cache(num_layers, num_blocks, block_size, 2 * kv_heads * head_dim,
                    kv_heads * head_dim);
}

void CudaBackend::mla_query(const MlaQueryArgs& args) {
  check_mla_query(args);
  const auto& w_uk = static_cast<const CudaLinear&>(*args.w_uk);
  const int64_t rows = args.q.dim(0), heads = args.q.dim(1), head_dim = args.q.dim(2);
  const int64_t nope = w_uk.in_features, width = args.out.dim(2);
  const int64_t rank = width - (head_dim - nope);
  KDT_CHECK(w_uk.num_matrices() == heads, "mla_query: W_UK has ", w_uk.num_matrices(),
            " matrices for ", heads, " heads");
  multiply(w_uk, args.q.data<float>(), heads * head_dim, head_dim, rows, args.out.data<float>(),
           heads * width, width, args.scale);
  launch_rotate_query({.q = args.q.data<float>(),
                       .out = args.out.data<float>(),
                       .rope = rope_params(args.rope, args.positions),
                       .fault = device_fault_,
                       .num_rows = rows,
                       .num_heads = heads,
                       .q_stride = head_dim,
                       .q_begin = nope,
                       .out_stride = width,
                       .out_begin = rank,
                       .scale = args.scale},
                      stream_);
}

void CudaBackend::mla_store(const MlaStoreArgs& args) {
  check_mla_store(args);
  const auto& cache = static_cast<const CudaKvCache&>(*args.cache);
  const int64_t rank = args.norm_weight.numel(), rope_dim = args.rope.cos_sin.dim(1);
  KDT_CHECK(cache.width == rank + rope_dim && cache.value_begin == 0,
            "mla_store: a cache of rows of ", cache.width, " for a latent of ", rank, " + ",
            rope_dim);
  launch_mla_store({.kv = args.kv.data<float>() + args.column,
                    .norm_weight = args.norm_weight.data<float>(),
                    .layer = cache.layer(args.layer),
                    .rope = rope_params(args.rope, args.positions),
                    .sequences = sequences_of(args.rows, cache, args.kv.dim(0), device_fault_),
                    .kv_stride = args.kv.dim(1),
                    .rank = rank,
                    .row_stride = cache.row_stride,
                    .eps = args.eps},
                   stream_);
}

void CudaBackend::gqa_store(const GqaStoreArgs& args) {
  check_gqa_store(args);
  const auto& cache = static_cast<const CudaKvCache&>(*args.cache);
  const int64_t dim = args.k_norm.numel(), kv_heads = cache.value_begin / dim;
  KDT_CHECK(kv_heads * dim == cache.value_begin &&
                detail::holds_columns(args.kv, args.column, 2 * kv_heads * dim),
            "gqa_store: kv ", args.kv.to_string(), " from column ", args.column, " for ",
            cache.value_begin, " keys of heads of ", dim);
  launch_gqa_store({.kv = args.kv.data<float>() + args.column,
                    .k_norm = args.k_norm.data<float>(),
                    .layer = cache.layer(args.layer),
                    .rope = rope_params(args.rope, args.positions),
                    .sequences = sequences_of(args.rows, cache, args.kv.dim(0), device_fault_),
                    .kv_stride = args.kv.dim(1),
                    .kv_heads = kv_heads,
                    .row_stride = cache.row_stride,
                    .eps = args.eps},
                   stream_);
}

void CudaBackend::kv_compact(KvCache& kv_cache, const Tensor& block_table, const Tensor& from,
                             const Tensor& to) {
  const auto& cache = static_cast<const CudaKvCache&>(kv_cache);
  check_kv_compact(block_table, from, to);
  launch_kv_compact({.memory = typed<uint16_t>(cache.memory),
                     .block_table = block_table.data<int32_t>(),
                     .from = from.data<int32_t>(),
                     .to = to.data<int32_t>(),
                     .fault = device_fault_,
                     .num_layers = cache.num_layers,
                     .num_blocks = cache.num_blocks,
                     .row_stride = cache.row_stride,
                     .num_moves = from.numel(),
                     .num_table_blocks = static_cast<int32_t>(block_table.numel()),
                     .block_size = static_cast<int32_t>(cache.block_size)},
                    stream_);
}

}  // namespace kdt::cuda
