// Starting a kernel. A kernel takes one struct of parameters and uses dynamic shared memory only,
// so that its size is checked here and the emulator of tests/emulator can provide it.
#pragma once

#include <cuda_runtime.h>

#include <atomic>

#include "ceil_div.h"
#include "core/error.h"
#include "cuda_check.h"
#include "device.h"

namespace kdt::cuda {

// What a block may use on every supported chip: sm_120 has 99 KiB.
inline constexpr int64_t kMaxSharedBytes = 101376;

#ifndef KDT_EMULATOR
namespace detail {
// Enters a kernel that is launched somewhere, before main.
template <auto kKernel>
struct Entered {
  static const bool done;
};
template <auto kKernel>
const bool Entered<kKernel>::done =
    (all_kernels().push_back(reinterpret_cast<const void*>(kKernel)), true);
// More than 48 KiB must be asked for, once a kernel and device.
template <auto kKernel>
void allow_shared_memory(int64_t bytes) {
  static std::atomic<int64_t> allowed[64];
  int device = 0;
  KDT_CUDA_CHECK(cudaGetDevice(&device));
  std::atomic<int64_t>& mine = allowed[device & 63];
  if (bytes <= mine.load()) return;
  KDT_CUDA_CHECK(cudaFuncSetAttribute(reinterpret_cast<const void*>(kKernel),
                                      cudaFuncAttributeMaxDynamicSharedMemorySize,
                                      static_cast<int>(bytes)));
  mine.store(bytes);
}
// Whether the kernel's code for the current device has the instruction that waits for the kernel
// before: not if it was made from older PTX.
template <auto kKernel>
bool can_start_early() {
  static std::atomic<int> known[64];  // 0: not asked yet, 1: no, 2: yes
  int device = 0;
  KDT_CUDA_CHECK(cudaGetDevice(&device));
  std::atomic<int>& mine = known[device & 63];
  if (mine.load() == 0) {
    cudaFuncAttributes attributes;
    KDT_CUDA_CHECK(cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kKernel)));
    mine.store(attributes.ptxVersion >= 90 ? 2 : 1);
  }
  return mine.load() == 2;
}
}  // namespace detail
#endif

// Nothing is started for an empty grid. `early`: the kernel may start while the one before it in
// the stream still runs (on sm_90 and newer). Such a kernel calls wait_for_previous_kernel before
// it touches what that one touches, and only then start_next_kernel: whoever starts early so knows
// that all before its predecessor have ended, and may read what they wrote.
template <auto kKernel, typename Params>
void launch(dim3 grid, int num_threads, int64_t shared_bytes, cudaStream_t stream,
            const Params& params, bool early = false) {
  KDT_CHECK(shared_bytes <= kMaxSharedBytes, "cuda: a block of ", shared_bytes,
            " bytes of shared memory, at most ", kMaxSharedBytes);
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return;
#ifdef KDT_EMULATOR
  static_cast<void>(stream);
  static_cast<void>(early);
  emulator::launch(grid, num_threads, shared_bytes, [params] { kKernel(params); });
#else
  static_cast<void>(&detail::Entered<kKernel>::done);
  if (shared_bytes > 48 * 1024) detail::allow_shared_memory<kKernel>(shared_bytes);
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(static_cast<unsigned>(num_threads));
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = early && detail::can_start_early<kKernel>() ? 1 : 0;
  KDT_CUDA_CHECK(cudaLaunchKernelEx(&config, kKernel, params));
#endif
}

}  // namespace kdt::cuda
