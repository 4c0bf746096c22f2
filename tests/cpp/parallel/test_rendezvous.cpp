// How processes find each other, and what comes to their port beside them.
#include <sys/resource.h>

#include <atomic>
#include <thread>

#include "check.h"
#include "core/clock.h"
#include "core/error.h"
#include "parallel/processes.h"
#include "parallel/rendezvous.h"
#include "parallel/tcp_group.h"

namespace kdt::test {
namespace {

constexpr double kLong = 40;  // a time-out that no test waits for

// Joins, meets once, and says how it went.
std::string join_and_meet(const Launch& launch, double timeout_s) {
  const auto group = make_tcp_group(launch, timeout_s);
  group->barrier();
  return "right";
}

KDT_TEST(rank_0_is_not_there) {
  const int port = next_master_port();
  Clock clock;
  EXPECT_THROWS(join(") found no rank 0 at 127.0.0.1, ports ", port + 1, " to ", port + 8,
                     ", within 0.5 s: Connection refused"),
                make_tcp_group(launch_of(1, 2, port), 0.5));
  EXPECT(clock.ms() > 450);
  EXPECT(clock.ms() < 5000);
  Launch launch = launch_of(1, 2, port);
  launch.master_addr = "no.such.host.invalid";
  EXPECT_THROWS("MASTER_ADDR is \"no.such.host.invalid\", which has no address",
                make_tcp_group(launch, 0.1));
  launch.rank = 0;
  EXPECT_THROWS("MASTER_ADDR is \"no.such.host.invalid\", which has no address",
                make_tcp_group(launch, 0.1));
}

KDT_TEST(ranks_that_do_not_come) {
  const int port = next_master_port();
  Processes processes(2, [&](int rank) { return join_and_meet(launch_of(rank, 4, port), 0.7); });
  for (int rank : {0, 1}) {
    EXPECT_EQ(processes.result(rank),
              join("threw: ranks 2, 3 of 4 did not come to 127.0.0.1, port ", port + 1,
                   ", within 0.7 s"));
  }
}

KDT_TEST(rank_0_names_who_is_missing_while_it_waits) {
  const int port = next_master_port();
  Processes processes(3, [&](int rank) -> std::string {
    sleep_ms(rank * 1000);
    if (rank > 0) return join_and_meet(launch_of(rank, 3, port), kLong);
    std::string told, before;
    std::atomic<bool> done = false;
    std::thread look([&] {
      for (; !done; sleep_ms(10)) {
        const std::string now = net::missing_ranks();
        if (!now.empty() && now != before) told += now + ".";
        before = now;
      }
    });
    make_tcp_group(launch_of(rank, 3, port), kLong)->barrier();
    const std::string after = net::missing_ranks();
    done = true;
    look.join();
    return told + after;
  });
  EXPECT_EQ(processes.result(0), "ranks 1, 2 of 3.rank 2 of 3.");
}

KDT_TEST(rank_0_comes_last) {
  const int port = next_master_port();
  Processes processes(3, [&](int rank) {
    if (rank == 0) sleep_ms(700);
    return join_and_meet(launch_of(rank, 3, port), kLong);
  });
  for (int rank = 0; rank < 3; ++rank) EXPECT_EQ(processes.result(rank), "right");
}

KDT_TEST(addresses) {
  for (const char* host : {"localhost", "::1", "127.0.0.1", "0.0.0.0"}) {
    const int port = next_master_port();
    const int probe = socket(AF_INET6, SOCK_STREAM, 0);
    sockaddr_in6 six{};
    six.sin6_family = AF_INET6;
    six.sin6_addr = in6addr_loopback;
    const bool has_six = bind(probe, reinterpret_cast<sockaddr*>(&six), sizeof(six)) == 0;
    close(probe);
    if (std::string(host) == "::1" && !has_six) continue;
    Processes processes(2, [&](int rank) {
      Launch launch = launch_of(rank, 2, port);
      launch.master_addr = host;
      return join_and_meet(launch, kLong);
    });
    EXPECT_EQ(processes.result(0), "right");
    EXPECT_EQ(processes.result(1), "right");
  }
}

KDT_TEST(an_address_of_another_machine) {
  // Rank 0 cannot be reached there, but it listens on all it has.
  const int port = next_master_port();
  Processes processes(2, [&](int rank) {
    Launch launch = launch_of(rank, 2, port);
    if (rank == 0) launch.master_addr = "192.0.2.1";
    return join_and_meet(launch, kLong);
  });
  EXPECT_EQ(processes.result(0), "right");
  EXPECT_EQ(processes.result(1), "right");
}

KDT_TEST(taken_ports) {
  const int port = next_master_port();
  std::vector<int> taken = {occupy(port + 1), occupy(port + 2)};
  EXPECT(taken[0] >= 0 && taken[1] >= 0);
  {
    Processes processes(2,
                        [&](int rank) { return join_and_meet(launch_of(rank, 2, port), kLong); });
    EXPECT_EQ(processes.result(0), "right");
    EXPECT_EQ(processes.result(1), "right");
  }
  for (int i = 3; i <= kGroupPorts; ++i) taken.push_back(occupy(port + i));
  EXPECT_THROWS(join("rank 0 cannot listen on any of the ports ", port + 1, " to ", port + 8,
                     " of 127.0.0.1 (those after MASTER_PORT): Address already in use"),
                make_tcp_group(launch_of(0, 2, port), 1));
  for (const int fd : taken) close(fd);
}

KDT_TEST(two_jobs_with_one_port) {
  const int port = next_master_port();
  Processes processes(4, [&](int i) {
    Launch launch = launch_of(i % 2, 2, port);
    launch.key = i < 2 ? "one" : "two";
    const auto group = make_tcp_group(launch, kLong);
    int jobs[2], job = i / 2;
    group->all_gather(&job, sizeof(job), jobs);
    return std::string(jobs[0] == job && jobs[1] == job ? "right" : "mixed up");
  });
  for (int i = 0; i < 4; ++i) EXPECT_EQ(processes.result(i), "right");
}

// Process 2 differs by `change`, then a right one takes its place; what the first one got.
std::string refused(const std::function<void(Launch&)>& change, int ranks_each = 1) {
  const int port = next_master_port();
  Processes processes(4, [&](int i) {
    Launch launch = launch_of(i == 3 ? 2 : i, 3, port);
    if (i == 2) {
      sleep_ms(300);
      change(launch);
      make_hybrid_group(ranks_each, launch, 1);
      return std::string("came in");
    }
    if (i == 3) sleep_ms(1800);
    return join_and_meet(launch, kLong);
  });
  for (int i : {0, 1, 3}) EXPECT_EQ(processes.result(i), "right");
  return processes.result(2);
}

KDT_TEST(processes_that_are_refused) {
  EXPECT(holds(refused([](Launch& launch) { launch.key = "tess"; }),
               "refused this process: it belongs to another job (KDTREE_GROUP_KEY or MASTER_PORT"));
  EXPECT(holds(refused([](Launch& launch) { launch.world_size = 4; }),
               "refused this process: the group has 3 processes, it is one of 4"));
  EXPECT(holds(refused([](Launch&) {}, 2),
               "refused this process: the group has 1 ranks a process, it has 2"));
  EXPECT(holds(refused([](Launch& launch) { launch.rank = 1; }), ") is already there"));
}

KDT_TEST(rank_0_tells_of_those_it_refused) {
  const int port = next_master_port();
  Processes processes(4, [&](int i) {
    // Process 2 is one of four, and 3 is a second rank 1.
    if (i == 3) sleep_ms(500);
    Launch launch = launch_of(i == 3 ? 1 : i, i == 2 ? 4 : 3, port);
    return join_and_meet(launch, i == 0 ? 2 : 3);
  });
  const std::string told = processes.result(0);
  EXPECT(holds(told, join("threw: rank 2 of 3 did not come to 127.0.0.1, port ", port + 1)));
  EXPECT(holds(told, "; process 2 ("));
  EXPECT(holds(told, ") was refused: the group has 3 processes, it is one of 4"));
  EXPECT(holds(told, ") was refused: rank 1 ("));
  EXPECT_EQ(processes.result(1), told);
}

KDT_TEST(member_that_dies_before_the_start_is_replaced) {
  const int port = next_master_port();
  Processes processes(4, [&](int i) {
    if (i == 2) sleep_ms(1200);
    if (i == 3) sleep_ms(300);
    return join_and_meet(launch_of(i == 3 ? 1 : i, 3, port), kLong);
  });
  sleep_ms(150);
  processes.send_signal(1, SIGKILL);
  for (int i : {0, 2, 3}) EXPECT_EQ(processes.result(i), "right");
}

void put(std::string& to, uint64_t value, int bytes) {
  to.append(reinterpret_cast<const char*>(&value), bytes);
}

// What process `process` of 3 with one rank says first.
std::string hello(int process, int port, uint32_t version, uint32_t pid = 4711) {
  std::string text = "KDTGROUP";
  for (uint32_t word :
       {version, 3u, static_cast<uint32_t>(process), 1u, static_cast<uint32_t>(port), pid}) {
    put(text, word, 4);
  }
  std::string host = "evil\n\x1b[2J";
  host.resize(64);
  std::string key = "test";
  key.resize(256);
  return text + host + key;
}

void say(int fd, const std::string& text) {
  if (send(fd, text.data(), text.size(), MSG_NOSIGNAL) < 0) return;
}

std::string hear(int fd, size_t bytes) {
  std::string text(bytes, '\0');
  const ssize_t got = recv(fd, text.data(), bytes, MSG_WAITALL);
  text.resize(got < 0 ? 0 : got);
  return text;
}

KDT_TEST(rank_0_tells_of_the_last_refusal_of_each_process) {
  const int port = next_master_port();
  Processes processes(1, [&](int rank) { return join_and_meet(launch_of(rank, 3, port), 2); });
  const auto come = [&](int process, uint32_t version, uint32_t pid) {
    const int fd = dial(port + 1);
    say(fd, hello(process, port, version, pid));
    EXPECT_EQ(hear(fd, 16 + 512).size(), size_t{16 + 512});
    close(fd);
  };
  for (uint32_t i = 1; i <= 5; ++i) come(1, 10 + i, i);  // is started again and again
  for (uint32_t i = 1; i <= 2; ++i) come(3, 1, i);
  come(0, 1, 1);
  come(1 << 30, 7, 1);
  come(2, 9, 1);
  const std::string spoken =
      ") was refused: the group speaks version 1 of the protocol, it speaks ";
  EXPECT_EQ(processes.result(0), join("threw: ranks 1, 2 of 3 did not come to 127.0.0.1, port ",
                                      port + 1, ", within 2 s; process 1 (evil??[2J:5", spoken,
                                      "15; process 2 (evil??[2J:1", spoken, "9; and 3 more"));
}

KDT_TEST(rank_0_forgets_the_refusal_of_a_process_that_comes_right) {
  const int port = next_master_port();
  Processes processes(1, [&](int rank) { return join_and_meet(launch_of(rank, 3, port), 1); });
  const int wrong = dial(port + 1), other = dial(port + 1), right = dial(port + 1);
  say(wrong, hello(2, port, 9, 1));
  say(other, hello(3, port, 1));
  for (const int fd : {wrong, other}) EXPECT_EQ(hear(fd, 16 + 512).size(), size_t{16 + 512});
  say(right, hello(2, port, 1, 2));
  const std::string told = join("rank 1 of 3 did not come to 127.0.0.1, port ", port + 1,
                                ", within 1 s; refused of other numbers: 1");
  EXPECT(holds(hear(right, 16 + 2 * 512), told));
  EXPECT_EQ(processes.result(0), "threw: " + told);
  for (const int fd : {wrong, other, right}) close(fd);
}

KDT_TEST(unknown_peers_do_not_disturb) {
  const int port = next_master_port();
  Clock clock;
  Processes processes(3, [&](int rank) {
    const rlimit few{100, 100};  // fewer descriptors than peers
    setrlimit(RLIMIT_NOFILE, &few);
    if (rank == 2) sleep_ms(1200);
    return join_and_meet(launch_of(rank, 3, port), kLong);
  });
  std::vector<int> peers;
  for (int i = 0; i < 150; ++i) peers.push_back(dial(port + 1));  // says nothing
  say(peers[149], "GET / HTTP/1.1\r\nHost: x\r\n\r\n");
  say(peers[148], std::string(1 << 20, '\xff'));
  say(peers[147], std::string("KDTGROUP") + std::string(1 << 20, '\xff'));
  say(peers[146], hello(2, port, 1).substr(0, 100));  // and no more
  EXPECT_EQ(hear(peers[149], 16).substr(0, 8), "KDTGROUP");
  EXPECT_EQ(hear(peers[149], 1), "");  // it was sent away
  say(peers[145], hello(2, port, 9));
  EXPECT(holds(hear(peers[145], 16 + 512), "the group speaks version 1 of the protocol"));
  say(peers[144], hello(0, port, 1));
  EXPECT(holds(hear(peers[144], 16 + 512), "its number is 0"));
  say(peers[143], hello(3, port, 1));
  EXPECT(holds(hear(peers[143], 16 + 512), "its number is 3"));
  for (int rank = 0; rank < 3; ++rank) EXPECT_EQ(processes.result(rank), "right");
  EXPECT(clock.ms() < 4500);  // not until the silent ones are sent away
  for (const int fd : peers) close(fd);
}

KDT_TEST(member_that_breaks_the_protocol) {
  struct Bad {
    uint32_t magic, frame;
    uint64_t round;
    uint8_t kind;
    int64_t call_bytes;
    uint64_t body_bytes;
  };
  constexpr uint32_t kMagic = 0x46544b44;
  const Bad cases[] = {
      {0x20544547, 0, 0, 0, 0, 0},                      // no frame of ours
      {kMagic, 0, 0, 0, int64_t{1} << 32, 1ull << 32},  // 4 GB
      {kMagic, 0, 0, 0, 4, 1ull << 63},                 // a body that is not the call's
      {kMagic, 0, 0, 0, -4, 0},                         // negative
      {kMagic, 0, 7, 0, 0, 0},                          // of another round
      {kMagic, 0, 0, 4, 0, 0},                          // no such call
      {kMagic, 1, 0, 0, 0, 0},                          // a result
      {kMagic, 3, 0, 0, 0, 1ull << 32},                 // a reason of 4 GB
      {kMagic, 17, 0, 0, 0, 0},                         // no such frame
  };
  for (const Bad& bad : cases) {
    const int port = next_master_port();
    Processes processes(2, [&](int rank) {
      const auto group = make_tcp_group(launch_of(rank, 3, port), kLong);
      group->barrier();
      return std::string("came back");
    });
    const int fd = dial(port + 1);
    say(fd, hello(2, port, 1));
    EXPECT_EQ(hear(fd, 16 + 2 * 512).size(), size_t{16 + 2 * 512});
    std::string header;
    put(header, bad.magic, 4);
    put(header, bad.frame, 4);
    put(header, bad.round, 8);
    put(header, bad.kind, 8);
    put(header, bad.call_bytes, 8);
    put(header, bad.body_bytes, 8);
    say(fd, header);
    for (int rank : {0, 1}) {
      EXPECT_EQ(processes.result(rank),
                "threw: rank 2 (evil??[2J:4711) broke the protocol of the group");
    }
    close(fd);
  }
}

KDT_TEST(launches_out_of_range) {
  EXPECT_THROWS("a process 2 of 2", make_tcp_group(launch_of(2, 2, 29500), 1));
  EXPECT_THROWS("a process -1 of 2", make_tcp_group(launch_of(-1, 2, 29500), 1));
  EXPECT_THROWS("master_port is 65530", make_tcp_group(launch_of(0, 2, 65530), 1));
  EXPECT_THROWS("0 ranks", make_hybrid_group(0, launch_of(0, 2, 29500), 1));
  EXPECT_THROWS("2000 ranks", make_hybrid_group(1000, launch_of(0, 2, 29500), 1));
  EXPECT_THROWS("time-out", make_hybrid_group(1, launch_of(0, 2, 29500), -1));
  Launch launch = launch_of(0, 2, 29500);
  launch.master_addr = "";
  EXPECT_THROWS("master_addr", make_tcp_group(launch, 1));
  launch = launch_of(0, 2, 29500);
  launch.key = std::string(256, 'k');
  EXPECT_THROWS("256 bytes", make_tcp_group(launch, 1));
}

}  // namespace
}  // namespace kdt::test

KDT_TEST_MAIN
