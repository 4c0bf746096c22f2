// KDTR: named arrays in one file; layout in docs/kdtr.md.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "core/dtype.h"
#include "io/mmap_file.h"

namespace kdt {

struct KdtrArray {
  DType dtype = DType::kFloat32;
  std::vector<int64_t> shape;
  const uint8_t* data = nullptr;  // 64-byte aligned in a file; null only when there are no elements
  uint64_t bytes = 0;

  int64_t numel() const;
  template <typename T>
  const T* as() const {
    return reinterpret_cast<const T*>(data);
  }
};

// Checks the whole file, checksums included; the views point into `file`. Throws Error naming the
// array and the fault.
std::map<std::string, KdtrArray> parse_kdtr(const uint8_t* file, uint64_t file_bytes,
                                            const std::string& source);

// A file's arrays, in a mapping of it: it must not be cut short while they are used. Cut short
// while it is opened, it is an Error.
class KdtrFile {
 public:
  explicit KdtrFile(const std::string& path);
  // Throws Error naming the file and the array when there is none of that name.
  const KdtrArray& at(const std::string& name) const;
  const std::map<std::string, KdtrArray>& arrays() const { return arrays_; }

 private:
  MmapFile file_;
  std::map<std::string, KdtrArray> arrays_;
};

// Writes the arrays in the given order. Throws Error when the file cannot be written completely.
void write_kdtr(const std::string& path,
                const std::vector<std::pair<std::string, KdtrArray>>& arrays);

}  // namespace kdt
