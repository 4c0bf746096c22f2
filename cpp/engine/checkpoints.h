// What the ranks of a process read of the checkpoints, once for all.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "io/tensor_source.h"
#include "model/config.h"
#include "model/loader.h"
#include "model/shard_cache.h"

namespace kdt {

struct EngineOptions {
  std::string model;           // checkpoint folder, or a name of synth_config.h
  std::string drafter;         // the same; "": none
  std::string device = "cpu";  // as rank_devices (backend.h) takes it
  int num_threads = 0;         // of all ranks; 0: one a core
  int64_t max_model_len = 0;   // 0: the checkpoint's max_position_embeddings
  int64_t max_num_seqs = 8;
  int64_t prefill_chunk_size = 256;
  double latent_rms_norm_eps = 0;  // 0: as the checkpoint says
  int tensor_parallel_size = 1;
  bool expert_parallel = false;  // whole experts a rank instead of a slice of each
  double timeout_s = 300;        // how long a rank waits for the others
  LoadProgress progress;
  // Called now and then by the caller's thread while several ranks load; may throw.
  std::function<void()> interrupted;
};

struct Checkpoints {
  // `num_ranks`: of this process, which load together. Throws Error for files and
  // std::invalid_argument for options, naming the field and the value.
  explicit Checkpoints(const EngineOptions& options, int num_ranks = 1);

  // Fills a rank's plan, which is of one of the sources here. As Loader::load.
  LoadReport load(LoadPlan& plan, RankGroup* group, const LoadProgress& progress);

  ModelConfig config;
  std::unique_ptr<TensorSource> source;
  DraftConfig draft_config;
  std::unique_ptr<TensorSource> draft_source;  // null: no drafter

  // Of config.json, the tensors' names and shapes and a sample of their values: the same in all
  // processes of a group.
  uint64_t fingerprint() const;

  int64_t target_bytes() const { return bytes_to_load(*source, 0); }
  int64_t all_bytes() const {
    return target_bytes() + (draft_source ? bytes_to_load(*draft_source, 0) : 0);
  }

 private:
  StreamOptions stream_;
  std::string config_text_;  // of both config.json
  Loader loader_, draft_loader_;
};

}  // namespace kdt
