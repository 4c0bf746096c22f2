#include "io/tensor_stream.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <new>
#include <set>
#include <stdexcept>

#include "core/error.h"

namespace kdt {
namespace {

constexpr uint64_t kBatchBytes = uint64_t{64} << 20;
constexpr auto kLook = std::chrono::milliseconds(100);

int64_t environment_number(const char* name, int64_t otherwise, int64_t least, int64_t most) {
  const char* text = std::getenv(name);
  if (text == nullptr || *text == '\0') return otherwise;
  int64_t value = 0;
  const char* end = text + std::strlen(text);
  const auto parsed = std::from_chars(text, end, value);
  KDT_CHECK_ARGUMENT(
      parsed.ec == std::errc() && parsed.ptr == end && value >= least && value <= most, name,
      " is '", text, "' in the environment; want ", least, " to ", most);
  return value;
}

// Batches small enough that the readers work on the next while consumers hold some.
uint64_t batch_bytes(const StreamOptions& options) {
  return std::min(kBatchBytes, options.buffer_bytes / 4);
}

}  // namespace

bool outgrows_page_cache(uint64_t bytes) {
  const auto memory = static_cast<uint64_t>(sysconf(_SC_PHYS_PAGES)) *
                      static_cast<uint64_t>(sysconf(_SC_PAGE_SIZE));
  return bytes > memory / 2;
}

StreamOptions StreamOptions::from_environment() {
  StreamOptions options;
  options.num_readers =
      static_cast<int>(environment_number("KDTREE_READERS", options.num_readers, 1, 256));
  options.buffer_bytes = static_cast<uint64_t>(
      environment_number("KDTREE_LOAD_BUFFER_BYTES", static_cast<int64_t>(options.buffer_bytes),
                         1 << 20, int64_t{1} << 40));
  if (const int64_t direct = environment_number("KDTREE_DIRECT_IO", -1, 0, 1); direct >= 0)
    options.direct_io = direct == 1;
  return options;
}

void LoadReport::add(const LoadReport& next) {
  bytes += next.bytes;
  reads += next.reads;
  seconds += next.seconds;
  buffer_bytes = std::max(buffer_bytes, next.buffer_bytes);
}

TensorStream::Pages::Pages(uint64_t bytes) : bytes_(bytes) {
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  KDT_CHECK(memory != MAP_FAILED, "no memory for ", bytes,
            " bytes of a checkpoint on their way: ", std::strerror(errno),
            "; KDTREE_LOAD_BUFFER_BYTES is the limit of all of them");
  // Fewer page faults; what is refused here costs nothing but them.
  madvise(memory, bytes, MADV_HUGEPAGE);
  data_ = static_cast<uint8_t*>(memory);
}

TensorStream::Pages::~Pages() { munmap(data_, bytes_); }

TensorStream::TensorStream(const TensorSource& source, std::vector<StreamPart> parts,
                           int num_consumers, const StreamOptions& options)
    : source_(source),
      parts_(std::move(parts)),
      options_(options),
      plan_(plan_reads(parts_, batch_bytes(options), options.read_bytes)),
      drop_behind_(outgrows_page_cache(plan_.wanted_bytes)),
      batches_(plan_.batches.size()) {
  std::set<const InputFile*> files;
  for (size_t i = 0; i < batches_.size(); ++i) {
    const ReadPlan::Batch& batch = plan_.batches[i];
    batches_[i].pending = static_cast<int64_t>(batch.reads.size());
    batches_[i].held = (batch.end - batch.begin) * num_consumers;
    for (const ReadPlan::Read& read : batch.reads) files.insert(read.file);
  }
  for (const InputFile* file : files) {
    if (file != nullptr) file->expect_sequential_reads();
  }
  const auto useful = static_cast<int64_t>(plan_.wanted_bytes / options.read_bytes + 1);
  const int num_readers = static_cast<int>(std::min<int64_t>(options.num_readers, useful));
  try {
    for (int i = 0; i < num_readers; ++i) readers_.emplace_back([this] { work(); });
  } catch (const std::system_error& error) {
    end_readers();
    throw Error(join("cannot start ", num_readers, " threads that read: ", error.what()));
  }
}

TensorStream::~TensorStream() { end_readers(); }

void TensorStream::end_readers() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
    work_.notify_all();
  }
  for (std::thread& reader : readers_) reader.join();
  readers_.clear();
}

void TensorStream::work() {
  try {
    for (Task task; next_task(task);) run(task);
  } catch (const std::bad_alloc&) {
    fail("no memory to load the checkpoint");
  } catch (const std::exception& error) {
    fail(error.what());
  }
}

// False: there is nothing left to do.
bool TensorStream::next_task(Task& task) {
  std::unique_lock lock(mutex_);
  const auto num_batches = static_cast<int64_t>(batches_.size());
  while (!stop_ && failure_.empty()) {
    if (!tasks_.empty()) {
      task = tasks_.front();
      tasks_.pop_front();
      return true;
    }
    if (next_batch_ == num_batches) {
      if (num_ready_ == num_batches) return false;
    } else if (get_memory(next_batch_)) {
      if (plan_.batches[next_batch_].reads.empty()) {
        reads_done(next_batch_++);
        continue;
      }
      task = {.batch = next_batch_, .read = next_read_++};
      if (next_read_ == static_cast<int64_t>(plan_.batches[next_batch_].reads.size())) {
        ++next_batch_;
        next_read_ = 0;
      }
      return true;
    }
    work_.wait(lock);
  }
  return false;
}

