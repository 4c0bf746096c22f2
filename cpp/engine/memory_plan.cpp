#include "engine/memory_plan.h"

#include <algorithm>
#include <memory>
#include <stdexcept>

#include "backend/checks.h"
#include "engine/inspect.h"
#include "engine/limits.h"
#include "io/safetensors.h"
#include "model/shard_cache.h"
#include "model/weights.h"

namespace kdt {
namespace {

constexpr int64_t kFloat = 4, kBFloat16 = 2;

// Bytes of a module's slice once loaded. Throws std::invalid_argument for one that cannot be.
int64_t bytes_of(const std::string& name, const WeightSpec& spec, const Shard& shard,
                 const TensorSource& tensors) {
  const int64_t out = spec.local_out(shard), in = spec.local_in(shard);
  if (spec.kind == WeightSpec::Kind::kVector) return out * kFloat;
  const SafetensorsView* plain = tensors.find(name + ".weight");
  // One that is missing is counted as config.json lets it be.
  const bool int4 = plain == nullptr && spec.int4;
  if (int4) {
    check_int4_slice(name, in, shard);
    return out * (in / 2) + out * (in / 32) * kBFloat16;
  }
  return out * in * (plain != nullptr && plain->dtype == "F32" ? kFloat : kBFloat16);
}

void add_weights(const WeightSpecs& specs, const TensorSource& tensors, const Shard& shard,
                 const char* only_part, std::map<std::string, int64_t>& by_part) {
  for (const auto& [name, spec] : specs) {
    if (spec.kind == WeightSpec::Kind::kIgnored) continue;
    const std::string part = part_of_tensor(name + ".");
    // Whole experts, the same number on every rank, or a slice of each.
    const bool whole = part == "experts" && shard.expert_parallel;
    by_part[only_part != nullptr ? only_part : part] +=
        bytes_of(name, spec, whole ? Shard{} : shard, tensors);
  }
  if (shard.expert_parallel && by_part.contains("experts")) by_part["experts"] /= shard.size;
}

// What TargetModel allocates besides weights.
int64_t target_workspace(const ModelConfig& c, const Shard& shard, int64_t rows, int64_t positions,
                         int64_t taps) {
  const int64_t heads = shard.count(c.num_attention_heads), rope = c.qk_rope_head_dim;
  const int64_t head_dim = c.qk_nope_head_dim + rope;
  const int64_t shared = c.n_routed_experts > 0 ? c.moe_intermediate_size * c.n_shared_experts : 0;
  const int64_t width = shard.count(std::max(c.intermediate_size, shared));
  int64_t row = 3 * c.hidden_size;
  row += (c.q_lora_rank > 0 ? c.q_lora_rank : heads * head_dim) + c.kv_lora_rank + rope;
  row += std::max<int64_t>(c.q_lora_rank, 1);
  row += heads * (head_dim + c.kv_lora_rank + rope + c.kv_lora_rank + c.v_head_dim);
  row += 3 * width;
  if (c.n_routed_experts > 0) row += c.n_routed_experts + 2 * c.num_experts_per_tok;
  row += std::max<int64_t>(1, taps * c.hidden_size);
  return kFloat * (rows * row + positions * rope);
}

// What DraftModel allocates besides weights.
int64_t draft_workspace(const DraftConfig& c, const Shard& shard, int64_t kv_heads, int64_t rows,
                        int64_t sequences, int64_t positions) {
  const int64_t heads = shard.count(c.num_attention_heads);
  const int64_t block_rows = sequences * c.block_size;
  const auto taps = static_cast<int64_t>(c.target_layer_ids.size());
  int64_t values = rows * 2 * c.hidden_size;
  if (shard.size > 1) values += rows * shard.count(taps * c.hidden_size);
  values += std::max(rows, block_rows) * 2 * kv_heads * c.head_dim;
  values += block_rows *
            (4 * c.hidden_size + 2 * heads * c.head_dim + 3 * shard.count(c.intermediate_size));
  return kFloat * (values + positions * c.head_dim);
}

// What Engine allocates itself, but for what is smaller than a megabyte.
int64_t engine_workspace(const ModelConfig& c, const DraftConfig* drafter, const Shard& shard,
                         const MemoryOptions& options, int64_t rows, int64_t max_model_len) {
  const int64_t vocab = shard.count(c.vocab_size);
  int64_t values = kLogitRows * vocab;
  if (shard.size > 1) values += shard.size * std::max(2 * rows, kLogitRows * vocab);
  if (drafter != nullptr) {
    const auto taps = static_cast<int64_t>(drafter->target_layer_ids.size());
    values += options.max_num_seqs * (drafter->block_size - 1) * vocab;
    values += options.max_num_seqs * std::max(rows, std::min(kPendingRows, max_model_len)) * taps *
              c.hidden_size;
  }
  return kFloat * values;
}

// In the largest unit of which it has one.
std::string size_text(int64_t bytes) {
  for (const auto& [unit, bits] : {std::pair{" GiB", 30}, {" MiB", 20}, {" KiB", 10}}) {
    const int64_t size = int64_t{1} << bits;
    if (bytes < size) continue;
    std::ostringstream out;
    out.setf(std::ios::fixed);
    out.precision(2);
    out << static_cast<double>(bytes) / static_cast<double>(size) << unit;
    return out.str();
  }
  return join(bytes, " B");
}

void check_range(const char* name, int64_t value, int64_t min, int64_t max) {
  KDT_CHECK_ARGUMENT(value >= min && value <= max, name, " is ", value, "; want ", min, " to ",
                     max);
}

// The longest max_model_len that leaves room for so many sequences and the spare one.
int64_t longest_of(const MemoryPlan& plan, int64_t sequences) {
  // Blocks of a slot hold a tree besides.
  return plan.kv_tokens_fit / (sequences + 1) / kBlockSize * kBlockSize - kMaxTreeBudget -
         kBlockSize;
}

// Weights and caches in the memory there is. What does not fit is told with the options that help.
void fit(const MemoryOptions& options, MemoryPlan& plan) {
  constexpr const char* kMoreMemory = "raise tensor_parallel_size or gpu_memory";
  const std::string memory = join("gpu_memory is ", size_text(options.gpu_memory), " a rank");
  if (plan.overhead >= options.gpu_memory) {
    plan.faults.push_back(join(memory, ", and overhead is ", size_text(plan.overhead),
                               ": raise gpu_memory or lower overhead"));
    return;
  }
  const int64_t free = options.gpu_memory - plan.weights - plan.workspace - plan.overhead;
  if (free <= 0) {
    const bool is_workspace = plan.workspace + plan.overhead >= options.gpu_memory;
    plan.faults.push_back(
        join(memory, ": the weights, ", size_text(plan.weights), ", the workspace, ",
             size_text(plan.workspace), ", and what is set aside as overhead, ",
             size_text(plan.overhead),
             ", do not fit: ", is_workspace ? "lower max_model_len or max_num_seqs" : kMoreMemory));
    return;
  }
  plan.kv_tokens_fit = free / (plan.kv_bytes_per_token + plan.draft_kv_bytes_per_token);
  plan.sequences_fit = std::max<int64_t>(0, plan.kv_tokens_fit / plan.slot_tokens - 1);
  if (plan.cache_tokens <= plan.kv_tokens_fit) return;
  std::vector<std::string> ways;
  if (plan.sequences_fit > 0) ways.push_back(join("set max_num_seqs ", plan.sequences_fit));
  if (const int64_t length = longest_of(plan, options.max_num_seqs); length > 0) {
    ways.push_back(join("set max_model_len ", length));
  } else if (const int64_t of_one = longest_of(plan, 1); ways.empty() && of_one > 0) {
    ways.push_back(join("set max_num_seqs 1 and max_model_len ", of_one));
  }
  if (ways.empty()) ways.push_back(kMoreMemory);
  plan.faults.push_back(join("the cache of max_num_seqs ", options.max_num_seqs,
                             " and a spare sequence, each of max_model_len ", plan.max_model_len,
                             ", takes ", plan.cache_tokens, " tokens, ", plan.kv_tokens_fit,
                             " fit: ", ways[0], ways.size() > 1 ? " or " + ways[1] : ""));
}

}  // namespace

MemoryPlan plan_memory(const ModelConfig& config, const TensorSource& tensors,
                       const DraftConfig* drafter, const TensorSource* draft_tensors,
                       const MemoryOptions& options) {
  check_ranks(options.tensor_parallel_size, options.expert_parallel);
  check_range("gpu_memory", options.gpu_memory, 0, int64_t{1} << 50);
  check_range("overhead", options.overhead, 0, int64_t{1} << 50);
  KDT_CHECK_ARGUMENT(
      options.max_model_len >= 0 && options.max_model_len <= config.max_position_embeddings,
      "max_model_len is ", options.max_model_len, "; want 0 (the checkpoint's) to ",
      config.max_position_embeddings);
  check_range("max_num_seqs", options.max_num_seqs, 1, kMaxSequences);
  check_range("prefill_chunk_size", options.prefill_chunk_size, 1, kMaxChunk);
  const Shard shard{0, options.tensor_parallel_size, options.expert_parallel};
  MemoryPlan plan;
  plan.max_model_len = options.max_model_len > 0
                           ? options.max_model_len
                           : std::min(config.max_position_embeddings, kMaxContext);
  try {
    check_shard(config, shard);
    if (drafter != nullptr) check_shard(*drafter, shard);
    add_weights(target_weight_specs(config, tensors), tensors, shard, nullptr,
                plan.weights_by_part);
  } catch (const std::invalid_argument& error) {
    plan.weights_by_part.clear();
    plan.faults.push_back(error.what());
    return plan;
  }
  // A tied head is the embedding once more, in the layout of a product.
  if (config.tie_word_embeddings) plan.weights_by_part["head"] = plan.weights_by_part["embedding"];
  int64_t kv_heads = 0;
  if (drafter != nullptr) {
    const WeightSpecs specs = draft_weight_specs(*drafter);
    add_weights(specs, *draft_tensors, {0, shard.size}, "drafter", plan.weights_by_part);
    kv_heads = specs.at(drafter->tensor_prefix + "layers.0.self_attn.k_proj").slice_count(shard) /
               drafter->head_dim;
  }
  for (const auto& [part, bytes] : plan.weights_by_part) plan.weights += bytes;

  const int64_t rows = std::max(options.prefill_chunk_size, kMaxTreeBudget + 1);
  const auto taps = drafter != nullptr ? static_cast<int64_t>(drafter->target_layer_ids.size()) : 0;
  plan.workspace = target_workspace(config, shard, rows, plan.max_model_len, taps) +
                   engine_workspace(config, drafter, shard, options, rows, plan.max_model_len);
  plan.kv_bytes_per_token =
      (config.kv_lora_rank + config.qk_rope_head_dim) * kBFloat16 * config.num_hidden_layers;
  if (drafter != nullptr) {
    plan.workspace += draft_workspace(*drafter, shard, kv_heads, rows, options.max_num_seqs,
                                      plan.max_model_len + drafter->block_size);
    plan.draft_kv_bytes_per_token =
        2 * kv_heads * drafter->head_dim * kBFloat16 * drafter->num_hidden_layers;
  }
  plan.overhead = options.overhead;
  plan.slot_tokens = (plan.max_model_len + kMaxTreeBudget + kBlockSize) / kBlockSize * kBlockSize;
  plan.cache_tokens = (options.max_num_seqs + 1) * plan.slot_tokens;
  if (options.gpu_memory > 0) fit(options, plan);
  return plan;
}

MemoryPlan plan_memory(const std::string& model, const std::string& drafter,
                       const MemoryOptions& options) {
  std::vector<std::string> faults;
  const auto open = [&](const std::string& folder) -> std::unique_ptr<TensorSource> {
    if (!is_shard_cache(folder)) return std::make_unique<SafetensorsFolder>(folder);
    auto cache = std::make_unique<ShardCache>(folder);
    try {
      cache->check(options.tensor_parallel_size, options.expert_parallel);
    } catch (const std::exception& error) {
      faults.push_back(error.what());
    }
    return cache;
  };
  const ModelConfig config = load_model_config(model);
  const std::unique_ptr<TensorSource> tensors = open(model);
  DraftConfig draft_config;
  std::unique_ptr<TensorSource> draft_tensors;
  if (!drafter.empty()) {
    draft_config = load_draft_config(drafter);
    check_draft_config(draft_config, config, drafter + "/config.json");
    draft_tensors = open(drafter);
    draft_config.tensor_prefix = find_draft_prefix(*draft_tensors);
  }
  MemoryPlan plan = plan_memory(config, *tensors, draft_tensors ? &draft_config : nullptr,
                                draft_tensors.get(), options);
  plan.faults.insert(plan.faults.begin(), faults.begin(), faults.end());
  return plan;
}

}  // namespace kdt
