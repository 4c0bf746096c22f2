// Pre-sharded caches for tests, and what loading them tells.
#pragma once

#include <filesystem>
#include <fstream>
#include <string>
#include <utility>
#include <vector>

#include "engine/checkpoints.h"
#include "engine/shard.h"
#include "io/temp_dir.h"
#include "model/shard_cache.h"
#include "tiny_models.h"

namespace kdt::test {

namespace fs = std::filesystem;

inline ShardOptions options_of(const std::string& model, const std::string& out, int size = 2,
                               bool expert_parallel = true) {
  ShardOptions options;
  options.model = model;
  options.drafter = model + "/drafter";
  options.out = out;
  options.device = device();
  options.tensor_parallel_size = size;
  options.expert_parallel = expert_parallel;
  return options;
}

inline EngineOptions engine_of(const std::string& model, int size, bool expert_parallel) {
  EngineOptions options;
  options.model = model;
  options.drafter = model + "/drafter";
  options.tensor_parallel_size = size;
  options.expert_parallel = expert_parallel;
  return options;
}

// A copy of a checkpoint and a cache of it, for two ranks, to be spoilt.
struct Made {
  explicit Made(const std::string& preset = "tiny") {
    fs::copy(preset_folder(preset), model, fs::copy_options::recursive);
    shard_checkpoint(options_of(model, out));
  }
  std::string rank(int r) const { return out + "/" + rank_file_name(r, 2); }

  TempDir dir;
  std::string model = dir.path("model"), out = dir.path("out");
};

// Name and bytes of all weights of a rank.
using Weights = std::vector<std::pair<std::string, std::string>>;

inline Weights memory_of(LoadPlan& plan) {
  Weights weights;
  for (LoadItem& item : plan.items()) {
    for (const Tensor& tensor : item.memory()) {
      std::string bytes(tensor.bytes(), '\0');
      backend().download(bytes.data(), tensor);
      weights.emplace_back(item.name, std::move(bytes));
    }
  }
  return weights;
}

inline Weights weights_of(const std::string& folder, int rank, int size, bool expert_parallel) {
  Checkpoints checkpoints(engine_of(folder, size, expert_parallel), 1);
  const RankContext ranks{backend(), {rank, size, expert_parallel}};
  TargetModel target(ranks, checkpoints.config, *checkpoints.source, 1, 1, {});
  DraftModel draft(ranks, checkpoints.draft_config, *checkpoints.draft_source, 1, 1, 1);
  Weights weights;
  for (const auto& plan : {target.take_plan(), draft.take_plan()}) {
    checkpoints.load(*plan, nullptr, {});
    for (auto& weight : memory_of(*plan)) weights.push_back(std::move(weight));
  }
  return weights;
}

// The message of what loading rank 0 of a cache throws, "" when it loads.
inline std::string load_fault(const std::string& folder, int size = 2,
                              bool expert_parallel = true) {
  try {
    weights_of(folder, 0, size, expert_parallel);
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

inline void expect_fault(const std::string& fault, const std::string& part) {
  if (fault.find(part) == std::string::npos)
    report(__FILE__, __LINE__, "fault is '" + fault + "', want '" + part + "'");
}

inline void overwrite(const std::string& path, size_t at, const std::string& bytes) {
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  file.seekp(static_cast<std::streamoff>(at));
  file << bytes;
  KDT_CHECK(file.good(), path, ": cannot change");
}

// Changes one byte.
inline void flip(const std::string& path, size_t at) {
  const std::string all = read_file(path);
  overwrite(path, at, std::string(1, static_cast<char>(all.at(at) ^ 1)));
}

inline void replace_in(const std::string& path, const std::string& from, const std::string& to) {
  std::string text = read_file(path);
  const size_t at = text.find(from);
  KDT_CHECK(at != text.npos, path, ": has no '", from, "'");
  text.replace(at, from.size(), to);
  std::ofstream(path, std::ios::binary | std::ios::trunc) << text;
}

}  // namespace kdt::test
