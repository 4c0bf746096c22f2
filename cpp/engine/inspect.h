// What a checkpoint folder holds, from its headers and the few numbers among its tensors.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "io/safetensors.h"
#include "model/config.h"
#include "model/loader.h"

namespace kdt {

// "experts", "attention", "embedding", ...
std::string part_of_tensor(const std::string& name);

// Of a pre-sharded cache.
struct CacheReport {
  std::string layout, source;
  int tensor_parallel_size = 0;  // 0: the folder is a checkpoint
  bool expert_parallel = false;
  std::vector<int64_t> rank_bytes;
};

struct CheckpointReport {
  bool is_drafter = false;
  ModelConfig model;    // of a target
  DraftConfig drafter;  // of a drafter
  int64_t num_tensors = 0;
  int64_t total_bytes = 0;
  std::map<std::string, int64_t> bytes_by_dtype;
  std::map<std::string, int64_t> bytes_by_part;
  std::vector<std::string> faults;   // what keeps it from loading, the first of it
  std::vector<std::string> unknown;  // of these, tensors that config.json lacks
  CacheReport cache;
};

// Throws Error when the folder has no readable config.json. Faults of tensors are in the report.
// `verify`: reads all of a pre-sharded cache and compares its checksums; `progress` gets bytes of
// its files, and what it throws is thrown unless that is an Error.
CheckpointReport inspect_checkpoint(const std::string& folder, bool verify = false,
                                    const LoadProgress& progress = {});

}  // namespace kdt
