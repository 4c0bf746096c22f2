#include <algorithm>
#include <cstdlib>
#include <sstream>
#include <thread>

#include "backend/check_backend.h"
#include "backend/measure.h"
#ifdef KDT_WITH_CUDA
#include "device.h"
#endif

namespace kdt {

namespace cpu {
std::unique_ptr<Backend> make_cpu_backend(int num_threads);
}
namespace cuda {
std::unique_ptr<Backend> make_cuda_backend(int device);
std::vector<OpTime> bench_ops(int device, const std::string& only);
void set_nccl_library(const std::string& path);
}  // namespace cuda

namespace {

// The number behind "cuda:", 0 for "cuda", -1 for anything else.
int cuda_device(const std::string& device) {
  if (device == "cuda") return 0;
  if (device.rfind("cuda:", 0) != 0 || device.size() < 6 || device.size() > 8) return -1;
  int number = 0;
  for (size_t i = 5; i < device.size(); ++i) {
    if (device[i] < '0' || device[i] > '9') return -1;
    number = number * 10 + (device[i] - '0');
  }
  return number;
}

// "check:A,B"
std::unique_ptr<Backend> make_check(const std::string& device, int num_threads) {
  const size_t begin = device.find(':') + 1, comma = device.find(',');
  const auto is_one = [](const std::string& name) {
    return name == "cpu" || cuda_device(name) >= 0;
  };
  const std::string reference = device.substr(begin, comma - begin);
  const std::string other = comma == std::string::npos ? "" : device.substr(comma + 1);
  KDT_CHECK_ARGUMENT(is_one(reference) && is_one(other), "device is '", device,
                     "'; want 'check:A,B', A and B being 'cpu', 'cuda' or 'cuda:N'");
  return make_check_backend(make_backend(reference, num_threads), make_backend(other, num_threads));
}

}  // namespace

std::unique_ptr<Backend> make_backend(const std::string& device, int num_threads) {
  KDT_CHECK_ARGUMENT(num_threads >= 0 && num_threads <= 1024, "num_threads is ", num_threads,
                     "; want 0 to 1024");
  if (device == "auto") {
#ifdef KDT_WITH_CUDA
    const int device_number = cuda::first_supported_device();
    if (device_number >= 0) return cuda::make_cuda_backend(device_number);
#endif
    return make_backend("cpu", num_threads);
  }
  if (device == "cpu") {
    const int cores = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
    return cpu::make_cpu_backend(num_threads == 0 ? cores : num_threads);
  }
  if (device.rfind("check:", 0) == 0) return make_check(device, num_threads);
  const int number = cuda_device(device);
  KDT_CHECK_ARGUMENT(number >= 0, "device is '", device,
                     "'; want 'auto', 'cpu', 'cuda', 'cuda:N' or 'check:A,B'");
#ifdef KDT_WITH_CUDA
  return cuda::make_cuda_backend(number);
#else
  throw Error(join("device is '", device,
                   "', but this build has no CUDA back end: install again with `pip install . "
                   "--config-settings=cmake.define.KDT_CUDA=ON` where nvcc is, or with "
                   "`KDTREE_PIP_CUDA=1 pip install .`, which takes the CUDA compiler from PyPI"));
#endif
}

std::vector<RankDevice> rank_devices(const std::string& device, int num_threads, int num_ranks,
                                     int first, int node_ranks) {
  KDT_CHECK_ARGUMENT(num_threads >= 0 && num_threads <= 1024, "num_threads is ", num_threads,
                     "; want 0 to 1024");
  if (node_ranks == 1) return {{device, num_threads}};
  std::string one = device;
  if (device == "auto") {
    one = "cpu";
#ifdef KDT_WITH_CUDA
    if (cuda::first_supported_device() >= 0) one = "cuda";
#endif
  }
  if (one == "cpu") {
    const int cores = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
    const int threads = num_threads == 0 ? cores : num_threads;
    return std::vector<RankDevice>(num_ranks, {"cpu", std::max(1, threads / node_ranks)});
  }
  std::vector<RankDevice> all;
  if (one == "cuda") {
    for (int rank = 0; rank < node_ranks; ++rank) all.push_back({join("cuda:", rank), 0});
  } else {
    std::istringstream names(one + ",");
    for (std::string name; std::getline(names, name, ',');) all.push_back({name, 0});
    const bool all_cuda = std::all_of(
        all.begin(), all.end(), [](const RankDevice& d) { return cuda_device(d.device) >= 0; });
    KDT_CHECK_ARGUMENT(all_cuda && static_cast<int>(all.size()) == node_ranks, "device is '",
                       device, "' for ", node_ranks,
                       " ranks; want 'auto', 'cpu', 'cuda', or one 'cuda:N' for each rank with "
                       "commas between");
    // Ranks that share a GPU wait for each other inside kernels, so each needs a queue of its own.
    // Read when the driver starts.
    setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
  }
  return {all.begin() + first, all.begin() + first + num_ranks};
}

void set_nccl_library(const std::string& path) {
#ifdef KDT_WITH_CUDA
  cuda::set_nccl_library(path);
#else
  static_cast<void>(path);
#endif
}

std::vector<OpTime> bench_ops(const std::string& device, const std::string& only) {
  const auto groups = {"", "moe_experts", "mla_attention", "choice", "rows", "linear"};
  KDT_CHECK_ARGUMENT(std::find(groups.begin(), groups.end(), only) != groups.end(), "only is '",
                     only, "'; want moe_experts, mla_attention, choice, rows or linear");
  const int number = cuda_device(device);
  KDT_CHECK_ARGUMENT(number >= 0, "device is '", device, "'; ops are timed on 'cuda' or 'cuda:N'");
#if defined(KDT_WITH_CUDA) && !defined(KDT_EMULATOR)
  return cuda::bench_ops(number, only);
#else
  throw Error(
      join("device is '", device,
           "', but this build has no CUDA back end to time: install again with `pip install . "
           "--config-settings=cmake.define.KDT_CUDA=ON` where nvcc is"));
#endif
}

}  // namespace kdt
