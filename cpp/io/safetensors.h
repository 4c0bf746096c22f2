// Reader of safetensors files. It refuses exactly what the `safetensors` package refuses.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "io/mmap_file.h"

namespace kdt {

// One tensor of a file. `data` may have any alignment: copy from it, never cast.
struct SafetensorsView {
  std::string dtype;           // as written in the file: "BF16", "F32", "I32", ...
  std::vector<int64_t> shape;  // may be empty (a scalar)
  const uint8_t* data = nullptr;
  uint64_t bytes = 0;
};

// Parses a header and checks every offset against the data that follows it. Throws Error naming
// the tensor and the fault. `source` is the name put into messages.
std::map<std::string, SafetensorsView> parse_safetensors(const uint8_t* file, uint64_t file_bytes,
                                                         const std::string& source);

// A checkpoint folder: `model.safetensors`, or the shards named by `model.safetensors.index.json`.
class SafetensorsFolder {
 public:
  // Throws Error: no file, a shard the index names is missing, a tensor in two shards or missing from the
  // shard the index names, a tensor the index does not name, anything parse_safetensors refuses.
  explicit SafetensorsFolder(const std::string& folder);

  // nullptr when there is no such tensor.
  const SafetensorsView* find(const std::string& name) const;
  const std::map<std::string, SafetensorsView>& tensors() const { return tensors_; }
  uint64_t total_bytes() const;
  const std::string& folder() const { return folder_; }

 private:
  std::string folder_;
  std::vector<std::unique_ptr<MmapFile>> files_;
  std::map<std::string, SafetensorsView> tensors_;
};

}  // namespace kdt
