#include "cpu/communicator.h"

#include <algorithm>
#include <cstdlib>
#include <string>

#include "backend/communicator_checks.h"
#include "cpu/cpu_backend.h"

namespace kdt::cpu {

void CpuCommunicator::all_reduce(const Tensor& x) {
  check_all_reduce(x);
  const int size = group_.size();
  if (size == 1) return;
  // Pieces that stay in the cache between the gather and the sum.
  constexpr int64_t kPiece = 65536;
  const int64_t count = x.numel();
  parts_.resize(std::max<size_t>(parts_.size(), std::min(count, kPiece) * size));
  for (int64_t begin = 0; begin < count; begin += kPiece) {
    const int64_t n = std::min(kPiece, count - begin);
    float* sum = x.data<float>() + begin;
    group_.all_gather(sum, n * static_cast<int64_t>(sizeof(float)), parts_.data());
    std::copy_n(parts_.data(), n, sum);
    for (int rank = 1; rank < size; ++rank) {
      const float* part = parts_.data() + rank * n;
      for (int64_t i = 0; i < n; ++i) sum[i] += part[i];
    }
  }
}

void CpuCommunicator::all_gather(const Tensor& from, const Tensor& to) {
  check_all_gather(from, to, group_.size());
  if (from.bytes() > 0) group_.all_gather(from.raw(), from.bytes(), to.raw());
}

std::unique_ptr<Communicator> CpuBackend::make_communicator(RankGroup& group) {
  const char* value = std::getenv("KDTREE_ALL_REDUCE");
  const std::string way = value == nullptr || *value == '\0' ? "auto" : value;
  KDT_CHECK_ARGUMENT(way == "auto", "KDTREE_ALL_REDUCE is '", way,
                     "'; ranks on the CPU have one way, want 'auto'");
  return std::make_unique<CpuCommunicator>(group);
}

}  // namespace kdt::cpu
