// The seam between the models and a device: every computation the engine asks for, one method an
// op.
//
// An op takes contiguous, row-major tensors in the device's memory, checks their shapes
// (backend/checks.h), writes only its outputs and allocates nothing. Ops run in order on the back
// end's one stream. Row independence: the bits of an output row depend on that row's inputs and the
// weights alone, never on how many rows the call holds. Names of sizes: T rows (tokens) of a call,
// S sequences, V vocab_size.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/tensor.h"

namespace kdt {

class Communicator;
class RankGroup;

// Memory of a device, released with the object.
struct Buffer {
  std::shared_ptr<void> memory;
  Tensor tensor;
};

// A matrix [out_features, in_features] in the host's memory, or a slice of one, as the checkpoint
// stores it; any alignment.
struct HostMatrix {
  const uint8_t* data =
      nullptr;  // kFloat32, kBFloat16: [out, in]; kInt32: int4 nibbles, [out, in / 8]
  const uint8_t* scale = nullptr;  // int4 only: bf16 [out, in / 32]
  DType dtype = DType::kBFloat16;
  int64_t out_features = 0;
  int64_t in_features = 0;
  // From one row to the next, in bytes; 0: the rows lie one behind another.
  int64_t row_stride = 0;
  int64_t scale_row_stride = 0;

