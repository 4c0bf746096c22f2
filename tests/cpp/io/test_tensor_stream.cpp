// The order, the memory and the failures of reading a checkpoint once.
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <random>
#include <thread>

#include "check.h"
#include "core/error.h"
#include "io/safetensors.h"
#include "io/temp_dir.h"
#include "io/tensor_stream.h"

namespace kdt::test {
namespace {

// Tensors in memory, of any order in "files" that are none. Counts how often each byte is read.
class MemorySource : public TensorSource {
 public:
  explicit MemorySource(uint64_t bytes) : data_(bytes), reads_(bytes) {
    std::mt19937 random(7);
    for (uint8_t& byte : data_) byte = static_cast<uint8_t>(random());
  }
  const NamedTensor* add(const std::string& name, uint64_t offset, uint64_t bytes) {
    const auto size = static_cast<int64_t>(bytes);
    return &*tensors_.emplace(name, SafetensorsView{"U8", {size}, nullptr, offset, bytes}).first;
  }
  const std::map<std::string, SafetensorsView>& tensors() const override { return tensors_; }
  const std::string& name() const override { return name_; }
  void read_range(const InputFile*, uint64_t offset, uint64_t bytes, void* out) const override {
    if (before_read) before_read(offset);
    std::memcpy(out, data_.data() + offset, bytes);
    for (uint64_t i = offset; i < offset + bytes; ++i) ++reads_[i];
  }
  bool has(const NamedTensor* tensor, const uint8_t* bytes) const {
    return std::memcmp(data_.data() + tensor->second.offset, bytes, tensor->second.bytes) == 0;
  }
  int times_read(uint64_t offset) const { return reads_[offset]; }

  std::function<void(uint64_t)> before_read;

