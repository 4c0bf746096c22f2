// A pre-sharded cache: a model's folder whose weights are one file a rank, as a back end holds them
// in memory, instead of safetensors. docs/adr/0019 has the layout.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "io/tensor_source.h"
#include "model/rank_file.h"

namespace kdt {

// The file that makes a folder a cache.
inline constexpr const char* kShardsFile = "kdtree_shards.json";

// Whether `folder` is a cache: it has a file of that name.
bool is_shard_cache(const std::string& folder);

// Over names, sizes and times of a checkpoint's config.json, index and safetensors files, and over
// the latter's headers. 0: there are no safetensors files. Throws Error for files that cannot be
// read.
uint64_t hash_checkpoint(const std::string& folder);

// As a source of tensors it has all of the checkpoint's, and the data of none.
class ShardCache final : public TensorSource {
 public:
  // Reads what describes the cache. Throws Error for a file that is malformed, of another version,
  // or has been changed.
  explicit ShardCache(const std::string& folder);

  // Throws std::invalid_argument when the cache was made for other ranks than these, Error when its
  // config.json has changed since, or its checkpoint is still there, can be read and has.
  void check(int size, bool expert_parallel) const;

  // Reads a rank's file into a model's weights, as RankFile::load does.
  void load(LoadPlan& plan, const LoadProgress& progress) const;

  const std::map<std::string, SafetensorsView>& tensors() const override { return tensors_; }
  const std::string& name() const override { return folder_; }
  void read_range(const InputFile* file, uint64_t offset, uint64_t bytes, void* out) const override;
  void use_direct_io() override { direct_io_ = true; }
  const ShardTerms& terms() const { return terms_; }
  const std::string& source_folder() const { return source_folder_; }
  // Of a rank's file.
  int64_t bytes(int rank) const { return static_cast<int64_t>(rank_bytes_.at(rank)); }
  // Throws Error when the file is missing, not of this cache, or not whole.
  RankFile open_rank(int rank) const;

 private:
  std::string folder_, source_folder_;
  ShardTerms terms_;
  uint64_t config_checksum_ = 0;
  std::vector<uint64_t> rank_bytes_;
  bool direct_io_ = false;
  std::map<std::string, SafetensorsView> tensors_;
};

// The checkpoint or the cache in a folder, for these ranks. Throws as SafetensorsFolder and
// ShardCache do.
std::unique_ptr<TensorSource> open_weights(const std::string& folder, int size,
                                           bool expert_parallel);
// What a rank reads of it.
int64_t bytes_to_load(const TensorSource& source, int rank);

std::string rank_file_name(int rank, int size);

// Writes what describes a cache into its folder, behind the ranks' files and config.json.
// `rank_bytes`: of each.
void write_shards_file(const std::string& folder, const ShardTerms& terms,
                       const std::string& source_folder, const TensorSource& tensors,
                       const std::vector<uint64_t>& rank_bytes);

}  // namespace kdt
