#include "io/block_reader.h"

#include <algorithm>
#include <cstdlib>
#include <system_error>

#include "core/error.h"

namespace kdt {

BlockReader::BlockReader(const InputFile& file, uint64_t begin, uint64_t end)
    : file_(file), begin_(begin), end_(end) {
  constexpr size_t kPage = 4096;
  static_assert(kBlockBytes % kPage == 0);
  for (uint64_t i = 0; i < std::min(kBlocks, num_blocks()); ++i) {
    blocks_.push_back(
        {{static_cast<uint8_t*>(std::aligned_alloc(kPage, kBlockBytes)), &std::free}});
    KDT_CHECK(blocks_.back().memory != nullptr, file.path(), ": no memory to read it");
  }
  const auto threads = std::min<size_t>(kThreads, blocks_.size());
  threads_.reserve(threads);
  try {
    while (threads_.size() < threads) threads_.emplace_back([this] { read_blocks(); });
  } catch (const std::system_error& error) {  // fewer are slower
    KDT_CHECK(!threads_.empty(), file.path(), ": no thread to read it: ", error.what());
  }
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
      block.bytes = std::min(kBlockBytes, end_ - at);
      file_.read(at, block.bytes, block.memory.get());
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
  return {block.memory.get(), block.bytes};
}

}  // namespace kdt
