// What tensors a checkpoint must hold, and their way to the back end.
#pragma once

#include <functional>
#include <list>
#include <map>
#include <string>
#include <vector>

#include "backend/backend.h"
#include "io/safetensors.h"
#include "model/config.h"

namespace kdt {

// A module of the contract, by the checkpoint's own name without the ending.
struct WeightSpec {
  enum class Kind {
    kMatrix,  // `name`.weight [out, in] bf16 or f32, or `name`.weight_packed + .weight_scale (int4)
    kTable,   // `name`.weight [out, in] bf16 or f32, read by rows: never int4
    kVector,  // `name` [out] bf16 or f32
    kIgnored,  // `name`, or all that begins with it when it ends with a dot: not read
  };
  Kind kind;
  int64_t out = 0;
  int64_t in = 0;
  bool int4 = false;  // whether config.json allows int4
};

using WeightSpecs = std::map<std::string, WeightSpec>;

// Throws Error when the config names more experts than `folder` has tensors: then the list would
// have no bound but memory.
WeightSpecs target_weight_specs(const ModelConfig& config, const SafetensorsFolder& folder);
WeightSpecs draft_weight_specs(const DraftConfig& config);

// A drafter's names begin with "model." or with nothing; only the tensors tell which.
std::string find_draft_prefix(const SafetensorsFolder& folder);

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
WeightFaults check_weights(const WeightSpecs& specs, const SafetensorsFolder& folder);

// The fault of `name`.weight_shape, which repeats an int4 matrix' [out, in]; "" when it is right or
// absent. Reads the file.
std::string weight_shape_fault(const SafetensorsFolder& folder, const std::string& name,
                               const WeightSpec& spec);

// Called with the bytes handed over so far and the bytes in all.
using LoadProgress = std::function<void(int64_t done, int64_t total)>;

// Hands tensors to a back end by the names of the contract.
class WeightReader {
 public:
  // Throws Error with the first faults when the folder breaks the contract, unknown tensors
  // included.
  WeightReader(const SafetensorsFolder& folder, WeightSpecs specs, Backend& backend,
               LoadProgress progress);

  // Valid until release(). Throws Error when its weight_shape says otherwise.
  HostMatrix matrix(const std::string& name);
  // Frees what matrix() has read.
  void release() { staged_.clear(); }
  std::unique_ptr<LinearWeight> linear(const std::vector<std::string>& stacked);
  // f32 [n] on the back end.
  Buffer vector(const std::string& name);
  // [out, in] on the back end in the checkpoint's dtype.
  Buffer table(const std::string& name);
  // Of a module that is not int4: bf16 or f32.
  DType dtype(const std::string& name) const;
  // bf16 or f32 rows of a matrix as f32, on the host.
  std::vector<float> values(const std::string& name);
  // f32 values of the host as a [n] tensor of the back end.
  Buffer upload(const std::vector<float>& values);

 private:
  const WeightSpec& spec(const std::string& name) const;
  std::vector<uint8_t> read(const SafetensorsView& view);

  const SafetensorsFolder& folder_;
  WeightSpecs specs_;
  Backend& backend_;
  LoadProgress progress_;
  int64_t done_bytes_ = 0;
  std::list<std::vector<uint8_t>> staged_;
};

}  // namespace kdt
