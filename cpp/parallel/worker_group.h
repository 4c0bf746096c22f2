// One long-lived thread a rank.
#pragma once

#include <sys/types.h>

#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "parallel/rank_group.h"

namespace kdt {

// Runs the same function on all ranks of this process. A forked process has none of the threads: it
// may destroy the group, but not run anything on it.
class WorkerGroup {
 public:
  // Ranks that are all in this process, as make_thread_group's.
  WorkerGroup(int size, double timeout_s);
  // The ranks of this process in a group that may be wider.
  explicit WorkerGroup(std::vector<std::unique_ptr<RankGroup>> ranks);
  // Waits for the threads, but no longer than the time-out.
  ~WorkerGroup();
  WorkerGroup(const WorkerGroup&) = delete;
  WorkerGroup& operator=(const WorkerGroup&) = delete;

  // The number of ranks in this process; body(i) and rank(i) are the i-th of them.
  int size() const;
  RankGroup& rank(int i) const;

  // Calls body(i) on each rank's thread and returns when all are done.
  //
  // When all ranks threw std::invalid_argument with the same text, it is thrown on and the group
  // stays as it was; so does whatever a group of one rank throws. Anything else ends the group, so
  // that ranks which wait for each other wake; thrown is Error with the first cause, "rank R: ..."
  // unless that is already the group's own, now and by later runs.
  //
  // `meanwhile`, if there is one, is called now and then by the caller's thread; what it throws
  // ends the group and is thrown when the ranks are done.
  //
  // A rank that works on for longer than the time-out, while another is done or the group has
  // ended, is given up: the group ends with an Error naming it. Its thread stays behind with its
  // copy of `body` and its RankGroup, which are never freed unless it comes back. `body` must
  // therefore own what it uses, by shared_ptr, or refer to what is never freed.
  void run(std::function<void(int)> body, const std::function<void()>& meanwhile = nullptr);

 private:
  struct State;
  static void work(const std::shared_ptr<State>& state, int i);
  void start(std::vector<std::unique_ptr<RankGroup>> ranks);
  void stop();

  std::shared_ptr<State> state_;  // the threads have it too
  std::vector<std::thread> threads_;
  pid_t process_;  // where they are
};

}  // namespace kdt
