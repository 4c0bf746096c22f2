// The two sides of a check back end: what a tensor, weight or cache is on each, and comparisons.
#pragma once

#include <cstring>
#include <map>
#include <mutex>

#include "backend/backend.h"

namespace kdt {

struct CheckLinear final : LinearWeight {
  std::unique_ptr<LinearWeight> reference, other;
  bool is_f32 = false;

  std::vector<Tensor> memory() const override { return reference->memory(); }
};
struct CheckExperts final : ExpertsWeight {
  std::unique_ptr<ExpertsWeight> reference, other;

  std::vector<Tensor> memory() const override { return reference->memory(); }
};
struct CheckCache final : KvCache {
  std::unique_ptr<KvCache> reference, other;
};

class CheckSides {
 public:
  CheckSides(std::unique_ptr<Backend> reference, std::unique_ptr<Backend> other);

  Backend& reference() const { return *reference_; }
  Backend& other() const { return *other_; }

  // Memory of the reference, and a twin of it on the other side that lives as long.
  Buffer allocate(DType dtype, std::initializer_list<int64_t> shape);
  Tensor twin(const Tensor& tensor) const;

  // One of the two back ends, and what an op's arguments are there.
  class Side {
    template <typename Pair>
    auto* half(Pair& pair) const {
      return is_other_ ? pair.other.get() : pair.reference.get();
    }

   public:
    Side(const CheckSides& sides, bool is_other) : sides_(sides), is_other_(is_other) {}

    Backend& backend() const { return is_other_ ? sides_.other() : sides_.reference(); }
    Tensor operator()(const Tensor& tensor) const {
      return is_other_ ? sides_.twin(tensor) : tensor;
    }
    const LinearWeight& operator()(const LinearWeight& weight) const {
      return *half(static_cast<const CheckLinear&>(weight));
    }
    KvCache& operator()(KvCache& cache) const { return *half(static_cast<CheckCache&>(cache)); }

    // Replaces arguments by this side's.
    template <typename... Arguments>
    void place(Arguments&... arguments) const {
      (replace(arguments), ...);
    }

   private:
    void replace(Tensor& tensor) const { tensor = (*this)(tensor); }
    void replace(RopeTable& rope) const { replace(rope.cos_sin); }
    void replace(SequenceRows& rows) const {
      place(rows.row_begin, rows.prefix_len, rows.block_table, rows.parents);
    }
    void replace(const LinearWeight*& weight) const {
      if (weight != nullptr) weight = &(*this)(*weight);
    }
    void replace(const ExpertsWeight*& weight) const {
      if (weight != nullptr) weight = half(static_cast<const CheckExperts&>(*weight));
    }
    void replace(KvCache*& cache) const {
      if (cache != nullptr) cache = &(*this)(*cache);
    }
    void replace(const KvCache*& cache) const {
      if (cache != nullptr) cache = half(static_cast<const CheckCache&>(*cache));
    }

    const CheckSides& sides_;
    bool is_other_;
  };

  // call(side) for both; an error of the other back end alone names it.
  template <typename Call>
  void run(const char* op, const Call& call) {
    call(Side(*this, false));
    reference_->synchronize();
    try {
      call(Side(*this, true));
      other_->synchronize();
    } catch (const std::exception& error) {
      throw Error(join("check: ", op, ": ", other_->info().device, " alone fails: ", error.what()));
    }
  }

  // What the reference holds.
  template <typename T>
  std::vector<T> read(const Tensor& tensor) const {
    return read_from<T>(*reference_, tensor);
  }

  // Throws unless the first `count` values (-1: all) have the same bits.
  template <typename T>
  void expect_same(const char* op, const Tensor& tensor, int64_t count = -1) const {
    const std::vector<T> a = read<T>(tensor), b = read_from<T>(*other_, twin(tensor));
    if (count < 0) count = tensor.numel();
    for (int64_t i = 0; i < count; ++i) {
      if (std::memcmp(&a[i], &b[i], sizeof(T)) != 0)
        fail(op, tensor, i, static_cast<double>(a[i]), static_cast<double>(b[i]),
             "want the same bits");
    }
  }

  // Throws unless each f32 value and each row is within the op's tolerance, at a row's worst value;
  // then the twin gets the reference's. Rows whose `skipped` is true are not looked at.
  void expect_close(const char* op, const Tensor& tensor,
                    const std::vector<bool>& skipped = {}) const;

  // Throws where ids differ and `is_tie(row, id, other's id)` is false; then the twin gets the
  // reference's. Tells which rows differ.
  template <typename IsTie>
  std::vector<bool> expect_ids(const char* op, const Tensor& ids, const IsTie& is_tie) const {
    const std::vector<int32_t> a = read<int32_t>(ids), b = read_from<int32_t>(*other_, twin(ids));
    const int64_t width = ids.ndim() > 1 ? ids.dim(1) : 1;
    std::vector<bool> differ(ids.dim(0), false);
    for (int64_t i = 0; i < ids.numel(); ++i) {
      if (a[i] == b[i]) continue;
      if (!is_tie(i / width, a[i], b[i])) fail(op, ids, i, a[i], b[i], "their scores are no tie");
      differ[i / width] = true;
    }
    copy_to_twin(ids);
    return differ;
  }

 private:
  // Allocations by their address on the reference. Any thread may free one.
  struct Twins {
    struct Entry {
      int64_t bytes;
      char* other;
    };
    std::mutex mutex;
    std::map<const char*, Entry> entries;
  };

  template <typename T>
  static std::vector<T> read_from(Backend& backend, const Tensor& tensor) {
    KDT_CHECK(dtype_bytes(tensor.dtype()) == sizeof(T), "check: ", tensor.to_string());
    std::vector<T> values(tensor.numel());
    backend.download(values.data(), tensor);
    return values;
  }
  void copy_to_twin(const Tensor& tensor) const;
  [[noreturn]] void fail(const char* op, const Tensor& tensor, int64_t index, double reference,
                         double other, const std::string& why) const;

  std::unique_ptr<Backend> reference_, other_;
  std::shared_ptr<Twins> twins_ = std::make_shared<Twins>();
};

}  // namespace kdt
