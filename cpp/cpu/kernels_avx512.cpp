// The kernels for AVX-512; CMake gives this file its instruction set.
// The compiler's own header reads an uninitialised vector on purpose (_mm512_undefined_ps).
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#define KDT_ISA_AVX512
#define KDT_ISA_NAME "avx512"
#include "cpu/kernels_impl.h"

namespace kdt::cpu {

const Kernels& avx512_kernels() { return kKernels; }

}  // namespace kdt::cpu
