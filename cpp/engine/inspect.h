// What a checkpoint folder holds, from its headers and the few numbers among its tensors.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "io/safetensors.h"
#include "model/config.h"

namespace kdt {

struct CheckpointReport {
  bool is_drafter = false;
  ModelConfig model;    // of a target
  DraftConfig drafter;  // of a drafter
  int64_t num_tensors = 0;
  int64_t total_bytes = 0;
  std::map<std::string, int64_t> bytes_by_dtype;
  std::map<std::string, int64_t> bytes_by_part;  // experts, attention, embedding, ...
  std::vector<std::string> faults;               // what keeps it from loading, the first of it
  std::vector<std::string> unknown;              // of these, tensors that config.json lacks
};

// Throws Error when the folder has no readable config.json. Faults of tensors are in the report.
CheckpointReport inspect_checkpoint(const std::string& folder);

}  // namespace kdt
