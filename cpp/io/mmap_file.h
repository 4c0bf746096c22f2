// Files open for reading.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace kdt {

// A regular file, read by copying. Cut short meanwhile, it is an error and no more.
class InputFile {
 public:
  // Throws Error naming the path when it is no regular file or cannot be opened. Symbolic links are
  // followed.
  explicit InputFile(const std::string& path);
  ~InputFile();
  InputFile(InputFile&& other) noexcept;
  InputFile& operator=(InputFile&&) = delete;
  InputFile(const InputFile&) = delete;

  size_t size() const { return size_; }  // bytes, when it was opened
  const std::string& path() const { return path_; }

  // Copies bytes from `offset` to `out`. Throws Error when the file does not have them any more.
  void read(size_t offset, size_t bytes, void* out) const;

  // From now on whole blocks are read past the page cache, where the file system can and `out` lies
  // as far from a border of blocks as `offset`. Not while another thread reads.
  void use_direct_io();
  // Hints to the page cache: that reads will follow each other; that these bytes were the last.
  void expect_sequential_reads() const;
  void forget(size_t offset, size_t bytes) const;

 protected:
  // Throws Error when the file ends before.
  void read_through_cache(size_t offset, size_t bytes, char* out) const;
  // Whole blocks from `offset` on, as many as could be read; out is aligned.
  size_t read_blocks(size_t offset, size_t bytes, char* out) const;

  std::string path_;
  int fd_ = -1;
  int direct_fd_ = -1;  // -1: direct reads are not wanted, or refused
  size_t size_ = 0;
};

// The same, mapped read-only into memory. A load from the mapping ends the process (SIGBUS) when
// the file has been cut short since: only for files that nobody changes.
class MmapFile : public InputFile {
 public:
  // Throws Error as InputFile does, and when it cannot be mapped. An empty file maps to no bytes.
  explicit MmapFile(const std::string& path);
  ~MmapFile();
  MmapFile(MmapFile&& other) noexcept;

  const uint8_t* data() const { return data_; }

 private:
  const uint8_t* data_ = nullptr;
};

// Whether there is anything of this name, if only a link that leads nowhere. Throws nothing.
bool has_entry(const std::string& path);

// The whole file. Throws Error when it cannot be read or is larger than `max_bytes`.
std::string read_text_file(const std::string& path, size_t max_bytes);

}  // namespace kdt
