#include "parallel/collective.h"

#include <unistd.h>

#include <cstring>
#include <exception>
#include <utility>

#include "core/error.h"

namespace kdt {
namespace {

constexpr double kLongestTimeout = 1e7;  // in seconds; keeps sums of times in range

void copy(void* to, const void* from, int64_t bytes) {
  if (bytes > 0 && to != from) std::memcpy(to, from, bytes);
}

class LocalRank final : public RankGroup {
 public:
  LocalRank(std::shared_ptr<Collective> collective, int slot)
      : collective_(std::move(collective)), slot_(slot) {}

  ~LocalRank() override {
    if (forked()) {
      // Threads of the process this one was forked from may hold the mutex or wait, for ever.
      new std::shared_ptr<Collective>(std::move(collective_));
      return;
    }
    abort(join("rank ", rank(), " of ", size(), " has left the group"));
  }

  int rank() const override { return collective_->first + slot_; }
  int size() const override { return collective_->size; }
  double timeout_s() const override { return collective_->timeout_s; }

  void all_gather(const void* mine, int64_t bytes, void* out) override {
    run({Collective::Kind::kGather, bytes}, mine, out);
  }
  void broadcast(void* data, int64_t bytes) override {
    run({Collective::Kind::kBroadcast, bytes}, data, data);
  }
  void wait_for_leader(void* data, int64_t bytes) override {
    run({Collective::Kind::kFollow, bytes}, data, data);
  }
  void wait_for_all() override { run({Collective::Kind::kWait, 0}, nullptr, nullptr); }
  void set_away(const std::string& reason) override {
    if (!forked()) collective_->set_away(slot_, reason);
  }
  void abort(const std::string& reason) noexcept override {
    if (!forked()) collective_->abort(reason);
  }
  std::string aborted() const override {
    return forked() ? "the group is another process's" : collective_->reason();
  }

 private:
  bool forked() const { return collective_->process != getpid(); }

  void run(const Collective::Call& call, const void* mine, void* out) {
    KDT_CHECK(!forked(), "rank ", rank(), " of ", size(), " belongs to process ",
              collective_->process, ", from which this one was forked");
    KDT_CHECK(call.bytes >= 0, "a group cannot exchange ", call.bytes, " bytes");
    collective_->run(slot_, call, mine, out);
  }

  std::shared_ptr<Collective> collective_;
  int slot_;
};

}  // namespace

Collective::Collective(int local, int first, int size, double timeout_s)
    : local(local), first(first), size(size), timeout_s(timeout_s), process(getpid()) {
  KDT_CHECK_ARGUMENT(size >= 1 && size <= 1024, "a group of ", size,
                     " ranks cannot be; the number must be 1 to 1024");
  KDT_CHECK_ARGUMENT(timeout_s > 0 && timeout_s <= kLongestTimeout, "the time-out of a group is ",
                     timeout_s, " s; it must be above 0 and at most ", kLongestTimeout);
  slots_.resize(local);
}

Collective::Time Collective::after_timeout() const {
  using std::chrono::steady_clock;
  return steady_clock::now() + std::chrono::duration_cast<steady_clock::duration>(
                                   std::chrono::duration<double>(timeout_s));
}

void Collective::wait(Lock& lock, Time deadline) {
  if (deadline == Time::max()) {
    changed_.wait(lock);
  } else {
    changed_.wait_until(lock, deadline);
  }
}

std::string Collective::names(const std::vector<int>& ranks, int size) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size(); ++i) text += join(i == 0 ? "" : ", ", ranks[i]);
  return join(text, " of ", size);
}

std::string Collective::describe(int rank, const Call& call) {
  const char* kinds[] = {"all_gather", "broadcast", "wait_for_leader", "wait_for_all"};
  return join("rank ", rank, " came to ", kinds[static_cast<int>(call.kind)], " with ", call.bytes,
              " bytes");
}

void Collective::end(std::string reason) {
  if (!reason_.empty()) return;
  reason_ = reason.empty() ? "the group has ended" : std::move(reason);
  changed_.notify_all();
  on_end();
}

