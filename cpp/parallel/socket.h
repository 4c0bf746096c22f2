// TCP sockets that never block for longer than they are told.
#pragma once

#include <chrono>
#include <cstddef>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "core/error.h"

namespace kdt::net {

using Time = std::chrono::steady_clock::time_point;

Time after(double seconds);

class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd) : fd_(fd) {}
  Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Fd& operator=(Fd&& other) noexcept;
  ~Fd() { close(); }
  int get() const { return fd_; }
  void close();

 private:
  int fd_ = -1;
};

// A host's TCP address.
struct Address {
  int family = 0;
  std::vector<char> bytes;  // a sockaddr with port 0
  bool loopback = false;
  bool literal = false;  // written as a number
};

class NoAddress : public Error {
  using Error::Error;
};

// Throws NoAddress with the host's name when it has none.
std::vector<Address> resolve(const std::string& host);

// Listening sockets on one port, the first free one of `ports` from first_port on: on the addresses
// that this machine has, or else on all of its interfaces; the latter also with `everywhere`.
// Throws Error naming the ports when none is free.
std::vector<Fd> listen_on(const std::vector<Address>& addresses, bool everywhere, int first_port,
                          int ports, const std::string& host, int& port);

// A connection to it, or none and why.
Fd connect_to(const Address& address, int port, Time deadline, std::string& why);

// No delay of small messages, and signs of life while idle: a peer whose machine has gone is
// noticed after some 25 s.
void set_options(int fd, double timeout_s);

enum class Result { kDone, kClosed, kTimedOut };

// All bytes or nothing known. The socket need not be non-blocking. `deadline` is asked again at
// least each 100 ms.
Result send_all(int fd, const void* data, size_t bytes, const std::function<Time()>& deadline);
Result receive_all(int fd, void* data, size_t bytes, Time deadline);

// Waits until one of the sockets can be read or the deadline.
void wait_readable(const std::vector<int>& fds, Time deadline, std::vector<bool>& readable);

// This machine's name.
std::string host_name();

}  // namespace kdt::net