  int64_t row_bytes() const {
    return dtype == DType::kInt32 ? in_features / 2
                                  : in_features * static_cast<int64_t>(dtype_bytes(dtype));
  }
  const uint8_t* row(int64_t i) const {
    return data + i * (row_stride == 0 ? row_bytes() : row_stride);
  }
  const uint8_t* scale_row(int64_t i) const {
    return scale + i * (scale_row_stride == 0 ? in_features / 32 * 2 : scale_row_stride);
  }
};

// kFloat32, kBFloat16 or kInt32 (int4).
struct MatrixShape {
  int64_t out_features = 0;
  int64_t in_features = 0;
  DType dtype = DType::kBFloat16;
};

// Weights in the back end's own layout; only the back end that made one can use it.
class LinearWeight {
 public:
  virtual ~LinearWeight() = default;
  // All memory that fill_linear writes, as bytes in the device's memory, in an order that the
  // shapes decide.
  virtual std::vector<Tensor> memory() const = 0;
  int64_t out_features = 0;
  int64_t in_features = 0;
};

// One expert's three matrices.
struct HostExpert {
  HostMatrix gate, up, down;
};

struct ExpertsShape {
  int64_t num_experts = 0;
  int64_t hidden_size = 0;
  int64_t intermediate_size = 0;
  DType gate_up_dtype = DType::kInt32;
  DType down_dtype = DType::kInt32;
};

class ExpertsWeight {
 public:
  virtual ~ExpertsWeight() = default;
  virtual std::vector<Tensor> memory() const = 0;  // as LinearWeight's
  int64_t num_experts = 0;
  int64_t hidden_size = 0;
  int64_t intermediate_size = 0;
};

// Cached rows of all layers of one model in the back end's own layout, in blocks of `block_size`
// positions.
class KvCache {
 public:
  virtual ~KvCache() = default;
  int64_t num_layers = 0;
  int64_t num_blocks = 0;
  int64_t block_size = 0;
};

// Which rows of a call belong to which sequence, and where their keys are. A row of a sequence is a
// slot of its tree: slot s sits in the cache at row prefix_len + s, its ancestors are found through
// `parents`. Plain decoding is a tree of one slot, a prefill chunk a tree that is a chain. A tree
// deeper than kMaxTreeDepth (backend/checks.h) must be a chain; the engine sees to it. All kInt32.
struct SequenceRows {
  Tensor row_begin;    // [S + 1] first row of each sequence; the last entry is T
  Tensor prefix_len;   // [S] cached rows before slot 0, visible to every slot
  Tensor block_table;  // [S, blocks] block of each run of block_size positions
  Tensor parents;  // [T] parent's slot within the sequence, smaller than the slot; -1 for slot 0
};

struct RmsNormArgs {
  Tensor x;       // [T, columns]; normalised are the weight's numel() columns from `column` on
  Tensor weight;  // [n] f32, as uploaded: no op writes it
  Tensor out;     // [T, n]
  float eps = 0;
  int64_t column = 0;
};

struct RopeTable {
  Tensor cos_sin;  // [positions, rotary_dim] f32: rotary_dim / 2 cosines, then as many sines
  bool interleaved = false;  // pairs (2i, 2i + 1), or (i, i + rotary_dim / 2)
};

// q[:, :, nope:] is rotated, q[:, :, :nope] goes through each head's W_UK; both are scaled by
// `scale`.
struct MlaQueryArgs {
  Tensor q;                  // [T, heads, nope + rope]
  const LinearWeight* w_uk;  // heads matrices [kv_lora_rank, nope], stacked
  RopeTable rope;
  Tensor positions;  // [T] i32
  float scale = 1;   // the softmax's
  Tensor out;        // [T, heads, kv_lora_rank + rope]
};

// Latent row of a position: RMSNorm(kv[:, :kv_lora_rank]) and the rotated key kv[:, kv_lora_rank:].
struct MlaStoreArgs {
  Tensor kv;  // [T, columns]; the row's kv_lora_rank + rope values start at `column`
  int64_t column = 0;
  Tensor norm_weight;  // [kv_lora_rank] f32
  float eps = 0;
  RopeTable rope;
  Tensor positions;  // [T] i32
  KvCache* cache = nullptr;
  int64_t layer = 0;
  SequenceRows rows;
};

// out[t, h] = sum over visible j of softmax_j(query[t, h] . latent[j]) * latent[j, :kv_lora_rank];
// visible are the prefix, the slot's ancestors and the slot itself, added up in position order.
struct MlaAttentionArgs {
  Tensor query;  // [T, heads, kv_lora_rank + rope], scaled
  const KvCache* cache = nullptr;
  int64_t layer = 0;
  SequenceRows rows;
  Tensor positions;  // [T] i32, each prefix_len plus the number of the slot's ancestors
  Tensor out;        // [T, heads, kv_lora_rank]
};

// Per-head RMSNorm, rotation, and storing of keys; values are stored as they are.
struct GqaStoreArgs {
  Tensor kv;  // [T, columns]; kv_heads * head_dim keys from `column` on, then as many values
  int64_t column = 0;
  Tensor k_norm;  // [head_dim] f32
  float eps = 0;
  RopeTable rope;
  Tensor positions;  // [T] i32
  KvCache* cache = nullptr;
  int64_t layer = 0;
  SequenceRows rows;
};

// Attention of a drafter's block over its cached context and the block itself.
struct GqaAttentionArgs {
  Tensor q;       // [T, heads, head_dim], before norm and rotation
  Tensor q_norm;  // [head_dim] f32
  float eps = 0;
  RopeTable rope;
  Tensor positions;  // [T] i32
  float scale = 1;
  bool causal = false;  // inside the block
  int64_t window = 0;   // keys further back than window - 1 positions are not seen; 0: all are
  const KvCache* cache = nullptr;
  int64_t layer = 0;
  SequenceRows rows;  // `parents` is not used: a block is no tree
  Tensor out;         // [T, heads, head_dim]
};

struct MoeRouteArgs {
  Tensor logits;  // [T, experts] f32
  Tensor bias;    // [experts] f32, for the selection only
  int64_t n_group = 1;
  int64_t topk_group = 1;
  bool norm_topk_prob = true;
  float routed_scaling_factor = 1;
  Tensor ids;      // [T, top_k] i32, greatest biased score first, equals by lower id
  Tensor weights;  // [T, top_k] f32
};

struct MoeExpertsArgs {
  Tensor x;        // [T, hidden_size]
  Tensor ids;      // [T, top_k] i32; `experts` are first_expert and those that follow it, and an id
                   // outside of them adds nothing
  Tensor weights;  // [T, top_k] f32
  const ExpertsWeight* experts = nullptr;
  Tensor out;  // [T, hidden_size]; the weighted sum is added in the order of ids
  int64_t first_expert = 0;
};

// out[t] = row token_ids[t] - first_id of the table; zeros when that is in another rank's part of
// the vocabulary.
struct EmbedArgs {
  Tensor table;      // [rows, H] bf16 or f32
  Tensor token_ids;  // [T] i32 in [0, vocab_size)
  Tensor out;        // [T, H] f32
  int64_t first_id = 0;
  int64_t vocab_size = 0;  // 0: the table has all rows
};

// ids[r] = first_id + the first greatest of logits[r]; -1 when the row holds no number.
struct ArgmaxArgs {
  Tensor logits;       // [R, V] f32
  Tensor ids;          // [R] i32
  Tensor values = {};  // [R] f32, the greatest, -inf where ids is -1; may be undefined
  int64_t first_id = 0;
};

struct TopkLogprobsArgs {
  Tensor logits;  // [R, V] f32
  float temperature = 1;
  // [R, k] f32, descending, over the full vocabulary; NaN counts as -inf. A row whose greatest
  // logit is not finite has no distribution: all -inf. With log_sums, that is for a part of a
  // vocabulary, logit / temperature instead: equals of two parts would not stay equals when each is
  // rounded with its own sum. merge_topk makes log-probabilities of them.
  Tensor logprobs;
  Tensor ids;  // [R, k] i32, equals by lower id
  // [R] f32, the logarithm of the sum of exp(logit / temperature): -inf for a row without a number
  // above -inf, inf where the greatest logit is inf. May be undefined.
  Tensor log_sums = {};
  int64_t first_id = 0;  // added to the ids
};

// The top k over the whole vocabulary from what topk_logprobs with log_sums gave for its N parts,
// in the order of their ids; k' is k, or less where a part has no more. The ids are those of
// topk_logprobs over the whole vocabulary, also of equals and of what is -inf (but that of two
// logits which differ and are the same when divided by the temperature, the lower id comes first),
// and for N = 1 the log-probabilities have the same bits. Back ends agree: the sum of the parts'
// exponentials is one of float64, in order, and is rounded once, with its logarithm.
struct MergeTopkArgs {
  // [N, R * (2 k' + 1)] i32, so that one gather brings them: of each part its logprobs [R, k'] as
  // the bits of f32, each row descending, then its ids [R, k'] of the whole vocabulary, then its
  // log_sums [R] as the bits of f32.
  Tensor parts;
  Tensor logprobs;  // [R, k] f32, descending; k <= N * k'
  Tensor ids;       // [R, k] i32, equals by lower id

