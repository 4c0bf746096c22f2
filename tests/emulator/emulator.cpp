#include "emulator.h"

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>
#include <numeric>
#include <optional>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "fibre.h"

namespace emulator {
namespace {

constexpr int kWarp = 32;
constexpr int kMaxWarps = 32;
constexpr int64_t kGuard = 1024;  // on either side of the shared memory, checked after each block

struct Copy {
  uint32_t to;
  const void* from;
  bool valid;
  int group;
};

struct Thread {
  Fibre fibre;
  std::vector<Copy> copies;  // under way, in the order of issue
  int groups = 0;            // committed
};

// Where threads wait for others.
struct SyncPoint {
  const char* name = nullptr;
  Where where;
};

struct Warp {
  int place = 0;                                          // in the block's order of warps
  uint32_t ready = 0, done = 0, at_barrier = 0, met = 0;  // lanes
  uint32_t waiting = 0;                                   // in let_others_run
  SyncPoint sync_point;
  Table in, out;
};

// The block that runs in this thread, and memory kept from launch to launch.
struct Machine {
  std::vector<std::unique_ptr<Thread>> threads;
  Warp warps[kMaxWarps];
  std::vector<unsigned char> memory;
  unsigned char* shared = nullptr;
  int64_t shared_bytes = 0;
  int num_threads = 0;
  int current = -1;           // thread; -1 outside of launch()
  int order[kMaxWarps] = {};  // warps in random order
  uint32_t ready = 0;         // places in it of warps with lanes that can run
  bool some_ahead = false;    // the first of these does
  bool some_waiting = false;  // in let_others_run
  int in_order = 0;           // objects of BlocksInOrder
  int num_at_barrier = 0, num_done = 0;
  SyncPoint barrier;
  std::exception_ptr error;
  const std::function<void()>* body = nullptr;
  uint64_t state = 0;  // of random numbers
  uint32_t seed = 0;
  bool seeded = false;

  int num_warps() const { return num_threads / kWarp; }
  Warp& warp() { return warps[current / kWarp]; }
  uint32_t lane_bit() const { return 1u << (current % kWarp); }

  void make_ready(Warp& w, uint32_t lanes) {
    w.ready |= lanes;
    if (lanes != 0) ready |= 1u << w.place;
  }

