// Why a buffer is not written again before everyone has read it. Call c of rank r writes the slots
// of parity c % 2. It begins after call c - 1 of rank r has ended (one stream, and these kernels
// first wait for all before them), in which at least one block saw the flag c - 1 of each other
// rank q. Rank q set that flag in its own call c - 1, which began after its call c - 2, the last to
// read slots of this parity, had ended.
//
// Why a flag means that the data is there. The block's stores come before the barrier, the barrier
// before the release at system scope; the reader's acquire comes before its barrier, and that
// before its block's loads.
#include "kernels/all_reduce.h"

#include "launch.cuh"
#include "primitives.cuh"

namespace kdt::cuda {
namespace {

constexpr int kThreads = 512;
constexpr int kSharedBytes = 16;

__device__ __forceinline__ float plus(float a, float b) { return a + b; }
__device__ __forceinline__ float4 plus(float4 a, float4 b) {
  return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}

// The slot of `sender` in the inbox of `owner`.
template <typename Unit>
__device__ __forceinline__ Unit* slot(const PushContext& m, int owner, uint64_t call, int sender) {
  const int64_t parity = static_cast<int64_t>(call & 1);
  return reinterpret_cast<Unit*>(m.inboxes[owner] + (parity * m.size + sender) * m.slot_bytes);
}

__device__ __forceinline__ uint64_t* flag(const PushContext& m, int owner, int sender) {
  unsigned char* flags = m.inboxes[owner] + 2 * m.size * m.slot_bytes;
  return reinterpret_cast<uint64_t*>(flags) + sender * kMaxPushBlocks + blockIdx.x;
}

// This call's number, from 1 on; 0 when the communicator has stopped: the block then ends without
// sending, so that no rank takes what follows a failed sum for a sum. The same for the whole block.
__device__ __forceinline__ uint64_t begin_call(const PushContext& m) {
  wait_for_previous_kernel();
  auto* shared = reinterpret_cast<uint64_t*>(shared_memory());
  if (threadIdx.x == 0) *shared = load_system(&m.state->stopped) != 0 ? 0 : m.state->calls + 1;
  __syncthreads();
  return *shared;
}

// Of the thread that is not needed for waiting. When all blocks have read the number of the call,
// it is advanced.
__device__ __forceinline__ void advance(const PushContext& m, uint64_t call) {
  __threadfence();
  if (atomicAdd(&m.state->blocks, 1u) + 1 < gridDim.x) return;
  m.state->blocks = 0;
  m.state->calls = call;
}

__device__ __forceinline__ void wait_for(const PushContext& m, int sender, uint64_t call) {
  const uint64_t* at = flag(m, m.rank, sender);
  uint64_t begin = 0;
  for (unsigned tries = 1; load_acquire_system(at) < call; ++tries) {
    let_others_run();
    if (tries % 256 != 0) continue;  // what follows is slow
    const uint64_t now = nanoseconds();
    if (begin == 0) begin = now;
    const bool late = now - begin > m.timeout_ns;
    if (late) store_system(&m.report->missing, static_cast<uint32_t>(sender) + 1);
    if (late || load_system(&m.report->stop) != 0 || load_system(&m.state->stopped) != 0) {
      store_system(&m.state->stopped, 1);
      return;
    }
  }
}

// The block has pushed its piece: says so, and waits for the same piece of the others.
__device__ __forceinline__ void arrive_and_wait(const PushContext& m, uint64_t call) {
  __syncthreads();
  const int t = static_cast<int>(threadIdx.x);
  if (t < m.size && t != m.rank) {
    store_release_system(flag(m, t, m.rank), call);
    wait_for(m, t, call);
  } else if (t == 32) {
    advance(m, call);
  }
  __syncthreads();
  // Not before: the next kernel's blocks would take the place of another rank's on this device that
  // has not come yet.
  start_next_kernel();
}

// from[begin ... end) goes to the same place of this rank's slot at the others, from the block's
// threads.
template <typename Unit>
__device__ __forceinline__ void push(const PushContext& m, uint64_t call, const Unit* from,
                                     int64_t begin, int64_t end, int64_t step) {
  for (int64_t i = begin; i < end; i += step) {
    const Unit value = from[i];
    for (int k = 1; k < m.size; ++k) {
      const int owner = m.rank + k < m.size ? m.rank + k : m.rank + k - m.size;
      slot<Unit>(m, owner, call, m.rank)[i] = value;
    }
  }
}

// ((rank 0's + rank 1's) + rank 2's) + ..., the own part from `own`.
template <typename Unit>
__device__ __forceinline__ Unit ordered_sum(const PushContext& m, uint64_t call, const Unit* own,
                                            int64_t i) {
  const Unit* const slots = slot<Unit>(m, m.rank, call, 0);
  const int64_t stride = m.slot_bytes / static_cast<int64_t>(sizeof(Unit));
  Unit sum = (m.rank == 0 ? own : slots)[i];
#pragma unroll 4
  for (int sender = 1; sender < m.size; ++sender)
    sum = plus(sum, (sender == m.rank ? own : slots + sender * stride)[i]);
  return sum;
}

template <typename Unit>
__global__ __launch_bounds__(kThreads) void push_reduce_kernel(const PushReduceParams p) {
  const uint64_t call = begin_call(p.context);
  if (call == 0) return;
  auto* x = reinterpret_cast<Unit*>(p.x);
  const int64_t count = p.count * 4 / static_cast<int64_t>(sizeof(Unit));
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  push<Unit>(p.context, call, x, first, count, step);
  arrive_and_wait(p.context, call);
  for (int64_t i = first; i < count; i += step) x[i] = ordered_sum<Unit>(p.context, call, x, i);
}

template <typename Unit>
__global__ __launch_bounds__(kThreads) void push_gather_kernel(const PushGatherParams p) {
  const uint64_t call = begin_call(p.context);
  if (call == 0) return;
  const auto* from = reinterpret_cast<const Unit*>(p.from);
  const int64_t count = p.bytes / static_cast<int64_t>(sizeof(Unit));
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  push<Unit>(p.context, call, from, first, count, step);
  arrive_and_wait(p.context, call);
  for (int sender = 0; sender < p.context.size; ++sender) {
    const Unit* part =
        sender == p.context.rank ? from : slot<Unit>(p.context, p.context.rank, call, sender);
    auto* to = reinterpret_cast<Unit*>(p.to + sender * p.to_stride);
    for (int64_t i = first; i < count; i += step) to[i] = part[i];
  }
}

__global__ void ordered_sum_kernel(const OrderedSumParams p) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  for (int64_t i = first; i < p.count; i += step) {
    float sum = p.parts[i];
#pragma unroll 4
    for (int64_t part = 1; part < p.num_parts; ++part) sum += p.parts[part * p.count + i];
    p.out[i] = sum;
  }
  if (first == 0 && p.progress != nullptr) *p.progress += 1;
}

int blocks_for(const PushContext& m, int64_t units) {
  const int64_t wanted = std::max<int64_t>(1, ceil_div(units, kThreads));
  return static_cast<int>(std::min<int64_t>(wanted, m.num_blocks));
}

template <typename... Pointers>
bool aligned(int64_t bytes, int64_t multiple, Pointers... pointers) {
  const auto at = (reinterpret_cast<uintptr_t>(pointers) | ...);
  return (static_cast<uintptr_t>(bytes) | at) % static_cast<uintptr_t>(multiple) == 0;
}

// A block of the emulator's runs to its end before the next begins, so those that wait for each
// other must come in the same order.
template <auto kKernel, typename Params>
void launch_waiting(int blocks, int num_threads, int64_t shared_bytes, cudaStream_t stream,
                    const Params& params) {
#ifdef KDT_EMULATOR
  const emulator::BlocksInOrder in_order;
#endif
  launch<kKernel>(dim3(static_cast<unsigned>(blocks)), num_threads, shared_bytes, stream, params,
                  /*early=*/true);
}

}  // namespace

