// Sums and gathers over ranks whose devices reach each other's memory. One-shot push: each rank
// writes its part into an inbox on every other rank's device, and adds up what lies in its own.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace kdt::cuda {

inline constexpr int kMaxPushRanks = 16;
inline constexpr int kMaxPushBlocks = 64;

// Of one rank, in its device's memory; zeros at first.
struct PushState {
  uint64_t calls;    // that have begun
  uint32_t stopped;  // a wait was given up: nothing is sent any more
  uint32_t blocks;   // of the call that runs, past its begin
};

// Of one rank, in the host's memory, mapped.
struct PushReport {
  uint32_t stop;     // set by the host: waits end
  uint32_t missing;  // 1 + the rank that did not come in time; 0: none
};

// An inbox: data [2, size, slot_bytes], by parity of the call and by sender, then flags [size,
// kMaxPushBlocks] u64, the last call of which a sender's block has delivered its piece.
inline int64_t inbox_flags_begin(int64_t size, int64_t slot_bytes) { return 2 * size * slot_bytes; }
inline int64_t inbox_bytes(int64_t size, int64_t slot_bytes) {
  return inbox_flags_begin(size, slot_bytes) + size * kMaxPushBlocks * 8;
}

// What a call needs to meet the other ranks'. All of it stays the same, so that a captured graph
// can be replayed.
struct PushContext {
  unsigned char* inboxes[kMaxPushRanks];  // [size], by owner, aligned to 16 bytes
  PushState* state;
  PushReport* report;
  int rank, size;
  int num_blocks;      // at most, the same on all ranks
  int64_t slot_bytes;  // a multiple of 16
  uint64_t timeout_ns;
};

// All ranks launch the same calls in the same order. A kernel waits for those of the other ranks:
// their blocks must be able to run at the same time, so ranks that share a device have num_blocks
// of at most its multiprocessors divided by their number.

struct PushReduceParams {
  PushContext context;
  float* x;       // [count], becomes the sum of all ranks' in rank order
  int64_t count;  // at most slot_bytes / 4
};
void launch_push_reduce(const PushReduceParams& params, cudaStream_t stream);

struct PushGatherParams {
  PushContext context;
  const unsigned char* from;  // [bytes]
  unsigned char* to;          // rank r's bytes at r * to_stride
  int64_t bytes, to_stride;   // bytes is at most slot_bytes
};
void launch_push_gather(const PushGatherParams& params, cudaStream_t stream);

// out[i] = ((parts[0, i] + parts[1, i]) + ...
struct OrderedSumParams {
  const float* parts;  // [num_parts, count]
  float* out;          // [count]
  int64_t num_parts, count;
  uint64_t* progress;  // in the host's memory, mapped; one is added. Or null
};
void launch_ordered_sum(const OrderedSumParams& params, cudaStream_t stream);

}  // namespace kdt::cuda
