#include "device_count.h"

#include <cuda_runtime_api.h>

namespace kdt::cuda {

int device_count() {
  int count = 0;
  // On an error `count` keeps whatever it held, so the status decides.
  return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
}

}  // namespace kdt::cuda
