#include "parallel/rendezvous.h"

#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <thread>

#include "core/error.h"

namespace kdt::net {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr char kMagic[8] = {'K', 'D', 'T', 'G', 'R', 'O', 'U', 'P'};
constexpr uint32_t kVersion = 1;
constexpr double kHelloSeconds = 5;   // for a peer that sends nothing
constexpr size_t kMaxPending = 64;    // connections that have not said who they are
constexpr size_t kMostOthers = 1000;  // refused ones of no number of the group that are counted
// For an answer of process 0 beyond the time-out, which is to name those who are missing.
constexpr double kGraceSeconds = 2;

// Messages have one size each: an unknown peer cannot make us wait for, or make room for, more.
// Process 0 speaks first, so that the key goes to nobody else's port by mistake.
struct Banner {
  char magic[8];
  uint32_t version;
  uint32_t zero;
};
struct Hello {
  char magic[8];
  uint32_t version;
  uint32_t world_size, process, ranks_each;
  uint32_t master_port, pid;
  char host[64];
  char key[256];
};
enum Code : uint32_t { kWelcome, kOtherJob, kRefused, kNotNow };
struct Reply {
  uint32_t code;
  uint32_t pid;
  char host[64];
  char reason[440];
};

template <size_t N>
void put(char (&to)[N], const std::string& text) {
  std::memset(to, 0, N);
  std::memcpy(to, text.data(), std::min(text.size(), N - 1));
}

// A text of the other side, for messages.
template <size_t N>
std::string get(const char (&from)[N]) {
  std::string text(from, strnlen(from, N));
  for (char& c : text) {
    if (!std::isprint(static_cast<unsigned char>(c))) c = '?';
  }
  return text;
}

std::string member_name(int process, int ranks_each, const std::string& host, uint32_t pid) {
  const int first = process * ranks_each;
  const std::string ranks = ranks_each == 1 ? join("rank ", first)
                                            : join("ranks ", first, " to ", first + ranks_each - 1);
  return join(ranks, " (", host, ":", pid, ")");
}

Hello hello_of(const Launch& launch, int ranks_each) {
  Hello hello{};
  std::memcpy(hello.magic, kMagic, sizeof(kMagic));
  hello.version = kVersion;
  hello.world_size = launch.world_size;
  hello.process = launch.rank;
  hello.ranks_each = ranks_each;
  hello.master_port = launch.master_port;
  hello.pid = getpid();
  put(hello.host, host_name());
  put(hello.key, launch.key);
  return hello;
}

void reply(int fd, Code code, const std::string& reason) {
  Reply message{};
  message.code = code;
  message.pid = getpid();
  put(message.host, host_name());
  put(message.reason, reason);
  const Time limit = after(1);
  send_all(fd, &message, sizeof(message), [=] { return limit; });
}

std::string place(const Launch& launch) {
  return join(launch.master_addr, ", ports ", launch.master_port + 1, " to ",
              launch.master_port + kGroupPorts);
}

// What missing_ranks() gives. Never freed: a thread that waits may outlive the program's end.
struct Missing {
  std::mutex mutex;
  std::string text;
};

Missing& missing_now() {
  static auto& now = *new Missing;
  return now;
}

void set_missing(const std::string& text) {
  const std::lock_guard lock(missing_now().mutex);
  missing_now().text = text;
}

// Process 0 while the group fills.
class Listener {
 public:
  Listener(const Launch& launch, int ranks_each, double timeout_s)
      : launch_(launch), ranks_each_(ranks_each), timeout_s_(timeout_s) {
    const std::vector<Address> addresses = resolve(launch.master_addr);
    // A host's own name is often an address of its loopback interface, where no other node comes.
    const bool only_here = std::all_of(addresses.begin(), addresses.end(),
                                       [](const Address& a) { return a.loopback && !a.literal; });
    listeners_ = listen_on(addresses, only_here && launch.local_size < launch.world_size,
                           launch.master_port + 1, kGroupPorts, launch.master_addr, port_);
    members_.resize(launch.world_size);
  }

  ~Listener() { set_missing(""); }
  Listener(const Listener&) = delete;

  std::vector<Member> fill() {
    const Time deadline = after(timeout_s_);
    while (!missing().empty()) {
      if (steady_clock::now() >= deadline) give_up();
      set_missing(named_missing() + refusals());
      look(deadline);
    }
    for (size_t i = 1; i < members_.size(); ++i) reply(members_[i].fd.get(), kWelcome, "");
    return std::move(members_);
  }

 private:
  struct PendingPeer {
    Fd fd;
    Hello hello{};
    size_t got = 0;
    Time limit;
  };

  std::string missing() const {
    std::string text;
    for (int process = 1; process < launch_.world_size; ++process) {
      if (members_[process].fd.get() >= 0) continue;
      for (int i = 0; i < ranks_each_; ++i) {
        text += join(text.empty() ? "" : ", ", process * ranks_each_ + i);
      }
    }
    return text;
  }

