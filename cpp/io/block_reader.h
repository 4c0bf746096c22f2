// A part of a file in order, read ahead by several threads.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

#include "io/mmap_file.h"

namespace kdt {

// Holds kBlocks * kBlockBytes of memory. Each byte is read once.
class BlockReader {
 public:
  static constexpr uint64_t kBlockBytes = uint64_t{8} << 20;
  static constexpr uint64_t kBlocks = 6;
  static constexpr int kThreads = 3;

  // Bytes [begin, end). The file must outlive the reader.
  BlockReader(const InputFile& file, uint64_t begin, uint64_t end);
  ~BlockReader();
  BlockReader(const BlockReader&) = delete;

  // The block that follows, valid until the next call; empty at the end. All but the last have
  // kBlockBytes. Throws what InputFile::read threw.
  std::span<const uint8_t> next();

 private:
  struct Block {
    std::unique_ptr<uint8_t, void (*)(void*)> memory;  // of whole pages, for direct reads
    uint64_t bytes = 0;
    bool ready = false;
  };

  uint64_t num_blocks() const { return (end_ - begin_ + kBlockBytes - 1) / kBlockBytes; }
  void read_blocks();

  const InputFile& file_;
  const uint64_t begin_, end_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Block> blocks_;
  // Blocks that a thread has begun to read, that were given out and that were given back.
  uint64_t begun_ = 0, given_ = 0, returned_ = 0;
  bool stop_ = false;
  std::exception_ptr error_;
  std::vector<std::thread> threads_;
};

}  // namespace kdt