  // splitmix64
  uint64_t random() {
    uint64_t z = state += 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
  }
};

thread_local Machine machine;
thread_local std::optional<Graph> captured;

std::string text(const SyncPoint& sync_point) {
  const std::string file = sync_point.where.file_name();
  return std::string(sync_point.name) + " (" + file.substr(file.rfind('/') + 1) + ":" +
         std::to_string(sync_point.where.line()) + ")";
}

bool same(const SyncPoint& a, const SyncPoint& b) {
  const auto equal = [](const char* x, const char* y) { return x == y || std::strcmp(x, y) == 0; };
  return a.where.line() == b.where.line() && equal(a.name, b.name) &&
         equal(a.where.file_name(), b.where.file_name());
}

void pause() { machine.threads[machine.current]->fibre.leave(); }

void release_barrier_if_full() {
  Machine& m = machine;
  if (m.num_at_barrier == 0 || m.num_at_barrier + m.num_done < m.num_threads) return;
  for (int w = 0; w < m.num_warps(); ++w) {
    Warp& warp = m.warps[w];
    if (warp.done != 0 && warp.at_barrier != 0)
      fail("a part of warp " + std::to_string(w) + " has ended, the others are at " +
           text(m.barrier));
    m.make_ready(warp, warp.at_barrier);
    warp.at_barrier = 0;
  }
  m.num_at_barrier = 0;
}

void run_thread() {
  Machine& m = machine;
  try {
    (*m.body)();
    if (!m.threads[m.current]->copies.empty())
      fail("a thread ended with asynchronous copies under way");
    m.warp().done |= m.lane_bit();
    ++m.num_done;
    release_barrier_if_full();
  } catch (...) {
    if (!m.error) m.error = std::current_exception();
  }
}

// A bit that is set, any of them; `random` is a number below 32.
int random_bit(uint32_t bits, uint32_t random) {
  return (__builtin_ctz(std::rotr(bits, static_cast<int>(random))) + static_cast<int>(random)) % 32;
}

// Takes the next thread to run; -1 when none can.
int take_thread() {
  Machine& m = machine;
  if (m.ready == 0 && m.some_waiting) {
    std::this_thread::yield();
    m.some_waiting = false;
    for (int w = 0; w < m.num_warps(); ++w)
      m.make_ready(m.warps[w], std::exchange(m.warps[w].waiting, 0));
  }
  if (m.ready == 0) return -1;
  const uint64_t random = m.random();
  const int place = m.some_ahead ? __builtin_ctz(m.ready) : random_bit(m.ready, random >> 59);
  Warp& warp = m.warps[m.order[place]];
  const int lane = random_bit(warp.ready, random >> 54 & 31);
  warp.ready &= ~(1u << lane);
  if (warp.ready == 0) m.ready &= ~(1u << place);
  return m.order[place] * kWarp + lane;
}

[[noreturn]] void fail_stuck() {
  Machine& m = machine;
  std::string what = "threads wait for others that never come: ";
  if (m.num_at_barrier > 0) what += std::to_string(m.num_at_barrier) + " at " + text(m.barrier);
  for (int w = 0; w < m.num_warps(); ++w) {
    if (m.warps[w].met == 0) continue;
    what += (what.back() == ' ' ? "" : ", ") + std::to_string(__builtin_popcount(m.warps[w].met)) +
            " lanes of warp " + std::to_string(w) + " at " + text(m.warps[w].sync_point);
  }
  fail(what);
}

void run_block() {
  Machine& m = machine;
  std::fill_n(m.shared - kGuard, m.shared_bytes + 2 * kGuard, static_cast<unsigned char>(0xFF));
  m.num_at_barrier = m.num_done = 0;
  for (int w = 0; w < m.num_warps(); ++w) {
    m.order[w] = w;
    std::swap(m.order[w], m.order[m.random() % (w + 1)]);
  }
  m.ready = 0;
  for (int place = 0; place < m.num_warps(); ++place) {
    Warp& warp = m.warps[m.order[place]];
    warp.place = place;
    warp.ready = warp.done = warp.at_barrier = warp.met = warp.waiting = 0;
    m.make_ready(warp, 0xFFFFFFFFu);
  }
  m.some_ahead = m.random() % 2 == 0;
  m.some_waiting = false;
  for (int t = 0; t < m.num_threads; ++t) {
    m.threads[t]->copies.clear();
    m.threads[t]->groups = 0;
    m.threads[t]->fibre.prepare(run_thread);
  }
  while (m.num_done < m.num_threads) {
    m.current = take_thread();
    if (m.current < 0) {
      m.current = 0;
      fail_stuck();
    }
    threadIdx = {static_cast<unsigned>(m.current), 0, 0};
    m.threads[m.current]->fibre.enter();
    if (m.error) std::rethrow_exception(m.error);
  }
  for (int64_t i = 0; i < kGuard; ++i) {
    if (m.shared[m.shared_bytes + i] != 0xFF || m.shared[-1 - i] != 0xFF)
      fail("a write outside the " + std::to_string(m.shared_bytes) + " bytes of shared memory");
  }
}

}  // namespace

void fail(const std::string& what) {
  throw std::runtime_error("emulator: " + what + " (block " + std::to_string(blockIdx.x) + ", " +
                           std::to_string(blockIdx.y) + ", " + std::to_string(blockIdx.z) +
                           ", thread " + std::to_string(threadIdx.x) +
                           ", KDT_EMULATOR_SEED=" + std::to_string(machine.seed) + ")");
}

void set_seed(uint32_t seed) {
  machine.seed = seed;
  machine.state = seed;
  machine.seeded = true;
}

BlocksInOrder::BlocksInOrder() { ++machine.in_order; }
BlocksInOrder::~BlocksInOrder() { --machine.in_order; }

void let_others_run() {
  machine.warp().waiting |= machine.lane_bit();
  machine.some_waiting = true;
  pause();
}

void begin_capture() {
  if (captured) fail("a capture inside of another");
  captured.emplace();
}

Graph end_capture() {
  if (!captured) fail("no capture to end");
  Graph graph = std::move(*captured);
  captured.reset();
  return graph;
}

bool is_capturing() { return captured.has_value(); }

void in_stream(const std::function<void()>& work) { captured ? captured->push_back(work) : work(); }

void launch(dim3 grid, int num_threads, int64_t shared_bytes, const std::function<void()>& body) {
  Machine& m = machine;
  if (captured) {
    captured->push_back([=, in_order = m.in_order > 0] {
      const auto run = [&] { launch(grid, num_threads, shared_bytes, body); };
      if (!in_order) return run();
      const BlocksInOrder keep;
      run();
    });
    return;
  }
  if (m.current >= 0) fail("a kernel starts a kernel");
  if (num_threads < kWarp || num_threads > kWarp * kMaxWarps || num_threads % kWarp != 0)
    fail("a block of " + std::to_string(num_threads) + " threads");
  if (!m.seeded) {
    const char* seed = std::getenv("KDT_EMULATOR_SEED");
    set_seed(seed != nullptr ? static_cast<uint32_t>(std::atoll(seed)) : std::random_device()());
  }
  while (static_cast<int>(m.threads.size()) < num_threads)
    m.threads.push_back(std::make_unique<Thread>());
  constexpr int64_t kAlignment = 128;
  m.memory.resize(std::max<size_t>(m.memory.size(), shared_bytes + 2 * kGuard + kAlignment));
  unsigned char* const first = m.memory.data() + kGuard;
  m.shared = first + (kAlignment - reinterpret_cast<uintptr_t>(first) % kAlignment) % kAlignment;
  m.shared_bytes = shared_bytes;
  m.num_threads = num_threads;
  m.body = &body;
  m.error = nullptr;
  struct Outside {
    ~Outside() { machine.current = -1; }
  } outside;
  blockDim = dim3(num_threads);
  gridDim = grid;
  std::vector<int64_t> blocks(static_cast<int64_t>(grid.x) * grid.y * grid.z);
  std::iota(blocks.begin(), blocks.end(), int64_t{0});
  for (size_t i = blocks.size(); i > 1 && m.in_order == 0; --i)
    std::swap(blocks[i - 1], blocks[m.random() % i]);
  for (const int64_t block : blocks) {
    const int64_t plane = static_cast<int64_t>(grid.x) * grid.y;
    blockIdx = {static_cast<unsigned>(block % grid.x),
                static_cast<unsigned>(block % plane / grid.x),
                static_cast<unsigned>(block / plane)};
    run_block();
  }
}

unsigned char* shared_memory() { return machine.shared; }

uint32_t shared_offset(const void* pointer) {
  const int64_t offset = static_cast<const unsigned char*>(pointer) - machine.shared;
  if (offset < 0 || offset > machine.shared_bytes) fail("a pointer outside the shared memory");
  return static_cast<uint32_t>(offset);
}

unsigned char* shared_at(uint32_t offset, uint32_t bytes, uint32_t alignment) {
  if (offset % alignment != 0)
    fail("shared address " + std::to_string(offset) + " is no multiple of " +
         std::to_string(alignment));
  if (static_cast<int64_t>(offset) + bytes > machine.shared_bytes)
    fail("shared bytes [" + std::to_string(offset) + ", +" + std::to_string(bytes) + ") of " +
         std::to_string(machine.shared_bytes));
  return machine.shared + offset;
}

void sync_block(Where where) {
  Machine& m = machine;
  const SyncPoint mine = {"__syncthreads", where};
  if (m.num_at_barrier == 0) m.barrier = mine;
  if (!same(m.barrier, mine))
    fail("threads of one block are at " + text(m.barrier) + " and at " + text(mine));
  m.warp().at_barrier |= m.lane_bit();
  ++m.num_at_barrier;
  release_barrier_if_full();
  pause();
}

void detail::meet_warp(const char* name, const uint32_t* in, int num_in, uint32_t* out, int num_out,
                       void (*combine)(const void*, const Table&, Table&), const void* context,
                       Where where) {
  Machine& m = machine;
  Warp& warp = m.warp();
  const int lane = m.current % kWarp;
  const SyncPoint mine = {name, where};
  if (warp.met == 0) warp.sync_point = mine;
  if (!same(warp.sync_point, mine))
    fail("lanes of one warp are at " + text(warp.sync_point) + " and at " + text(mine));
  std::memcpy(warp.in[lane], in, num_in * sizeof(uint32_t));
  warp.met |= 1u << lane;
  if (warp.met == 0xFFFFFFFFu) {
    combine(context, warp.in, warp.out);
    m.make_ready(warp, ~(1u << lane));
    warp.met = 0;
  } else {
    pause();
  }
  // The next exchange cannot end before every lane has left this one, since all must arrive.
  std::memcpy(out, warp.out[lane], num_out * sizeof(uint32_t));
}

void copy_async(uint32_t to, const void* from, bool valid) {
  unsigned char* target = shared_at(to, 16, 16);
  if (valid && reinterpret_cast<uintptr_t>(from) % 16 != 0)
    fail("an asynchronous copy from an address that is no multiple of 16");
  std::memset(target, 0xFF, 16);
  Thread& thread = *machine.threads[machine.current];
  thread.copies.push_back({to, from, valid, thread.groups});
}

void commit_async() { ++machine.threads[machine.current]->groups; }

void wait_async(int pending) {
  Thread& thread = *machine.threads[machine.current];
  size_t landed = 0;
  for (; landed < thread.copies.size(); ++landed) {
    const Copy& copy = thread.copies[landed];
    if (copy.group >= thread.groups - pending) break;
    unsigned char* to = machine.shared + copy.to;
    copy.valid ? std::memcpy(to, copy.from, 16) : std::memset(to, 0, 16);
  }
  thread.copies.erase(thread.copies.begin(), thread.copies.begin() + static_cast<int64_t>(landed));
}

}  // namespace emulator
