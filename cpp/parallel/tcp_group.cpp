#include "parallel/tcp_group.h"

#include <signal.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <deque>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>

#include "core/error.h"
#include "parallel/collective.h"
#include "parallel/rendezvous.h"

namespace kdt {
namespace {

constexpr int64_t kMostBytes = int64_t{1} << 30;  // of one exchange
constexpr size_t kLongestReason = 4096;
// How long a message that is on its way may take once the group has ended.
constexpr double kGraceSeconds = 1;
// How long process 0 waits beyond the time-out for a process of several ranks, which alone knows
// which of them are late; and how long the others wait for what process 0 then says.
constexpr double kNamingSeconds = 0.5;
constexpr double kAnswerSeconds = 1.5;

enum class Frame : uint32_t { kCall, kResult, kLate, kEnd };
struct Header {
  uint32_t magic = 0x46544b44;
  Frame frame = Frame::kCall;
  uint64_t round = 0;
  Collective::Kind kind = Collective::Kind::kGather;
  uint8_t zero[7] = {};
  int64_t call_bytes = 0;
  uint64_t body_bytes = 0;
};
static_assert(sizeof(Header) == 40);

// Exchanges pass through process 0: the others send it what their ranks bring and get all of it
// back. The thread that comes last to a call in its process sends and waits for the others of the
// process. One more thread a process reads all connections, so that a process that has gone is
// noticed whatever the ranks do, and tells the others when the group ends.
class TcpCollective final : public Collective {
 public:
  TcpCollective(int local, const Launch& launch, double timeout_s)
      : Collective(local, launch.rank * local, launch.world_size * local, timeout_s),
        leads_(launch.rank == 0),
        wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    KDT_CHECK(wake_.get() >= 0, "no eventfd: ", std::generic_category().message(errno));
    if (leads_) {
      std::vector<net::Member> members = net::gather_members(launch, local, timeout_s);
      for (size_t i = 1; i < members.size(); ++i) add_peer(std::move(members[i]));
    } else {
      add_peer(net::join_members(launch, local, timeout_s));
    }
    // Signals are for the threads of the program.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    try {
      reader_ = std::thread([this] { read_connections(); });
    } catch (const std::system_error& error) {
      pthread_sigmask(SIG_SETMASK, &before, nullptr);
      throw Error(join("no thread for the connections of a group: ", error.what()));
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  ~TcpCollective() override {
    {
      Lock lock(mutex_);
      stop_ = true;
    }
    wake_reader();
    reader_.join();
    for (Peer& peer : peers_) {
      // What is not read when a socket closes makes the other side lose what it has not read yet.
      char rest[4096];
      while (recv(peer.fd.get(), rest, sizeof(rest), MSG_DONTWAIT) > 0) continue;
    }
  }

 protected:
  bool exchange(Lock& lock) override { return leads_ ? lead(lock) : follow(lock); }
  void on_end() override { wake_reader(); }

  std::vector<int> missing() const override {
    std::vector<int> ranks = Collective::missing();
    for (size_t i = 0; leads_ && i < peers_.size(); ++i) {
      if (peers_[i].here) continue;
      for (int rank = 0; rank < local; ++rank) {
        ranks.push_back(static_cast<int>(i + 1) * local + rank);
      }
    }
    return ranks;
  }

 private:
  struct Peer {
    net::Fd fd;
    std::string name;
    std::mutex sending;
    // Of the reading thread.
    Header header;
    size_t header_got = 0, body_got = 0;
    std::vector<char> body;
    bool open = true;
    // With the mutex locked: what it has brought, or what process 0 has sent back.
    bool here = false;
    Call call;
    std::vector<char> data;
    uint64_t round = 0;  // of the next frame from it
  };

  void add_peer(net::Member member) {
    Peer& peer = peers_.emplace_back();
    peer.fd = std::move(member.fd);
    peer.name = std::move(member.name);
  }

  void wake_reader() {
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t written = write(wake_.get(), &one, sizeof(one));
  }

  // ---------------------------------------------------------------- exchanges
  // A result is on its way while this lives, without the mutex. The end of the group waits for it,
  // so it must not outlive a fault.
  class Sending {
   public:
    Sending(TcpCollective& group, Lock& lock) : group_(group), lock_(lock) {
      group_.sending_ = true;
      lock_.unlock();
    }
    ~Sending() {
      lock_.lock();
      group_.sending_ = false;
      group_.changed_.notify_all();
    }
    Sending(const Sending&) = delete;

   private:
    TcpCollective& group_;
    Lock& lock_;
  };

  static int64_t blocks_of(const Call& call, int ranks) {
    return call.bytes * (call.kind == Kind::kGather ? ranks : 1);
  }

  bool fits(const Call& call) {
    const bool fits = call.bytes <= kMostBytes / size;
    if (!fits) {
      end(join(describe(first, call), ", but the blocks of ", size, " ranks may have ", kMostBytes,
               " bytes together"));
    }
    return fits;
  }

  void pack(char* to) const {
    for (int slot = 0; slot < local; ++slot) {
      const int64_t bytes = slots_[slot].call.bytes;
      if (bytes > 0) std::memcpy(to + slot * bytes, slots_[slot].mine, bytes);
    }
  }

  void hand_out(const std::vector<char>& all) const {
    for (const Slot& slot : slots_) {
      if (!all.empty()) std::memcpy(slot.out, all.data(), all.size());
    }
  }

  Time later(Time time) const {
    if (local == 1 || time == Time::max()) return time;
    return time + std::chrono::milliseconds(static_cast<int>(kNamingSeconds * 1000));
  }

  bool lead(Lock& lock) {
    const Call call = slots_[0].call;
    if (!fits(call)) return false;
    const auto all_here = [&] {
      return std::all_of(peers_.begin(), peers_.end(), [](const Peer& peer) { return peer.here; });
    };
    leading_ = true;
    limit_ = later(deadline_);
    while (reason_.empty() && !all_here()) {
      wait(lock, limit_);
      if (!all_here() && std::chrono::steady_clock::now() >= limit_) end_for_missing();
    }
    leading_ = false;
    if (!reason_.empty()) return false;
    for (size_t i = 0; i < peers_.size(); ++i) {
      if (peers_[i].call == call) continue;
      end(join(describe(0, call), ", ", describe(static_cast<int>(i + 1) * local, peers_[i].call)));
      return false;
    }
    std::vector<char> all(blocks_of(call, size));
    if (call.kind == Kind::kGather) {
      pack(all.data());
      char* to = all.data() + local * call.bytes;
      for (const Peer& peer : peers_) {
        to = std::copy(peer.data.begin(), peer.data.end(), to);
      }
    } else if (call.bytes > 0) {
      std::memcpy(all.data(), slots_[0].mine, call.bytes);
    }
    for (Peer& peer : peers_) peer.here = false;
    Header header;
    header.frame = Frame::kResult;
    header.round = round_;
    const Time limit = after_timeout();
    {
      const Sending sending(*this, lock);
      for (Peer& peer : peers_) send_frame(peer, header, call, all, limit);
    }
    hand_out(all);
    return true;
  }

  bool follow(Lock& lock) {
    const Call call = slots_[0].call;
    if (!fits(call)) return false;
    Peer& leader = peers_[0];
    std::vector<char> mine(call.kind == Kind::kGather ? call.bytes * local : 0);
    if (!mine.empty()) pack(mine.data());
    Header header;
    header.round = round_;
    const Time limit = after_timeout();
    lock.unlock();
    send_frame(leader, header, call, mine, limit);
    lock.lock();
    Time deadline = deadline_;
    bool asked = false;
    while (!leader.here && reason_.empty()) {
      wait(lock, deadline);
      if (leader.here || !reason_.empty() || std::chrono::steady_clock::now() < deadline) continue;
      if (asked) {
        end(join(leader.name, " did not answer within ", timeout_s, " s"));
        continue;
      }
      // It knows who is late.
      asked = true;
      header.frame = Frame::kLate;
      lock.unlock();
      send_frame(leader, header, call, {}, net::after(kGraceSeconds));
      lock.lock();
      deadline = net::after(kAnswerSeconds);
    }
    if (!leader.here) return false;
    leader.here = false;
    if (leader.call != call) {
      end(leader.name + " broke the protocol of the group");
      return false;
    }
    hand_out(leader.data);
    return true;
  }

  // Without the mutex. What fails ends the group.
  void send_frame(Peer& peer, Header header, const Call& call, const std::vector<char>& body,
                  Time limit) {
    header.kind = call.kind;
    header.call_bytes = call.bytes;
    header.body_bytes = body.size();
    std::lock_guard sending(peer.sending);
    const auto deadline = [&, shortened = false]() mutable {
      Lock lock(mutex_);
      if (!reason_.empty() && !std::exchange(shortened, true)) {
        limit = std::min(limit, net::after(kGraceSeconds));
      }
      return limit;
    };
    net::Result result = net::send_all(peer.fd.get(), &header, sizeof(header), deadline);
    if (result == net::Result::kDone) {
      result = net::send_all(peer.fd.get(), body.data(), body.size(), deadline);
    }
    if (result == net::Result::kDone) return;
    // Nothing can follow half a message.
    shutdown(peer.fd.get(), SHUT_WR);
    Lock lock(mutex_);
    end(result == net::Result::kClosed
            ? peer.name + " has gone"
            : join(peer.name, " took no message within ", timeout_s, " s"));
  }

  // ---------------------------------------------------------------- the reading thread
  void read_connections() noexcept {
    bool told = false;
    std::vector<int> fds;
    std::vector<Peer*> open;
    std::vector<bool> readable;
    while (true) {
      fds.assign(1, wake_.get());
      open.clear();
      for (Peer& peer : peers_) {
        if (!peer.open) continue;
        fds.push_back(peer.fd.get());
        open.push_back(&peer);
      }
      net::wait_readable(fds, Time::max(), readable);
      uint64_t count;
      while (read(wake_.get(), &count, sizeof(count)) > 0) continue;
      for (size_t i = 0; i < open.size(); ++i) {
        if (readable[i + 1]) read_some(*open[i]);
      }
      Lock lock(mutex_);
      const std::string reason = reason_;
      const bool stop = stop_;
      // A rank may leave as soon as it has a result that others are still to get.
      while (!reason.empty() && sending_) changed_.wait(lock);
      lock.unlock();
      if (!reason.empty() && !std::exchange(told, true)) tell_all(reason);
      if (stop) return;
    }
  }

  void tell_all(const std::string& reason) {
    const std::vector<char> body(reason.begin(),
                                 reason.begin() + std::min(reason.size(), kLongestReason));
    Header header;
    header.frame = Frame::kEnd;
    const Time limit = net::after(kGraceSeconds);
    for (Peer& peer : peers_) {
      if (peer.open) send_frame(peer, header, {}, body, limit);
    }
  }

  void lose(Peer& peer, const std::string& why) {
    peer.open = false;
    Lock lock(mutex_);
    end(peer.name + why);
  }

  void read_some(Peer& peer) {
    const bool in_header = peer.header_got < sizeof(Header);
    char* to = in_header ? reinterpret_cast<char*>(&peer.header) + peer.header_got
                         : peer.body.data() + peer.body_got;
    const size_t space =
        in_header ? sizeof(Header) - peer.header_got : peer.body.size() - peer.body_got;
    const ssize_t got = recv(peer.fd.get(), to, space, MSG_DONTWAIT);
    if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) return;
    if (got <= 0) return lose(peer, " has gone");
    (in_header ? peer.header_got : peer.body_got) += got;
    try {
      if (in_header && peer.header_got == sizeof(Header)) {
        if (!is_valid(peer.header)) return lose(peer, " broke the protocol of the group");
        peer.body.resize(peer.header.body_bytes);
        peer.body_got = 0;
      }
      if (peer.header_got < sizeof(Header) || peer.body_got < peer.body.size()) return;
      peer.header_got = 0;
      if (!take(peer)) lose(peer, " broke the protocol of the group");
    } catch (const std::exception& error) {
      lose(peer, join(" sent ", peer.header.body_bytes, " bytes: ", error.what()));
    }
  }

