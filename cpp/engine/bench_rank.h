// What a forward pass of the target costs on ranks, against one of them alone.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "backend/backend.h"
#include "engine/checkpoints.h"

namespace kdt {

// Microseconds at one number of rows, medians of several runs.
struct RankTimes {
  int64_t rows = 0;
  double alone_us = 0;       // the pass on rank 0 with its part of the weights; it sums nothing
  double ranks_us = 0;       // the pass on all ranks
  double all_reduce_us = 0;  // one of many sums of [rows, hidden_size] in a row
};

struct RankBench {
  BackendInfo backend;        // rank 0's
  std::string communication;  // Communicator::describe()
  int64_t hidden_size = 0;
  int64_t num_all_reduces = 0;  // of a pass
  LoadReport load;
  std::vector<RankTimes> times;  // one of `rows` each
};

// Loads the target for all ranks, in threads of this process, fills the cache with `context` rows
// and times passes of trees of so many `rows` behind them. What the options say of requests, of a
// drafter and of progress is not used. Throws Error for files and devices and std::invalid_argument
// for options, naming the field and the value.
RankBench bench_rank(const EngineOptions& options, const std::vector<int64_t>& rows,
                     int64_t context);

}  // namespace kdt
