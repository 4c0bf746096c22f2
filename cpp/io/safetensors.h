// Reader of safetensors files.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "io/mmap_file.h"
#include "io/tensor_source.h"

namespace kdt {

// Copies bytes of a file, from `offset` to `out`.
using ReadAt = std::function<void(uint64_t offset, uint64_t bytes, void* out)>;

// Parses a header and checks every offset against the data that follows it. Throws Error naming
// the tensor and the fault. `source` is the name put into messages.
//
// It refuses what the `safetensors` package (0.8.0) refuses, and four oddities which that package
// lets pass: a key twice in one object, a tensor or a dtype written as another JSON type, a
// dimension over 2^63 - 1.
std::map<std::string, SafetensorsView> parse_safetensors(const ReadAt& read, uint64_t file_bytes,
                                                         const std::string& source);

// A checkpoint folder: `model.safetensors`, or the shards named by `model.safetensors.index.json`.
class SafetensorsFolder final : public TensorSource {
 public:
  // Throws Error: neither or both of the two files, a shard the index names is missing, a tensor in
  // two shards or missing from the shard the index names, a tensor the index does not name, a file
  // `model-*.safetensors` the index does not name, anything parse_safetensors refuses.
  explicit SafetensorsFolder(const std::string& folder);

  const std::map<std::string, SafetensorsView>& tensors() const override { return tensors_; }
  const std::string& name() const override { return folder_; }
  void use_direct_io() override;
  void read_range(const InputFile* file, uint64_t offset, uint64_t bytes,
                  void* out) const override {
    file->read(offset, bytes, out);
  }

 private:
  void add_file(const std::string& name, const std::map<std::string, std::string>* weight_map);

  std::string folder_;
  std::vector<std::unique_ptr<InputFile>> files_;
  std::map<std::string, SafetensorsView> tensors_;
};

}  // namespace kdt
