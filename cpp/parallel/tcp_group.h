// Ranks in several processes, which are connected to that of rank 0 by TCP.
#pragma once

#include <memory>
#include <vector>

#include "parallel/launch.h"
#include "parallel/rank_group.h"

namespace kdt {

// The ranks of this process in a group of launch.world_size processes with as many each: rank
// launch.rank * local_ranks + i is the i-th of them. Returns when all processes are there. Blocks
// of one exchange may have 1 GiB together.
//
// A process whose connection ends, ends the group at once with "rank 2 (node1:4711) has gone"; one
// that only stalls, within the time-out, which also is the time to come together. The last exchange
// may be complete on some ranks and not on others when the group ends.
//
// Throws Error naming the ranks that did not come, or why this one could not join, and
// std::invalid_argument for a launch or numbers out of range.
std::vector<std::unique_ptr<RankGroup>> make_hybrid_group(int local_ranks, const Launch& launch,
                                                          double timeout_s);
// With one rank a process.
std::unique_ptr<RankGroup> make_tcp_group(const Launch& launch, double timeout_s);

}  // namespace kdt
