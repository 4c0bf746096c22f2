#include "kernels/tree_build.h"

#include "launch.cuh"
#include "primitives.cuh"

namespace kdt::cuda {
namespace {

constexpr int kThreads = 256;

struct Nodes {
  double logw[kMaxTreeNodes];
  double candidate[kMaxTreeNodes];  // log-probability of the node's next child
  uint32_t next[kMaxTreeNodes];     // that child's depth, rank << 8, and the child before it << 20
  uint32_t place[kMaxTreeNodes];    // depth, rank << 8, parent << 20
  int32_t first_child[kMaxTreeNodes];
  int32_t next_sibling[kMaxTreeNodes];
  int32_t num_nodes;
};

// What can be reached: no path is longer and no rank greater than the budget.
struct Reach {
  int depth, width;
};
__device__ __host__ inline Reach reach_of(const TreeBuildParams& p) {
  return {static_cast<int>(p.depth < p.budget ? p.depth : p.budget),
          static_cast<int>(p.width < p.budget ? p.width : p.budget)};
}

// Greater log-probabilities have greater keys, the two zeros the same. 0: no candidate, which is
// also what a probability of zero or no number gives. In integers, as few chips are quick at f64.
__device__ __forceinline__ uint64_t candidate_key(double logw) {
  constexpr uint64_t kSign = uint64_t{1} << 63, kExponent = uint64_t{0x7FF} << 52;
  const auto bits = static_cast<uint64_t>(__double_as_longlong(logw));
  const uint64_t key = (bits & kSign) != 0 && bits != kSign ? ~bits : bits | kSign;
  return (bits & kExponent) == kExponent ? 0 : key;
}

// By one warp. Node i's candidate is held by lane i % 32. The time of a tree is the latency of this
// loop, so nothing in it branches.
template <int kSlots>
__device__ void grow(int budget, Reach reach, const float* logprobs, Nodes& nodes) {
  const auto lane = static_cast<int>(threadIdx.x);
  uint64_t key[kSlots] = {};    // of the candidates
  uint32_t order[kSlots] = {};  // of the nodes: the post-order
  if (reach.depth > 0 && reach.width > 0 && lane == 0) {
    key[0] = candidate_key(static_cast<double>(logprobs[0]));
    nodes.candidate[0] = static_cast<double>(logprobs[0]);
    nodes.next[0] = 1;
  }
  __syncwarp();

  int num_nodes = 1;
  while (num_nodes <= budget) {
    uint64_t best = key[0];
    uint32_t best_at = order[0] << 16 | static_cast<uint32_t>(lane);
#pragma unroll
    for (int j = 1; j < kSlots; ++j) {
      const uint32_t at = order[j] << 16 | static_cast<uint32_t>(lane + 32 * j);
      const bool better = (key[j] > best) | ((key[j] == best) & (at < best_at));
      best = better ? key[j] : best;
      best_at = better ? at : best_at;
    }
    const auto best_high = static_cast<uint32_t>(best >> 32);
    const uint32_t high = redux_max(best_high);
    if (high == 0) break;
    const uint32_t low = redux_max(best_high == high ? static_cast<uint32_t>(best) : 0u);
    const bool equal = (best_high == high) & (static_cast<uint32_t>(best) == low);
    const uint32_t first = redux_min(equal ? best_at : 0xFFFFFFFFu);
    const auto parent = static_cast<int>(first & 0xFFFF);
    const uint32_t place = first >> 16;

    const uint32_t next = nodes.next[parent];
    const double logw = nodes.candidate[parent];
    const auto depth = static_cast<int>(next & 0xFF), rank = static_cast<int>(next >> 8 & 0xFFF);
    const float* row = logprobs + (depth - 1) * reach.width;
    const double sibling = __dadd_rn(__dsub_rn(logw, static_cast<double>(row[rank])),
                                     static_cast<double>(row[rank + 1]));
    const double child = __dadd_rn(logw, static_cast<double>(row[reach.width]));
    const uint64_t sibling_key = rank + 1 < reach.width ? candidate_key(sibling) : 0;
    const uint64_t child_key = depth < reach.depth ? candidate_key(child) : 0;
    const int node = num_nodes++;
#pragma unroll
    for (int j = 0; j < kSlots; ++j) {
      const bool is_parent = lane + 32 * j == parent, is_node = lane + 32 * j == node;
      order[j] = is_node ? place : order[j] + (order[j] >= place);
      key[j] = is_node ? child_key : is_parent ? sibling_key : key[j];
    }
    __syncwarp();  // all have read what changes now
    if (lane == 0) {
      nodes.logw[node] = logw;
      nodes.place[node] = (next & 0xFFFFF) | static_cast<uint32_t>(parent) << 20;
      (rank == 0 ? nodes.first_child[parent] : nodes.next_sibling[next >> 20]) = node;
      nodes.next[parent] = static_cast<uint32_t>(depth | (rank + 1) << 8 | node << 20);
      nodes.candidate[parent] = sibling;
      nodes.next[node] = static_cast<uint32_t>(depth + 1);
      nodes.candidate[node] = child;
    }
    __syncwarp();
  }
  if (lane == 0) nodes.num_nodes = num_nodes;
}

template <int kSlots>
__global__ void __launch_bounds__(kThreads) tree_build_kernel(const TreeBuildParams p) {
  Nodes& nodes = *reinterpret_cast<Nodes*>(shared_memory());
  auto* logprobs = reinterpret_cast<float*>(shared_memory() + sizeof(Nodes));
  const Reach reach = reach_of(p);
  for (int i = static_cast<int>(threadIdx.x); i <= p.budget; i += kThreads)
    nodes.first_child[i] = nodes.next_sibling[i] = -1;
  for (int i = static_cast<int>(threadIdx.x); i < reach.depth * reach.width; i += kThreads)
    logprobs[i] = p.logprobs[i / reach.width * p.width + i % reach.width];
  // Behind the last row one value is read and not used.
  if (threadIdx.x == 0) logprobs[reach.depth * reach.width] = 0;
  __syncthreads();
  if (threadIdx.x < 32) grow<kSlots>(p.budget, reach, logprobs, nodes);
  __syncthreads();

  const int num_nodes = nodes.num_nodes;
  for (int i = static_cast<int>(threadIdx.x); i < num_nodes; i += kThreads) {
    p.first_child[i] = nodes.first_child[i];
    p.next_sibling[i] = nodes.next_sibling[i];
    if (i == 0) {
      p.tokens[0] = p.parents[0] = -1;
      p.depths[0] = 0;
      p.logw[0] = 0;
      *p.num_nodes = num_nodes;
      continue;
    }
    const uint32_t place = nodes.place[i];
    const auto depth = static_cast<int32_t>(place & 0xFF);
    p.tokens[i] = p.ids[(depth - 1) * p.width + (place >> 8 & 0xFFF)];
    p.parents[i] = static_cast<int32_t>(place >> 20);
    p.depths[i] = depth;
    p.logw[i] = nodes.logw[i];
  }
}

}  // namespace

void launch_tree_build(const TreeBuildParams& params, cudaStream_t stream) {
  const Reach reach = reach_of(params);
  const int64_t shared_bytes =
      sizeof(Nodes) + (static_cast<int64_t>(reach.depth) * reach.width + 1) * sizeof(float);
  // The last node needs no candidate: nothing is chosen after it.
  if (params.budget <= 64) {
    launch<tree_build_kernel<2>>(dim3(1), kThreads, shared_bytes, stream, params);
  } else {
    launch<tree_build_kernel<8>>(dim3(1), kThreads, shared_bytes, stream, params);
  }
}

}  // namespace kdt::cuda
