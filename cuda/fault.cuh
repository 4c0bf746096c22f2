// Reporting a fault from a kernel.
#pragma once

#include "fault.h"
#include "primitives.cuh"

namespace kdt::cuda {

// One report is enough, so writers do not wait for each other.
__device__ __forceinline__ void report(Fault* fault, FaultKind kind, int64_t row, int64_t value) {
  fault->row = static_cast<int32_t>(row);
  fault->value = static_cast<int32_t>(value);
  fault->kind = static_cast<int32_t>(kind);
}

}  // namespace kdt::cuda