std::vector<int> Collective::missing() const {
  std::vector<int> ranks;
  for (int slot = 0; slot < local; ++slot) {
    if (!slots_[slot].here) ranks.push_back(first + slot);
  }
  return ranks;
}

void Collective::end_for_missing() {
  const std::vector<int> ranks = missing();
  if (ranks.empty()) return;  // the call is about to be complete
  end(join(names(ranks, size), " did not come within ", timeout_s, " s"));
}

// Copies while it holds the mutex: no rank whose memory is used can leave meanwhile, and one
// wake-up is enough.
bool Collective::exchange(Lock&) {
  const Call& call = slots_[0].call;
  for (Slot& to : slots_) {
    if (call.kind != Kind::kGather) {
      copy(to.out, slots_[0].mine, call.bytes);
      continue;
    }
    for (int rank = 0; rank < local; ++rank) {
      copy(static_cast<char*>(to.out) + rank * call.bytes, slots_[rank].mine, call.bytes);
    }
  }
  return true;
}

bool Collective::complete(Lock& lock) {
  for (int slot = 1; slot < local; ++slot) {
    if (slots_[slot].call == slots_[0].call) continue;
    end(join(describe(first, slots_[0].call), ", ", describe(first + slot, slots_[slot].call)));
    return false;
  }
  exchanging_ = true;
  bool done = false;
  try {
    done = exchange(lock);
  } catch (const std::exception& error) {  // no memory for what comes from other processes
    if (!lock.owns_lock()) lock.lock();
    end(join(describe(first, slots_[0].call), ": ", error.what()));
  }
  exchanging_ = false;
  if (done) {
    for (Slot& slot : slots_) slot.here = false;
    arrived_ = 0;
    deadline_ = Time::max();
    ++round_;
  }
  changed_.notify_all();
  return done;
}

void Collective::run(int slot, const Call& call, const void* mine, void* out) {
  Lock lock(mutex_);
  const uint64_t round = round_;
  const bool timed =
      call.kind == Kind::kFollow ? first + slot == 0 : call.kind != Kind::kWait || local == size;
  for (const Slot& other : slots_) {
    if (!other.away.empty()) end(other.away);
  }
  if (!reason_.empty()) throw Error(reason_);
  slots_[slot] = {true, call, mine, out, ""};
  if (timed && deadline_ == Time::max()) deadline_ = after_timeout();
  if (++arrived_ == local) {
    if (!complete(lock)) throw Error(reason_);
    return;
  }
  while (round_ == round && (exchanging_ || reason_.empty())) {
    // The rank that came last keeps the time for all when the ranks of this process are complete.
    const bool keeps_time = timed && arrived_ < local;
    wait(lock, keeps_time ? deadline_ : Time::max());
    if (round_ == round && keeps_time && arrived_ < local &&
        std::chrono::steady_clock::now() >= deadline_) {
      end_for_missing();
    }
  }
  // What was complete before the group ended counts.
  if (round_ == round) throw Error(reason_);
}

void Collective::set_away(int slot, const std::string& reason) {
  Lock lock(mutex_);
  slots_[slot].away = reason;
  if (!reason.empty() && arrived_ > 0) end(reason);
}

void Collective::abort(const std::string& reason) {
  Lock lock(mutex_);
  end(reason);
}

std::string Collective::reason() const {
  Lock lock(mutex_);
  return reason_;
}

std::vector<std::unique_ptr<RankGroup>> make_ranks(const std::shared_ptr<Collective>& collective) {
  std::vector<std::unique_ptr<RankGroup>> ranks;
  for (int slot = 0; slot < collective->local; ++slot) {
    ranks.push_back(std::make_unique<LocalRank>(collective, slot));
  }
  return ranks;
}

std::vector<std::unique_ptr<RankGroup>> make_thread_group(int size, double timeout_s) {
  return make_ranks(std::make_shared<Collective>(size, 0, size, timeout_s));
}

}  // namespace kdt
