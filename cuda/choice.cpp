// Choosing tokens from logits.
#include "backend/checks.h"
#include "cuda_backend.h"
#include "kernels/argmax.h"
#include "kernels/merge_topk.h"
#include "kernels/topk.h"

namespace kdt::cuda {
namespace {

constexpr int64_t kMost = (int64_t{1} << 31) - 1;

// Rows and their lengths fit the kernels' 32-bit positions and grids.
void check_size(const char* op, const Tensor& logits) {
  KDT_CHECK(logits.dim(1) <= kMost && logits.dim(0) <= kMost / num_logits_chunks(logits.dim(1)), op,
            ": logits ", logits.to_string(), " are too many for cuda");
}

}  // namespace

void CudaBackend::topk_logprobs(const TopkLogprobsArgs& args) {
  check_topk_logprobs(args);
  check_size("topk_logprobs", args.logits);
  const auto* logits = args.logits.data<float>();
  const int64_t rows = args.logits.dim(0), vocab = args.logits.dim(1);
  const int64_t groups = rows * ceil_div(vocab, kTopkGroup),
                chunks = rows * num_logits_chunks(vocab);
  workspace_.reserve(Workspace::piece(groups * 4) + 2 * Workspace::piece(chunks * 4) +
                     Workspace::piece(rows * 8));
  launch_topk({.logits = logits,
               .logprobs = args.logprobs.data<float>(),
               .ids = args.ids.data<int32_t>(),
               .log_sums = args.log_sums.data<float>(),
               .first_id = static_cast<int32_t>(args.first_id),
               .num_rows = rows,
               .vocab = vocab,
               .k = args.logprobs.dim(1),
               .num_groups = ceil_div(vocab, kTopkGroup),
               .num_chunks = static_cast<uint32_t>(num_logits_chunks(vocab)),
               .scale = 1.0f / args.temperature,
               .aligned = logits_aligned(logits, vocab),
               .maxima = workspace_.take<uint32_t>(groups),
               .tops = workspace_.take<float>(chunks),
               .sums = workspace_.take<float>(chunks),
               .bounds = workspace_.take<uint64_t>(rows),
               .first = 0,
               .count = 0},
              stream_);
}

void CudaBackend::merge_topk(const MergeTopkArgs& args) {
  check_merge_topk(args);
  KDT_CHECK(args.parts.numel() <= kMost, "merge_topk: parts ", args.parts.to_string(),
            " are too many for cuda");
  const int64_t rows = args.ids.dim(0), part_k = args.part_k();
  launch_merge_topk({.part_logprobs = args.parts.data<float>(),
                     .part_ids = args.parts.data<int32_t>() + rows * part_k,
                     .log_sums = args.parts.data<float>() + 2 * rows * part_k,
                     .logprobs = args.logprobs.data<float>(),
                     .ids = args.ids.data<int32_t>(),
                     .part_stride = static_cast<int32_t>(args.parts.dim(1)),
                     .num_parts = static_cast<int32_t>(args.parts.dim(0)),
                     .num_rows = static_cast<int32_t>(rows),
                     .part_k = static_cast<int32_t>(part_k),
                     .k = static_cast<int32_t>(args.ids.dim(1))},
                    stream_);
}

void CudaBackend::argmax(const ArgmaxArgs& args) {
  check_argmax(args);
  check_size("argmax", args.logits);
  const auto* logits = args.logits.data<float>();
  const int64_t rows = args.logits.dim(0), vocab = args.logits.dim(1),
                chunks = rows * num_logits_chunks(vocab);
  workspace_.reserve(Workspace::piece(chunks * 8));
  launch_argmax({.logits = logits,
                 .ids = args.ids.data<int32_t>(),
                 .values = args.values.data<float>(),
                 .first_id = static_cast<int32_t>(args.first_id),
                 .keys = workspace_.take<uint64_t>(chunks),
                 .num_rows = rows,
                 .vocab = vocab,
                 .num_chunks = static_cast<uint32_t>(num_logits_chunks(vocab)),
                 .aligned = logits_aligned(logits, vocab)},
                stream_);
}

}  // namespace kdt::cuda
