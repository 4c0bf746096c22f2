// A file mapped read-only into memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace kdt {

class MmapFile {
 public:
  // Throws Error naming the path when it is no regular file or cannot be opened or mapped. An empty
  // file maps to no bytes. Symbolic links are followed.
  explicit MmapFile(const std::string& path);
  ~MmapFile();
  MmapFile(MmapFile&& other) noexcept;
  MmapFile& operator=(MmapFile&&) = delete;
  MmapFile(const MmapFile&) = delete;

  const uint8_t* data() const { return data_; }
  size_t size() const { return size_; }
  const std::string& path() const { return path_; }

  // Copies bytes with pread. Unlike a load from the mapping, which ends the process when the file
  // has been cut short since, this throws Error.
  void read(size_t offset, size_t bytes, void* out) const;

 private:
  std::string path_;
  int fd_ = -1;
  const uint8_t* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace kdt
