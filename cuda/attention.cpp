// The target's attention over its latent cache.
#include <algorithm>

#include "backend/checks.h"
#include "cuda_backend.h"
#include "kernels/mla_attention.h"

namespace kdt::cuda {
namespace {

static_assert(kMlaTreeDepth == kMaxTreeDepth);

// What the partial results of one launch may take; long prefill chunks go in several.
constexpr int64_t kMaxPartialBytes = int64_t{256} << 20;

}  // namespace

void CudaBackend::mla_attention(const MlaAttentionArgs& args) {
  check_mla_attention(args);
  const auto& cache = static_cast<const CudaKvCache&>(*args.cache);
  const int64_t num_rows = args.query.dim(0), heads = args.query.dim(1), width = args.query.dim(2),
                rank = args.out.dim(2);
  KDT_CHECK(width == cache.width && cache.value_begin == 0 && rank > 0 && rank <= width,
            "mla_attention: query ", args.query.to_string(), " and out ", args.out.to_string(),
            " for a cache of rows of ", cache.width);
  if (num_rows == 0) return;
  MlaAttentionParams params = {.query = args.query.data<float>(),
                               .layer = cache.layer(args.layer),
                               .positions = args.positions.data<int32_t>(),
                               .out = args.out.data<float>(),
                               .partial_out = nullptr,
                               .partial_sums = nullptr,
                               .sequences = sequences_of(args.rows, cache, num_rows, device_fault_),
                               .row_stride = cache.row_stride,
                               .num_heads = static_cast<int32_t>(heads),
                               .rank = static_cast<int32_t>(rank),
                               .rope = static_cast<int32_t>(width - rank),
                               .first_row = 0,
                               .end_row = static_cast<int32_t>(num_rows),
                               .num_segments = 0};
  if (!mla_runs_on_tensor_cores(rank, width - rank, cache.block_size)) {
    launch_mla_attention_plain(params, stream_);
    return;
  }
  // How many keys a sequence has is on the device; the block table bounds it.
  const int64_t most_keys = args.rows.block_table.dim(1) * cache.block_size;
  KDT_CHECK(most_keys < INT32_MAX, "mla_attention: block_table ", args.rows.block_table.to_string(),
            " of blocks of ", cache.block_size);
  params.num_segments = mla_segment_count(mla_prefix_keys(static_cast<int32_t>(most_keys)));
  const int64_t per_row = heads * (params.num_segments + 1);
  const int64_t row_bytes = per_row * (rank * 4 + 8);
  const int64_t at_once = std::clamp<int64_t>(kMaxPartialBytes / row_bytes, 1, num_rows);
  const int64_t out_count = at_once * per_row * rank, sum_count = at_once * per_row;
  workspace_.reserve(Workspace::piece(out_count * 4) + Workspace::piece(sum_count * 8));
  params.partial_out = workspace_.take<float>(out_count);
  params.partial_sums = workspace_.take<float2>(sum_count);
  for (int64_t row = 0; row < num_rows; row += at_once) {
    params.first_row = static_cast<int32_t>(row);
    params.end_row = static_cast<int32_t>(std::min(row + at_once, num_rows));
    launch_mla_attention(params, {num_multiprocessors_, shared_bytes_}, stream_);
    launch_mla_merge(params, stream_);
  }
}

}  // namespace kdt::cuda
