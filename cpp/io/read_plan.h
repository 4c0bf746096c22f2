// In which order a checkpoint is read, and where its bytes come to lie.
#pragma once

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "io/tensor_source.h"

namespace kdt {

// A tensor of a source with its name.
using NamedTensor = std::pair<const std::string, SafetensorsView>;

// Tensors that are needed at the same time.
struct StreamPart {
  std::vector<const NamedTensor*> tensors;
  // Room for what `finish` makes of the tensors, and the calls finish(bytes of each tensor, that
  // room, i) for i in [0, num_tasks), of threads at once, once all tensors are there.
  uint64_t extra_bytes = 0;
  int64_t num_tasks = 0;
  std::function<void(const std::vector<const uint8_t*>& tensors, uint8_t* extra, int64_t task)>
      finish = nullptr;
};

struct ReadPlan {
  static constexpr uint64_t kBlock = 4096;  // of files and memory
  static constexpr uint64_t kMaxGap = uint64_t{64} << 10;

  struct Read {
    const InputFile* file;
    uint64_t offset, bytes;
    uint64_t place;             // in the batch's memory; as far from a border of blocks as `offset`
    const NamedTensor* tensor;  // the first of it
  };
  // Parts that are read together and share a piece of memory.
  struct Batch {
    int64_t begin = 0, end = 0;  // in `order`
    uint64_t bytes = 0;          // of memory
    std::vector<Read> reads;
  };
  struct Place {
    int64_t batch = 0;
    std::vector<uint64_t> tensors;  // in the batch's memory
    uint64_t extra = 0;
  };

  std::vector<int64_t> order;  // of the parts
  std::vector<Place> places;   // [part]
  std::vector<Batch> batches;
  uint64_t wanted_bytes = 0;  // of all tensors, each once
};

// Sorts the parts by where their first tensors lie. A batch is as many parts as have `batch_bytes`,
// at least one; within it, what lies side by side is one read, up to `read_bytes`. Bytes that
// nobody wants are read only where they are a gap below kMaxGap. Throws Error when two parts share
// a tensor and do not begin with the same one.
ReadPlan plan_reads(const std::vector<StreamPart>& parts, uint64_t batch_bytes,
                    uint64_t read_bytes);

}  // namespace kdt