  // k', after the shape check.
  int64_t part_k() const {
    const int64_t rows = logprobs.dim(0);
    return rows == 0 ? 0 : (parts.dim(1) / rows - 1) / 2;
  }
};

// A tree per request: slot 0 is the root, slot i the i-th candidate in best-first order (ddtree
// paper, algorithm 1; ties: docs/adr/0004). Slots past num_nodes are not written. All i32 but logw.
struct TreeBuildArgs {
  Tensor logprobs;      // [L, K] f32, each row descending
  Tensor ids;           // [L, K]
  int64_t budget = 0;   // most slots below the root
  Tensor tokens;        // [>= budget + 1]; the root's is -1
  Tensor parents;       // [>= budget + 1]; the root's is -1
  Tensor depths;        // [>= budget + 1]
  Tensor first_child;   // [>= budget + 1] -1: none
  Tensor next_sibling;  // [>= budget + 1] -1: none
  Tensor logw;          // [>= budget + 1] f64
  Tensor num_nodes;     // [1] slots, root included
};

// Walks the tree from its root along the target's tokens as far as a child matches.
struct TreeAcceptArgs {
  Tensor tokens, first_child, next_sibling;  // [n] i32
  Tensor target;                             // [n] i32, the target model's token after each slot
  Tensor accepted;                           // [n] i32, accepted slots, root first
  Tensor accept_length;                      // [1] i32, how many, root included
  Tensor bonus_token;                        // [1] i32, the target's token after the last of them
};

// Ops to run again (Backend::record). It must end before what its ops work with, and while no rank
// can be waiting for this one: that may take until the device is idle.
class Recording {
 public:
  virtual ~Recording() = default;
  // In order with the back end's other ops, on what is in the arguments' memory then.
  virtual void run() = 0;
};

// What a back end runs on.
struct BackendInfo {
  std::string device;  // as asked for, such as "cpu"
  std::string isa;     // instruction set or chip
  int num_threads = 0;
};

class Backend {
 public:
  virtual ~Backend() = default;
  virtual BackendInfo info() const = 0;

  // Memory and weights.
  virtual Buffer allocate(DType dtype, std::initializer_list<int64_t> shape) = 0;
  virtual void upload(const Tensor& to, const void* from) = 0;
  virtual void download(void* to, const Tensor& from) = 0;
  virtual void synchronize() = 0;
  // Whether record() is worth its while here.
  virtual bool records() const { return false; }
  // The ops, also the communicator's, that `body` calls, to run later and as often as wanted for
  // less than their calls cost; nothing runs now. They have run with these arguments before. Throws
  // Error when `body` moves values between host and device or waits for them. All ranks of a
  // communicator call it; they go on when all have recorded.
  virtual std::unique_ptr<Recording> record(const std::function<void()>& body);
  // A weight without values. The matrices lie one under another in the result; all of one dtype
  // and in_features.
  virtual std::unique_ptr<LinearWeight> make_linear(const std::vector<MatrixShape>& stacked) = 0;
  // Gives it its values, in the shapes it was made for.
  virtual void fill_linear(LinearWeight& weight, const std::vector<HostMatrix>& stacked) = 0;
  virtual std::unique_ptr<ExpertsWeight> make_experts(const ExpertsShape& shape) = 0;
  virtual void fill_expert(ExpertsWeight& weight, int64_t index, const HostExpert& expert) = 0;
  // Names the layout of memory(): what one back end wrote, another of the same name can read.
  virtual std::string weight_layout() const = 0;
  // Both steps at once.
  std::unique_ptr<LinearWeight> prepare_linear(const std::vector<HostMatrix>& stacked);
  std::unique_ptr<ExpertsWeight> prepare_experts(const std::vector<HostExpert>& experts);
  // For this rank of a group. All ranks call it.
  virtual std::unique_ptr<Communicator> make_communicator(RankGroup& group) = 0;
  virtual std::unique_ptr<KvCache> make_mla_cache(int64_t num_layers, int64_t num_blocks,
                                                  int64_t block_size, int64_t kv_lora_rank,
                                                  int64_t rope_dim) = 0;
  virtual std::unique_ptr<KvCache> make_gqa_cache(int64_t num_layers, int64_t num_blocks,
                                                  int64_t block_size, int64_t kv_heads,
                                                  int64_t head_dim) = 0;

