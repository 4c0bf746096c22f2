// A file mapped read-only into memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace kdt {

class MmapFile {
 public:
  // Throws Error naming the path when it cannot be opened or mapped. An empty file maps to no bytes.
  explicit MmapFile(const std::string& path);
  ~MmapFile();
  MmapFile(MmapFile&& other) noexcept;
  MmapFile& operator=(MmapFile&&) = delete;
  MmapFile(const MmapFile&) = delete;

  const uint8_t* data() const { return data_; }
  size_t size() const { return size_; }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
  const uint8_t* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace kdt
