// The shape check of each op, called by every back end before it starts.
#pragma once

#include <limits>

#include "backend/backend.h"

namespace kdt {

namespace detail {

inline void check_shape(const char* op, const char* name, const Tensor& tensor, DType dtype,
                        std::initializer_list<int64_t> shape) {
  bool same = tensor.dtype() == dtype && tensor.ndim() == static_cast<int>(shape.size());
  int i = 0;
  for (int64_t size : shape) same = same && tensor.dim(i++) == size;
  KDT_CHECK(same && (tensor.defined() || tensor.numel() == 0), op, ": ", name, " is ",
            tensor.to_string(), ", want ", Tensor(nullptr, dtype, shape).to_string());
}

inline void check_f32(const char* op, const char* name, const Tensor& t,
                      std::initializer_list<int64_t> shape) {
  check_shape(op, name, t, DType::kFloat32, shape);
}

inline void check_i32(const char* op, const char* name, const Tensor& t,
                      std::initializer_list<int64_t> shape) {
  check_shape(op, name, t, DType::kInt32, shape);
}

// Ids of tokens and experts are int32.
inline constexpr int64_t kMostIds = std::numeric_limits<int32_t>::max();

// The last id of `vocab` from first_id on is one.
inline void check_first_id(const char* op, int64_t first_id, int64_t vocab) {
  KDT_CHECK(first_id >= 0 && first_id <= kMostIds - vocab, op, ": first_id ", first_id, " for ",
            vocab, " logits");
}

// `width` >= 0 columns from `column` on, compared so that no sum of them can overflow.
inline bool holds_columns(const Tensor& tensor, int64_t column, int64_t width) {
  return column >= 0 && width <= tensor.dim(1) && column <= tensor.dim(1) - width;
}

inline void check_rope(const char* op, const RopeTable& rope, int64_t rotary_dim) {
  KDT_CHECK(rope.cos_sin.dtype() == DType::kFloat32 && rope.cos_sin.ndim() == 2 &&
                rope.cos_sin.dim(1) == rotary_dim && rotary_dim % 2 == 0,
            op, ": rope table is ", rope.cos_sin.to_string(), " for a rotary dimension of ",
            rotary_dim);
}

inline void check_rows(const char* op, const SequenceRows& rows, int64_t num_rows,
                       bool need_parents) {
  const int64_t sequences = rows.prefix_len.numel();
  KDT_CHECK(sequences > 0, op, ": no sequence");
  check_i32(op, "row_begin", rows.row_begin, {sequences + 1});
  check_i32(op, "prefix_len", rows.prefix_len, {sequences});
  KDT_CHECK(rows.block_table.ndim() == 2 && rows.block_table.dim(0) == sequences &&
                rows.block_table.dtype() == DType::kInt32,
            op, ": block_table is ", rows.block_table.to_string(), " for ", sequences,
            " sequences");
  if (need_parents) check_i32(op, "parents", rows.parents, {num_rows});
}

}  // namespace detail

inline void check_embed(const EmbedArgs& a) {
  const DType dtype = a.table.dtype();
  KDT_CHECK(a.table.ndim() == 2 && (dtype == DType::kFloat32 || dtype == DType::kBFloat16),
            "embed: table is ", a.table.to_string());
  KDT_CHECK(a.vocab_size >= 0 && a.first_id >= 0 && (a.vocab_size > 0 || a.first_id == 0),
            "embed: first_id ", a.first_id, " of a vocabulary of ", a.vocab_size);
  detail::check_i32("embed", "token_ids", a.token_ids, {a.token_ids.numel()});
  detail::check_f32("embed", "out", a.out, {a.token_ids.numel(), a.table.dim(1)});
}

inline void check_rms_norm(const RmsNormArgs& a) {
  const int64_t n = a.weight.numel();
  KDT_CHECK(a.x.dtype() == DType::kFloat32 && a.x.ndim() == 2 && n > 0 &&
                detail::holds_columns(a.x, a.column, n),
            "rms_norm: weight has ", n, " values for columns from ", a.column, " of ",
            a.x.to_string());
  detail::check_f32("rms_norm", "weight", a.weight, {n});
  detail::check_f32("rms_norm", "out", a.out, {a.x.dim(0), n});
}

inline void check_add_rms_norm(const Tensor& residual, const Tensor& delta, const Tensor& weight,
                               const Tensor& out) {
  const int64_t n = weight.numel();
  const int64_t rows = out.dim(0);
  KDT_CHECK(n > 0, "add_rms_norm: weight is ", weight.to_string());
  detail::check_f32("add_rms_norm", "weight", weight, {n});
  detail::check_f32("add_rms_norm", "out", out, {rows, n});
  detail::check_f32("add_rms_norm", "residual", residual, {rows, n});
  detail::check_f32("add_rms_norm", "delta", delta, {rows, n});
}

inline void check_silu_mul(const Tensor& gate_up, const Tensor& out) {
  KDT_CHECK(out.ndim() == 2, "silu_mul: out is ", out.to_string());
  detail::check_f32("silu_mul", "out", out, {out.dim(0), out.dim(1)});
  detail::check_f32("silu_mul", "gate_up", gate_up, {out.dim(0), 2 * out.dim(1)});
}

inline void check_gather_rows(const Tensor& from, const Tensor& rows, const Tensor& to) {
  KDT_CHECK(from.ndim() == 2 && rows.dtype() == DType::kInt32, "gather_rows: ", rows.to_string(),
            " rows of ", from.to_string());
  detail::check_f32("gather_rows", "from", from, {from.dim(0), from.dim(1)});
  detail::check_f32("gather_rows", "to", to, {rows.numel(), from.dim(1)});
}

inline void check_copy_columns(const Tensor& from, int64_t from_column, const Tensor& to,
                               int64_t to_column, int64_t width) {
  const auto holds = [&](const Tensor& t, int64_t column) {
    return t.ndim() == 2 && t.dtype() == DType::kFloat32 && width >= 0 &&
           detail::holds_columns(t, column, width);
  };
  KDT_CHECK(holds(from, from_column) && holds(to, to_column) && from.dim(0) == to.dim(0),
            "copy_columns: ", width, " columns from ", from_column, " of ", from.to_string(),
            " to ", to_column, " of ", to.to_string());
}

inline void check_linear(const Tensor& x, const LinearWeight& w, const Tensor& out) {
  const int64_t rows = out.ndim() > 0 ? out.dim(0) : 0;
  KDT_CHECK(x.dtype() == DType::kFloat32 && out.dtype() == DType::kFloat32 &&
                x.numel() == rows * w.in_features && out.numel() == rows * w.out_features,
            "linear: x ", x.to_string(), ", weight [", w.out_features, ", ", w.in_features,
            "], out ", out.to_string());
}

inline void check_head_linear(const Tensor& x, const LinearWeight& w, const Tensor& out) {
  KDT_CHECK(x.ndim() == 3 && x.dim(1) > 0 && w.out_features % x.dim(1) == 0, "head_linear: x ",
            x.to_string(), ", weight with ", w.out_features, " outputs");
  detail::check_f32("head_linear", "x", x, {x.dim(0), x.dim(1), w.in_features});
  detail::check_f32("head_linear", "out", out, {x.dim(0), x.dim(1), w.out_features / x.dim(1)});
}

inline void check_mla_query(const MlaQueryArgs& a) {
  KDT_CHECK(a.w_uk != nullptr && a.q.ndim() == 3 && a.out.ndim() == 3 && a.q.dim(1) > 0,
            "mla_query: q ", a.q.to_string(), ", out ", a.out.to_string());
  const int64_t heads = a.q.dim(1);
  const int64_t rope_dim = a.q.dim(2) - a.w_uk->in_features;
  KDT_CHECK(rope_dim >= 0 && a.w_uk->out_features % heads == 0, "mla_query: W_UK [",
            a.w_uk->out_features, ", ", a.w_uk->in_features, "] for q ", a.q.to_string());
  detail::check_rope("mla_query", a.rope, rope_dim);
  detail::check_i32("mla_query", "positions", a.positions, {a.q.dim(0)});
  detail::check_f32("mla_query", "q", a.q, {a.q.dim(0), heads, a.q.dim(2)});
  detail::check_f32("mla_query", "out", a.out,
                    {a.q.dim(0), heads, a.w_uk->out_features / heads + rope_dim});
}

inline void check_mla_store(const MlaStoreArgs& a) {
  KDT_CHECK(a.cache != nullptr && a.kv.ndim() == 2 && a.rope.cos_sin.ndim() == 2 && a.layer >= 0 &&
                a.layer < a.cache->num_layers,
            "mla_store: kv ", a.kv.to_string(), ", layer ", a.layer);
  const int64_t rank = a.norm_weight.numel();
  const int64_t rope_dim = a.rope.cos_sin.dim(1);
  detail::check_f32("mla_store", "norm_weight", a.norm_weight, {rank});
  detail::check_rope("mla_store", a.rope, rope_dim);
  KDT_CHECK(
      detail::holds_columns(a.kv, a.column, rank + rope_dim) && a.kv.dtype() == DType::kFloat32,
      "mla_store: columns from ", a.column, " of ", a.kv.to_string(), " do not hold ", rank, " + ",
      rope_dim);
  detail::check_i32("mla_store", "positions", a.positions, {a.kv.dim(0)});
  detail::check_rows("mla_store", a.rows, a.kv.dim(0), false);
}

inline void check_mla_attention(const MlaAttentionArgs& a) {
  KDT_CHECK(a.cache != nullptr && a.query.ndim() == 3 && a.query.dim(1) > 0 && a.out.ndim() == 3 &&
                a.layer >= 0 && a.layer < a.cache->num_layers,
            "mla_attention: query ", a.query.to_string(), ", out ", a.out.to_string(), ", layer ",
            a.layer);
  detail::check_f32("mla_attention", "query", a.query,
                    {a.query.dim(0), a.query.dim(1), a.query.dim(2)});
  detail::check_f32("mla_attention", "out", a.out, {a.query.dim(0), a.query.dim(1), a.out.dim(2)});
  detail::check_rows("mla_attention", a.rows, a.query.dim(0), true);
  detail::check_i32("mla_attention", "positions", a.positions, {a.query.dim(0)});
}

inline void check_gqa_store(const GqaStoreArgs& a) {
  KDT_CHECK(a.cache != nullptr && a.kv.ndim() == 2 && a.kv.dtype() == DType::kFloat32 &&
                a.column >= 0 && a.layer >= 0 && a.layer < a.cache->num_layers,
            "gqa_store: kv ", a.kv.to_string(), ", column ", a.column, ", layer ", a.layer);
  detail::check_f32("gqa_store", "k_norm", a.k_norm, {a.k_norm.numel()});
  detail::check_rope("gqa_store", a.rope, a.k_norm.numel());
  detail::check_i32("gqa_store", "positions", a.positions, {a.kv.dim(0)});
  detail::check_rows("gqa_store", a.rows, a.kv.dim(0), false);
}

inline void check_gqa_attention(const GqaAttentionArgs& a) {
  KDT_CHECK(a.cache != nullptr && a.q.ndim() == 3 && a.q.dim(1) > 0 && a.layer >= 0 &&
                a.layer < a.cache->num_layers,
            "gqa_attention: q ", a.q.to_string(), ", layer ", a.layer);
  detail::check_f32("gqa_attention", "q_norm", a.q_norm, {a.q.dim(2)});
  detail::check_f32("gqa_attention", "q", a.q, {a.q.dim(0), a.q.dim(1), a.q.dim(2)});
  detail::check_f32("gqa_attention", "out", a.out, {a.q.dim(0), a.q.dim(1), a.q.dim(2)});
  detail::check_rope("gqa_attention", a.rope, a.q.dim(2));
  detail::check_i32("gqa_attention", "positions", a.positions, {a.q.dim(0)});
  detail::check_rows("gqa_attention", a.rows, a.q.dim(0), false);
  KDT_CHECK(a.window >= 0, "gqa_attention: window ", a.window);
}

inline void check_kv_compact(const Tensor& block_table, const Tensor& from, const Tensor& to) {
  KDT_CHECK(from.dtype() == DType::kInt32 && to.dtype() == DType::kInt32 &&
                from.numel() == to.numel() && block_table.dtype() == DType::kInt32,
            "kv_compact: from ", from.to_string(), ", to ", to.to_string());
}

inline void check_moe_route(const MoeRouteArgs& a) {
  KDT_CHECK(a.logits.ndim() == 2 && a.ids.ndim() == 2, "moe_route: logits ", a.logits.to_string(),
            ", ids ", a.ids.to_string());
  const int64_t rows = a.logits.dim(0), experts = a.logits.dim(1), top_k = a.ids.dim(1);
  detail::check_f32("moe_route", "logits", a.logits, {rows, experts});
  detail::check_f32("moe_route", "bias", a.bias, {experts});
  detail::check_i32("moe_route", "ids", a.ids, {rows, top_k});
  detail::check_f32("moe_route", "weights", a.weights, {rows, top_k});
  KDT_CHECK(a.n_group > 0 && experts % a.n_group == 0 && a.topk_group > 0 &&
                a.topk_group <= a.n_group && top_k > 0 &&
                top_k <= experts / a.n_group * a.topk_group,
            "moe_route: top ", top_k, " of ", experts, " experts in ", a.topk_group, " of ",
            a.n_group, " groups");
}

inline void check_moe_experts(const MoeExpertsArgs& a) {
  KDT_CHECK(a.experts != nullptr && a.x.ndim() == 2 && a.ids.ndim() == 2, "moe_experts: x ",
            a.x.to_string(), ", ids ", a.ids.to_string());
  const int64_t rows = a.x.dim(0), hidden_size = a.experts->hidden_size;
  detail::check_f32("moe_experts", "x", a.x, {rows, hidden_size});
  detail::check_f32("moe_experts", "out", a.out, {rows, hidden_size});
  detail::check_i32("moe_experts", "ids", a.ids, {rows, a.ids.dim(1)});
  detail::check_f32("moe_experts", "weights", a.weights, {rows, a.ids.dim(1)});
  KDT_CHECK(a.first_expert >= 0 && a.first_expert <= detail::kMostIds - a.experts->num_experts,
            "moe_experts: first_expert ", a.first_expert);
}

inline void check_topk_logprobs(const TopkLogprobsArgs& a) {
  KDT_CHECK(a.logits.ndim() == 2 && a.logprobs.ndim() == 2, "topk_logprobs: logits ",
            a.logits.to_string());
  const int64_t rows = a.logits.dim(0), k = a.logprobs.dim(1);
  KDT_CHECK(k > 0 && k <= a.logits.dim(1), "topk_logprobs: k ", k, " of ", a.logits.dim(1));
  KDT_CHECK(a.temperature > 0, "topk_logprobs: temperature ", a.temperature);
  detail::check_f32("topk_logprobs", "logits", a.logits, {rows, a.logits.dim(1)});
  detail::check_f32("topk_logprobs", "logprobs", a.logprobs, {rows, k});
  detail::check_i32("topk_logprobs", "ids", a.ids, {rows, k});
  if (a.log_sums.defined()) detail::check_f32("topk_logprobs", "log_sums", a.log_sums, {rows});
  detail::check_first_id("topk_logprobs", a.first_id, a.logits.dim(1));
}

inline void check_merge_topk(const MergeTopkArgs& a) {
  KDT_CHECK(a.parts.ndim() == 2 && a.logprobs.ndim() == 2, "merge_topk: parts ",
            a.parts.to_string(), ", logprobs ", a.logprobs.to_string());
  const int64_t parts = a.parts.dim(0), width = a.parts.dim(1), rows = a.logprobs.dim(0),
                k = a.logprobs.dim(1);
  detail::check_i32("merge_topk", "parts", a.parts, {parts, width});
  KDT_CHECK(width == rows * (2 * a.part_k() + 1), "merge_topk: parts is ", a.parts.to_string(),
            ", want ", rows, " * (2 k' + 1) columns");
  KDT_CHECK(rows == 0 || (k > 0 && k <= parts * a.part_k()), "merge_topk: k ", k, " of ", parts,
            " parts with ", a.part_k(), " each");
  detail::check_f32("merge_topk", "logprobs", a.logprobs, {rows, k});
  detail::check_i32("merge_topk", "ids", a.ids, {rows, k});
}

inline void check_argmax(const ArgmaxArgs& a) {
  KDT_CHECK(a.logits.ndim() == 2 && a.logits.dim(1) > 0, "argmax: logits ", a.logits.to_string());
  detail::check_f32("argmax", "logits", a.logits, {a.logits.dim(0), a.logits.dim(1)});
  detail::check_i32("argmax", "ids", a.ids, {a.logits.dim(0)});
  if (a.values.defined()) detail::check_f32("argmax", "values", a.values, {a.logits.dim(0)});
  detail::check_first_id("argmax", a.first_id, a.logits.dim(1));
}

inline constexpr int64_t kMaxTreeBudget = 256;
inline constexpr int64_t kMaxTreeDepth = 64;

inline void check_tree_build(const TreeBuildArgs& a) {
  KDT_CHECK(a.logprobs.ndim() == 2 && a.ids.ndim() == 2, "tree_build: logprobs ",
            a.logprobs.to_string());
  detail::check_f32("tree_build", "logprobs", a.logprobs, {a.ids.dim(0), a.ids.dim(1)});
  KDT_CHECK(a.ids.dtype() == DType::kInt32, "tree_build: ids ", a.ids.to_string());
  KDT_CHECK(a.budget >= 0 && a.budget <= kMaxTreeBudget, "tree_build: budget ", a.budget,
            ", at most ", kMaxTreeBudget);
  KDT_CHECK(a.ids.dim(0) <= kMaxTreeDepth, "tree_build: depth ", a.ids.dim(0), ", at most ",
            kMaxTreeDepth);
  for (const Tensor& t : {a.tokens, a.parents, a.depths, a.first_child, a.next_sibling}) {
    KDT_CHECK(t.dtype() == DType::kInt32 && t.numel() > a.budget, "tree_build: output ",
              t.to_string(), " for a budget of ", a.budget);
  }
  KDT_CHECK(a.logw.dtype() == DType::kFloat64 && a.logw.numel() > a.budget, "tree_build: logw ",
            a.logw.to_string());
  detail::check_i32("tree_build", "num_nodes", a.num_nodes, {1});
}

inline void check_tree_accept(const TreeAcceptArgs& a) {
  const int64_t slots = a.tokens.numel();
  KDT_CHECK(slots > 0, "tree_accept: a tree has at least its root");
  for (const Tensor& t : {a.tokens, a.first_child, a.next_sibling, a.target, a.accepted}) {
    KDT_CHECK(t.dtype() == DType::kInt32 && t.numel() == slots, "tree_accept: want ", slots,
              " int32 values, got ", t.to_string());
  }
  detail::check_i32("tree_accept", "accept_length", a.accept_length, {1});
  detail::check_i32("tree_accept", "bonus_token", a.bonus_token, {1});
}

}  // namespace kdt