void launch_push_reduce(const PushReduceParams& p, cudaStream_t stream) {
  if (p.count == 0) return;
  if (aligned(p.count * 4, 16, p.x)) {
    launch_waiting<push_reduce_kernel<float4>>(blocks_for(p.context, p.count / 4), kThreads,
                                               kSharedBytes, stream, p);
  } else {
    launch_waiting<push_reduce_kernel<float>>(blocks_for(p.context, p.count), kThreads,
                                              kSharedBytes, stream, p);
  }
}

void launch_push_gather(const PushGatherParams& p, cudaStream_t stream) {
  if (p.bytes == 0) return;
  const auto run = [&]<typename Unit>(Unit) {
    launch_waiting<push_gather_kernel<Unit>>(blocks_for(p.context, p.bytes / sizeof(Unit)),
                                             kThreads, kSharedBytes, stream, p);
  };
  if (aligned(p.bytes | p.to_stride, 16, p.from, p.to)) {
    run(uint4{});
  } else if (aligned(p.bytes | p.to_stride, 4, p.from, p.to)) {
    run(uint32_t{});
  } else {
    run(uint8_t{});
  }
}

void launch_ordered_sum(const OrderedSumParams& p, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(ceil_div(p.count, kThreads), 1024));
  launch<ordered_sum_kernel>(dim3(blocks), kThreads, 0, stream, p);
}

}  // namespace kdt::cuda
