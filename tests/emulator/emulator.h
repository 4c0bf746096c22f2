// Runs CUDA kernels on the host: the threads of a block are fibres, blocks run one after another.
//
// What a kernel can get wrong shows: shared memory starts as NaN; the target of an asynchronous
// copy is NaN from its issue to its wait, which is stricter than the hardware both ways; threads
// run in random order from one rendezvous to the next, and in half of the blocks some warps always
// run ahead (so a missing barrier gives wrong numbers); addresses and alignments are checked; a
// barrier or collective that not all reach, or that they reach at different lines, is an error.
// Speed, the rounding of mma and races between two rendezvous of one thread are not modelled.
//
// KDT_EMULATOR_SEED repeats the order of a run; errors name the seed. From inside a kernel errors
// are std::runtime_error, thrown by launch().
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <source_location>
#include <string>
#include <vector>

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};
struct uint3 {
  unsigned x, y, z;
};

inline thread_local uint3 threadIdx, blockIdx;
inline thread_local dim3 blockDim, gridDim;

namespace emulator {

using Where = std::source_location;

void launch(dim3 grid, int num_threads, int64_t shared_bytes, const std::function<void()>& body);

// What a thread's stream was given while it was captured.
using Graph = std::vector<std::function<void()>>;
void begin_capture();
Graph end_capture();
bool is_capturing();
// Now, or in the graph that is captured.
void in_stream(const std::function<void()>& work);

// Kernels of several threads of the process run at the same time. Those that wait for each other do
// it block by block: while an object of this class exists, the blocks of this thread's launches run
// in ascending order.
class BlocksInOrder {
 public:
  BlocksInOrder();
  ~BlocksInOrder();
  BlocksInOrder(const BlocksInOrder&) = delete;
  BlocksInOrder& operator=(const BlocksInOrder&) = delete;
};

// A planted fault: flags of other kernels are taken as set.
inline std::atomic<bool> skip_waits = false;

// Orders of the launches that follow in this thread.
void set_seed(uint32_t seed);

// For the definitions of builtins and primitives; called from inside a kernel.

[[noreturn]] void fail(const std::string& what);

unsigned char* shared_memory();
// Offset of a pointer into the block's shared memory.
uint32_t shared_offset(const void* pointer);
// `bytes` at an offset of shared memory, aligned to `alignment`.
unsigned char* shared_at(uint32_t offset, uint32_t bytes, uint32_t alignment);

void sync_block(Where where);

// In a loop that waits for what another thread of the block, or another kernel, does: all threads
// that can run do so before this one goes on.
void let_others_run();

inline constexpr int kWords = 16;
using Table = uint32_t[32][kWords];
namespace detail {
void meet_warp(const char* name, const uint32_t* in, int num_in, uint32_t* out, int num_out,
               void (*combine)(const void* context, const Table& in, Table& out),
               const void* context, Where where);
}
// All lanes of the warp meet: each brings `in`, `combine` runs once over the table of lanes, and
// each takes its row of `out`. `name` and `where` must be the same in all lanes.
template <typename Combine>
void meet_warp(const char* name, const uint32_t* in, int num_in, uint32_t* out, int num_out,
               const Combine& combine, Where where = Where::current()) {
  detail::meet_warp(
      name, in, num_in, out, num_out,
      [](const void* context, const Table& table_in, Table& table_out) {
        (*static_cast<const Combine*>(context))(table_in, table_out);
      },
      &combine, where);
}

void copy_async(uint32_t to, const void* from, bool valid);
void commit_async();
void wait_async(int pending);

}  // namespace emulator
