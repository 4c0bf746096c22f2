// Building and walking draft trees.
#include "backend/checks.h"
#include "cuda_backend.h"
#include "kernels/tree_accept.h"
#include "kernels/tree_build.h"

namespace kdt::cuda {

static_assert(kMaxTreeBudget < kMaxTreeNodes);

void CudaBackend::tree_build(const TreeBuildArgs& args) {
  check_tree_build(args);
  launch_tree_build({.logprobs = args.logprobs.data<float>(),
                     .ids = args.ids.data<int32_t>(),
                     .depth = args.ids.dim(0),
                     .width = args.ids.dim(1),
                     .budget = static_cast<int>(args.budget),
                     .tokens = args.tokens.data<int32_t>(),
                     .parents = args.parents.data<int32_t>(),
                     .depths = args.depths.data<int32_t>(),
                     .first_child = args.first_child.data<int32_t>(),
                     .next_sibling = args.next_sibling.data<int32_t>(),
                     .logw = args.logw.data<double>(),
                     .num_nodes = args.num_nodes.data<int32_t>()},
                    stream_);
}

void CudaBackend::tree_accept(const TreeAcceptArgs& args) {
  check_tree_accept(args);
  KDT_CHECK(args.tokens.numel() <= kMaxAcceptSlots, "tree_accept: ", args.tokens.numel(),
            " slots, at most ", kMaxAcceptSlots, " on cuda");
  launch_tree_accept({.tokens = args.tokens.data<int32_t>(),
                      .first_child = args.first_child.data<int32_t>(),
                      .next_sibling = args.next_sibling.data<int32_t>(),
                      .target = args.target.data<int32_t>(),
                      .accepted = args.accepted.data<int32_t>(),
                      .accept_length = args.accept_length.data<int32_t>(),
                      .bonus_token = args.bonus_token.data<int32_t>(),
                      .fault = device_fault_,
                      .num_slots = static_cast<int>(args.tokens.numel())},
                     stream_);
}

}  // namespace kdt::cuda
