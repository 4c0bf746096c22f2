// The kernels for AVX2; CMake gives this file its instruction set.
#define KDT_ISA_AVX2
#define KDT_ISA_NAME "avx2"
#include "cpu/kernels_impl.h"

namespace kdt::cpu {

const Kernels& avx2_kernels() { return kKernels; }

}  // namespace kdt::cpu
