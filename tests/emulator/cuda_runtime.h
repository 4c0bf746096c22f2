// What the kernels and the back end use of the CUDA runtime, on the host. Copies and kernels are
// done when the call returns; fresh device memory is filled with NaN.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <type_traits>

#include "emulator.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)

struct uint2 {
  uint32_t x, y;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

// ---------------------------------------------------------------- builtins of device code

using std::isfinite;
using std::isnan;
using std::max;
using std::min;

inline void __syncthreads(emulator::Where where = emulator::Where::current()) {
  emulator::sync_block(where);
}

namespace emulator {
inline void check_mask(unsigned mask) {
  if (mask != 0xFFFFFFFFu) fail("a collective of a part of a warp");
}
template <typename T, typename Source>
T shuffle(const char* name, unsigned mask, T value, Where where, const Source& source) {
  static_assert(std::is_trivially_copyable_v<T> && (sizeof(T) == 4 || sizeof(T) == 8));
  check_mask(mask);
  uint32_t words[2] = {};
  std::memcpy(words, &value, sizeof(T));
  meet_warp(
      name, words, 2, words, 2,
      [&](const Table& in, Table& out) {
        for (int l = 0; l < 32; ++l) {
          const int from = source(l);
          std::memcpy(out[l], in[from >= 0 && from < 32 ? from : l], 8);
        }
      },
      where);
  std::memcpy(&value, words, sizeof(T));
  return value;
}
// A bit of each lane combined into one word for all.
template <typename Combine>
uint32_t vote(const char* name, unsigned mask, bool predicate, Where where,
              const Combine& combine) {
  check_mask(mask);
  uint32_t word = predicate;
  meet_warp(
      name, &word, 1, &word, 1,
      [&](const Table& in, Table& out) {
        uint32_t ballot = 0;
        for (int l = 0; l < 32; ++l) ballot |= (in[l][0] & 1u) << l;
        for (int l = 0; l < 32; ++l) out[l][0] = combine(ballot);
      },
      where);
  return word;
}
}  // namespace emulator

inline void __syncwarp(unsigned mask = 0xFFFFFFFFu,
                       emulator::Where where = emulator::Where::current()) {
  emulator::check_mask(mask);
  uint32_t nothing = 0;
  emulator::meet_warp(
      "__syncwarp", &nothing, 1, &nothing, 0, [](const emulator::Table&, emulator::Table&) {},
      where);
}
// Each lane names its own source.
template <typename T>
T __shfl_sync(unsigned mask, T value, int from,
              emulator::Where where = emulator::Where::current()) {
  emulator::check_mask(mask);
  uint32_t words[3] = {0, 0, static_cast<uint32_t>(from)};
  std::memcpy(words, &value, sizeof(T));
  emulator::meet_warp(
      "__shfl_sync", words, 3, words, 2,
      [](const emulator::Table& in, emulator::Table& out) {
        for (int l = 0; l < 32; ++l) std::memcpy(out[l], in[in[l][2] % 32], 8);
      },
      where);
  std::memcpy(&value, words, sizeof(T));
  return value;
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int lanes,
                  emulator::Where where = emulator::Where::current()) {
  return emulator::shuffle("__shfl_xor_sync", mask, value, where, [=](int l) { return l ^ lanes; });
}
template <typename T>
T __shfl_down_sync(unsigned mask, T value, int by,
                   emulator::Where where = emulator::Where::current()) {
  return emulator::shuffle("__shfl_down_sync", mask, value, where, [=](int l) { return l + by; });
}
template <typename T>
T __shfl_up_sync(unsigned mask, T value, int by,
                 emulator::Where where = emulator::Where::current()) {
  return emulator::shuffle("__shfl_up_sync", mask, value, where, [=](int l) { return l - by; });
}
inline unsigned __ballot_sync(unsigned mask, bool predicate,
                              emulator::Where where = emulator::Where::current()) {
  return emulator::vote("__ballot_sync", mask, predicate, where,
                        [](uint32_t ballot) { return ballot; });
}
inline int __any_sync(unsigned mask, bool predicate,
                      emulator::Where where = emulator::Where::current()) {
  return static_cast<int>(emulator::vote("__any_sync", mask, predicate, where,
                                         [](uint32_t ballot) { return ballot != 0; }));
}
inline int __all_sync(unsigned mask, bool predicate,
                      emulator::Where where = emulator::Where::current()) {
  return static_cast<int>(emulator::vote("__all_sync", mask, predicate, where,
                                         [](uint32_t b) { return b == 0xFFFFFFFFu; }));
}

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline float __uint_as_float(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}
inline uint32_t __float_as_uint(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}
inline long long __double_as_longlong(double x) {
  long long bits;
  std::memcpy(&bits, &x, 8);
  return bits;
}
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline void __threadfence() {}
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dsub_rn(double a, double b) { return a - b; }
template <typename T>
T __ldg(const T* from) {
  return *from;
}
template <typename T>
T atomicAdd(T* at, T value) {
  const T old = *at;
  *at = old + value;
  return old;
}

// ---------------------------------------------------------------- the runtime

using cudaError_t = int;
inline constexpr cudaError_t cudaSuccess = 0;
inline constexpr cudaError_t cudaErrorMemoryAllocation = 2;
inline constexpr cudaError_t cudaErrorNotReady = 600;
inline constexpr cudaError_t cudaErrorPeerAccessAlreadyEnabled = 704;
using cudaStream_t = void*;
enum cudaMemcpyKind { cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost, cudaMemcpyDeviceToDevice };
struct cudaDeviceProp {
  char name[256] = "emulated GPU";
  int major = 9, minor = 0;
  int multiProcessorCount = 4;
  size_t sharedMemPerMultiprocessor = 102400;
};
inline constexpr unsigned cudaHostAllocDefault = 0;
inline constexpr unsigned cudaHostAllocMapped = 2;
inline constexpr unsigned cudaStreamNonBlocking = 1;

inline const char* cudaGetErrorString(cudaError_t) { return "emulated error"; }
inline const char* cudaGetErrorName(cudaError_t) { return "emulated"; }
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}
inline cudaError_t cudaSetDevice(int) { return cudaSuccess; }
inline cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
inline cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  *properties = cudaDeviceProp();
  return cudaSuccess;
}
inline cudaError_t cudaDriverGetVersion(int* version) {
  *version = 13000;
  return cudaSuccess;
}
inline cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = 13000;
  return cudaSuccess;
}
// The size is not rounded up, so that the address sanitizer sees the array's own end.
inline cudaError_t cudaMalloc(void** pointer, size_t bytes) {
  if (posix_memalign(pointer, 256, bytes) != 0) return cudaErrorMemoryAllocation;
  std::memset(*pointer, 0xFF, bytes);
  return cudaSuccess;
}
inline cudaError_t cudaFree(void* pointer) {
  std::free(pointer);
  return cudaSuccess;
}
inline cudaError_t cudaHostAlloc(void** pointer, size_t bytes, unsigned) {
  return cudaMalloc(pointer, bytes);
}
inline cudaError_t cudaFreeHost(void* pointer) { return cudaFree(pointer); }
inline cudaError_t cudaHostGetDevicePointer(void** device, void* host, unsigned) {
  *device = host;
  return cudaSuccess;
}
inline cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total_bytes) {
  *free_bytes = *total_bytes = size_t{1} << 30;
  return cudaSuccess;
}
inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  *stream = nullptr;
  return cudaSuccess;
}
inline cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
inline cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
inline cudaError_t cudaStreamQuery(cudaStream_t) { return cudaSuccess; }
// A thread has one stream, and so one capture.
enum cudaStreamCaptureStatus { cudaStreamCaptureStatusNone, cudaStreamCaptureStatusActive };
enum cudaStreamCaptureMode { cudaStreamCaptureModeThreadLocal };
inline cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = emulator::is_capturing() ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
using cudaGraph_t = emulator::Graph*;
using cudaGraphExec_t = emulator::Graph*;
inline cudaError_t cudaStreamBeginCapture(cudaStream_t, cudaStreamCaptureMode) {
  emulator::begin_capture();
  return cudaSuccess;
}
inline cudaError_t cudaStreamEndCapture(cudaStream_t, cudaGraph_t* graph) {
  *graph = new emulator::Graph(emulator::end_capture());
  return cudaSuccess;
}
inline cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph,
                                        unsigned long long) {
  *executable = new emulator::Graph(*graph);
  return cudaSuccess;
}
inline cudaError_t cudaGraphUpload(cudaGraphExec_t, cudaStream_t) { return cudaSuccess; }
inline cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete graph;
  return cudaSuccess;
}
inline cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
  delete executable;
  return cudaSuccess;
}
inline cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t) {
  for (const auto& node : *executable) node();
  return cudaSuccess;
}
// There is one device.
inline cudaError_t cudaDeviceCanAccessPeer(int* possible, int, int) {
  *possible = 0;
  return cudaSuccess;
}
inline cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }
// A pool is all of the memory.
using cudaMemPool_t = void*;
enum cudaMemAllocationType { cudaMemAllocationTypePinned };
enum cudaMemLocationType { cudaMemLocationTypeDevice };
enum cudaMemPoolAttr { cudaMemPoolAttrReleaseThreshold };
struct cudaMemPoolProps {
  cudaMemAllocationType allocType;
  struct {
    cudaMemLocationType type;
    int id;
  } location;
};
inline cudaError_t cudaMemPoolCreate(cudaMemPool_t* pool, const cudaMemPoolProps*) {
  *pool = nullptr;
  return cudaSuccess;
}
inline cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t, cudaMemPoolAttr, void*) {
  return cudaSuccess;
}
inline cudaError_t cudaMemPoolDestroy(cudaMemPool_t) { return cudaSuccess; }
inline cudaError_t cudaMallocFromPoolAsync(void** pointer, size_t bytes, cudaMemPool_t,
                                           cudaStream_t) {
  return cudaMalloc(pointer, bytes);
}
inline cudaError_t cudaFreeAsync(void* pointer, cudaStream_t) { return cudaFree(pointer); }
inline cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind,
                                   cudaStream_t) {
  emulator::in_stream([=] { std::memcpy(to, from, bytes); });
  return cudaSuccess;
}
// Copies are done when their call returns, so an event has always happened.
using cudaEvent_t = void*;
inline constexpr unsigned cudaEventDisableTiming = 2;
inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  static char any;
  *event = &any;
  return cudaSuccess;
}
inline cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) { return cudaSuccess; }
inline cudaError_t cudaEventSynchronize(cudaEvent_t) { return cudaSuccess; }
inline cudaError_t cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }
inline cudaError_t cudaMemset(void* at, int value, size_t bytes) {
  std::memset(at, value, bytes);
  return cudaSuccess;
}
inline cudaError_t cudaMemsetAsync(void* at, int value, size_t bytes, cudaStream_t) {
  emulator::in_stream([=] { std::memset(at, value, bytes); });
  return cudaSuccess;
}
