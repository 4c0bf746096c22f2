#include "io/block_reader.h"

#include <algorithm>

namespace kdt {

BlockReader::BlockReader(const InputFile& file, uint64_t begin, uint64_t end)
    : file_(file), begin_(begin), end_(end), blocks_(std::min(kBlocks, num_blocks())) {
  const auto threads = std::min<size_t>(kThreads, blocks_.size());
  for (size_t i = 0; i < threads; ++i) threads_.emplace_back([this] { read_blocks(); });
}

BlockReader::~BlockReader() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void BlockReader::read_blocks() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] {
      return stop_ || begun_ == num_blocks() || begun_ < returned_ + blocks_.size();
    });
    if (stop_ || begun_ == num_blocks()) return;
    const uint64_t number = begun_++;
    Block& block = blocks_[number % blocks_.size()];
    lock.unlock();
    const uint64_t at = begin_ + number * kBlockBytes;
    std::exception_ptr error;
    try {
      block.bytes.resize(std::min(kBlockBytes, end_ - at));
      file_.read(at, block.bytes.size(), block.bytes.data());
    } catch (...) {
      error = std::current_exception();
    }
    lock.lock();
    block.ready = true;
    if (error && !error_) error_ = error;
    stop_ |= error != nullptr;
    changed_.notify_all();
  }
}

std::span<const uint8_t> BlockReader::next() {
  std::unique_lock lock(mutex_);
  if (returned_ < given_) {
    blocks_[returned_++ % blocks_.size()].ready = false;
    changed_.notify_all();
  }
  if (given_ == num_blocks()) return {};
  Block& block = blocks_[given_ % blocks_.size()];
  changed_.wait(lock, [&] { return block.ready || error_; });
  if (error_) std::rethrow_exception(error_);
  ++given_;
  return block.bytes;
}

}  // namespace kdt
