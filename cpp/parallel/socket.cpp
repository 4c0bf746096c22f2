#include "parallel/socket.h"

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <system_error>

namespace kdt::net {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr int kKeepIdle = 10, kKeepInterval = 5, kKeepCount = 3;  // seconds and a number

std::string text_of(int error) { return std::generic_category().message(error); }

// For poll: at least 1, so that a wait of less than a millisecond does not become a spin.
int milliseconds_until(Time deadline, int most) {
  if (deadline == Time::max()) return most;
  const auto left = std::chrono::duration_cast<milliseconds>(deadline - steady_clock::now());
  return static_cast<int>(std::clamp<int64_t>(left.count() + 1, 1, most));
}

bool wait_for(int fd, short events, Time deadline, int most_ms) {
  pollfd entry{fd, events, 0};
  return poll(&entry, 1, milliseconds_until(deadline, most_ms)) > 0;
}

void set(int fd, int level, int option, int value) {
  setsockopt(fd, level, option, &value, sizeof(value));
}

std::vector<char> with_port(const Address& address, int port) {
  std::vector<char> bytes = address.bytes;
  const size_t at = address.family == AF_INET6 ? offsetof(sockaddr_in6, sin6_port)
                                               : offsetof(sockaddr_in, sin_port);
  const uint16_t big_endian = htons(static_cast<uint16_t>(port));
  std::memcpy(bytes.data() + at, &big_endian, sizeof(big_endian));
  return bytes;
}

const sockaddr* raw(const std::vector<char>& bytes) {
  return reinterpret_cast<const sockaddr*>(bytes.data());
}

Fd listen_at(const Address& address, int port, bool both_families) {
  Fd fd(socket(address.family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (fd.get() < 0) return fd;
  set(fd.get(), SOL_SOCKET, SO_REUSEADDR, 1);  // else a port rests for minutes after its last use
  if (address.family == AF_INET6) set(fd.get(), IPPROTO_IPV6, IPV6_V6ONLY, both_families ? 0 : 1);
  const std::vector<char> bytes = with_port(address, port);
  if (bind(fd.get(), raw(bytes), bytes.size()) != 0 || listen(fd.get(), 128) != 0) {
    const int error = errno;
    fd.close();
    errno = error;
  }
  return fd;
}

Address any_address(int family) {
  Address any{family, {}, false, false};
  any.bytes.resize(family == AF_INET6 ? sizeof(sockaddr_in6) : sizeof(sockaddr_in));
  const sa_family_t value = static_cast<sa_family_t>(family);
  std::memcpy(any.bytes.data() + offsetof(sockaddr, sa_family), &value, sizeof(value));
  return any;
}

}  // namespace

Time after(double seconds) {
  return steady_clock::now() +
         std::chrono::duration_cast<steady_clock::duration>(std::chrono::duration<double>(seconds));
}

Fd& Fd::operator=(Fd&& other) noexcept {
  if (this != &other) {
    close();
    fd_ = std::exchange(other.fd_, -1);
  }
  return *this;
}

void Fd::close() {
  if (fd_ >= 0) ::close(fd_);
  fd_ = -1;
}

std::vector<Address> resolve(const std::string& host) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICHOST;
  addrinfo* first = nullptr;
  int error = getaddrinfo(host.c_str(), nullptr, &hints, &first);
  const bool literal = error == 0;
  if (!literal) {
    hints.ai_flags = 0;
    error = getaddrinfo(host.c_str(), nullptr, &hints, &first);
  }
  if (error != 0) {
    throw NoAddress(
        join("MASTER_ADDR is \"", host, "\", which has no address: ", gai_strerror(error)));
  }
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> list(first, freeaddrinfo);
  std::vector<Address> addresses;
  for (const addrinfo* entry = first; entry != nullptr; entry = entry->ai_next) {
    if (entry->ai_family != AF_INET && entry->ai_family != AF_INET6) continue;
    Address address{entry->ai_family, {}, false, literal};
    const char* bytes = reinterpret_cast<const char*>(entry->ai_addr);
    address.bytes.assign(bytes, bytes + entry->ai_addrlen);
    if (address.family == AF_INET6) {
      const auto* six = reinterpret_cast<const sockaddr_in6*>(entry->ai_addr);
      address.loopback = IN6_IS_ADDR_LOOPBACK(&six->sin6_addr);
    } else {
      const auto* four = reinterpret_cast<const sockaddr_in*>(entry->ai_addr);
      address.loopback = (ntohl(four->sin_addr.s_addr) >> 24) == 127;
    }
    addresses.push_back(std::move(address));
  }
  return addresses;
}

std::vector<Fd> listen_on(const std::vector<Address>& addresses, bool everywhere, int first_port,
                          int ports, const std::string& host, int& port) {
  int error = 0;
  for (port = first_port; port < first_port + ports; ++port) {
    std::vector<Fd> listeners;
    bool taken = false;
    for (const Address& address : addresses) {
      if (everywhere) break;
      Fd fd = listen_at(address, port, false);
      if (fd.get() < 0 && errno == EADDRINUSE) taken = true;
      if (fd.get() >= 0) listeners.push_back(std::move(fd));
    }
    if (taken) {
      error = EADDRINUSE;
      continue;
    }
    if (listeners.empty()) {
      Fd fd = listen_at(any_address(AF_INET6), port, true);
      if (fd.get() < 0 && errno != EADDRINUSE) fd = listen_at(any_address(AF_INET), port, false);
      if (fd.get() < 0) {
        error = errno;
        continue;
      }
      listeners.push_back(std::move(fd));
    }
    return listeners;
  }
  throw Error(join("rank 0 cannot listen on any of the ports ", first_port, " to ",
                   first_port + ports - 1, " of ", host,
                   " (those after MASTER_PORT): ", text_of(error)));
}

Fd connect_to(const Address& address, int port, Time deadline, std::string& why) {
  Fd fd(socket(address.family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  const std::vector<char> bytes = with_port(address, port);
  int error = fd.get() < 0 ? errno : 0;
  if (error == 0 && connect(fd.get(), raw(bytes), bytes.size()) != 0) error = errno;
  if (error == EINPROGRESS) {
    socklen_t length = sizeof(error);
    error = ETIMEDOUT;
    if (wait_for(fd.get(), POLLOUT, deadline, 1000)) {
      getsockopt(fd.get(), SOL_SOCKET, SO_ERROR, &error, &length);
    }
  }
  if (error != 0) {
    why = text_of(error);
    fd.close();
  }
  return fd;
}

void set_options(int fd, double timeout_s) {
  set(fd, IPPROTO_TCP, TCP_NODELAY, 1);
  set(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
  set(fd, IPPROTO_TCP, TCP_KEEPIDLE, kKeepIdle);
  set(fd, IPPROTO_TCP, TCP_KEEPINTVL, kKeepInterval);
  set(fd, IPPROTO_TCP, TCP_KEEPCNT, kKeepCount);
  set(fd, IPPROTO_TCP, TCP_USER_TIMEOUT,
      static_cast<int>(std::clamp(timeout_s * 1000, 1000.0, 25000.0)));
}

Result send_all(int fd, const void* data, size_t bytes, const std::function<Time()>& deadline) {
  const char* from = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t sent = send(fd, from, bytes, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent > 0) {
      from += sent;
      bytes -= sent;
      continue;
    }
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0 && errno != EAGAIN && errno != EWOULDBLOCK) return Result::kClosed;
    const Time limit = deadline();
    if (steady_clock::now() >= limit) return Result::kTimedOut;
    wait_for(fd, POLLOUT, limit, 100);
  }
  return Result::kDone;
}

Result receive_all(int fd, void* data, size_t bytes, Time deadline) {
  char* to = static_cast<char*>(data);
  while (bytes > 0) {
    const ssize_t got = recv(fd, to, bytes, MSG_DONTWAIT);
    if (got > 0) {
      to += got;
      bytes -= got;
      continue;
    }
    if (got < 0 && errno == EINTR) continue;
    if (got == 0 || (errno != EAGAIN && errno != EWOULDBLOCK)) return Result::kClosed;
    if (steady_clock::now() >= deadline) return Result::kTimedOut;
    wait_for(fd, POLLIN, deadline, 1000);
  }
  return Result::kDone;
}

void wait_readable(const std::vector<int>& fds, Time deadline, std::vector<bool>& readable) {
  std::vector<pollfd> entries;
  for (const int fd : fds) entries.push_back({fd, POLLIN, 0});
  const int most = deadline == Time::max() ? -1 : milliseconds_until(deadline, 1000);
  poll(entries.data(), entries.size(), most);
  readable.assign(fds.size(), false);
  for (size_t i = 0; i < fds.size(); ++i) readable[i] = entries[i].revents != 0;
}

std::string host_name() {
  char name[64] = {};
  gethostname(name, sizeof(name) - 1);
  return name;
}

}  // namespace kdt::net
