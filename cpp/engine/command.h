// A call of the engine as data, so that every process of a group can make it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/engine.h"

namespace kdt {

struct Command {
  enum class Kind : uint8_t { kAddRequest, kStep, kAbort, kLogits, kTreeLogits, kClose };
  Kind kind = Kind::kStep;
  std::vector<int64_t> token_ids;        // add_request, logits; tree_logits: the prefix
  std::vector<int64_t> tokens, parents;  // tree_logits
  int64_t request_id = 0;                // abort
  RequestOptions options;                // add_request

  std::string encode() const;
  // Throws Error for what encode() did not make.
  static Command decode(const std::string& bytes);
};

struct CommandResult {
  int64_t request_id = 0;           // add_request
  bool was_there = false;           // abort
  std::vector<StepOutput> outputs;  // step
  std::vector<float> logits;        // logits, tree_logits
};

CommandResult run_command(Engine& engine, const Command& command);

}  // namespace kdt