  bool is_valid(const Header& header) const {
    const auto call_frame = leads_ ? Frame::kCall : Frame::kResult;
    const Call call{header.kind, header.call_bytes};
    if (header.magic != Header().magic || header.kind > Kind::kWait || header.call_bytes < 0 ||
        header.call_bytes > kMostBytes / size) {
      return false;
    }
    if (header.frame == Frame::kEnd) return header.body_bytes <= kLongestReason;
    if (header.frame == Frame::kLate) return leads_ && header.body_bytes == 0;
    if (header.frame != call_frame) return false;
    const int64_t expected = !leads_                      ? blocks_of(call, size)
                             : call.kind == Kind::kGather ? call.bytes * local
                                                          : 0;
    return header.body_bytes == static_cast<uint64_t>(expected);
  }

  // A whole frame; false when it cannot come now.
  bool take(Peer& peer) {
    Lock lock(mutex_);
    switch (peer.header.frame) {
      case Frame::kEnd:
        end(std::string(peer.body.begin(), peer.body.end()));
        return true;
      case Frame::kLate:
        if (!peer.here) return true;  // the result is on its way to it
        if (leading_) {
          limit_ = std::min(limit_, later(std::chrono::steady_clock::now()));
          changed_.notify_all();
        } else {
          end_for_missing();
        }
        return true;
      default:
        if (peer.here || peer.header.round != peer.round) return false;
        ++peer.round;
        peer.here = true;
        peer.call = {peer.header.kind, peer.header.call_bytes};
        peer.data.swap(peer.body);
        changed_.notify_all();
        return true;
    }
  }

