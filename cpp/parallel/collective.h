// What the ranks of one process share to do a collective. Ranks of other processes are joined in by
// a class derived from it (tcp_group.cpp).
#pragma once

#include <sys/types.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "parallel/rank_group.h"

namespace kdt {

class Collective {
 public:
  enum class Kind : uint8_t { kGather, kBroadcast, kFollow, kWait };
  // What the ranks must agree on.
  struct Call {
    Kind kind = Kind::kGather;
    int64_t bytes = 0;
    bool operator==(const Call&) const = default;
  };

  // Ranks [first, first + local) of `size` are in this process.
  Collective(int local, int first, int size, double timeout_s);
  virtual ~Collective() = default;
  Collective(const Collective&) = delete;
  Collective& operator=(const Collective&) = delete;

  // Returns when all ranks are here and `out` is filled; throws the reason if the group ends first.
  // Of a broadcast only rank 0's `mine` is read.
  void run(int slot, const Call& call, const void* mine, void* out);
  void set_away(int slot, const std::string& reason);
  void abort(const std::string& reason);
  std::string reason() const;

  const int local, first, size;
  const double timeout_s;
  const pid_t process;  // that the ranks are in

 protected:
  using Time = std::chrono::steady_clock::time_point;
  using Lock = std::unique_lock<std::mutex>;
  struct Slot {
    bool here = false;
    Call call;
    const void* mine = nullptr;
    void* out = nullptr;
    std::string away;
  };

  // These are called, and members below read, with the mutex locked.
  // All ranks of this process are here and make the same call, and they stay until this returns:
  // brings all data to them. False: the group has ended.
  virtual bool exchange(Lock& lock);
  // The group has just ended.
  virtual void on_end() {}
  void end(std::string reason);
  void end_for_missing();
  // The ranks that have not come to the present call.
  virtual std::vector<int> missing() const;
  Time after_timeout() const;
  void wait(Lock& lock, Time deadline);
  // "rank 2 was called for ..., rank 3 for ...".
  static std::string describe(int rank, const Call& call);
  // "rank 3 of 8", "ranks 3, 5 of 8".
  static std::string names(const std::vector<int>& ranks, int size);

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Slot> slots_;
  uint64_t round_ = 0;  // the number of calls that are done
  int arrived_ = 0;
  Time deadline_ = Time::max();  // of the call; none while only followers are here
  std::string reason_;

 private:
  bool complete(Lock& lock);

  bool exchanging_ = false;
};

// The rank objects, one a slot.
std::vector<std::unique_ptr<RankGroup>> make_ranks(const std::shared_ptr<Collective>& collective);

}  // namespace kdt
