// Checkpoints made by rule: tensors with a real model's names, types and statistics, and no
// training. docs/adr/0015-synthetic-checkpoints.md says what the numbers are.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "io/tensor_source.h"
#include "model/synth_config.h"
#include "model/synth_values.h"

namespace kdt {

// A file of the checkpoint: a header, then the data from `offset` on.
struct SynthShard {
  std::string file;
  uint64_t offset = 0;
  uint64_t bytes = 0;  // of data
};

// All tensors of a target or of a drafter. A byte is a function of the seed, the tensor's name and
// its place in the tensor alone, so any part can be made at any time, by any thread.
class SynthSource final : public TensorSource {
 public:
  enum class Part { kTarget, kDrafter };

  SynthSource(const SynthModel& model, Part part, uint64_t seed);
  SynthSource(const SynthSource&) = delete;  // entries_ points into the maps
  SynthSource& operator=(const SynthSource&) = delete;

  // Their offsets count through the data of all shards, one after the other.
  const std::map<std::string, SafetensorsView>& tensors() const override { return tensors_; }
  const std::string& name() const override { return name_; }
  // Throws std::invalid_argument for a file, and beyond the data's end.
  void read_range(const InputFile* file, uint64_t offset, uint64_t bytes, void* out) const override;

  const std::map<std::string, uint64_t>& bytes_by_part() const { return bytes_by_part_; }
  const std::vector<SynthShard>& shards() const { return shards_; }
  // What stands before the data in the shard's file, its length included: the bytes that the
  // `safetensors` package writes.
  std::string header(const SynthShard& shard) const;

 private:
  // A tensor in its shard. What it points to lies in tensors_ and recipes_.
  struct Entry {
    const std::string* name;
    SafetensorsView* view;
    const SynthRecipe* recipe;
    uint64_t key;
  };

  void list_target(const SynthModel& model);
  void list_layer(const ModelConfig& config, int64_t index);
  void list_drafter(const DraftConfig& config);
  // Places what was listed since the last shard.
  void end_shard(const std::string& file);
  size_t entry_at(uint64_t offset) const;

  // Modules of a checkpoint, and the `part` they are counted as (kdtree inspect's).
  void norm(const char* part, const std::string& name, int64_t size);
  void matrix(const char* part, const std::string& module, int64_t out, int64_t in, double gain);
  void fp8(const char* part, const std::string& module, int64_t out, int64_t in);
  void int4(const char* part, const std::string& module, int64_t out, int64_t in);
  // In the dialect's type.
  void linear(const char* part, const std::string& module, int64_t out, int64_t in);
  void expert(const char* part, const std::string& module, int64_t out, int64_t in);
  // gate_proj, up_proj and down_proj, each a call of `add`.
  using Add = void (SynthSource::*)(const char*, const std::string&, int64_t, int64_t);
  void mlp(Add add, const char* part, const std::string& module, int64_t hidden, int64_t width);
  void tensor(const char* part, const std::string& name, const char* dtype,
              std::vector<int64_t> shape, const SynthRecipe& recipe);
  // Makes a recipe once; `id` tells it from others.
  template <typename Make>
  const SynthRecipe& recipe(const std::string& id, const Make& make);

  std::string name_;
  bool fp8_;
  uint64_t seed_;
  std::map<std::string, SynthRecipe> recipes_;
  std::map<std::string, SafetensorsView> tensors_;
  std::vector<Entry> entries_;  // by offset
  size_t num_placed_ = 0;       // of these, in the shards that have ended
  std::vector<SynthShard> shards_;
  std::map<std::string, uint64_t> bytes_by_part_;
  uint64_t end_ = 0;  // of the data of all shards
};

}  // namespace kdt