// Whether the batch has memory. A batch has all of the limit to itself if it must.
bool TensorStream::get_memory(int64_t index) {
  Batch& batch = batches_[index];
  if (batch.memory) return true;
  const uint64_t page = ReadPlan::kBlock;
  const uint64_t bytes = (std::max(plan_.batches[index].bytes, page) + page - 1) / page * page;
  for (auto& spare : spare_) {
    if (spare->bytes() < bytes || spare->bytes() / 2 > bytes) continue;
    batch.memory = std::move(spare);
    std::swap(spare, spare_.back());
    spare_.pop_back();
    return true;
  }
  while (!spare_.empty() && held_bytes_ + bytes > options_.buffer_bytes) {
    held_bytes_ -= spare_.back()->bytes();
    spare_.pop_back();
  }
  if (held_bytes_ > 0 && held_bytes_ + bytes > options_.buffer_bytes) return false;
  batch.memory = std::make_unique<Pages>(bytes);
  held_bytes_ += bytes;
  peak_bytes_ = std::max(peak_bytes_, held_bytes_);
  return true;
}

void TensorStream::run(const Task& task) {
  // The memory of a batch that is not ready stays where it is, so no lock is needed.
  if (task.read >= 0) {
    const ReadPlan::Read& read = plan_.batches[task.batch].reads[task.read];
    uint8_t* to = batches_[task.batch].memory->data() + read.place;
    ++num_reading_;
    try {
      source_.read_range(read.file, read.offset, read.bytes, to);
    } catch (const std::exception& error) {
      --num_reading_;
      throw Error(join(error.what(), ", reading '", read.tensor->first, "' and what follows"));
    }
    --num_reading_;
    if (drop_behind_ && read.file != nullptr) read.file->forget(read.offset, read.bytes);
    bytes_read_ += static_cast<int64_t>(read.bytes);
    ++num_reads_;
  } else {
    const Bytes bytes = bytes_of(task.part);
    parts_[task.part].finish(bytes.tensors, const_cast<uint8_t*>(bytes.extra), task.task);
  }
  end_task(task);
}

void TensorStream::end_task(const Task& task) {
  const std::lock_guard lock(mutex_);
  ++moves_;
  Batch& batch = batches_[task.batch];
  if (--batch.pending == 0) {
    if (task.read >= 0) {
      reads_done(task.batch);
    } else {
      batch.ready = true;
      ++num_ready_;
      work_.notify_all();
    }
  }
  ready_.notify_all();
}

void TensorStream::reads_done(int64_t index) {
  Batch& batch = batches_[index];
  for (int64_t i = plan_.batches[index].begin; i < plan_.batches[index].end; ++i) {
    const int64_t part = plan_.order[i];
    for (int64_t task = 0; task < parts_[part].num_tasks; ++task)
      tasks_.push_back({.batch = index, .part = part, .task = task});
    batch.pending += parts_[part].num_tasks;
  }
  if (batch.pending == 0) {
    batch.ready = true;
    ++num_ready_;
    ready_.notify_all();
  }
  work_.notify_all();
}

TensorStream::Bytes TensorStream::bytes_of(int64_t part) const {
  const ReadPlan::Place& place = plan_.places[part];
  const uint8_t* memory = batches_[place.batch].memory->data();
  Bytes bytes;
  for (const uint64_t offset : place.tensors) bytes.tensors.push_back(memory + offset);
  bytes.extra = memory + place.extra;
  return bytes;
}

TensorStream::Bytes TensorStream::wait(int64_t part, const std::function<void()>& meanwhile) {
  const Batch& batch = batches_[plan_.places[part].batch];
  while (true) {
    meanwhile();
    std::unique_lock lock(mutex_);
    if (!failure_.empty()) throw Error(failure_);
    if (batch.ready) return bytes_of(part);
    ready_.wait_for(lock, kLook);
  }
}

void TensorStream::done(int64_t part) {
  const std::lock_guard lock(mutex_);
  ++moves_;
  Batch& batch = batches_[plan_.places[part].batch];
  if (--batch.held > 0) return;
  spare_.push_back(std::move(batch.memory));
  work_.notify_all();
}

void TensorStream::fail(const std::string& reason) noexcept {
  const std::lock_guard lock(mutex_);
  try {
    if (failure_.empty()) failure_ = reason.empty() ? "loading failed" : reason;
  } catch (const std::bad_alloc&) {
    failure_ = "no memory";  // needs none
  }
  work_.notify_all();
  ready_.notify_all();
}

std::string TensorStream::failure() const {
  const std::lock_guard lock(mutex_);
  return failure_;
}

LoadReport TensorStream::report() const {
  const std::lock_guard lock(mutex_);
  return {bytes_read_, num_reads_, clock_.ms() / 1000, static_cast<int64_t>(peak_bytes_)};
}

}  // namespace kdt
