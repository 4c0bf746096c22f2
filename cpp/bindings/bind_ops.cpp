// Ops of the CPU back end on numpy arrays, for tests and study.
#include <pybind11/stl.h>

#include <cstring>
#include <optional>

#include "backend/checks.h"
#include "bindings/array.h"

namespace py = pybind11;

namespace kdt {
namespace {

Backend& cpu() {
  // One for all calls: its threads sleep between them.
  static const std::unique_ptr<Backend> backend = make_backend("cpu", 0);
  return *backend;
}

using Floats = Array<float>;
using Ints = Array<int32_t>;

Floats empty(std::vector<py::ssize_t> shape) { return Floats(shape); }

py::dict build_tree(const Floats& logprobs, const Ints& ids, int64_t budget) {
  const Tensor lp = as_tensor("logprobs", logprobs, 2), tokens = as_tensor("token_ids", ids, 2);
  KDT_CHECK_ARGUMENT(lp.dim(0) == tokens.dim(0) && lp.dim(1) == tokens.dim(1), "logprobs is [",
                     lp.dim(0), ", ", lp.dim(1), "], token_ids is [", tokens.dim(0), ", ",
                     tokens.dim(1), "]");
  KDT_CHECK_ARGUMENT(budget >= 0 && budget <= kMaxTreeBudget, "budget is ", budget, "; want 0 to ",
                     kMaxTreeBudget);
  KDT_CHECK_ARGUMENT(lp.dim(0) <= kMaxTreeDepth, "logprobs has ", lp.dim(0), " rows; want at most ",
                     kMaxTreeDepth);
  std::vector<std::vector<int32_t>> arrays(5, std::vector<int32_t>(budget + 1));
  std::vector<double> logw(budget + 1);
  int32_t count = 0;
  const auto view = [&](int i) { return Tensor(arrays[i].data(), DType::kInt32, {budget + 1}); };
  cpu().tree_build({.logprobs = lp,
                    .ids = tokens,
                    .budget = budget,
                    .tokens = view(0),
                    .parents = view(1),
                    .depths = view(2),
                    .first_child = view(3),
                    .next_sibling = view(4),
                    .logw = Tensor(logw.data(), DType::kFloat64, {budget + 1}),
                    .num_nodes = Tensor(&count, DType::kInt32, {1})});
  py::dict d;
  const char* names[] = {"tokens", "parents", "depths", "first_child", "next_sibling"};
  for (int i = 0; i < 5; ++i) {
    arrays[i].resize(count);
    d[names[i]] = to_array(arrays[i]);
  }
  logw.resize(count);
  d["logw"] = to_array(logw);
  d["visibility"] = visibility(arrays[1]);
  return d;
}

std::pair<Ints, int> accept_tree(const Ints& tokens, const Ints& first_child,
                                 const Ints& next_sibling, const Ints& target) {
  const int64_t slots = tokens.size();
  KDT_CHECK_ARGUMENT(slots > 0 && first_child.size() == slots && next_sibling.size() == slots &&
                         target.size() == slots,
                     "the arrays have ", slots, ", ", first_child.size(), ", ", next_sibling.size(),
                     " and ", target.size(), " entries; want the same number, at least 1");
  std::vector<int32_t> accepted(slots);
  int32_t length = 0, bonus = 0;
  cpu().tree_accept({.tokens = as_tensor("tokens", tokens, 1),
                     .first_child = as_tensor("first_child", first_child, 1),
                     .next_sibling = as_tensor("next_sibling", next_sibling, 1),
                     .target = as_tensor("target_tokens", target, 1),
                     .accepted = Tensor(accepted.data(), DType::kInt32, {slots}),
                     .accept_length = Tensor(&length, DType::kInt32, {1}),
                     .bonus_token = Tensor(&bonus, DType::kInt32, {1})});
  accepted.resize(length);
  return {to_array(accepted), bonus};
}

Floats rms_norm(const Floats& x, const Floats& weight, float eps) {
  Floats out = empty({x.shape(0), weight.size()});
  cpu().rms_norm({.x = as_tensor("x", x, 2),
                  .weight = as_tensor("weight", weight, 1),
                  .out = as_tensor("out", out, 2),
                  .eps = eps});
  return out;
}

Floats linear(const Floats& x, const py::array& weight,
              const std::optional<Array<uint16_t>>& scale) {
  const auto kind = weight.dtype();
  HostMatrix matrix;
  KDT_CHECK_ARGUMENT(weight.ndim() == 2 && (weight.flags() & py::array::c_style) != 0,
                     "weight has ", weight.ndim(), " dimensions; want a C-contiguous array of 2");
  if (kind.is(py::dtype::of<float>())) {
    matrix.dtype = DType::kFloat32;
  } else if (kind.is(py::dtype::of<uint16_t>())) {
    matrix.dtype = DType::kBFloat16;
  } else {
    KDT_CHECK_ARGUMENT(kind.is(py::dtype::of<int32_t>()), "weight is ", std::string(py::str(kind)),
                       "; want float32, uint16 (bf16 bits) or int32 (int4 nibbles)");
    KDT_CHECK_ARGUMENT(scale.has_value(), "scale is missing for an int4 weight");
    matrix.dtype = DType::kInt32;
  }
  matrix.data = static_cast<const uint8_t*>(weight.data());
  matrix.out_features = weight.shape(0);
  matrix.in_features = weight.shape(1) * (matrix.dtype == DType::kInt32 ? 8 : 1);
  if (scale) {
    KDT_CHECK_ARGUMENT(matrix.dtype == DType::kInt32 && scale->ndim() == 2 &&
                           scale->shape(0) == matrix.out_features &&
                           scale->shape(1) * 32 == matrix.in_features,
                       "scale does not belong to a weight of [", matrix.out_features, ", ",
                       matrix.in_features, "]");
    matrix.scale = reinterpret_cast<const uint8_t*>(scale->data());
  }
  const auto prepared = cpu().prepare_linear({matrix});
  Floats out = empty({x.ndim() > 0 ? x.shape(0) : 0, weight.shape(0)});
  cpu().linear(as_tensor("x", x, 2), *prepared, as_tensor("out", out, 2));
  return out;
}

std::pair<Floats, Ints> topk_logprobs(const Floats& logits, int64_t k, float temperature) {
  const Tensor rows = as_tensor("logits", logits, 2);
  KDT_CHECK_ARGUMENT(k >= 1 && k <= rows.dim(1), "k is ", k, "; want 1 to ", rows.dim(1));
  KDT_CHECK_ARGUMENT(temperature > 0, "temperature is ", temperature, "; want more than 0");
  Floats logprobs = empty({logits.shape(0), k});
  Ints ids(std::vector<py::ssize_t>{logits.shape(0), k});
  cpu().topk_logprobs({.logits = rows,
                       .temperature = temperature,
                       .logprobs = as_tensor("logprobs", logprobs, 2),
                       .ids = as_tensor("ids", ids, 2)});
  return {logprobs, ids};
}

Ints argmax(const Floats& logits) {
  Ints ids(std::vector<py::ssize_t>{logits.ndim() > 0 ? logits.shape(0) : 0});
  cpu().argmax(as_tensor("logits", logits, 2), as_tensor("ids", ids, 1));
  return ids;
}

Floats silu_mul(const Floats& gate_up) {
  const Tensor x = as_tensor("gate_up", gate_up, 2);
  Floats out = empty({gate_up.shape(0), gate_up.shape(1) / 2});
  cpu().silu_mul(x, as_tensor("out", out, 2));
  return out;
}

std::pair<Ints, Floats> moe_route(const Floats& logits, const Floats& bias, int64_t top_k,
                                  int64_t n_group, int64_t topk_group, bool norm_topk_prob,
                                  float scale) {
  const Tensor rows = as_tensor("logits", logits, 2);
  KDT_CHECK_ARGUMENT(top_k >= 1 && top_k <= rows.dim(1), "top_k is ", top_k, "; want 1 to ",
                     rows.dim(1));
  Ints ids(std::vector<py::ssize_t>{logits.shape(0), top_k});
  Floats weights = empty({logits.shape(0), top_k});
  cpu().moe_route({.logits = rows,
                   .bias = as_tensor("bias", bias, 1),
                   .n_group = n_group,
                   .topk_group = topk_group,
                   .norm_topk_prob = norm_topk_prob,
                   .routed_scaling_factor = scale,
                   .ids = as_tensor("ids", ids, 2),
                   .weights = as_tensor("weights", weights, 2)});
  return {ids, weights};
}

// The rows of one sequence: `prefix_len` cached ones, then `count` slots.
struct OneSequence {
  OneSequence(int64_t prefix_len, int64_t count)
      : row_begin{0, static_cast<int32_t>(count)},
        prefix{static_cast<int32_t>(prefix_len)},
        blocks((prefix_len + count + kBlockSize - 1) / kBlockSize) {
    for (size_t i = 0; i < blocks.size(); ++i) blocks[i] = static_cast<int32_t>(i);
  }
  SequenceRows rows(const Tensor& parents) {
    return {.row_begin = Tensor(row_begin.data(), DType::kInt32, {2}),
            .prefix_len = Tensor(prefix.data(), DType::kInt32, {1}),
            .block_table =
                Tensor(blocks.data(), DType::kInt32, {1, static_cast<int64_t>(blocks.size())}),
            .parents = parents};
  }
  static constexpr int64_t kBlockSize = 64;
  std::vector<int32_t> row_begin, prefix, blocks;
};

RopeTable rope_table(const Floats& cos_sin, bool interleaved) {
  return {.cos_sin = as_tensor("cos_sin", cos_sin, 2), .interleaved = interleaved};
}

std::vector<int32_t> count_up(int64_t begin, int64_t count) {
  std::vector<int32_t> values(count);
  for (int64_t i = 0; i < count; ++i) values[i] = static_cast<int32_t>(begin + i);
  return values;
}

Floats mla_attention(const Floats& q, const Floats& kv, const Floats& w_uk,
                     const Floats& norm_weight, float eps, const Floats& cos_sin, bool interleaved,
                     const Ints& parents, int64_t prefix_len, float scale) {
  const Tensor queries = as_tensor("q", q, 3), rows = as_tensor("kv", kv, 2),
               uk = as_tensor("w_uk", w_uk, 3);
  const Tensor links = as_tensor("parents", parents, 1),
               norm = as_tensor("norm_weight", norm_weight, 1);
  const int64_t count = queries.dim(0), heads = queries.dim(1), rank = norm.dim(0),
                width = rows.dim(1);
  KDT_CHECK_ARGUMENT(
      count > 0 && prefix_len >= 0 && rows.dim(0) == prefix_len + count && links.dim(0) == count,
      "q has ", count, " rows, parents ", links.dim(0), ", kv ", rows.dim(0),
      "; want one parent a row, and prefix_len = ", prefix_len, " more rows of kv");
  KDT_CHECK_ARGUMENT(
      uk.dim(0) == heads && uk.dim(1) == rank && uk.dim(2) + width - rank == queries.dim(2),
      "w_uk is ", uk.to_string(), ", q ", queries.to_string(), ", kv ", rows.to_string());
  std::vector<int32_t> positions(count);
  for (int64_t i = 0; i < count; ++i) {
    const int32_t parent = links.data<int32_t>()[i];
    KDT_CHECK_ARGUMENT(i == 0 ? parent == -1 : parent >= 0 && parent < i, "parents[", i, "] is ",
                       parent);
    positions[i] = i == 0 ? static_cast<int32_t>(prefix_len) : positions[parent] + 1;
  }
  std::vector<int32_t> all_positions = count_up(0, prefix_len);
  all_positions.insert(all_positions.end(), positions.begin(), positions.end());
  OneSequence all(0, prefix_len + count), sequence(prefix_len, count);
  const auto cache = cpu().make_mla_cache(1, static_cast<int64_t>(all.blocks.size()),
                                          OneSequence::kBlockSize, rank, width - rank);
  cpu().mla_store({.kv = rows,
                   .norm_weight = norm,
                   .eps = eps,
                   .rope = rope_table(cos_sin, interleaved),
                   .positions = Tensor(all_positions.data(), DType::kInt32, {prefix_len + count}),
                   .cache = cache.get(),
                   .rows = all.rows({})});
  std::vector<HostMatrix> matrices;
  for (int64_t h = 0; h < heads; ++h) {
    matrices.push_back(
        {.data = reinterpret_cast<const uint8_t*>(w_uk.data() + h * rank * uk.dim(2)),
         .dtype = DType::kFloat32,
         .out_features = rank,
         .in_features = uk.dim(2)});
  }
  const auto prepared = cpu().prepare_linear(matrices);
  Floats query = empty({count, heads, width}), out = empty({count, heads, rank});
  cpu().mla_query({.q = queries,
                   .w_uk = prepared.get(),
                   .rope = rope_table(cos_sin, interleaved),
                   .positions = Tensor(positions.data(), DType::kInt32, {count}),
                   .scale = scale,
                   .out = as_tensor("query", query, 3)});
  cpu().mla_attention({.query = as_tensor("query", query, 3),
                       .cache = cache.get(),
                       .rows = sequence.rows(links),
                       .out = as_tensor("out", out, 3)});
  return out;
}

Floats gqa_attention(const Floats& q, const Floats& k, const Floats& v, const Floats& q_norm,
                     const Floats& k_norm, float eps, const Floats& cos_sin, int64_t context_len,
                     bool causal, int64_t window, float scale) {
  const Tensor queries = as_tensor("q", q, 3), keys = as_tensor("k", k, 3),
               values = as_tensor("v", v, 3);
  const int64_t count = queries.dim(0), dim = queries.dim(2), kv_heads = keys.dim(1),
                total = keys.dim(0);
  KDT_CHECK_ARGUMENT(count > 0 && context_len >= 0 && total == context_len + count &&
                         keys.dim(2) == dim && values.dim(0) == total &&
                         values.dim(1) == kv_heads && values.dim(2) == dim,
                     "shapes do not agree: q ", queries.to_string(), ", k ", keys.to_string(),
                     ", v ", values.to_string(), ", context_len ", context_len);
  Floats kv = empty({total, 2 * kv_heads * dim});
  for (int64_t i = 0; i < total; ++i) {
    std::copy_n(k.data() + i * kv_heads * dim, kv_heads * dim,
                kv.mutable_data() + i * 2 * kv_heads * dim);
    std::copy_n(v.data() + i * kv_heads * dim, kv_heads * dim,
                kv.mutable_data() + (2 * i + 1) * kv_heads * dim);
  }
  std::vector<int32_t> positions = count_up(0, total);
  OneSequence all(0, total), sequence(context_len, count);
  const auto cache = cpu().make_gqa_cache(1, static_cast<int64_t>(all.blocks.size()),
                                          OneSequence::kBlockSize, kv_heads, dim);
  cpu().gqa_store({.kv = as_tensor("kv", kv, 2),
                   .k_norm = as_tensor("k_norm", k_norm, 1),
                   .eps = eps,
                   .rope = rope_table(cos_sin, false),
                   .positions = Tensor(positions.data(), DType::kInt32, {total}),
                   .cache = cache.get(),
                   .rows = all.rows({})});
  Floats out = empty({count, queries.dim(1), dim});
  cpu().gqa_attention({.q = queries,
                       .q_norm = as_tensor("q_norm", q_norm, 1),
                       .eps = eps,
                       .rope = rope_table(cos_sin, false),
                       .positions = Tensor(positions.data() + context_len, DType::kInt32, {count}),
                       .scale = scale,
                       .causal = causal,
                       .window = window,
                       .cache = cache.get(),
                       .rows = sequence.rows({}),
                       .out = as_tensor("out", out, 3)});
  return out;
}

Floats moe_experts(const Floats& x, const Ints& ids, const Floats& weights, const Floats& gate,
                   const Floats& up, const Floats& down) {
  const Tensor g = as_tensor("gate", gate, 3), u = as_tensor("up", up, 3),
               d = as_tensor("down", down, 3);
  KDT_CHECK_ARGUMENT(g.dim(0) > 0 && g.dim(0) == u.dim(0) && g.dim(0) == d.dim(0),
                     "gate, up and down hold ", g.dim(0), ", ", u.dim(0), " and ", d.dim(0),
                     " experts");
  std::vector<HostExpert> experts;
  const auto matrix = [](const Tensor& all, int64_t expert) {
    return HostMatrix{.data = reinterpret_cast<const uint8_t*>(all.data<float>() +
                                                               expert * all.dim(1) * all.dim(2)),
                      .dtype = DType::kFloat32,
                      .out_features = all.dim(1),
                      .in_features = all.dim(2)};
  };
  for (int64_t e = 0; e < g.dim(0); ++e)
    experts.push_back({matrix(g, e), matrix(u, e), matrix(d, e)});
  const auto prepared = cpu().prepare_experts(experts);
  const Tensor rows = as_tensor("x", x, 2);
  Floats out = empty({x.shape(0), x.shape(1)});
  const Tensor sum = as_tensor("out", out, 2);
  cpu().fill_zero(sum);
  cpu().moe_experts({.x = rows,
                     .ids = as_tensor("ids", ids, 2),
                     .weights = as_tensor("weights", weights, 2),
                     .experts = prepared.get(),
                     .out = sum});
  return out;
}

}  // namespace

void register_ops(py::module_& m) {
  m.def("build_tree", &build_tree, py::arg("logprobs"), py::arg("token_ids"), py::arg("budget"));
  m.def("accept_tree", &accept_tree, py::arg("tokens"), py::arg("first_child"),
        py::arg("next_sibling"), py::arg("target_tokens"));
  m.def("op_rms_norm", &rms_norm, py::arg("x"), py::arg("weight"), py::arg("eps"));
  m.def("op_linear", &linear, py::arg("x"), py::arg("weight"), py::arg("scale") = py::none());
  m.def("op_topk_logprobs", &topk_logprobs, py::arg("logits"), py::arg("k"),
        py::arg("temperature") = 1.0f);
  m.def("op_argmax", &argmax, py::arg("logits"));
  m.def("op_silu_mul", &silu_mul, py::arg("gate_up"));
  m.def("op_moe_route", &moe_route, py::arg("logits"), py::arg("bias"), py::arg("top_k"),
        py::arg("n_group"), py::arg("topk_group"), py::arg("norm_topk_prob"), py::arg("scale"));
  m.def("op_moe_experts", &moe_experts, py::arg("x"), py::arg("ids"), py::arg("weights"),
        py::arg("gate"), py::arg("up"), py::arg("down"));
  m.def("op_mla_attention", &mla_attention, py::arg("q"), py::arg("kv"), py::arg("w_uk"),
        py::arg("norm_weight"), py::arg("eps"), py::arg("cos_sin"), py::arg("interleaved"),
        py::arg("parents"), py::arg("prefix_len"), py::arg("scale"));
  m.def("op_gqa_attention", &gqa_attention, py::arg("q"), py::arg("k"), py::arg("v"),
        py::arg("q_norm"), py::arg("k_norm"), py::arg("eps"), py::arg("cos_sin"),
        py::arg("context_len"), py::arg("causal"), py::arg("window"), py::arg("scale"));
}

}  // namespace kdt
