// Calls of the CUDA runtime: a failure throws with the call's text and the runtime's words.
#pragma once

#include <cuda_runtime_api.h>

#include "core/error.h"

#define KDT_CUDA_CHECK(call)                                                             \
  do {                                                                                   \
    const cudaError_t kdt_status = (call);                                               \
    KDT_CHECK(kdt_status == cudaSuccess, "cuda: ", cudaGetErrorString(kdt_status), " (", \
              cudaGetErrorName(kdt_status), ") from ", #call);                           \
  } while (false)
