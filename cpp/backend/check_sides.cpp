#include "backend/check_sides.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace kdt {
namespace {

// What two right back ends may differ by, relative to a row's root mean square: a value by `value`
// (or by `absolute`, if that is more), a row of 32 values or more by `row` in its own root mean
// square. Ops that are not here have no rounding of their own and must give the same bits.
//
// Products round their inputs to bf16 where a weight is packed: half of 2^-8 each, and in a long
// row of a sum one value is a few times worse than the row. Attention also reads a cache of bf16,
// and a key's error moves a score by |q| |k| 2^-9, which sharp scores of a trained model make a
// tenth of the result. Measured on k2-nano, in values and rows: products 0.05 and 0.009, experts
// 0.024 and 0.006, attention 0.14 and 0.05.
struct Tolerance {
  const char* op;
  double value, row, absolute;
};
constexpr Tolerance kTolerances[] = {
    {"rms_norm", 1e-5, 1e-5, 0},        {"add_rms_norm", 1e-5, 1e-5, 0},
    {"silu_mul", 1e-5, 1e-5, 1e-7},     {"linear", 0.1, 0.01, 0},
    {"linear (f32)", 1e-4, 1e-4, 1e-6}, {"head_linear", 0.1, 0.02, 0},
    {"mla_query", 0.1, 0.01, 0},        {"mla_attention", 0.3, 0.1, 0},
    {"gqa_attention", 0.3, 0.1, 0},     {"moe_route", 1e-5, 1e-5, 1e-6},
    {"moe_experts", 0.1, 0.02, 0},      {"topk_logprobs", 1e-6, 1e-6, 1e-5},
    {"merge_topk", 1e-6, 1e-6, 1e-5},
};
constexpr int64_t kShortRow = 32;

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
    double squares = 0, errors = 0, worst = 0;
    int64_t at = begin;
    for (int64_t i = begin; i < begin + width; ++i) {
      const double a = reference[i], b = other[i];
      if (std::isfinite(a)) squares += a * a;
      if (same_value(a, b)) continue;
      double error = std::fabs(a - b);
      if (!std::isfinite(error)) error = std::numeric_limits<double>::infinity();
      errors += error * error;
      if (error > worst) at = i;
      worst = std::max(worst, error);
    }
    const double scale = std::sqrt(squares / static_cast<double>(width));
    const double row_error = std::sqrt(errors / static_cast<double>(width));
    const double most = std::max(tolerance.value * scale, tolerance.absolute);
    const double row_most = std::max(tolerance.row * scale, tolerance.absolute);
    if (!(worst <= most)) fail(op, tensor, at, reference[at], other[at], join("tolerance ", most));
    if (width >= kShortRow && !(row_error <= row_most))
      fail(op, tensor, at, reference[at], other[at],
           join("root mean square of the row's differences ", row_error, ", tolerance ", row_most));
  }
  copy_to_twin(tensor);
}

}  // namespace kdt
