#include "io/mmap_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <utility>

#include "core/error.h"

namespace kdt {
namespace {

constexpr size_t kBlock = 4096;

}  // namespace

InputFile::InputFile(const std::string& path) : path_(path) {
  // O_NONBLOCK: opening a pipe must not wait for its writer.
  fd_ = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  KDT_CHECK(fd_ >= 0, path, ": cannot open: ", std::strerror(errno));
  std::string fault;
  struct stat status{};
  if (fstat(fd_, &status) != 0) {
    fault = join("cannot read its size: ", std::strerror(errno));
  } else if (!S_ISREG(status.st_mode)) {
    fault = "not a regular file";
  }
  if (!fault.empty()) {
    close(fd_);
    throw Error(join(path, ": ", fault));
  }
  size_ = static_cast<size_t>(status.st_size);
}

InputFile::InputFile(InputFile&& other) noexcept
    : path_(std::move(other.path_)),
      fd_(std::exchange(other.fd_, -1)),
      direct_fd_(std::exchange(other.direct_fd_, -1)),
      size_(std::exchange(other.size_, 0)) {}

InputFile::~InputFile() {
  if (fd_ >= 0) close(fd_);
  if (direct_fd_ >= 0) close(direct_fd_);
}

void InputFile::read(size_t offset, size_t bytes, void* out) const {
  KDT_CHECK(offset <= size_ && bytes <= size_ - offset, path_, ": read of ", bytes, " bytes at ",
            offset, ", the file has ", size_);
  char* to = static_cast<char*>(out);
  const size_t head = (kBlock - offset % kBlock) % kBlock;
  if (direct_fd_ >= 0 && bytes >= head + kBlock &&
      (reinterpret_cast<uintptr_t>(to) + head) % kBlock == 0) {
    const size_t blocks = (bytes - head) / kBlock * kBlock;
    const size_t done = head + read_blocks(offset + head, blocks, to + head);
    read_through_cache(offset, head, to);
    read_through_cache(offset + done, bytes - done, to + done);
  } else {
    read_through_cache(offset, bytes, to);
  }
}

void InputFile::read_through_cache(size_t offset, size_t bytes, char* out) const {
  size_t done = 0;
  while (done < bytes) {
    const ssize_t count = pread(fd_, out + done, bytes - done, static_cast<off_t>(offset + done));
    if (count < 0 && errno == EINTR) continue;
    KDT_CHECK(count >= 0, path_, ": cannot read at ", offset + done, ": ", std::strerror(errno));
    KDT_CHECK(count > 0, path_, ": the file became shorter while open: it ends at ", offset + done,
              " of ", size_, " bytes");
    done += static_cast<size_t>(count);
  }
}

size_t InputFile::read_blocks(size_t offset, size_t bytes, char* out) const {
  size_t done = 0;
  while (done < bytes) {
    const ssize_t count =
        pread(direct_fd_, out + done, bytes - done, static_cast<off_t>(offset + done));
    if (count < 0 && errno == EINTR) continue;
    // Whatever is wrong, the other way shows it or can do without.
    if (count <= 0) break;
    done += static_cast<size_t>(count);
    if (done % kBlock != 0) break;  // the end of the file
  }
  return done / kBlock * kBlock;
}

void InputFile::use_direct_io() {
  if (direct_fd_ < 0) direct_fd_ = open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_DIRECT);
}

void InputFile::expect_sequential_reads() const { posix_fadvise(fd_, 0, 0, POSIX_FADV_SEQUENTIAL); }

void InputFile::forget(size_t offset, size_t bytes) const {
  posix_fadvise(fd_, static_cast<off_t>(offset), static_cast<off_t>(bytes), POSIX_FADV_DONTNEED);
}

MmapFile::MmapFile(const std::string& path) : InputFile(path) {
  if (size_ == 0) return;
  void* mapping = mmap(nullptr, size_, PROT_READ, MAP_SHARED, fd_, 0);
  KDT_CHECK(mapping != MAP_FAILED, path, ": cannot map ", size_, " bytes: ", std::strerror(errno));
  data_ = static_cast<const uint8_t*>(mapping);
}

MmapFile::MmapFile(MmapFile&& other) noexcept
    : InputFile(std::move(other)), data_(std::exchange(other.data_, nullptr)) {}

MmapFile::~MmapFile() {
  if (data_ != nullptr) munmap(const_cast<uint8_t*>(data_), size_);
}

bool has_entry(const std::string& path) {
  std::error_code ignored;
  const auto type = std::filesystem::symlink_status(path, ignored).type();
  return type != std::filesystem::file_type::not_found;
}

std::string read_text_file(const std::string& path, size_t max_bytes) {
  const InputFile file(path);
  KDT_CHECK(file.size() <= max_bytes, path, ": ", file.size(), " bytes, want at most ", max_bytes);
  std::string text(file.size(), '\0');
  file.read(0, text.size(), text.data());
  return text;
}

}  // namespace kdt
