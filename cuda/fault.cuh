// Reporting a fault from a kernel.
#pragma once

#include "fault.h"
#include "primitives.cuh"

namespace kdt::cuda {

// One report is enough, the first as far as threads see each other's.
__device__ __forceinline__ void report(Fault* fault, FaultKind kind, int64_t row, int64_t value) {
  volatile Fault* record = fault;
  if (record->kind != 0) return;
  record->row = static_cast<int32_t>(row);
  record->value = static_cast<int32_t>(value);
  record->kind = static_cast<int32_t>(kind);
}

}  // namespace kdt::cuda
