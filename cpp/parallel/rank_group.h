// Collectives of the ranks of a group, on the host. Each rank has an object of its own, which one
// thread uses; abort() and aborted() may be called from any thread.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace kdt {

// A rank that destroys its object has left, which ends the group. A forked process may destroy the
// objects, but take part in no collective.
class RankGroup {
 public:
  virtual ~RankGroup() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;

  // Each rank brings `bytes` of `mine`, as many as the others; `out` [size * bytes] has all of
  // them, in rank order. `mine` may be its place in `out`, and else may not overlap it. Throws
  // Error naming the ranks that did not come in time, or the reason for which the group has ended.
  virtual void all_gather(const void* mine, int64_t bytes, void* out) = 0;
  // Ends the group: what any rank waits for, now or later, throws `reason`. The first reason stays.
  virtual void abort(const std::string& reason) noexcept = 0;
  // The reason for which the group has ended; "": it has not.
  virtual std::string aborted() const = 0;
  // How long a rank waits for the others, in seconds.
  virtual double timeout_s() const = 0;

  // `data` becomes rank 0's. Errors as all_gather's.
  virtual void broadcast(void* data, int64_t bytes);
  // The same between two pieces of work, where the others wait for rank 0 as long as it takes.
  virtual void wait_for_leader(void* data, int64_t bytes);
  void barrier();
  // A barrier behind work that other processes may take any time for: without a time limit, unless
  // all ranks are in this process.
  virtual void wait_for_all();

  // With a reason this rank will not come until it is back (""): another rank of its process that
  // waits for it meanwhile ends the group with that reason at once, not after the time-out.
  virtual void set_away(const std::string& reason);
};

// Ranks that are threads of this process. Throws std::invalid_argument unless size is 1 to 1024 and
// timeout_s above 0.
std::vector<std::unique_ptr<RankGroup>> make_thread_group(int size, double timeout_s);

}  // namespace kdt
