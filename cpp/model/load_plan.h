// What a model wants of a checkpoint: each weight, how it is made and which modules fill it.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "backend/backend.h"
#include "model/weights.h"

namespace kdt {

// A part of a weight, filled by modules of the contract (weights.h).
struct LoadPart {
  std::vector<std::string> modules;
  // Gets the modules as they are in the checkpoint, whole; their bytes are valid during the call.
  // A vector is a matrix of one column.
  std::function<void(const std::vector<HostMatrix>&)> fill;
};

// One weight in the back end's memory.
struct LoadItem {
  std::string name;
  std::function<void()> make;  // without values
  std::vector<LoadPart> parts;
  std::function<std::vector<Tensor>()> memory;  // all of it, after make()
  std::function<void()> drop;                   // forgets it
};

// Lists a model's weights, this rank's slices of them.
class LoadPlan {
 public:
  // Throws Error with the first faults when the source breaks the contract, unknown tensors
  // included. The plan's items refer to `backend`.
  LoadPlan(Backend& backend, const TensorSource& source, WeightSpecs specs, const Shard& shard);

  // The destinations are filled later and must stay where they are.
  void linear(const std::vector<std::string>& stacked, std::unique_ptr<LinearWeight>* to);
  // f32 [n]
  void vector(const std::string& name, Buffer* to);
  // [out, in] in the checkpoint's dtype.
  void table(const std::string& name, Buffer* to);
  // kv_b_proj holds, head by head, W_UK [nope, rank] and W_UV [v, rank]. Absorbed attention applies
  // W_UK's transpose to the query and W_UV to the weighted latent (DeepSeek-V2, section 2.1).
  void kv_b(const std::string& name, int64_t nope, int64_t v, std::unique_ptr<LinearWeight>* w_uk,
            std::unique_ptr<LinearWeight>* w_uv);
  // Modules `name`.E.gate_proj, up_proj and down_proj.
  void experts(const std::string& name, int64_t num_experts, std::unique_ptr<ExpertsWeight>* to);

  const TensorSource& source() const { return source_; }
  const WeightSpecs& specs() const { return specs_; }
  const WeightSpec& spec(const std::string& name) const;
  // Of a module's values once loaded: kFloat32, kBFloat16 or kInt32 (int4).
  DType dtype(const std::string& name) const;
  // LoadItem::make with the names of the source and the item in what it throws.
  void make(LoadItem& item) const;
  std::vector<LoadItem>& items() { return items_; }
  const std::vector<LoadItem>& items() const { return items_; }
  Backend& backend() const { return backend_; }
  const Shard& shard() const { return shard_; }

 private:
  MatrixShape shape(const std::string& name, const Shard& shard) const;
  HostMatrix slice(const std::string& name, const HostMatrix& whole, const Shard& shard) const;

  Backend& backend_;
  const TensorSource& source_;
  WeightSpecs specs_;
  Shard shard_;
  std::vector<LoadItem> items_;
};

}  // namespace kdt
