// Where a model runs: this rank's back end, its shard, and its way to the other ranks.
#pragma once

#include "backend/backend.h"
#include "model/shard.h"
#include "parallel/communicator.h"

namespace kdt {

struct RankContext {
  Backend& backend;
  Shard shard = {};
  Communicator* communicator = nullptr;  // null: there is one rank

  // x = its sum over the ranks.
  void all_reduce(const Tensor& x) const {
    if (communicator != nullptr) communicator->all_reduce(x);
  }
  // residual += delta summed over the ranks, then out = RMSNorm(residual) * weight.
  void add_rms_norm(const Tensor& residual, const Tensor& delta, const Tensor& weight, float eps,
                    const Tensor& out) const {
    all_reduce(delta);
    backend.add_rms_norm(residual, delta, weight, eps, out);
  }
};

}  // namespace kdt
