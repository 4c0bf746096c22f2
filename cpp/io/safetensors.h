// Reader of safetensors files.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "io/mmap_file.h"

namespace kdt {

// Where one tensor lies.
struct SafetensorsView {
  std::string dtype;                // as written in the file: "BF16", "F32", "I32", ...
  std::vector<int64_t> shape;       // may be empty (a scalar)
  const InputFile* file = nullptr;  // of a SafetensorsFolder
  uint64_t offset = 0;              // from the start of the file
  uint64_t bytes = 0;
};

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
class SafetensorsFolder {
 public:
  // Throws Error: neither or both of the two files, a shard the index names is missing, a tensor in
  // two shards or missing from the shard the index names, a tensor the index does not name, a file
  // `model-*.safetensors` the index does not name, anything parse_safetensors refuses.
  explicit SafetensorsFolder(const std::string& folder);

  // nullptr when there is no such tensor.
  const SafetensorsView* find(const std::string& name) const;
  const std::map<std::string, SafetensorsView>& tensors() const { return tensors_; }
  uint64_t total_bytes() const;
  const std::string& folder() const { return folder_; }

  // Copies a tensor's bytes to `out`, which holds `view.bytes`. Throws Error when its file has
  // become shorter since. `view` is one of tensors().
  void read(const SafetensorsView& view, void* out) const;

 private:
  void add_file(const std::string& name, const std::map<std::string, std::string>* weight_map);

  std::string folder_;
  std::vector<std::unique_ptr<InputFile>> files_;
  std::map<std::string, SafetensorsView> tensors_;
};

}  // namespace kdt
