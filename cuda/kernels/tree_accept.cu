#include "kernels/tree_accept.h"

#include "fault.cuh"
#include "launch.cuh"
#include "primitives.cuh"

namespace kdt::cuda {
namespace {

constexpr int kThreads = 256;

struct Link {
  int32_t token, to;
};
static_assert(2 * sizeof(Link) * kMaxAcceptSlots <= kMaxSharedBytes);

__global__ void __launch_bounds__(kThreads) tree_accept_kernel(const TreeAcceptParams p) {
  auto* down = reinterpret_cast<Link*>(shared_memory());  // the target's token, the first child
  Link* across = down + p.num_slots;                      // the slot's token, the next sibling
  for (int i = static_cast<int>(threadIdx.x); i < p.num_slots; i += kThreads) {
    down[i] = {p.target[i], p.first_child[i]};
    across[i] = {p.tokens[i], p.next_sibling[i]};
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  int node = 0, length = 0;
  while (true) {
    p.accepted[length++] = node;
    const int32_t wanted = down[node].token;
    int from = node, child = down[node].to;
    // Links lead to later slots, so that every walk ends.
    while (child > from && child < p.num_slots && across[child].token != wanted) {
      from = child;
      child = across[child].to;
    }
    if (child != -1 && (child <= from || child >= p.num_slots)) {
      report(p.fault, FaultKind::kLink, from, child);
      child = -1;
    }
    if (child < 0) break;
    node = child;
  }
  *p.accept_length = length;
  *p.bonus_token = down[node].token;
}

}  // namespace

void launch_tree_accept(const TreeAcceptParams& params, cudaStream_t stream) {
  launch<tree_accept_kernel>(dim3(1), kThreads, 2 * sizeof(Link) * params.num_slots, stream,
                             params);
}

}  // namespace kdt::cuda
