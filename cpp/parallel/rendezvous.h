// How the processes of a group find each other: all connect to process 0, which lets in those of
// its own job. What else comes to its port is sent away.
#pragma once

#include <string>
#include <vector>

#include "parallel/launch.h"
#include "parallel/socket.h"

namespace kdt::net {

struct Member {
  Fd fd;
  std::string name;  // "rank 2 (node1:4711)"
};

// Process 0: a connection to each process, the one at [0] being none. Both throw Error naming who
// did not come, or why this process was refused.
std::vector<Member> gather_members(const Launch& launch, int ranks_each, double timeout_s);
// While gather_members() waits: the ranks that have not come, "ranks 1, 3 of 4", and the processes
// that were refused. "": it does not wait. For any thread.
std::string missing_ranks();
// The others: the connection to process 0.
Member join_members(const Launch& launch, int ranks_each, double timeout_s);

}  // namespace kdt::net
