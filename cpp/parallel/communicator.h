// Sums and gathers over the ranks of a group. A call is an op of the back end that made the
// communicator: its tensors lie in that rank's device memory, and it runs in order with the other
// ops. All ranks make the same calls in the same order.
#pragma once

#include "core/tensor.h"
#include "parallel/rank_group.h"

namespace kdt {

class Communicator {
 public:
  virtual ~Communicator() = default;
  // How the ranks' tensors reach each other, in words for the user.
  virtual std::string describe() const = 0;

  // x [T, n] f32 = ((x of rank 0 + x of rank 1) + x of rank 2) + ...: in rank order whatever the
  // size, so that a row's bits depend neither on the rank nor on the rows beside it.
  virtual void all_reduce(const Tensor& x) = 0;
  // to [size, ...] = each rank's `from`, in rank order.
  virtual void all_gather(const Tensor& from, const Tensor& to) = 0;
};

}  // namespace kdt