 private:
  std::string name_ = "memory";
  std::vector<uint8_t> data_;
  mutable std::vector<std::atomic<int>> reads_;
  std::map<std::string, SafetensorsView> tensors_;
};

StreamPart part_of(std::vector<const NamedTensor*> tensors) {
  StreamPart part;
  part.tensors = std::move(tensors);
  return part;
}

void nothing() {}

// What one consumer does: all parts in order.
template <typename Look>
void consume(TensorStream& stream, const Look& look) {
  for (const int64_t part : stream.order()) {
    look(part, stream.wait(part, nothing));
    stream.done(part);
  }
}

KDT_TEST(parts_come_in_file_order_and_neighbours_are_one_read) {
  MemorySource source(1000);
  const auto* a = source.add("a", 500, 100);
  const auto* b = source.add("b", 600, 50);
  const auto* c = source.add("c", 0, 10);
  const auto* d = source.add("d", 20, 30);
  // b's part begins with c; between c and d is a gap.
  const std::vector<StreamPart> parts = {part_of({a}), part_of({b, c}), part_of({d})};
  const ReadPlan all = plan_reads(parts, 1 << 20, 1 << 20);
  EXPECT(all.order == (std::vector<int64_t>{1, 2, 0}));
  EXPECT_EQ(all.batches.size(), 1u);
  EXPECT_EQ(all.wanted_bytes, 190u);
  const auto& reads = all.batches[0].reads;
  EXPECT_EQ(reads.size(), 1u);
  EXPECT(reads[0].offset == 0 && reads[0].bytes == 650 && reads[0].tensor == c);

  // A batch each: a read does not pass over what another batch wants.
  const ReadPlan each = plan_reads(parts, 1, 1 << 20);
  EXPECT_EQ(each.batches.size(), 3u);
  const auto& first = each.batches[0].reads;
  EXPECT_EQ(first.size(), 2u);
  EXPECT(first[0].offset == 0 && first[0].bytes == 10 && first[1].offset == 600);
}

KDT_TEST(a_large_gap_is_not_read) {
  const uint64_t gap = ReadPlan::kMaxGap;
  MemorySource source(2 * gap + 30);
  const auto* a = source.add("a", 0, 10);
  const auto* b = source.add("b", 10 + gap - 1, 10);
  const auto* c = source.add("c", 20 + 2 * gap - 1, 10);
  const ReadPlan plan = plan_reads({part_of({a, b, c})}, 1 << 20, 1 << 20);
  const auto& reads = plan.batches[0].reads;
  EXPECT_EQ(reads.size(), 2u);
  EXPECT(reads[0].bytes == gap + 19 && reads[1].offset == 19 + 2 * gap && reads[1].bytes == 10);
}

KDT_TEST(long_reads_are_cut_at_blocks) {
  MemorySource source(100'000);
  const auto* a = source.add("a", 5000, 20'000);
  const auto* b = source.add("b", 25'000, 50'000);
  const ReadPlan plan = plan_reads({part_of({a, b})}, 1 << 20, 16384);
  uint64_t at = 5000;
  for (const ReadPlan::Read& read : plan.batches[0].reads) {
    EXPECT_EQ(read.offset, at);
    EXPECT(read.bytes <= 16384 && read.bytes > 0);
    EXPECT_EQ(read.place % ReadPlan::kBlock, read.offset % ReadPlan::kBlock);
    at += read.bytes;
    EXPECT(at == 75'000 || at % ReadPlan::kBlock == 0);
    EXPECT_EQ(read.tensor->first, read.offset < 25'000 ? "a" : "b");
  }
  EXPECT_EQ(at, 75'000u);
}

KDT_TEST(a_tensor_of_two_parts_is_read_once_and_only_where_both_begin) {
  MemorySource source(100);
  const auto* a = source.add("a", 0, 40);
  const auto* b = source.add("b", 40, 40);
  const std::vector<StreamPart> tied = {part_of({a}), part_of({b}), part_of({a})};
  const ReadPlan plan = plan_reads(tied, 1, 1 << 20);
  EXPECT(plan.order == (std::vector<int64_t>{0, 2, 1}));
  EXPECT_EQ(plan.batches.size(), 2u);
  EXPECT_EQ(plan.wanted_bytes, 80u);
  EXPECT_THROWS("tensor 'b' is part of two weights that begin with others",
                plan_reads({part_of({a, b}), part_of({b})}, 1, 1 << 20));
}

// Random tensors with gaps between them, dealt to random parts.
KDT_TEST(every_byte_is_read_once_for_all_consumers) {
  std::mt19937 random(3);
  for (int repeat = 0; repeat < 30; ++repeat) {
    MemorySource source(3 << 20);
    std::vector<const NamedTensor*> tensors;
    uint64_t at = random() % 100;
    while (at < (3 << 20) - 70'000) {
      const uint64_t bytes = random() % (repeat % 2 == 0 ? 60'000 : 2000);
      tensors.push_back(source.add(join("t", at), at, bytes));
      at += bytes + (random() % 4 == 0 ? random() % 5000 + 1 : 1);
    }
    std::shuffle(tensors.begin(), tensors.end(), random);
    std::vector<StreamPart> parts(1 + random() % 200);
    for (const NamedTensor* tensor : tensors)
      parts[random() % parts.size()].tensors.push_back(tensor);
    StreamOptions options;
    options.num_readers = 1 + static_cast<int>(random() % 5);
    options.buffer_bytes = repeat % 3 == 0 ? 1 << 16 : 1 << 20;
    options.read_bytes = repeat % 2 == 0 ? 4096 : 1 << 16;
    const int num_consumers = 1 + static_cast<int>(random() % 4);
    LoadReport report;
    {
      TensorStream stream(source, parts, num_consumers, options);
      std::vector<std::thread> consumers;
      std::atomic<int> right = 0;
      for (int i = 0; i < num_consumers; ++i) {
        consumers.emplace_back([&] {
          consume(stream, [&](int64_t part, const TensorStream::Bytes& bytes) {
            for (size_t t = 0; t < bytes.tensors.size(); ++t)
              right += source.has(parts[part].tensors[t], bytes.tensors[t]) ? 1 : 0;
          });
        });
      }
      for (std::thread& consumer : consumers) consumer.join();
      EXPECT_EQ(right.load(), num_consumers * static_cast<int>(tensors.size()));
      report = stream.report();
    }
    int wrong = 0;
    int64_t read = 0;
    for (uint64_t i = 0; i < (3 << 20); ++i) {
      read += source.times_read(i);
      wrong += source.times_read(i) > 1 ? 1 : 0;
    }
    for (const NamedTensor* tensor : tensors) {
      for (uint64_t i = 0; i < tensor->second.bytes; ++i)
        wrong += source.times_read(tensor->second.offset + i) != 1 ? 1 : 0;
    }
    EXPECT_EQ(wrong, 0);
    EXPECT_EQ(report.bytes, read);
    EXPECT(report.reads > 0 && report.seconds > 0);
  }
}

KDT_TEST(memory_is_bounded_and_a_larger_part_gets_its_room_alone) {
  constexpr uint64_t kPiece = 100 << 10, kLarge = 3 << 20, kLimit = 1 << 20;
  MemorySource source(kPiece * 40 + kLarge);
  std::vector<StreamPart> parts;
  uint64_t at = 0;
  for (int i = 0; i < 41; ++i) {
    const uint64_t bytes = i == 20 ? kLarge : kPiece;
    parts.push_back(part_of({source.add(join("t", i), at, bytes)}));
    at += bytes;
  }
  StreamOptions options;
  options.buffer_bytes = kLimit;
  options.read_bytes = 64 << 10;
  const auto peak = [&](size_t count) {
    const std::vector<StreamPart> some(parts.begin(), parts.begin() + count);
    TensorStream stream(source, some, 1, options);
    consume(stream, [&](int64_t, const TensorStream::Bytes&) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));  // the readers fill what they may
    });
    return static_cast<uint64_t>(stream.report().buffer_bytes);
  };
  const uint64_t small = peak(20);
  EXPECT(small <= kLimit && small > kLimit / 2);
  EXPECT_EQ(peak(41), kLarge);
}

KDT_TEST(parts_are_finished_before_they_come) {
  MemorySource source(64 * 100);
  std::vector<StreamPart> parts;
  for (uint64_t i = 0; i < 64; ++i) {
    StreamPart part = part_of({source.add(join("t", i), i * 100, 100)});
    part.extra_bytes = 800;
    part.num_tasks = i % 5;
    part.finish = [](const std::vector<const uint8_t*>& tensors, uint8_t* extra, int64_t task) {
      for (int64_t k = 0; k < 100; ++k)
        extra[task * 100 + k] = static_cast<uint8_t>(tensors[0][k] + task + 1);
    };
    parts.push_back(part);
  }
  StreamOptions options;
  options.buffer_bytes = 1 << 15;
  TensorStream stream(source, parts, 1, options);
  int wrong = 0;
  consume(stream, [&](int64_t part, const TensorStream::Bytes& bytes) {
    for (int64_t task = 0; task < parts[part].num_tasks; ++task) {
      for (int64_t k = 0; k < 100; ++k) {
        const auto want = static_cast<uint8_t>(bytes.tensors[0][k] + task + 1);
        wrong += bytes.extra[task * 100 + k] != want ? 1 : 0;
      }
    }
  });
  EXPECT_EQ(wrong, 0);
}

int num_threads() {
  const auto tasks = std::filesystem::directory_iterator("/proc/self/task");
  return static_cast<int>(std::distance(begin(tasks), end(tasks)));
}

// One part of each of 100 tensors, more than the buffer holds.
struct Long {
  MemorySource source{100 << 12};
  std::vector<StreamPart> parts;
  StreamOptions options;
  Long() {
    for (uint64_t i = 0; i < 100; ++i)
      parts.push_back(part_of({source.add(join("t", i), i << 12, 1 << 12)}));
    options.buffer_bytes = 1 << 15;
    options.read_bytes = 1 << 12;
  }
};

KDT_TEST(a_read_that_fails_ends_all_consumers) {
  Long l;
  l.source.before_read = [](uint64_t offset) {
    if (offset >= 50 << 12) throw Error("disk on fire");
  };
  const int before = num_threads();
  {
    TensorStream stream(l.source, l.parts, 3, l.options);
    std::vector<std::thread> consumers;
    std::atomic<int> failed = 0;
    for (int i = 0; i < 3; ++i) {
      consumers.emplace_back([&] {
        try {
          consume(stream, [](int64_t, const TensorStream::Bytes&) {});
        } catch (const Error& error) {
          failed += std::string(error.what()) == stream.failure() ? 1 : 0;
        }
      });
    }
    for (std::thread& consumer : consumers) consumer.join();
    EXPECT_EQ(failed.load(), 3);
    EXPECT(stream.failure().starts_with("disk on fire, reading 't5"));
  }
  EXPECT_EQ(num_threads(), before);
}

KDT_TEST(a_task_that_fails_ends_the_stream) {
  Long l;
  l.parts[60].num_tasks = 1;
  l.parts[60].finish = [](const auto&, uint8_t*, int64_t) { throw Error("no number"); };
  TensorStream stream(l.source, l.parts, 1, l.options);
  EXPECT_THROWS("no number", consume(stream, [](int64_t, const TensorStream::Bytes&) {}));
}

KDT_TEST(a_stream_ends_in_the_middle_without_its_consumers) {
  const int before = num_threads();
  for (int repeat = 0; repeat < 200; ++repeat) {
    Long l;
    TensorStream stream(l.source, l.parts, 2, l.options);
    if (repeat % 4 == 0) continue;
    const int64_t first = stream.order().front();
    stream.wait(first, nothing);
    if (repeat % 4 == 1) stream.fail("rank 1 has had enough");
    if (repeat % 4 == 1) EXPECT_THROWS("rank 1 has had enough", stream.wait(first, nothing));
    if (repeat % 4 == 2) stream.done(first);
  }
  EXPECT_EQ(num_threads(), before);
}

KDT_TEST(what_a_waiting_consumer_throws_comes_out) {
  Long l;
  std::atomic<bool> go = false;
  l.source.before_read = [&](uint64_t) {
    while (!go) std::this_thread::yield();
  };
  TensorStream stream(l.source, l.parts, 1, l.options);
  int calls = 0;
  EXPECT_THROWS("enough", stream.wait(stream.order().front(), [&] {
    if (++calls == 3) throw Error("enough");
  }));
  go = true;
}

KDT_TEST(too_little_memory_is_an_error) {
  Long l;
  l.options.buffer_bytes = uint64_t{1} << 45;
  l.parts[0].extra_bytes = uint64_t{1} << 47;  // more than a process may have
  TensorStream stream(l.source, l.parts, 1, l.options);
  EXPECT_THROWS("KDTREE_LOAD_BUFFER_BYTES",
                consume(stream, [](int64_t, const TensorStream::Bytes&) {}));
  EXPECT(stream.failure().starts_with("no memory for "));
}

KDT_TEST(a_file_cut_short_after_it_was_opened_is_named) {
  const TempDir dir;
  const std::string data(8 << 20, 'x');
  const std::string header = join(R"({"a":{"dtype":"U8","shape":[)", data.size(),
                                  R"(],"data_offsets":[0,)", data.size(), "]}}");
  const uint64_t length = header.size();
  const std::string path = dir.write(
      "model.safetensors", std::string(reinterpret_cast<const char*>(&length), 8) + header + data);
  for (const bool direct : {false, true}) {
    dir.write("model.safetensors",
              std::string(reinterpret_cast<const char*>(&length), 8) + header + data);
    SafetensorsFolder folder(dir.path(""));
    if (direct) folder.use_direct_io();
    const StreamPart part = part_of({&*folder.tensors().begin()});
    StreamOptions options;
    options.read_bytes = 1 << 20;
    {
      TensorStream stream(folder, {part}, 1, options);
      consume(stream, [&](int64_t, const TensorStream::Bytes& bytes) {
        EXPECT(std::memcmp(bytes.tensors[0], data.data(), data.size()) == 0);
      });
      EXPECT_EQ(stream.report().bytes, static_cast<int64_t>(data.size()));
    }
    std::filesystem::resize_file(path, 5 << 20);
    TensorStream stream(folder, {part}, 1, options);
    EXPECT_THROWS(path + ": the file became shorter while open: it ends at ",
                  consume(stream, [](int64_t, const TensorStream::Bytes&) {}));
    EXPECT(stream.failure().ends_with(", reading 'a' and what follows"));
  }
}

KDT_TEST(options_of_the_environment) {
  const auto read = [](const char* name, const char* value) {
    setenv(name, value, 1);
    try {
      const StreamOptions options = StreamOptions::from_environment();
      unsetenv(name);
      return options;
    } catch (...) {
      unsetenv(name);
      throw;
    }
  };
  EXPECT_EQ(read("KDTREE_READERS", "9").num_readers, 9);
  EXPECT_EQ(read("KDTREE_LOAD_BUFFER_BYTES", "1048576").buffer_bytes, 1u << 20);
  EXPECT(read("KDTREE_DIRECT_IO", "1").direct_io == true);
  EXPECT(read("KDTREE_DIRECT_IO", "0").direct_io == false);
  EXPECT(!StreamOptions::from_environment().direct_io.has_value());
  // Empty is not set.
  EXPECT_EQ(read("KDTREE_READERS", "").num_readers, StreamOptions().num_readers);
  EXPECT_EQ(read("KDTREE_LOAD_BUFFER_BYTES", "").buffer_bytes, StreamOptions().buffer_bytes);
  EXPECT(!read("KDTREE_DIRECT_IO", "").direct_io.has_value());
  for (const char* name : {"KDTREE_READERS", "KDTREE_LOAD_BUFFER_BYTES", "KDTREE_DIRECT_IO"}) {
    for (const char* value : {"x", "-1", "1.5", "4 ", "99999999999999999999"})
      EXPECT_THROWS(join(name, " is '", value, "' in the environment; want "), read(name, value));
  }
  EXPECT_THROWS("want 1 to 256", read("KDTREE_READERS", "0"));
  EXPECT_THROWS("want 0 to 1", read("KDTREE_DIRECT_IO", "2"));
}

}  // namespace
}  // namespace kdt::test

KDT_TEST_MAIN