  // Rows.
  virtual void embed(const EmbedArgs& args) = 0;
  virtual void rms_norm(const RmsNormArgs& args) = 0;
  // residual += delta, then out = RMSNorm(residual) * weight. All [T, H]; no op writes the weight.
  virtual void add_rms_norm(const Tensor& residual, const Tensor& delta, const Tensor& weight,
                            float eps, const Tensor& out) = 0;
  // gate_up [T, 2 I] -> out [T, I] = silu(gate) * up
  virtual void silu_mul(const Tensor& gate_up, const Tensor& out) = 0;
  virtual void fill_zero(const Tensor& x) = 0;
  // to[i] = from[rows[i]]; rows [n] i32, from [T, C], to [n, C].
  virtual void gather_rows(const Tensor& from, const Tensor& rows, const Tensor& to) = 0;
  // to[:, to_column : to_column + width] = from[:, from_column : from_column + width]; both [T,
  // ...].
  virtual void copy_columns(const Tensor& from, int64_t from_column, const Tensor& to,
                            int64_t to_column, int64_t width) = 0;

  // Products: x [T, in], out [T, out]. head_linear: `heads` stacked matrices, x [T, heads, in], out
  // [T, heads, out / heads].
  virtual void linear(const Tensor& x, const LinearWeight& weight, const Tensor& out) = 0;
  virtual void head_linear(const Tensor& x, const LinearWeight& weight, const Tensor& out) = 0;

  // Attention and its cache.
  virtual void mla_query(const MlaQueryArgs& args) = 0;
  virtual void mla_store(const MlaStoreArgs& args) = 0;
  virtual void mla_attention(const MlaAttentionArgs& args) = 0;
  virtual void gqa_store(const GqaStoreArgs& args) = 0;
  virtual void gqa_attention(const GqaAttentionArgs& args) = 0;
  // Moves rows of every layer of one sequence: position to[i] gets what from[i] held. from, to [n]
  // i32, ascending, to[i] <= from[i]; block_table [blocks] i32.
  virtual void kv_compact(KvCache& cache, const Tensor& block_table, const Tensor& from,
                          const Tensor& to) = 0;

  // Experts.
  virtual void moe_route(const MoeRouteArgs& args) = 0;
  virtual void moe_experts(const MoeExpertsArgs& args) = 0;

  // Choice and tree.
  virtual void topk_logprobs(const TopkLogprobsArgs& args) = 0;
  virtual void merge_topk(const MergeTopkArgs& args) = 0;
  virtual void argmax(const ArgmaxArgs& args) = 0;
  virtual void tree_build(const TreeBuildArgs& args) = 0;
  virtual void tree_accept(const TreeAcceptArgs& args) = 0;
};

// "cpu", a GPU as factory.cpp names it, "auto" (a GPU if there is one that this build has code for,
// else "cpu") or "check:A,B" (both, compared op by op). `num_threads` 0: one a core. Throws
// std::invalid_argument for any other word and Error where the device, its driver or its back end
// is missing.
std::unique_ptr<Backend> make_backend(const std::string& device, int num_threads);

// Where the ranks of a process run, ranks [first, first + num_ranks) of the node's `node_ranks`. A
// kind of GPU without a number, and "auto", give rank R the GPU R; GPUs with numbers and commas
// between name one for each rank of the node, the same one for several if wanted; "cpu" shares
// `num_threads` (0: one a core) between them. Throws std::invalid_argument for anything else.
struct RankDevice {
  std::string device;
  int num_threads = 0;
};
std::vector<RankDevice> rank_devices(const std::string& device, int num_threads, int num_ranks,
                                     int first, int node_ranks);

// Where NCCL's library is; "": wherever the system finds it. For groups that are made afterwards.
void set_nccl_library(const std::string& path);

}  // namespace kdt
