// The instructions kernels use beyond CUDA's own builtins. tests/emulator has a second definition
// that runs the same kernel bodies on the host.
//
// Fragments of mma m16n8k16 (PTX ISA, "Matrix Fragments for mma.m16n8k16"), lane = 4 g + t:
//   a[0] row g, columns 2t, 2t+1    a[1] row g+8    a[2] row g, columns 2t+8, 2t+9    a[3] row g+8
//   b0 rows (k) 2t, 2t+1 of column g    b1 rows 2t+8, 2t+9
//   c[0], c[1] row g, columns 2t, 2t+1    c[2], c[3] row g+8
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#ifdef KDT_EMULATOR
#include "primitives_host.h"
#else

namespace kdt::cuda {

__device__ __forceinline__ unsigned char* shared_memory() {
  extern __shared__ __align__(128) unsigned char kdt_shared_memory[];
  return kdt_shared_memory;
}

// Address of shared memory as the instructions below take it.
__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Copies 16 bytes to shared memory, or fills them with zeros; both addresses are multiples of 16.
// They are there after cp_async_wait, in the calling thread.
__device__ __forceinline__ void cp_async_16(uint32_t to, const void* from, bool valid = true) {
  const int bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(to), "l"(from), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void cp_async_commit() {
  asm volatile("cp.async.commit_group;\n" ::: "memory");
}
// Waits until at most kPending of the calling thread's groups are under way.
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(kPending) : "memory");
}

// Four 8x8 matrices of 16-bit values: lane l names row l % 8 of matrix l / 8 (16 bytes, aligned);
// it gets columns 2 (l % 4), + 1 of row l / 4 of each.
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row)
               : "memory");
}
// The same, each matrix transposed: lane l gets rows 2 (l % 4), + 1 of column l / 4.
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row)
               : "memory");
}

// c += a b, bf16 inputs, f32 sums.
__device__ __forceinline__ void mma_bf16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                         uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};\n"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Two f32 rounded to bf16 (nearest, ties to even), `low` in the lower half.
__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
  uint32_t bits;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;\n" : "=r"(bits) : "f"(high), "f"(low));
  return bits;
}
// a - b in each half, bf16.
__device__ __forceinline__ uint32_t sub_bf16x2(uint32_t a, uint32_t b) {
  uint32_t bits;
  constexpr uint32_t kMinusOne = 0xBF80BF80;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;\n" : "=r"(bits) : "r"(b), "r"(kMinusOne), "r"(a));
  return bits;
}

// (a & mask) | bits in one instruction.
__device__ __forceinline__ uint32_t and_or(uint32_t a, uint32_t mask, uint32_t bits) {
  uint32_t result;
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;\n" : "=r"(result) : "r"(a), "r"(mask), "r"(bits));
  return result;
}

// A kernel that is launched early starts while the one before it in the stream still runs. This
// waits until that one, and all before it, have ended and what they wrote can be seen. Every thread
// calls it before it touches what they write, and before it ends.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;\n" ::: "memory");
#endif
}
// Lets the next kernel, if it is launched early, start once all blocks have called this or ended.
__device__ __forceinline__ void start_next_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;\n" ::: "memory");
#endif
}

// How a kernel that is launched early begins when it has nothing to do before.
__device__ __forceinline__ void follow_previous_kernel() {
  wait_for_previous_kernel();
  start_next_kernel();
}

// 2^x, within 2 units in the last place.
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}

// The greatest and the least of the warp's words, for every lane.
__device__ __forceinline__ uint32_t redux_max(uint32_t x) {
  return __reduce_max_sync(0xFFFFFFFFu, x);
}
__device__ __forceinline__ uint32_t redux_min(uint32_t x) {
  return __reduce_min_sync(0xFFFFFFFFu, x);
}

// Words that kernels of other streams and devices, or the host, use while this one runs. What the
// thread, and others before a barrier with it, wrote before the release can be seen by whoever
// acquires the value.
__device__ __forceinline__ void store_release_system(uint64_t* at, uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;\n" ::"l"(at), "l"(value) : "memory");
}
__device__ __forceinline__ uint64_t load_acquire_system(const uint64_t* at) {
  uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];\n" : "=l"(value) : "l"(at) : "memory");
  return value;
}
__device__ __forceinline__ void store_system(uint32_t* at, uint32_t value) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;\n" ::"l"(at), "r"(value) : "memory");
}
__device__ __forceinline__ uint32_t load_system(const uint32_t* at) {
  uint32_t value;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];\n" : "=r"(value) : "l"(at) : "memory");
  return value;
}
// A clock of all the device's threads.
__device__ __forceinline__ uint64_t nanoseconds() {
  uint64_t now;
  asm volatile("mov.u64 %0, %globaltimer;\n" : "=l"(now)::"memory");
  return now;
}
// In a loop that waits for others.
__device__ __forceinline__ void let_others_run() {}

// x, which the compiler from here on takes for another value.
__device__ __forceinline__ unsigned forget(unsigned x) {
  asm volatile("" : "+r"(x));
  return x;
}

// 16 bytes. Not by the read-only path: a kernel that is launched early waits for those that write
// them.
__device__ __forceinline__ uint4 load_16(const void* from) {
  return *static_cast<const uint4*>(from);
}

}  // namespace kdt::cuda
#endif

namespace kdt::cuda {

__device__ __forceinline__ float bf16_low(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float bf16_high(uint32_t pair) {
  return __uint_as_float(pair & 0xFFFF0000u);
}
__device__ __forceinline__ float bf16_value(uint16_t bits) {
  return __uint_as_float(static_cast<uint32_t>(bits) << 16);
}
__device__ __forceinline__ uint16_t to_bf16(float x) {
  return static_cast<uint16_t>(pack_bf16(x, 0.0f));
}

// Sums and maxima over a warp; every lane gets the result. The order is fixed.
__device__ __forceinline__ float warp_sum(float x) {
  for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(0xFFFFFFFFu, x, offset);
  return x;
}
__device__ __forceinline__ float warp_max(float x) {
  for (int offset = 16; offset > 0; offset /= 2)
    x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, offset));
  return x;
}

}  // namespace kdt::cuda
