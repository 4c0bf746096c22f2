// Forked processes that are ranks of a group, for tests.
#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <functional>
#include <string>
#include <vector>

#include "parallel/launch.h"
#include "parallel/ranks.h"

namespace kdt::test {

// Ports that no other test of this run, or of one beside it, uses.
inline int next_master_port() {
  // Below those that the system gives to connections, which begin at 32768.
  static int used = getpid() * 31;
  return 16000 + 9 * (used++ % 1800);
}

inline Launch launch_of(int rank, int world_size, int master_port) {
  Launch launch;
  launch.rank = rank;
  launch.world_size = world_size;
  launch.local_rank = rank;
  launch.local_size = world_size;
  launch.master_addr = "127.0.0.1";
  launch.master_port = master_port;
  launch.key = "test";
  return launch;
}

class Processes {
 public:
  // The text that body(rank) returns, or the error that it throws, can be read with result(rank).
  Processes(int count, const std::function<std::string(int)>& body) {
    for (int rank = 0; rank < count; ++rank) {
      int ends[2];
      if (pipe(ends) != 0) std::abort();
      const pid_t pid = fork();
      if (pid == 0) {
        alarm(60);
        close(ends[0]);
        std::string text;
        try {
          text = body(rank);
        } catch (const std::exception& error) {
          text = std::string("threw: ") + error.what();
        }
        _exit(write(ends[1], text.data(), text.size()) == static_cast<ssize_t>(text.size()) ? 0
                                                                                            : 1);
      }
      close(ends[1]);
      pids_.push_back(pid);
      outputs_.push_back(ends[0]);
    }
  }
  ~Processes() {
    for (size_t i = 0; i < pids_.size(); ++i) {
      kill(pids_[i], SIGKILL);
      waitpid(pids_[i], nullptr, 0);
      close(outputs_[i]);
    }
  }
  Processes(const Processes&) = delete;
  Processes& operator=(const Processes&) = delete;

  pid_t pid(int rank) const { return pids_[rank]; }
  void send_signal(int rank, int signal) const { kill(pids_[rank], signal); }

  // Waits for the end of the process.
  std::string result(int rank) const {
    std::string text;
    char buffer[1024];
    ssize_t got;
    while ((got = read(outputs_[rank], buffer, sizeof(buffer))) > 0) text.append(buffer, got);
    return text;
  }

 private:
  std::vector<pid_t> pids_;
  std::vector<int> outputs_;
};

// A connection to a port of this machine, or -1; tries for some seconds.
inline int dial(int port) {
  for (int i = 0; i < 300; ++i) {
    const int fd = socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(port);
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0) return fd;
    close(fd);
    sleep_ms(20);
  }
  return -1;
}

// Takes a port; -1 when it cannot.
inline int occupy(int port) {
  const int fd = socket(AF_INET, SOCK_STREAM, 0), yes = 1;
  setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof(yes));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  if (bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0 || listen(fd, 4) != 0) {
    close(fd);
    return -1;
  }
  return fd;
}

}  // namespace kdt::test
