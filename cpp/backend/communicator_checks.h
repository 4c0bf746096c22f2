// The shape check of each call of a Communicator.
#pragma once

#include "backend/checks.h"
#include "parallel/communicator.h"

namespace kdt {

inline void check_all_reduce(const Tensor& x) {
  KDT_CHECK(x.dtype() == DType::kFloat32 && x.ndim() > 0 && (x.defined() || x.numel() == 0),
            "all_reduce: x is ", x.to_string(), ", want f32");
}

inline void check_all_gather(const Tensor& from, const Tensor& to, int size) {
  bool same = to.dtype() == from.dtype() && to.ndim() == from.ndim() + 1 && to.dim(0) == size;
  for (int i = 0; same && i < from.ndim(); ++i) same = to.dim(i + 1) == from.dim(i);
  KDT_CHECK(same && ((from.defined() && to.defined()) || from.numel() == 0), "all_gather: from ",
            from.to_string(), " to ", to.to_string(), " with ", size, " ranks");
}

}  // namespace kdt
