#include "device.h"

#include "cuda_check.h"

namespace kdt::cuda {
namespace {

constexpr int kOldestMajor = 8;  // of the compute capability

}  // namespace

int device_count() {
  int count = 0;
  // On an error `count` keeps whatever it held, so the status decides.
  const bool ok = cudaGetDeviceCount(&count) == cudaSuccess;
  static_cast<void>(cudaGetLastError());
  return ok ? count : 0;
}

int first_supported_device() {
#ifdef KDT_EMULATOR
  return -1;  // for tests that ask for it, too slow for anyone else
#endif
  const int count = device_count();
  for (int device = 0; device < count; ++device) {
    cudaDeviceProp properties;
    if (cudaGetDeviceProperties(&properties, device) == cudaSuccess &&
        properties.major >= kOldestMajor)
      return device;
  }
  static_cast<void>(cudaGetLastError());
  return -1;
}

std::string why_no_device() {
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  static_cast<void>(cudaGetLastError());
  if (status == cudaSuccess && count > 0) return "";
  if (status == cudaSuccess) return "the driver shows no GPU (is CUDA_VISIBLE_DEVICES empty?)";
  int driver = 0, runtime = 0;
  static_cast<void>(cudaDriverGetVersion(&driver));
  static_cast<void>(cudaRuntimeGetVersion(&runtime));
  const auto version = [](int v) { return join(v / 1000, ".", v % 1000 / 10); };
  if (driver == 0) return "no NVIDIA driver was found (libcuda.so.1)";
  return join(cudaGetErrorString(status), " (the driver supports CUDA ", version(driver),
              ", this build needs ", version(runtime), ")");
}

void use_device(int device) {
  const int count = device_count();
  KDT_CHECK(count > 0, "device is 'cuda:", device, "': ", why_no_device());
  KDT_CHECK_ARGUMENT(device >= 0 && device < count, "device is 'cuda:", device, "'; want 'cuda:0'",
                     count == 1 ? "" : join(" to 'cuda:", count - 1, "'"));
  KDT_CUDA_CHECK(cudaSetDevice(device));
  cudaDeviceProp properties;
  KDT_CUDA_CHECK(cudaGetDeviceProperties(&properties, device));
  KDT_CHECK(properties.major >= kOldestMajor, "cuda:", device, " is ", properties.name, " (sm_",
            properties.major, properties.minor, "); this engine needs sm_", kOldestMajor,
            "0 or newer");
}

std::vector<const void*>& all_kernels() {
  static std::vector<const void*> kernels;
  return kernels;
}

void load_all_kernels() {
#ifndef KDT_EMULATOR
  for (const void* kernel : all_kernels()) {
    cudaFuncAttributes attributes;
    KDT_CUDA_CHECK(cudaFuncGetAttributes(&attributes, kernel));
  }
#endif
}

}  // namespace kdt::cuda
