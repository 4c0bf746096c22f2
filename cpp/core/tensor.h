// A view of a contiguous, row-major array. It owns nothing (docs/adr/0002).
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <string>

#include "core/dtype.h"
#include "core/error.h"

namespace kdt {

class Tensor {
 public:
  static constexpr int kMaxDims = 4;

  Tensor() = default;
  Tensor(void* data, DType dtype, std::initializer_list<int64_t> shape)
      : data_(data), dtype_(dtype) {
    KDT_CHECK(shape.size() <= kMaxDims, "tensor: ", shape.size(), " dimensions, at most ",
              kMaxDims);
    for (int64_t size : shape) shape_[ndim_++] = size;
  }

  bool defined() const { return data_ != nullptr; }
  DType dtype() const { return dtype_; }
  int ndim() const { return ndim_; }
  int64_t dim(int i) const { return shape_[i]; }
  int64_t numel() const {
    int64_t n = 1;
    for (int i = 0; i < ndim_; ++i) n *= shape_[i];
    return n;
  }
  int64_t bytes() const { return numel() * static_cast<int64_t>(dtype_bytes(dtype_)); }
  void* raw() const { return data_; }

  // Typed pointer; the back ends call it after the op's shape check.
  template <typename T>
  T* data() const {
    return static_cast<T*>(data_);
  }

  // The first `count` rows of the outermost dimension, starting at `begin`.
  Tensor rows(int64_t begin, int64_t count) const {
    KDT_CHECK(ndim_ > 0 && begin >= 0 && count >= 0 && begin + count <= shape_[0], "tensor: rows [",
              begin, ", ", begin + count, ") of ", to_string());
    Tensor view = *this;
    const int64_t row_bytes = shape_[0] == 0 ? 0 : bytes() / shape_[0];
    view.data_ = static_cast<char*>(data_) + begin * row_bytes;
    view.shape_[0] = count;
    return view;
  }

  // The same elements under another shape.
  Tensor view(std::initializer_list<int64_t> shape) const {
    Tensor out(data_, dtype_, shape);
    KDT_CHECK(out.numel() == numel(), "tensor: view ", out.to_string(), " of ", to_string());
    return out;
  }

  // The same shape over other memory.
  Tensor at(void* data) const {
    Tensor out = *this;
    out.data_ = data;
    return out;
  }

  std::string to_string() const {
    std::string text = std::string(dtype_name(dtype_)) + "[";
    for (int i = 0; i < ndim_; ++i) text += (i ? ", " : "") + std::to_string(shape_[i]);
    return text + "]";
  }

 private:
  void* data_ = nullptr;
  DType dtype_ = DType::kFloat32;
  int ndim_ = 0;
  std::array<int64_t, kMaxDims> shape_{};
};

}  // namespace kdt
