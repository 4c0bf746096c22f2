#pragma once

namespace kdt::cuda {

// GPUs this process may use; 0 without one, without a driver, or with a driver too old for the
// runtime.
int device_count();

}  // namespace kdt::cuda
