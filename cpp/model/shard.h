// Which part of a model a rank holds.
#pragma once

#include <cstdint>

namespace kdt {

inline constexpr int kMaxRanks = 64;

struct Shard {
  int rank = 0;
  int size = 1;
  bool expert_parallel = false;  // whole experts instead of a slice of each

  int64_t count(int64_t all) const { return all / size; }
  int64_t begin(int64_t all) const { return count(all) * rank; }
};

}  // namespace kdt
