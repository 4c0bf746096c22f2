// What tensors a checkpoint must hold, and their way to the back end.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "io/tensor_source.h"
#include "model/config.h"
#include "model/shard.h"

namespace kdt {

// A module of the contract, by the checkpoint's own name without the ending.
struct WeightSpec {
  enum class Kind {
    // `name`.weight [out, in] bf16, f32 or fp8 (with .weight_scale_inv), or `name`.weight_packed +
    // .weight_scale (int4)
    kMatrix,
    kTable,    // `name`.weight [out, in] bf16, f32 or fp8, read by rows: never int4
    kVector,   // `name` [out] bf16 or f32
    kIgnored,  // `name`, or all that begins with it when it ends with a dot: not read
  };
  // How a module is cut between ranks: into slices of its rows, or of its columns.
  enum class Split { kNone, kRows, kColumns };
  Kind kind;
  int64_t out = 0;
  int64_t in = 0;
  Split split = Split::kNone;
  // Equal pieces of `split` that stay whole, such as heads. Fewer pieces than ranks, if they divide
  // the ranks, are held by several.
  int64_t num_units = 0;
  // What config.json allows.
  bool int4 = false;
  bool fp8 = false;

  // Rows or columns of a rank.
  int64_t split_size() const { return split == Split::kColumns ? in : out; }
  int64_t slice_count(const Shard& shard) const;
  int64_t slice_begin(const Shard& shard) const;
  // Of the slice.
  int64_t local_out(const Shard& shard) const;
  int64_t local_in(const Shard& shard) const;
};

using WeightSpecs = std::map<std::string, WeightSpec>;

// Throws Error when the config names more experts than `source` has tensors: then the list would
// have no bound but memory.
WeightSpecs target_weight_specs(const ModelConfig& config, const TensorSource& source);
WeightSpecs draft_weight_specs(const DraftConfig& config);

// A drafter's names begin with "model." or with nothing; only the tensors tell which.
std::string find_draft_prefix(const TensorSource& source);

struct WeightFaults {
  static constexpr size_t kMaxKept = 20;

  size_t count = 0;
  // The first of them: missing tensors, wrong shapes and dtypes, tensors outside the contract. Each
  // names the tensor and the values.
  std::vector<std::string> faults;
  std::vector<std::string> unknown;  // names of tensors outside the contract, the first of them

  void add(std::string fault);
};

// Compares the headers with the contract.
WeightFaults check_weights(const WeightSpecs& specs, const TensorSource& source);

// `name`.weight_shape repeats an int4 matrix' [out, in]. Its fault, "" when it is right: from the
// tensor's bytes, or read from the source; then "" too when it is absent or check_weights finds its
// fault.
std::string weight_shape_fault(const std::string& tensor, const SafetensorsView& view,
                               const uint8_t* bytes, const WeightSpec& spec);
std::string weight_shape_fault(const TensorSource& source, const std::string& name,
                               const WeightSpec& spec);

// Throws std::invalid_argument for a number of ranks that no model is cut into.
void check_ranks(int tensor_parallel_size, bool expert_parallel);

// Throws std::invalid_argument when a rank's `columns` of an int4 module are no whole groups.
void check_int4_slice(const std::string& name, int64_t columns, const Shard& shard);

// Throws std::invalid_argument when the modules cannot be cut into that many slices, naming the key
// of config.json.
void check_shard(const ModelConfig& config, const Shard& shard);
void check_shard(const DraftConfig& config, const Shard& shard);

}  // namespace kdt