  const bool leads_;
  net::Fd wake_;
  std::deque<Peer> peers_;  // process 0: the others in order; the others: process 0
  bool leading_ = false;    // process 0, all of whose ranks wait for the others until limit_
  Time limit_;
  bool sending_ = false;  // process 0: a result
  bool stop_ = false;
  std::thread reader_;
};

}  // namespace

std::vector<std::unique_ptr<RankGroup>> make_hybrid_group(int local_ranks, const Launch& launch,
                                                          double timeout_s) {
  KDT_CHECK_ARGUMENT(launch.world_size >= 1 && launch.rank >= 0 && launch.rank < launch.world_size,
                     "a group cannot have a process ", launch.rank, " of ", launch.world_size);
  KDT_CHECK_ARGUMENT(local_ranks >= 1 && local_ranks <= 1024, "a process cannot have ", local_ranks,
                     " ranks");
  if (launch.world_size == 1) return make_thread_group(local_ranks, timeout_s);
  KDT_CHECK_ARGUMENT(!launch.master_addr.empty(), "master_addr is empty");
  KDT_CHECK_ARGUMENT(launch.master_port >= 1 && launch.master_port + kGroupPorts <= 65535,
                     "master_port is ", launch.master_port, "; it must be 1 to ",
                     65535 - kGroupPorts);
  KDT_CHECK_ARGUMENT(launch.key.size() <= kLongestKey, "the group's key has ", launch.key.size(),
                     " bytes; at most ", kLongestKey, " are possible");
  return make_ranks(std::make_shared<TcpCollective>(local_ranks, launch, timeout_s));
}

std::unique_ptr<RankGroup> make_tcp_group(const Launch& launch, double timeout_s) {
  return std::move(make_hybrid_group(1, launch, timeout_s)[0]);
}

}  // namespace kdt
