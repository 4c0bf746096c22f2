#include "backend/check_sides.h"

#include <algorithm>
#include <cmath>

namespace kdt {
namespace {

// What two right back ends may differ by: a value by `relative` times its row's root mean square,
// and by `absolute` in any case. Ops that are not here have no rounding of their own and must give
// the same bits.
//
// Products round their inputs to bf16 (relative 2^-9 each) where a weight is packed, and sums of
// them wander with the square root of their length as the result does. Attention also reads a cache
// of bf16: a key's error moves a score by |q| |k| 2^-9.
struct Tolerance {
  const char* op;
  double relative, absolute;
};
constexpr Tolerance kTolerances[] = {
    {"rms_norm", 1e-5, 0},     {"add_rms_norm", 1e-5, 0},  {"silu_mul", 1e-5, 1e-7},
    {"linear", 3e-2, 0},       {"head_linear", 3e-2, 0},   {"linear (f32)", 1e-4, 1e-6},
    {"mla_query", 3e-2, 0},    {"mla_attention", 5e-2, 0}, {"gqa_attention", 5e-2, 0},
    {"moe_route", 1e-5, 1e-6}, {"moe_experts", 3e-2, 0},   {"topk_logprobs", 1e-6, 1e-5},
};

const Tolerance& tolerance_of(const char* op) {
  for (const Tolerance& t : kTolerances) {
    if (std::strcmp(t.op, op) == 0) return t;
  }
  throw Error(join("check: no tolerance of ", op));
}

bool same_value(double a, double b) { return a == b || (std::isnan(a) && std::isnan(b)); }

}  // namespace

CheckSides::CheckSides(std::unique_ptr<Backend> reference, std::unique_ptr<Backend> other)
    : reference_(std::move(reference)), other_(std::move(other)) {}

Buffer CheckSides::allocate(DType dtype, std::initializer_list<int64_t> shape) {
  Buffer a = reference_->allocate(dtype, shape), b = other_->allocate(dtype, shape);
  const char* key = static_cast<const char*>(a.tensor.raw());
  {
    const std::lock_guard lock(twins_->mutex);
    twins_->entries[key] = {a.tensor.bytes(), static_cast<char*>(b.tensor.raw())};
  }
  // Forgotten before the memory can be given out again.
  const auto release = [twins = twins_, key, a = a.memory, b = b.memory](void*) mutable {
    {
      const std::lock_guard lock(twins->mutex);
      twins->entries.erase(key);
    }
    a.reset();
    b.reset();
  };
  return {std::shared_ptr<void>(a.tensor.raw(), release), a.tensor};
}

Tensor CheckSides::twin(const Tensor& tensor) const {
  if (!tensor.defined() || tensor.numel() == 0) return tensor.at(nullptr);
  const auto* begin = static_cast<const char*>(tensor.raw());
  const std::lock_guard lock(twins_->mutex);
  auto entry = twins_->entries.upper_bound(begin);
  const bool found =
      entry != twins_->entries.begin() &&
      begin - std::prev(entry)->first + tensor.bytes() <= std::prev(entry)->second.bytes;
  KDT_CHECK(found, "check: ", tensor.to_string(), " is in no memory of this back end");
  --entry;
  return tensor.at(entry->second.other + (begin - entry->first));
}

void CheckSides::copy_to_twin(const Tensor& tensor) const {
  std::vector<char> bytes(tensor.bytes());
  reference_->download(bytes.data(), tensor);
  other_->upload(twin(tensor), bytes.data());
}

void CheckSides::fail(const char* op, const Tensor& tensor, int64_t index, double reference,
                      double other, const std::string& why) const {
  // The first dimension counts rows, the others together columns.
  const int64_t columns = tensor.ndim() > 1 ? tensor.numel() / tensor.dim(0) : 1;
  std::ostringstream text;
  text.precision(9);
  text << "check: " << op << ": row " << index / columns;
  if (columns > 1) text << ", column " << index % columns;
  text << " of " << tensor.to_string() << ": " << reference_->info().device << " has " << reference
       << ", " << other_->info().device << " has " << other << "; " << why;
  throw Error(text.str());
}

void CheckSides::expect_close(const char* op, const Tensor& tensor,
                              const std::vector<bool>& skipped) const {
  if (tensor.numel() == 0) return;
  const Tolerance& tolerance = tolerance_of(op);
  const std::vector<float> reference = read<float>(tensor),
                           other = read_from<float>(*other_, twin(tensor));
  const int64_t width = tensor.dim(tensor.ndim() - 1);
  for (int64_t begin = 0; begin < tensor.numel(); begin += width) {
    if (!skipped.empty() && skipped[begin / width]) continue;
    double squares = 0;
    for (int64_t i = begin; i < begin + width; ++i) {
      const double x = reference[i];
      if (std::isfinite(x)) squares += x * x;
    }
    const double most = std::max(
        tolerance.relative * std::sqrt(squares / static_cast<double>(width)), tolerance.absolute);
    for (int64_t i = begin; i < begin + width; ++i) {
      const double a = reference[i], b = other[i];
      if (!same_value(a, b) && !(std::fabs(a - b) <= most))
        fail(op, tensor, i, a, b, join("tolerance ", most));
    }
  }
  copy_to_twin(tensor);
}

}  // namespace kdt
