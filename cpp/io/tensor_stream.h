// Reads the tensors of a source once, in the order in which they lie there, for several consumers.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "core/clock.h"
#include "io/read_plan.h"

namespace kdt {

struct StreamOptions {
  int num_readers = 4;                        // threads
  uint64_t buffer_bytes = uint64_t{1} << 30;  // in all; a larger part gets its room, alone
  uint64_t read_bytes = uint64_t{16} << 20;   // at most at a time, whole blocks
  // Past the page cache, where the files can. Not said: where it could not keep all of them.
  std::optional<bool> direct_io;

  // From KDTREE_READERS, KDTREE_LOAD_BUFFER_BYTES and KDTREE_DIRECT_IO. Throws
  // std::invalid_argument naming the variable and its value.
  static StreamOptions from_environment();
};

// Whether the page cache could not keep so much for the next start.
bool outgrows_page_cache(uint64_t bytes);

struct LoadReport {
  int64_t bytes = 0;  // read
  int64_t reads = 0;
  double seconds = 0;
  int64_t buffer_bytes = 0;  // of host memory, at most at a time

  void add(const LoadReport& next);
};

class TensorStream {
 public:
  // Begins to read. Every one of `num_consumers` goes through all parts in order. `source` must
  // outlive the stream.
  TensorStream(const TensorSource& source, std::vector<StreamPart> parts, int num_consumers,
               const StreamOptions& options);
  ~TensorStream();  // ends the readers
  TensorStream(const TensorStream&) = delete;

  // Numbers of the parts, in the order in which they come.
  const std::vector<int64_t>& order() const { return plan_.order; }

  struct Bytes {
    std::vector<const uint8_t*> tensors;  // as the part lists them
    const uint8_t* extra;
  };
  // The bytes of a part, valid until this consumer is done with it. Calls `meanwhile` at least
  // once, and again and again while it waits. Throws Error when the stream has failed.
  Bytes wait(int64_t part, const std::function<void()>& meanwhile);
  // By each consumer once a part.
  void done(int64_t part);

  // Ends the stream for all. The first reason stays.
  void fail(const std::string& reason) noexcept;
  std::string failure() const;  // "": it has not failed

  int64_t bytes_read() const { return bytes_read_; }
  LoadReport report() const;
  // Grows with all that readers and consumers do.
  uint64_t moves() const { return moves_; }
  // Whether readers are at work, and not waiting for room that consumers hold.
  bool reading() const { return num_reading_ > 0; }

 private:
  // Memory of whole pages.
  class Pages {
   public:
    explicit Pages(uint64_t bytes);  // throws Error
    ~Pages();
    uint8_t* data() const { return data_; }
    uint64_t bytes() const { return bytes_; }

   private:
    uint8_t* data_;
    uint64_t bytes_;
  };
  struct Batch {
    std::unique_ptr<Pages> memory;
    int64_t pending = 0;  // reads, then tasks, that are not done
    int64_t held = 0;     // parts times consumers that are not done with it
    bool ready = false;
  };
  // A read of a batch, or with `part` a task of it.
  struct Task {
    int64_t batch = -1, read = -1, part = -1, task = -1;
  };

  void work();
  bool next_task(Task& task);
  bool get_memory(int64_t batch);
  void run(const Task& task);
  void end_task(const Task& task);
  void reads_done(int64_t batch);
  void release(Batch& batch);
  Bytes bytes_of(int64_t part) const;
  void end_readers();

  const TensorSource& source_;
  const std::vector<StreamPart> parts_;
  const StreamOptions options_;
  const ReadPlan plan_;
  bool drop_behind_;  // what was read goes out of the page cache
  const Clock clock_;

  mutable std::mutex mutex_;              // of all below
  std::condition_variable work_, ready_;  // for readers, for consumers
  std::vector<Batch> batches_;
  std::vector<std::unique_ptr<Pages>> spare_;
  uint64_t held_bytes_ = 0, peak_bytes_ = 0;  // spare ones too
  int64_t next_batch_ = 0, next_read_ = 0, num_ready_ = 0;
  std::deque<Task> tasks_;
  bool stop_ = false;
  std::string failure_;

  std::atomic<int64_t> bytes_read_{0}, num_reads_{0};
  std::atomic<uint64_t> moves_{0};
  std::atomic<int> num_reading_{0};
  std::vector<std::thread> readers_;
};

}  // namespace kdt
