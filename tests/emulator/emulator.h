// Runs CUDA kernels on the host: the threads of a block are fibres, blocks run one after another.
//
// What a kernel can get wrong shows: shared memory starts as NaN, asynchronous copies land only at
// their wait, fibres are resumed in random order and run from one rendezvous to the next (so a
// missing barrier gives wrong numbers), addresses and alignments are checked, and a collective that
// not all lanes reach is an error. Speed, real rounding of mma and races inside one instruction
// window are not modelled.
#pragma once

#include <cstdint>
#include <functional>
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

// Throws std::runtime_error when a thread did something that is no fault of the host's.
void launch(dim3 grid, int num_threads, int64_t shared_bytes, const std::function<void()>& body);

// For the definitions of primitives; called from inside a kernel.

unsigned char* shared_memory();
// Offset of a pointer into the block's shared memory.
uint32_t shared_offset(const void* pointer);
// `bytes` at an offset of shared memory, aligned to `alignment`.
unsigned char* shared_at(uint32_t offset, uint32_t bytes, uint32_t alignment);

void sync_block();

// All lanes of the warp meet: each brings `in`, `combine` runs once over the table of lanes, and
// each takes its row of `out`. `name` must be the same in all lanes.
inline constexpr int kWords = 16;
using Table = uint32_t[32][kWords];
void meet_warp(const char* name, const uint32_t* in, int num_in, uint32_t* out, int num_out,
               const std::function<void(const Table& in, Table& out)>& combine);
int lane();

void copy_async(uint32_t to, const void* from, bool valid);
void commit_async();
void wait_async(int pending);

}  // namespace emulator
