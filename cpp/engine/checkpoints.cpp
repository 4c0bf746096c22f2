#include "engine/checkpoints.h"

#include <cmath>

#include "backend/checks.h"

namespace kdt {

Checkpoints::Checkpoints(const EngineOptions& options) {
  KDT_CHECK_ARGUMENT(std::isfinite(options.latent_rms_norm_eps) &&
                         options.latent_rms_norm_eps >= 0 && options.latent_rms_norm_eps < 1,
                     "latent_rms_norm_eps is ", options.latent_rms_norm_eps,
                     "; want 0 (as the checkpoint says) to 1");
  config = load_model_config(options.model);
  if (options.latent_rms_norm_eps > 0) config.latent_rms_norm_eps = options.latent_rms_norm_eps;
  source = std::make_unique<SafetensorsFolder>(options.model);
  if (options.drafter.empty()) return;
  draft_config = load_draft_config(options.drafter);
  const std::string where = options.drafter + "/config.json";
  check_draft_config(draft_config, config, where);
  KDT_CHECK(
      draft_config.block_size - 1 <= kMaxTreeDepth && draft_config.block_size <= kMaxTreeBudget,
      where, ": block_size is ", draft_config.block_size, "; this engine takes at most ",
      kMaxTreeDepth + 1);
  draft_source = std::make_unique<SafetensorsFolder>(options.drafter);
  draft_config.tensor_prefix = find_draft_prefix(*draft_source);
}

}  // namespace kdt