  std::string named_missing() const {
    const std::string ranks = missing();
    return join(ranks.find(',') == std::string::npos ? "rank " : "ranks ", ranks, " of ",
                launch_.world_size * ranks_each_);
  }

  std::string refusals() const {
    std::string text;
    for (const auto& [process, refusal] : refused_) text += "; " + refusal;
    if (others_.empty()) return text;
    return text.empty() ? join("; refused of other numbers: ", others_.size())
                        : join(text, "; and ", others_.size(), " more");
  }

  void give_up() {
    const std::string reason = join(named_missing(), " did not come to ", launch_.master_addr,
                                    ", port ", port_, ", within ", timeout_s_, " s", refusals());
    for (const Member& member : members_) {
      if (member.fd.get() >= 0) reply(member.fd.get(), kRefused, reason);
    }
    throw Error(reason);
  }

  void look(Time deadline) {
    std::vector<int> fds;
    for (const Fd& fd : listeners_) fds.push_back(fd.get());
    for (const PendingPeer& peer : pending_) fds.push_back(peer.fd.get());
    const size_t first_member = fds.size();
    std::vector<int> processes;
    for (int process = 1; process < launch_.world_size; ++process) {
      if (members_[process].fd.get() < 0) continue;
      processes.push_back(process);
      fds.push_back(members_[process].fd.get());
    }
    std::vector<bool> readable;
    wait_readable(fds, std::min(deadline, after(0.2)), readable);
    // A member has nothing to say yet: it has gone. Another may take its place.
    for (size_t i = 0; i < processes.size(); ++i) {
      if (readable[first_member + i]) members_[processes[i]].fd.close();
    }
    for (size_t i = 0; i < pending_.size(); ++i) {
      PendingPeer& peer = pending_[i];
      if (readable[listeners_.size() + i]) listen_to(peer);
      if (steady_clock::now() >= peer.limit) peer.fd.close();
    }
    std::erase_if(pending_, [](const PendingPeer& peer) { return peer.fd.get() < 0; });
    for (size_t i = 0; i < listeners_.size(); ++i) {
      if (readable[i]) accept_from(listeners_[i].get());
    }
  }

  void accept_from(int socket) {
    PendingPeer peer{Fd(accept4(socket, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK)),
                     {},
                     0,
                     after(kHelloSeconds)};
    if (peer.fd.get() < 0) {
      std::this_thread::sleep_for(milliseconds(10));  // out of descriptors: not at full speed
      return;
    }
    set_options(peer.fd.get(), timeout_s_);
    Banner banner{{}, kVersion, 0};
    std::memcpy(banner.magic, kMagic, sizeof(kMagic));
    send(peer.fd.get(), &banner, sizeof(banner), MSG_NOSIGNAL);
    if (pending_.size() >= kMaxPending) pending_.erase(pending_.begin());
    pending_.push_back(std::move(peer));
  }

  void listen_to(PendingPeer& peer) {
    char* bytes = reinterpret_cast<char*>(&peer.hello);
    const ssize_t got =
        recv(peer.fd.get(), bytes + peer.got, sizeof(Hello) - peer.got, MSG_DONTWAIT);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (got > 0) peer.got += got;
    const size_t known = std::min(peer.got, sizeof(kMagic));
    if (got <= 0 || std::memcmp(bytes, kMagic, known) != 0) {
      peer.fd.close();
    } else if (peer.got == sizeof(Hello)) {
      check_hello(peer);
    }
  }

  void check_hello(PendingPeer& peer) {
    const Hello& hello = peer.hello;
    const Hello mine = hello_of(launch_, ranks_each_);
    // "It" is the process that is refused, which is told so too.
    const auto refuse = [&](Code code, const std::string& reason) {
      reply(peer.fd.get(), code, reason);
      peer.fd.close();
      if (hello.process > 0 && hello.process < mine.world_size) {
        refused_[hello.process] = join("process ", hello.process, " (", get(hello.host), ":",
                                       hello.pid, ") was refused: ", reason);
      } else if (others_.size() < kMostOthers) {
        others_.insert(hello.process);
      }
    };
    if (hello.version != kVersion) {
      refuse(kRefused, join("the group speaks version ", kVersion, " of the protocol, it speaks ",
                            hello.version));
    } else if (std::memcmp(hello.key, mine.key, sizeof(mine.key)) != 0 ||
               hello.master_port != mine.master_port) {
      refuse(kOtherJob, "it belongs to another job (KDTREE_GROUP_KEY or MASTER_PORT differ)");
    } else if (hello.world_size != mine.world_size) {
      refuse(kRefused, join("the group has ", mine.world_size, " processes, it is one of ",
                            hello.world_size));
    } else if (hello.ranks_each != mine.ranks_each) {
      refuse(kRefused, join("the group has ", mine.ranks_each, " ranks a process, it has ",
                            hello.ranks_each));
    } else if (hello.process == 0 || hello.process >= mine.world_size) {
      refuse(kRefused, join("its number is ", hello.process));
    } else if (members_[hello.process].fd.get() >= 0) {
      refuse(kNotNow, join(members_[hello.process].name, " is already there"));
    } else {
      reply(peer.fd.get(), kWelcome, "");
      refused_.erase(hello.process);
      members_[hello.process] = {
          std::move(peer.fd), member_name(hello.process, ranks_each_, get(hello.host), hello.pid)};
    }
  }

