// The models that can be generated: their numbers and their config files.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "model/config.h"

namespace kdt {

// What to generate. A size of 0: as the model named has it.
struct SynthOptions {
  std::string like;  // "kimi-k2.6", "kimi-k2-instruct" or "tiny"
  int64_t layers = 0;
  int64_t experts = 0;
  int64_t hidden = 0;
  int64_t vocab = 0;
  int64_t seed = 0;  // another seed, other weights

  // The number of that name. Throws std::invalid_argument when there is none.
  int64_t& number(std::string_view name);
};

struct SynthModel {
  std::string name;  // for messages
  ModelConfig config;
  DraftConfig drafter;
  // The files' text.
  std::string config_json;
  std::string generation_config_json;
  std::string drafter_config_json;
};

// Throws std::invalid_argument naming the option for a model that cannot be.
SynthModel make_synth_model(const SynthOptions& options);

// A model that is made in memory when it is loaded, in the place of a folder's name:
// "synth:tiny,layers=3,seed=1" with any of SynthOptions' numbers.
bool is_synth_name(const std::string& model);
// Throws std::invalid_argument naming what is wrong in it.
SynthOptions parse_synth_name(const std::string& model);

}  // namespace kdt
