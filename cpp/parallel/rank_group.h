// The ranks of a group meet here, on the host. Each rank has an object of its own, which one thread
// uses.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace kdt {

class RankGroup {
 public:
  virtual ~RankGroup() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;

  // Each rank brings `bytes` of `mine`, as many as the others; `out` [size * bytes] has all of
  // them, in rank order. Throws Error naming the ranks that did not come in time, or the reason
  // for which the group has ended.
  virtual void all_gather(const void* mine, int64_t bytes, void* out) = 0;
  // Ends the group: what any rank waits for, now or later, throws `reason`. The first reason stays.
  virtual void abort(const std::string& reason) noexcept = 0;
  // The reason for which the group has ended; "": it has not.
  virtual std::string aborted() const = 0;
  // How long a rank waits for the others, in seconds.
  virtual double timeout_s() const = 0;

  // `data` becomes rank 0's.
  void broadcast(void* data, int64_t bytes);
  void barrier();
};

// Ranks that are threads of this process.
std::vector<std::unique_ptr<RankGroup>> make_thread_group(int size, double timeout_s);

}  // namespace kdt
