#include "emulator.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <exception>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>

#include "fibre.h"

namespace emulator {
namespace {

struct Copy {
  uint32_t to;
  const void* from;
  bool valid;
};

struct Thread {
  Fibre fibre;
  bool done = false;
  bool waiting = false;       // for others; cleared by them
  uint64_t barrier_seen = 0;  // the barrier's generation it waits to pass
  std::deque<std::vector<Copy>> copies;
};

struct Warp {
  uint64_t generation = 0;
  int arrived = 0;
  const char* name = nullptr;
  Table in, out;
};

struct Block {
  std::vector<std::unique_ptr<Thread>> threads;
  std::vector<Warp> warps;
  unsigned char* shared = nullptr;
  int64_t shared_bytes = 0;
  uint64_t barrier_generation = 0;
  int barrier_arrived = 0;
  int alive = 0;
  int current = 0;
  bool progress = false;
  std::exception_ptr error;
  const std::function<void()>* body = nullptr;
  std::mt19937 random{std::random_device{}()};
};

thread_local Block* block = nullptr;

[[noreturn]] void fail(const std::string& what) {
  throw std::runtime_error("emulator: " + what + " (block " + std::to_string(blockIdx.x) + ", " +
                           std::to_string(blockIdx.y) + ", " + std::to_string(blockIdx.z) +
                           ", thread " + std::to_string(threadIdx.x) + ")");
}

Thread& self() { return *block->threads[block->current]; }

void pause() { self().fibre.leave(); }

int warp_size(int warp) {
  return std::min<int>(32, static_cast<int>(block->threads.size()) - 32 * warp);
}

void release_barrier_if_full() {
  if (block->barrier_arrived == 0 || block->barrier_arrived < block->alive) return;
  block->barrier_arrived = 0;
  ++block->barrier_generation;
  block->progress = true;
}

void run_thread() {
  try {
    (*block->body)();
    if (self().copies.size() > 1 || (!self().copies.empty() && !self().copies.front().empty()))
      fail("a thread ended with asynchronous copies under way");
  } catch (...) {
    if (!block->error) block->error = std::current_exception();
  }
  self().done = true;
  --block->alive;
  block->progress = true;
  release_barrier_if_full();
}

void run_block() {
  std::vector<int> order(block->threads.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int>(i);
  while (block->alive > 0 && !block->error) {
    std::shuffle(order.begin(), order.end(), block->random);
    block->progress = false;
    for (const int t : order) {
      Thread& thread = *block->threads[t];
      if (thread.done) continue;
      block->current = t;
      threadIdx = {static_cast<unsigned>(t), 0, 0};
      thread.fibre.enter();
      if (block->error) break;
    }
    if (!block->progress && block->alive > 0 && !block->error)
      fail("threads wait for others that never come: a barrier or collective not all reach");
  }
  if (block->error) std::rethrow_exception(block->error);
}

}  // namespace

void launch(dim3 grid, int num_threads, int64_t shared_bytes, const std::function<void()>& body) {
  if (num_threads < 1 || num_threads > 1024) fail("a block of " + std::to_string(num_threads));
  Block mine;
  if (const char* seed = std::getenv("KDT_EMULATOR_SEED")) mine.random.seed(std::atoi(seed));
  // 128 bytes of guard behind, checked after each block.
  constexpr int64_t kGuard = 128;
  std::vector<unsigned char> memory(shared_bytes + 128 + kGuard);
  mine.shared = memory.data() + (128 - reinterpret_cast<uintptr_t>(memory.data()) % 128) % 128;
  mine.shared_bytes = shared_bytes;
  mine.body = &body;
  for (int t = 0; t < num_threads; ++t) mine.threads.push_back(std::make_unique<Thread>());
  mine.warps.resize((num_threads + 31) / 32);
  Block* const outer = block;
  block = &mine;
  struct Restore {
    Block* outer;
    ~Restore() { block = outer; }
  } restore{outer};
  blockDim = dim3(num_threads);
  gridDim = grid;
  for (unsigned z = 0; z < grid.z; ++z) {
    for (unsigned y = 0; y < grid.y; ++y) {
      for (unsigned x = 0; x < grid.x; ++x) {
        blockIdx = {x, y, z};
        std::memset(mine.shared, 0xFF, shared_bytes + kGuard);
        for (Warp& warp : mine.warps) warp = Warp();
        mine.barrier_arrived = 0;
        mine.alive = num_threads;
        for (auto& thread : mine.threads) {
          thread->done = false;
          thread->copies.assign(1, {});
          thread->fibre.prepare(run_thread);
        }
        run_block();
        for (int64_t i = 0; i < kGuard; ++i) {
          if (mine.shared[shared_bytes + i] != 0xFF) fail("a write behind the shared memory");
        }
      }
    }
  }
}

unsigned char* shared_memory() { return block->shared; }

uint32_t shared_offset(const void* pointer) {
  const int64_t offset = static_cast<const unsigned char*>(pointer) - block->shared;
  if (offset < 0 || offset > block->shared_bytes) fail("a pointer outside the shared memory");
  return static_cast<uint32_t>(offset);
}

unsigned char* shared_at(uint32_t offset, uint32_t bytes, uint32_t alignment) {
  if (offset % alignment != 0)
    fail("shared address " + std::to_string(offset) + " is no multiple of " +
         std::to_string(alignment));
  if (static_cast<int64_t>(offset) + bytes > block->shared_bytes)
    fail("shared bytes [" + std::to_string(offset) + ", +" + std::to_string(bytes) + ") of " +
         std::to_string(block->shared_bytes));
  return block->shared + offset;
}

int lane() { return block->current % 32; }

void sync_block() {
  const uint64_t generation = block->barrier_generation;
  ++block->barrier_arrived;
  release_barrier_if_full();
  while (block->barrier_generation == generation) pause();
}

void meet_warp(const char* name, const uint32_t* in, int num_in, uint32_t* out, int num_out,
               const std::function<void(const Table& in, Table& out)>& combine) {
  const int index = block->current / 32;
  Warp& warp = block->warps[index];
  if (warp.arrived == 0) warp.name = name;
  if (std::strcmp(warp.name, name) != 0)
    fail(std::string("lanes of one warp are at ") + warp.name + " and at " + name);
  std::memcpy(warp.in[lane()], in, num_in * sizeof(uint32_t));
  const uint64_t generation = warp.generation;
  if (++warp.arrived == warp_size(index)) {
    combine(warp.in, warp.out);
    warp.arrived = 0;
    ++warp.generation;
    block->progress = true;
  } else {
    while (warp.generation == generation) pause();
  }
  // The next meeting cannot begin before every lane has left this one, since all must arrive.
  std::memcpy(out, warp.out[lane()], num_out * sizeof(uint32_t));
}

void copy_async(uint32_t to, const void* from, bool valid) {
  shared_at(to, 16, 16);
  if (valid && reinterpret_cast<uintptr_t>(from) % 16 != 0)
    fail("an asynchronous copy from an address that is no multiple of 16");
  self().copies.back().push_back({to, from, valid});
}

void commit_async() { self().copies.emplace_back(); }

void wait_async(int pending) {
  auto& copies = self().copies;
  while (static_cast<int>(copies.size()) - 1 > pending) {
    for (const Copy& copy : copies.front()) {
      unsigned char* to = shared_at(copy.to, 16, 16);
      copy.valid ? static_cast<void>(std::memcpy(to, copy.from, 16))
                 : static_cast<void>(std::memset(to, 0, 16));
    }
    copies.pop_front();
  }
}

}  // namespace emulator
