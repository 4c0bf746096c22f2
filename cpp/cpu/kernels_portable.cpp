// The kernels for any processor the compiler knows.
#define KDT_ISA_NAME "portable"
#include "cpu/kernels_impl.h"

namespace kdt::cpu {

const Kernels& portable_kernels() { return kKernels; }

}  // namespace kdt::cpu
