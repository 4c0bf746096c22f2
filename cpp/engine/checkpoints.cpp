#include "engine/checkpoints.h"

#include <cmath>

#include "backend/checks.h"

namespace kdt {

Checkpoints::Checkpoints(const EngineOptions& options, int num_ranks)
    : stream_(StreamOptions::from_environment()),
      loader_(num_ranks, stream_),
      draft_loader_(num_ranks, stream_) {
  KDT_CHECK_ARGUMENT(std::isfinite(options.latent_rms_norm_eps) &&
                         options.latent_rms_norm_eps >= 0 && options.latent_rms_norm_eps < 1,
                     "latent_rms_norm_eps is ", options.latent_rms_norm_eps,
                     "; want 0 (as the checkpoint says) to 1");
  config = load_model_config(options.model);
  if (options.latent_rms_norm_eps > 0) config.latent_rms_norm_eps = options.latent_rms_norm_eps;
  const auto open = [&](const std::string& folder) {
    auto opened = open_weights(folder, options.tensor_parallel_size, options.expert_parallel);
    if (stream_.direct_io.value_or(outgrows_page_cache(opened->total_bytes())))
      opened->use_direct_io();
    return opened;
  };
  source = open(options.model);
  if (options.drafter.empty()) return;
  draft_config = load_draft_config(options.drafter);
  const std::string where = options.drafter + "/config.json";
  check_draft_config(draft_config, config, where);
  KDT_CHECK(
      draft_config.block_size - 1 <= kMaxTreeDepth && draft_config.block_size <= kMaxTreeBudget,
      where, ": block_size is ", draft_config.block_size, "; this engine takes at most ",
      kMaxTreeDepth + 1);
  draft_source = open(options.drafter);
  draft_config.tensor_prefix = find_draft_prefix(*draft_source);
}

LoadReport Checkpoints::load(LoadPlan& plan, RankGroup* group, const LoadProgress& progress) {
  if (const auto* cache = dynamic_cast<const ShardCache*>(&plan.source())) {
    const Clock clock;
    cache->load(plan, progress);
    return {.bytes = cache->bytes(plan.shard().rank), .seconds = clock.ms() / 1000};
  }
  Loader& loader = &plan.source() == source.get() ? loader_ : draft_loader_;
  return loader.load(plan, group, progress);
}

}  // namespace kdt