  const Launch& launch_;
  int ranks_each_;
  double timeout_s_;
  int port_ = 0;
  std::vector<Fd> listeners_;
  std::vector<PendingPeer> pending_;
  std::vector<Member> members_;
  // By number, which a process keeps when it is started again: the last refusal of each of the
  // group, and the others' numbers.
  std::map<uint32_t, std::string> refused_;
  std::set<uint32_t> others_;
};

// Why there is no connection yet. A refusal tells more than a port where nobody answers.
class JoinFailure {
 public:
  enum Weight { kNobody, kNoAnswer, kRefusal };
  void set(Weight weight, std::string text) {
    if (weight < weight_) return;
    weight_ = weight;
    text_ = std::move(text);
  }
  const std::string& text() const { return text_; }

 private:
  Weight weight_ = kNobody;
  std::string text_;
};

// One attempt; none, and `failure` says why, when another may succeed.
std::optional<Member> try_join(const Address& address, int port, const Hello& hello,
                               double timeout_s, Time deadline, JoinFailure& failure) {
  std::string why;
  Fd fd = connect_to(address, port, deadline, why);
  if (fd.get() < 0) {
    failure.set(JoinFailure::kNobody, why);
    return std::nullopt;
  }
  set_options(fd.get(), timeout_s);
  Banner banner{};
  if (receive_all(fd.get(), &banner, sizeof(banner), std::min(deadline, after(2))) !=
          Result::kDone ||
      std::memcmp(banner.magic, kMagic, sizeof(kMagic)) != 0) {
    failure.set(JoinFailure::kNoAnswer, join("what listens on port ", port, " is not a rank 0"));
    return std::nullopt;
  }
  const Time limit = after(kHelloSeconds);
  Reply answer{};
  if (send_all(fd.get(), &hello, sizeof(hello), [=] { return limit; }) != Result::kDone ||
      receive_all(fd.get(), &answer, sizeof(answer), limit) != Result::kDone) {
    failure.set(JoinFailure::kNoAnswer, "rank 0 did not answer");
    return std::nullopt;
  }
  const std::string name =
      member_name(0, static_cast<int>(hello.ranks_each), get(answer.host), answer.pid);
  if (answer.code != kWelcome) {
    why = name + " refused this process: " + get(answer.reason);
    KDT_CHECK(answer.code != kRefused, why);
    failure.set(JoinFailure::kRefusal, why);
    return std::nullopt;
  }
  // Once inside, process 0 says whether all have come.
  const Result result =
      receive_all(fd.get(), &answer, sizeof(answer), after(timeout_s + kGraceSeconds));
  KDT_CHECK(result != Result::kTimedOut, name, " did not start the group within ", timeout_s, " s");
  if (result == Result::kClosed) {
    failure.set(JoinFailure::kRefusal, name + " has gone");
    return std::nullopt;
  }
  KDT_CHECK(answer.code == kWelcome, get(answer.reason));
  return Member{std::move(fd), name};
}

}  // namespace

std::string missing_ranks() {
  const std::lock_guard lock(missing_now().mutex);
  return missing_now().text;
}

std::vector<Member> gather_members(const Launch& launch, int ranks_each, double timeout_s) {
  return Listener(launch, ranks_each, timeout_s).fill();
}

Member join_members(const Launch& launch, int ranks_each, double timeout_s) {
  const Time deadline = after(timeout_s);
  const Hello hello = hello_of(launch, ranks_each);
  JoinFailure failure;
  while (true) {
    try {
      for (const Address& address : resolve(launch.master_addr)) {
        for (int i = 1; i <= kGroupPorts; ++i) {
          auto member =
              try_join(address, launch.master_port + i, hello, timeout_s, deadline, failure);
          if (member) return std::move(*member);
        }
      }
    } catch (const NoAddress& error) {  // a name may become known later
      failure.set(JoinFailure::kNobody, error.what());
    }
    if (steady_clock::now() >= deadline) break;
    std::this_thread::sleep_for(milliseconds(100));
  }
  throw Error(join(member_name(launch.rank, ranks_each, host_name(), getpid()),
                   " found no rank 0 at ", place(launch), ", within ", timeout_s,
                   " s: ", failure.text()));
}

}  // namespace kdt::net
