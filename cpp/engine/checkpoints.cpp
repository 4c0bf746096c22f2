#include "engine/checkpoints.h"

#include <algorithm>
#include <cmath>

#include "backend/checks.h"
#include "io/xxh64.h"
#include "model/synth.h"

namespace kdt {
namespace {

constexpr size_t kMaxConfigBytes = 64 << 20;  // what has been read before

// Some bytes of some tensors: two checkpoints of one architecture differ in them. A cache's are in
// a layout, not in tensors.
void add_sample(const TensorSource& source, std::string& text) {
  if (dynamic_cast<const ShardCache*>(&source) != nullptr) return;
  constexpr size_t kTensors = 16, kBytes = 256;
  const size_t step = std::max<size_t>(1, source.tensors().size() / kTensors);
  size_t i = 0;
  for (const auto& [name, view] : source.tensors()) {
    if (i++ % step != 0) continue;
    std::string bytes(std::min<uint64_t>(view.bytes, kBytes), '\0');
    source.read_range(view.file, view.offset, bytes.size(), bytes.data());
    text += bytes;
  }
}

}  // namespace

Checkpoints::Checkpoints(const EngineOptions& options, int num_ranks)
    : stream_(StreamOptions::from_environment()),
      loader_(num_ranks, stream_),
      draft_loader_(num_ranks, stream_) {
  KDT_CHECK_ARGUMENT(std::isfinite(options.latent_rms_norm_eps) &&
                         options.latent_rms_norm_eps >= 0 && options.latent_rms_norm_eps < 1,
                     "latent_rms_norm_eps is ", options.latent_rms_norm_eps,
                     "; want 0 (as the checkpoint says) to 1");
  const auto open = [&](const std::string& folder) {
    auto opened = open_weights(folder, options.tensor_parallel_size, options.expert_parallel);
    if (stream_.direct_io.value_or(outgrows_page_cache(opened->total_bytes())))
      opened->use_direct_io();
    return opened;
  };
  const auto text_of = [](const std::string& folder) {
    return read_text_file(folder + "/config.json", kMaxConfigBytes);
  };
  const auto make = [](const std::string& name, SynthSource::Part part) {
    const SynthOptions options = parse_synth_name(name);
    const SynthModel model = make_synth_model(options);
    return std::pair(
        model, std::make_unique<SynthSource>(model, part, static_cast<uint64_t>(options.seed)));
  };
  if (is_synth_name(options.model)) {
    auto [model, made] = make(options.model, SynthSource::Part::kTarget);
    config = model.config;
    source = std::move(made);
    config_text_ = options.model;
  } else {
    config = load_model_config(options.model);
    source = open(options.model);
    config_text_ = text_of(options.model);
  }
  if (options.latent_rms_norm_eps > 0) config.latent_rms_norm_eps = options.latent_rms_norm_eps;
  if (options.drafter.empty()) return;
  std::string where = options.drafter;
  if (is_synth_name(options.drafter)) {
    auto [model, made] = make(options.drafter, SynthSource::Part::kDrafter);
    draft_config = model.drafter;
    draft_source = std::move(made);
    config_text_ += options.drafter;
  } else {
    where += "/config.json";
    draft_config = load_draft_config(options.drafter);
    draft_source = open(options.drafter);
    draft_config.tensor_prefix = find_draft_prefix(*draft_source);
    config_text_ += text_of(options.drafter);
  }
  check_draft_config(draft_config, config, where);
  KDT_CHECK(
      draft_config.block_size - 1 <= kMaxTreeDepth && draft_config.block_size <= kMaxTreeBudget,
      where, ": block_size is ", draft_config.block_size, "; this engine takes at most ",
      kMaxTreeDepth + 1);
}

uint64_t Checkpoints::fingerprint() const {
  std::string text = config_text_;
  for (const TensorSource* tensors : {source.get(), draft_source.get()}) {
    if (tensors == nullptr) continue;
    for (const auto& [name, view] : tensors->tensors()) {
      text += join(name, ' ', view.dtype);
      for (const int64_t size : view.shape) text += join(' ', size);
      text += '\n';
    }
    add_sample(*tensors, text);
  }
  return xxh64(text.data(), text.size());
}

LoadReport Checkpoints::load(LoadPlan& plan, RankGroup* group, const LoadProgress& progress) {
  if (const auto* cache = dynamic_cast<const ShardCache*>(&plan.source())) {
    const Clock clock;
    cache->load(plan, [&](int64_t done, int64_t total) {
      if (progress) progress(done, total);
      if (group == nullptr) return;
      const std::string ended = group->aborted();
      KDT_CHECK(ended.empty(), ended);
    });
    return {.bytes = cache->bytes(plan.shard().rank), .seconds = clock.ms() / 1000};
  }
  Loader& loader = &plan.source() == source.get() ? loader_ : draft_loader_;
  return loader.load(plan, group, progress);
}

}  // namespace kdt
