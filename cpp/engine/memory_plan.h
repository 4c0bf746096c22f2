// What a model will need of each rank's memory, from headers alone.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "io/tensor_source.h"
#include "model/config.h"

namespace kdt {

struct MemoryOptions {
  int tensor_parallel_size = 1;
  bool expert_parallel = false;
  int64_t gpu_memory = 0;  // bytes a rank has; 0: not known
  // What the driver, the kernels, their scratch and the communication take besides.
  int64_t overhead = int64_t{2} << 30;
  int64_t max_model_len = 0;  // 0: the checkpoint's max_position_embeddings
  int64_t max_num_seqs = 8;
  int64_t prefill_chunk_size = 256;
};

// Bytes of one rank of a GPU; all have the same. Weights as the checkpoint packs them, FP8 as bf16
// and vectors as f32, which is how they are loaded; a kernel layout may add a little padding.
struct MemoryPlan {
  std::map<std::string, int64_t> weights_by_part;  // part_of_tensor()'s, and "drafter"
  int64_t weights = 0;
  int64_t workspace = 0;  // activations, rope tables and what waits for a drafter
  int64_t overhead = 0;
  // Of the latent cache, that every rank holds whole, and of the drafter's.
  int64_t kv_bytes_per_token = 0, draft_kv_bytes_per_token = 0;
  int64_t max_model_len = 0;
  int64_t slot_tokens = 0;   // the cache sets aside for one sequence
  int64_t cache_tokens = 0;  // and for all of max_num_seqs and a spare one
  // With gpu_memory; none of these is negative.
  int64_t kv_tokens_fit = 0, sequences_fit = 0;
  std::vector<std::string> faults;  // what cannot be cut, and what does not fit
};

// `drafter` and `draft_tensors` are null without one. Throws std::invalid_argument for a bad
// option, naming it.
MemoryPlan plan_memory(const ModelConfig& config, const TensorSource& tensors,
                       const DraftConfig* drafter, const TensorSource* draft_tensors,
                       const MemoryOptions& options);

// The same of folders, checkpoints or caches. `drafter` "": none.
MemoryPlan plan_memory(const std::string& model, const std::string& drafter,
                       const MemoryOptions& options);

}  // namespace kdt
