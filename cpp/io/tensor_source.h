// Named tensors that can be read, wherever they come from.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "io/mmap_file.h"

namespace kdt {

// Where one tensor lies.
struct SafetensorsView {
  std::string dtype;                // as written in the file: "BF16", "F32", "I32", ...
  std::vector<int64_t> shape;       // may be empty (a scalar)
  const InputFile* file = nullptr;  // null: the source is no file; its offsets count through it all
  uint64_t offset = 0;              // from the start of the file
  uint64_t bytes = 0;
};

class TensorSource {
 public:
  virtual ~TensorSource() = default;
  virtual const std::map<std::string, SafetensorsView>& tensors() const = 0;
  // What messages call it, such as a folder.
  virtual const std::string& name() const = 0;
  // Copies bytes of a file, those of several tensors too, from `offset` to `out`. Any thread may
  // call it. `file` is that of one of the tensors. Throws Error when it does not have them any
  // more.
  virtual void read_range(const InputFile* file, uint64_t offset, uint64_t bytes,
                          void* out) const = 0;

  // InputFile's, of all files.
  virtual void use_direct_io() {}

  // Copies a tensor's bytes to `out`, which holds `view.bytes`. `view` is one of tensors().
  void read(const SafetensorsView& view, void* out) const {
    read_range(view.file, view.offset, view.bytes, out);
  }
  // nullptr when there is no such tensor.
  const SafetensorsView* find(const std::string& tensor) const {
    const auto found = tensors().find(tensor);
    return found == tensors().end() ? nullptr : &found->second;
  }
  uint64_t total_bytes() const {
    uint64_t total = 0;
    for (const auto& [tensor, view] : tensors()) total += view.bytes;
    return total;
  }
};

}  // namespace kdt
