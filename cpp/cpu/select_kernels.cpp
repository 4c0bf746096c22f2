#include <cstdlib>
#include <string>

#include "core/error.h"
#include "cpu/kernels.h"

namespace kdt::cpu {

const Kernels& select_kernels() {
  const char* variable = std::getenv("KDT_ISA");
  const std::string asked = variable == nullptr ? "" : variable;
  KDT_CHECK_ARGUMENT(asked.empty() || asked == "portable" || asked == "avx2" || asked == "avx512",
                     "KDT_ISA is '", asked, "'; want portable, avx2 or avx512");
#if defined(__x86_64__)
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                        __builtin_cpu_supports("f16c");
  const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") &&
                          __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  KDT_CHECK(asked != "avx512" || has_avx512, "KDT_ISA is avx512, which this processor lacks");
  KDT_CHECK(asked != "avx2" || has_avx2, "KDT_ISA is avx2, which this processor lacks");
  if (has_avx512 && (asked.empty() || asked == "avx512")) return avx512_kernels();
  if (has_avx2 && (asked.empty() || asked == "avx2")) return avx2_kernels();
#else
  KDT_CHECK(asked.empty() || asked == "portable", "KDT_ISA is ", asked, ", which is an x86-64 set");
#endif
  return portable_kernels();
}

}  // namespace kdt::cpu
