// The devices of this machine.
#pragma once

#include <string>
#include <vector>

namespace kdt::cuda {

// GPUs this process may use; 0 without one, without a driver, or with one too old for the runtime.
int device_count();

// The first that this engine has code for, -1 without one.
int first_supported_device();

// Why there is no GPU, in words for the user; "" when there is one.
std::string why_no_device();

// Makes `device` current. Throws std::invalid_argument when it does not exist and Error when this
// build has no code for it.
void use_device(int device);

// Loads the code of all kernels onto the current device. Left to a kernel's first launch, loading
// may wait for the device, where a rank's kernel may wait for that of the rank that loads.
void load_all_kernels();
// Those of this build, entered by launch.cuh.
std::vector<const void*>& all_kernels();

}  // namespace kdt::cuda
