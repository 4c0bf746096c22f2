#include "engine/inspect.h"

#include <array>
#include <memory>

#include "core/error.h"
#include "io/mmap_file.h"
#include "io/safetensors.h"
#include "io/tensor_stream.h"
#include "model/shard_cache.h"
#include "model/weights.h"

namespace kdt {

std::string part_of_tensor(const std::string& name) {
  // The first that fits: experts are inside an mlp.
  constexpr std::array<std::pair<const char*, const char*>, 8> kParts = {{
      {".mlp.experts.", "experts"},
      {".mlp.shared_experts.", "shared experts"},
      {".mlp.gate.", "router"},
      {".mlp.", "dense mlp"},
      {".self_attn.", "attention"},
      {"embed_tokens", "embedding"},
      {"lm_head", "head"},
      {"norm", "norms"},
  }};
  for (const auto& [text, part] : kParts) {
    if (name.find(text) != std::string::npos) return part;
  }
  return "other";
}

namespace {

// What is wrong with the files of a cache.
void inspect_cache(const ShardCache& cache, bool verify, const LoadProgress& progress,
                   CheckpointReport& report) {
  const ShardTerms& terms = cache.terms();
  report.cache = {.layout = terms.layout,
                  .source = cache.source_folder(),
                  .tensor_parallel_size = terms.size,
                  .expert_parallel = terms.expert_parallel,
                  .rank_bytes = {}};
  const auto collect = [&](const auto& check) {
    try {
      check();
    } catch (const Error& error) {
      report.faults.push_back(error.what());
    }
  };
  collect([&] { cache.check(terms.size, terms.expert_parallel); });
  int64_t before = 0, total = 0;  // bytes of lower ranks' files, and of all
  for (int rank = 0; rank < terms.size; ++rank) total += cache.bytes(rank);
  const auto tell = [&](int64_t done, int64_t) {
    if (progress) progress(before + done, total);
  };
  for (int rank = 0; rank < terms.size; ++rank) {
    report.cache.rank_bytes.push_back(cache.bytes(rank));
    collect([&] {
      RankFile file = cache.open_rank(rank);
      if (verify && outgrows_page_cache(cache.total_bytes())) file.use_direct_io();
      if (verify) file.verify(tell);
    });
    before += cache.bytes(rank);
  }
}

}  // namespace

CheckpointReport inspect_checkpoint(const std::string& folder, bool verify,
                                    const LoadProgress& progress) {
  KDT_CHECK_ARGUMENT(!verify || is_shard_cache(folder), "verify is true, but ", folder,
                     " is no pre-sharded cache: only its files have checksums");
  CheckpointReport report;
  report.is_drafter = is_draft_config(folder);
  if (report.is_drafter) {
    report.drafter = load_draft_config(folder);
  } else {
    report.model = load_config_alone(folder);
  }
  try {
    if (!report.is_drafter) add_generation_eos(folder, report.model);
    const auto* cache = static_cast<const ShardCache*>(nullptr);
    std::unique_ptr<TensorSource> opened;
    if (is_shard_cache(folder)) {
      auto shards = std::make_unique<ShardCache>(folder);
      cache = shards.get();
      opened = std::move(shards);
    } else {
      opened = std::make_unique<SafetensorsFolder>(folder);
    }
    const TensorSource& files = *opened;
    for (const auto& [name, view] : files.tensors()) {
      ++report.num_tensors;
      report.total_bytes += static_cast<int64_t>(view.bytes);
      report.bytes_by_dtype[view.dtype] += static_cast<int64_t>(view.bytes);
      report.bytes_by_part[part_of_tensor(name)] += static_cast<int64_t>(view.bytes);
    }
    if (report.is_drafter) report.drafter.tensor_prefix = find_draft_prefix(files);
    const WeightSpecs specs = report.is_drafter ? draft_weight_specs(report.drafter)
                                                : target_weight_specs(report.model, files);
    WeightFaults faults = check_weights(specs, files);
    for (const auto& [name, spec] : specs) {
      if (cache != nullptr) break;  // it was made of weights that were right
      std::string fault = weight_shape_fault(files, name, spec);
      if (!fault.empty()) faults.add(std::move(fault));
    }
    report.faults = faults.faults;
    if (faults.count > report.faults.size())
      report.faults.push_back(join("and ", faults.count - report.faults.size(), " more"));
    report.unknown = faults.unknown;
    if (cache != nullptr) inspect_cache(*cache, verify, progress, report);
    const std::string drafter = folder + "/drafter";
    if (!report.is_drafter && has_entry(drafter + "/config.json"))
      check_draft_config(load_draft_config(drafter), report.model, drafter + "/config.json");
  } catch (const Error& error) {
    // A malformed file is a finding too.
    report.faults.push_back(error.what());
  }
  return report;
}

}  // namespace kdt
