// A drafter's attention.
#include <algorithm>

#include "backend/checks.h"
#include "cuda_backend.h"
#include "kernels/cache.h"
#include "kernels/gqa_attention.h"

namespace kdt::cuda {

void CudaBackend::gqa_attention(const GqaAttentionArgs& args) {
  check_gqa_attention(args);
  const auto& cache = static_cast<const CudaKvCache&>(*args.cache);
  const int64_t rows = args.q.dim(0), heads = args.q.dim(1), dim = args.q.dim(2);
  const int64_t kv_heads = cache.value_begin / dim;
  KDT_CHECK(kv_heads > 0 && kv_heads * dim == cache.value_begin && heads % kv_heads == 0,
            "gqa_attention: q ", args.q.to_string(), " for a cache of ", cache.value_begin,
            " keys a row");
  // At most 32 segments, whatever the capacity; their size depends on it alone.
  const int64_t capacity = std::max<int64_t>(args.rows.block_table.dim(1) * cache.block_size, 1);
  int64_t segment = 256;
  while (segment * 32 < capacity) segment *= 2;
  const int64_t segments = ceil_div(capacity, segment), items = rows * heads * segments;
  using W = Workspace;
  workspace_.reserve(W::piece(rows * heads * dim * 2) + W::piece(items * dim * 4) +
                     W::piece(items * 8));
  auto* query = workspace_.take<uint16_t>(rows * heads * dim);
  constexpr float kLog2E = 1.4426950408889634f;
  launch_prepare_heads({.x = args.q.data<float>(),
                        .weight = args.q_norm.data<float>(),
                        .out = query,
                        .rope = rope_params(args.rope, args.positions),
                        .fault = device_fault_,
                        .num_rows = rows,
                        .num_heads = heads,
                        .eps = args.eps,
                        .scale = args.scale * kLog2E},
                       stream_);
  launch_gqa_attention({.query = query,
                        .layer = cache.layer(args.layer),
                        .out = args.out.data<float>(),
                        .partial_out = workspace_.take<float>(items * dim),
                        .partial_lse = workspace_.take<float2>(items),
                        .sequences = sequences_of(args.rows, cache, rows, device_fault_),
                        .num_heads = heads,
                        .kv_heads = kv_heads,
                        .head_dim = dim,
                        .row_stride = cache.row_stride,
                        .window = args.window,
                        .num_segments = static_cast<int32_t>(segments),
                        .segment_size = static_cast<int32_t>(segment),
                        .causal = args.causal},
                       stream_);
}

}  // namespace kdt::cuda
