// The ceilings of this processor that arithmetic in the docs is held against.
#include "backend/measure.h"

#include <algorithm>

#include "core/clock.h"
#include "cpu/cpu_backend.h"

namespace kdt {

CpuCeilings measure_cpu(int num_threads, int64_t cache_bytes) {
  KDT_CHECK_ARGUMENT(num_threads >= 0 && num_threads <= 1024, "num_threads is ", num_threads,
                     "; want 0 to 1024");
  KDT_CHECK_ARGUMENT(cache_bytes >= 65536 && cache_bytes <= int64_t{1} << 32, "cache_bytes is ",
                     cache_bytes, "; want 65536 to 4294967296");
  const cpu::Kernels& kernels = cpu::select_kernels();
  const int threads = num_threads == 0
                          ? static_cast<int>(std::max(1u, std::thread::hardware_concurrency()))
                          : num_threads;
  ThreadPool pool(threads);
  CpuCeilings result;
  result.isa = kernels.isa;
  result.num_threads = threads;
  result.cache_bytes = cache_bytes;
  std::vector<float> sinks(threads);  // the results, so that the work is not left out

  // The best of several tries: another process can only make one slower.
  constexpr int64_t kRounds = 2'000'000;
  for (int i = 0; i < 8; ++i) {
    std::vector<int64_t> done(threads);
    const Clock clock;
    pool.run(threads,
             [&](int64_t task, int) { sinks[task] = kernels.fma_rounds(kRounds, &done[task]); });
    const double ms = clock.ms();
    int64_t multiply_adds = 0;
    for (const int64_t n : done) multiply_adds += n;
    result.fma_gflops =
        std::max(result.fma_gflops, 2.0 * static_cast<double>(multiply_adds) / ms * 1e-6);
  }
  const auto read_rate = [&](int64_t bytes, int tries) {
    const std::shared_ptr<void> memory = cpu::map_zeroed(bytes);
    float* values = cpu::typed<float>(memory);
    const int64_t count = bytes / 4;
    std::fill(values, values + count, 1.0f);
    double best = 0;
    for (int i = 0; i < tries; ++i) {
      const Clock clock;
      pool.run(threads, [&](int64_t task, int) {
        const int64_t begin = count * task / threads, end = count * (task + 1) / threads;
        sinks[task] = kernels.read_all(values + begin, end - begin);
      });
      best = std::max(best, static_cast<double>(bytes) / clock.ms() * 1e-6);
    }
    return best;
  };
  result.read_gb_s = read_rate(int64_t{512} << 20, 4);
  result.cache_gb_s = read_rate(cache_bytes, 50);
  return result;
}

}  // namespace kdt
