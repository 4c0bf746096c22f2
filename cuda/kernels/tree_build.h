// The best-first draft tree, one block a tree (ddtree paper, algorithm 1; ties: docs/adr/0004).
//
// Each node has one candidate, its next child, so one warp holds all candidates in registers and a
// pop is a maximum over the warp instead of a heap's. Candidates of equal log-probability come in
// the order of their paths, a prefix before its extensions. That is the post-order of their parents
// in the tree so far: children of a node below the candidate have smaller ranks than it. A new node
// stands right before its parent, so the order is kept by moving all behind it up by one, and no
// path is ever compared.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace kdt::cuda {

inline constexpr int kMaxTreeNodes = 257;  // the root and the greatest budget

struct TreeBuildParams {
  const float* logprobs;  // [depth, width]
  const int32_t* ids;     // [depth, width]
  int64_t depth, width;
  int budget;  // below kMaxTreeNodes

  int32_t* tokens;  // [>= budget + 1], as the others
  int32_t* parents;
  int32_t* depths;
  int32_t* first_child;
  int32_t* next_sibling;
  double* logw;
  int32_t* num_nodes;  // [1]
};
void launch_tree_build(const TreeBuildParams& params, cudaStream_t stream);

}  // namespace kdt::cuda
