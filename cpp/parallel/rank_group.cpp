#include "parallel/rank_group.h"

#include <cstring>

namespace kdt {

void RankGroup::broadcast(void* data, int64_t bytes) {
  std::vector<char> all(static_cast<size_t>(bytes) * size());
  all_gather(data, bytes, all.data());
  if (bytes > 0) std::memcpy(data, all.data(), bytes);
}

void RankGroup::wait_for_leader(void* data, int64_t bytes) { broadcast(data, bytes); }

void RankGroup::barrier() { all_gather(nullptr, 0, nullptr); }

void RankGroup::wait_for_all() { barrier(); }

void RankGroup::set_away(const std::string&) {}

}  // namespace kdt
