// Building and walking draft trees. The order of operations here, ties included, is the definition
// that every other back end must match (docs/adr/0004).
#include <algorithm>
#include <cmath>
#include <cstring>

#include "backend/checks.h"
#include "cpu/cpu_backend.h"

namespace kdt::cpu {
namespace {

// A prefix that may become a node: its parent is one, its last token is the rank-th of its depth.
struct Candidate {
  double logw;
  int32_t parent;
  int32_t depth;
  int32_t rank;
};

// The paths of ranks from the root, compared as sequences; a proper prefix is the smaller.
class PathOrder {
 public:
  PathOrder(const int32_t* parents, const int32_t* ranks) : parents_(parents), ranks_(ranks) {}

  bool less(const Candidate& a, const Candidate& b) const {
    int32_t path_a[kMaxTreeDepth], path_b[kMaxTreeDepth];
    write(a, path_a);
    write(b, path_b);
    return std::lexicographical_compare(path_a, path_a + a.depth, path_b, path_b + b.depth);
  }

 private:
  void write(const Candidate& candidate, int32_t* path) const {
    path[candidate.depth - 1] = candidate.rank;
    int32_t node = candidate.parent;
    for (int32_t d = candidate.depth - 1; d > 0; --d) {
      path[d - 1] = ranks_[node];
      node = parents_[node];
    }
  }

  const int32_t* parents_;
  const int32_t* ranks_;
};

}  // namespace

void CpuBackend::tree_build(const TreeBuildArgs& args) {
  check_tree_build(args);
  const int64_t max_depth = args.ids.dim(0), width = args.ids.dim(1);
  const float* logprobs = args.logprobs.data<float>();
  int32_t* parents = args.parents.data<int32_t>();
  int32_t* first_child = args.first_child.data<int32_t>();
  int32_t* next_sibling = args.next_sibling.data<int32_t>();
  int32_t ranks[kMaxTreeBudget + 1];
  int32_t last_child[kMaxTreeBudget + 1];

  const auto add_node = [&](int32_t slot, int32_t token, int32_t parent, int32_t depth,
                            int32_t rank, double logw) {
    args.tokens.data<int32_t>()[slot] = token;
    args.depths.data<int32_t>()[slot] = depth;
    args.logw.data<double>()[slot] = logw;
    parents[slot] = parent;
    first_child[slot] = next_sibling[slot] = last_child[slot] = -1;
    ranks[slot] = rank;
    if (parent < 0) return;
    (last_child[parent] < 0 ? first_child[parent] : next_sibling[last_child[parent]]) = slot;
    last_child[parent] = slot;
  };
  add_node(0, -1, -1, 0, -1, 0.0);
  int32_t num_nodes = 1;

  const PathOrder order(parents, ranks);
  // The heap's top is the candidate that comes first.
  const auto comes_later = [&](const Candidate& a, const Candidate& b) {
    return a.logw < b.logw || (a.logw == b.logw && order.less(b, a));
  };
  Candidate heap[2 * kMaxTreeBudget + 1];
  int64_t heap_size = 0;
  const auto push = [&](const Candidate& candidate) {
    // A probability of zero, or no number, ends the run of siblings here.
    if (!std::isfinite(candidate.logw)) return;
    heap[heap_size++] = candidate;
    std::push_heap(heap, heap + heap_size, comes_later);
  };

  if (max_depth > 0 && width > 0) push({static_cast<double>(logprobs[0]), 0, 1, 0});
  while (heap_size > 0 && num_nodes <= args.budget) {
    std::pop_heap(heap, heap + heap_size, comes_later);
    const Candidate best = heap[--heap_size];
    const float* row = logprobs + (best.depth - 1) * width;
    const int32_t slot = num_nodes++;
    add_node(slot, args.ids.data<int32_t>()[(best.depth - 1) * width + best.rank], best.parent,
             best.depth, best.rank, best.logw);
    if (best.rank + 1 < width) {
      const double logw = (best.logw - static_cast<double>(row[best.rank])) +
                          static_cast<double>(row[best.rank + 1]);
      push({logw, best.parent, best.depth, best.rank + 1});
    }
    if (best.depth < max_depth) {
      push({best.logw + static_cast<double>(row[width]), slot, best.depth + 1, 0});
    }
  }
  args.num_nodes.data<int32_t>()[0] = num_nodes;
}

void CpuBackend::tree_accept(const TreeAcceptArgs& args) {
  check_tree_accept(args);
  const int64_t slots = args.tokens.numel();
  const int32_t* tokens = args.tokens.data<int32_t>();
  const int32_t* first_child = args.first_child.data<int32_t>();
  const int32_t* next_sibling = args.next_sibling.data<int32_t>();
  const int32_t* target = args.target.data<int32_t>();
  const auto check_link = [&](int32_t link, int32_t from) {
    KDT_CHECK(link == -1 || (link > from && link < slots), "tree_accept: link from slot ", from,
              " to ", link);
  };
  int32_t node = 0, length = 0;
  while (true) {
    args.accepted.data<int32_t>()[length++] = node;
    int32_t child = first_child[node];
    check_link(child, node);
    while (child >= 0 && tokens[child] != target[node]) {
      check_link(next_sibling[child], child);
      child = next_sibling[child];
    }
    if (child < 0) break;
    node = child;
  }
  args.accept_length.data<int32_t>()[0] = length;
  args.bonus_token.data<int32_t>()[0] = target[node];
}

}  // namespace kdt::cpu
