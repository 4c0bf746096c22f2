#include <algorithm>
#include <thread>

#include "backend/backend.h"

namespace kdt {

namespace cpu {
std::unique_ptr<Backend> make_cpu_backend(int num_threads);
}

std::unique_ptr<Backend> make_backend(const std::string& device, int num_threads) {
  KDT_CHECK_ARGUMENT(num_threads >= 0 && num_threads <= 1024, "num_threads is ", num_threads,
                     "; want 0 to 1024");
  if (device == "cpu") {
    const int cores = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
    return cpu::make_cpu_backend(num_threads == 0 ? cores : num_threads);
  }
  throw std::invalid_argument(join("device is '", device, "'; this build knows 'cpu'"));
}

}  // namespace kdt
