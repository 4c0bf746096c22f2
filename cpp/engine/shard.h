// Makes a pre-sharded cache of a checkpoint (docs/adr/0019).
#pragma once

#include <cstdint>
#include <string>

#include "model/rank_file.h"

namespace kdt {

struct ShardOptions {
  std::string model;    // checkpoint folder
  std::string drafter;  // checkpoint folder; "": none
  std::string out;      // a folder that is not there, or empty
  // As make_backend takes it: whose layout the weights get. One device does it for all ranks.
  std::string device = "cpu";
  int num_threads = 0;
  int tensor_parallel_size = 1;
  bool expert_parallel = false;
  // Gets bytes written and bytes in all. May throw: then nothing is left of the cache.
  LoadProgress progress;
};

struct ShardSummary {
  std::string layout;
  int64_t read_bytes = 0;     // of the checkpoints' tensors, each once
  int64_t written_bytes = 0;  // of all ranks' files
};

// Holds the part of one layer or so that is being written. The folder appears under its name when
// all of it is on the disk. Throws std::invalid_argument for options and Error for files, a
// checkpoint that changes meanwhile and a disk without room, naming the bytes; then nothing is left
// of the cache.
ShardSummary shard_checkpoint(const ShardOptions& options);

}  // namespace kdt
