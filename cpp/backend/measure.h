// What processors and GPUs reach, and what ops take on them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace kdt {

// What this processor reaches with `num_threads` threads (0: one a core), measured in about a
// second.
struct CpuCeilings {
  std::string isa;
  int num_threads = 0;
  double fma_gflops = 0;  // f32 multiply-adds from registers, two operations each
  double read_gb_s = 0;   // reading 512 MiB of memory
  double cache_gb_s = 0;  // reading `cache_bytes` again and again
  int64_t cache_bytes = 0;
};
CpuCeilings measure_cpu(int num_threads, int64_t cache_bytes);

// An op, or a ceiling ("ceiling: ..."), timed at one size.
struct OpTime {
  std::string op, shape;
  double us = 0;
  double bytes = 0;       // that must be read once
  double operations = 0;  // multiplications and additions
};
// The ops of a GPU at the sizes of Kimi K2.6, and what it reaches at best in the same run. `only`
// "": all, or one of moe_experts, mla_attention, choice, rows and linear. Throws as make_backend
// does.
std::vector<OpTime> bench_ops(const std::string& device, const std::string& only);

}  // namespace kdt
