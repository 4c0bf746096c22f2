// Attention of the CPU back end on numpy arrays: one sequence, its cache made for the call.
#include <algorithm>

#include "bindings/ops.h"

namespace py = pybind11;

namespace kdt {
namespace {

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

// As many as a pass of the engine holds: what is kept of a tree's paths grows with the square.
constexpr int64_t kMaxRows = 4096;

// The number of rows of `q`, which `total` rows of keys are to hold behind `before` cached ones.
int64_t check_rows(const Floats& q, const char* before_name, int64_t before, const char* keys_name,
                   int64_t total) {
  check_not_empty("q", q);
  const int64_t count = q.shape(0);
  KDT_CHECK_ARGUMENT(count <= kMaxRows, "q has ", count, " rows; want at most ", kMaxRows);
  KDT_CHECK_ARGUMENT(before >= 0 && before == total - count, before_name, " is ", before, ", but ",
                     keys_name, " has ", total, " rows and q ", count,
                     "; want as many as both together");
  return count;
}

void check_table(const Floats& cos_sin, int64_t last_position, int64_t rotary_dim) {
  KDT_CHECK_ARGUMENT(
      cos_sin.shape(0) > last_position && cos_sin.shape(1) == rotary_dim && rotary_dim % 2 == 0,
      "cos_sin is ", as_tensor(cos_sin).to_string(), "; want more than ", last_position,
      " rows of ", rotary_dim, ", an even number");
}

std::vector<int32_t> count_up(int64_t begin, int64_t count) {
  std::vector<int32_t> values(count);
  for (int64_t i = 0; i < count; ++i) values[i] = static_cast<int32_t>(begin + i);
  return values;
}

Floats mla_attention(Argument q_in, Argument kv_in, Argument w_uk_in, Argument norm_weight_in,
                     Argument eps_in, Argument cos_sin_in, Argument interleaved_in,
                     Argument parents_in, Argument prefix_len_in, Argument scale) {
  const Floats q = floats("q", q_in, 3), kv = floats("kv", kv_in, 2),
               w_uk = floats("w_uk", w_uk_in, 3);
  const Floats norm_weight = floats("norm_weight", norm_weight_in, 1),
               cos_sin = floats("cos_sin", cos_sin_in, 2);
  const Ints parents = ints("parents", parents_in, 1);
  const float eps = positive("eps", eps_in);
  const int64_t prefix_len = integer("prefix_len", prefix_len_in);
  const int64_t count = check_rows(q, "prefix_len", prefix_len, "kv", kv.shape(0));
  check_not_empty("w_uk", w_uk);
  const int64_t heads = q.shape(1), rank = w_uk.shape(1), nope = w_uk.shape(2),
                rope_dim = q.shape(2) - nope;
  KDT_CHECK_ARGUMENT(w_uk.shape(0) == heads && rope_dim >= 0, "w_uk is ",
                     as_tensor(w_uk).to_string(), "; want [heads, rank, nope] for q ",
                     as_tensor(q).to_string());
  check_shape("kv", kv, {prefix_len + count, rank + rope_dim});
  check_shape("norm_weight", norm_weight, {rank});
  check_shape("parents", parents, {count});
  std::vector<int32_t> all_positions = count_up(0, prefix_len);
  int32_t last_position = 0;
  for (int64_t i = 0; i < count; ++i) {
    const int32_t parent = parents.data()[i];
    KDT_CHECK_ARGUMENT(i == 0 ? parent == -1 : parent >= 0 && parent < i, "parents[", i, "] is ",
                       parent, "; want ", i == 0 ? "-1" : "a slot before its own");
    all_positions.push_back(i == 0 ? static_cast<int32_t>(prefix_len)
                                   : all_positions[prefix_len + parent] + 1);
    last_position = std::max(last_position, all_positions.back());
  }
  check_table(cos_sin, last_position, rope_dim);
  const RopeTable rope{.cos_sin = as_tensor(cos_sin),
                       .interleaved = boolean("interleaved", interleaved_in)};
  OneSequence all(0, prefix_len + count), sequence(prefix_len, count);
  const auto cache = cpu_backend().make_mla_cache(1, static_cast<int64_t>(all.blocks.size()),
                                                  OneSequence::kBlockSize, rank, rope_dim);
  cpu_backend().mla_store(
      {.kv = as_tensor(kv),
       .norm_weight = as_tensor(norm_weight),
       .eps = eps,
       .rope = rope,
       .positions = Tensor(all_positions.data(), DType::kInt32, {prefix_len + count}),
       .cache = cache.get(),
       .rows = all.rows({})});
  std::vector<HostMatrix> matrices;
  for (int64_t h = 0; h < heads; ++h) {
    matrices.push_back({.data = reinterpret_cast<const uint8_t*>(w_uk.data(h)),
                        .dtype = DType::kFloat32,
                        .out_features = rank,
                        .in_features = nope});
  }
  const auto prepared = cpu_backend().prepare_linear(matrices);
  Floats query = empty({count, heads, rank + rope_dim}), out = empty({count, heads, rank});
  const Tensor positions(all_positions.data() + prefix_len, DType::kInt32, {count});
  cpu_backend().mla_query({.q = as_tensor(q),
                           .w_uk = prepared.get(),
                           .rope = rope,
                           .positions = positions,
                           .scale = finite("scale", scale),
                           .out = as_tensor(query)});
  cpu_backend().mla_attention({.query = as_tensor(query),
                               .cache = cache.get(),
                               .rows = sequence.rows(as_tensor(parents)),
                               .positions = positions,
                               .out = as_tensor(out)});
  return out;
}

Floats gqa_attention(Argument q_in, Argument k_in, Argument v_in, Argument q_norm_in,
                     Argument k_norm_in, Argument eps_in, Argument cos_sin_in,
                     Argument context_len_in, Argument causal, Argument window, Argument scale) {
  const Floats q = floats("q", q_in, 3), k = floats("k", k_in, 3), v = floats("v", v_in, 3);
  const Floats q_norm = floats("q_norm", q_norm_in, 1), k_norm = floats("k_norm", k_norm_in, 1);
  const Floats cos_sin = floats("cos_sin", cos_sin_in, 2);
  const float eps = positive("eps", eps_in);
  const int64_t context_len = integer("context_len", context_len_in);
  const int64_t count = check_rows(q, "context_len", context_len, "k", k.shape(0));
  check_not_empty("k", k);
  const int64_t heads = q.shape(1), dim = q.shape(2), kv_heads = k.shape(1), total = k.shape(0);
  check_shape("k", k, {total, kv_heads, dim});
  check_shape("v", v, {total, kv_heads, dim});
  KDT_CHECK_ARGUMENT(heads % kv_heads == 0, "q has ", heads, " heads; want a multiple of k's ",
                     kv_heads);
  check_shape("q_norm", q_norm, {dim});
  check_shape("k_norm", k_norm, {dim});
  check_table(cos_sin, total - 1, dim);
  const RopeTable rope{.cos_sin = as_tensor(cos_sin), .interleaved = false};
  const int64_t width = kv_heads * dim;
  Floats kv = empty({total, 2 * width});
  for (int64_t i = 0; i < total; ++i) {
    std::copy_n(k.data(i), width, kv.mutable_data(i));
    std::copy_n(v.data(i), width, kv.mutable_data(i) + width);
  }
  std::vector<int32_t> positions = count_up(0, total);
  OneSequence all(0, total), sequence(context_len, count);
  const auto cache = cpu_backend().make_gqa_cache(1, static_cast<int64_t>(all.blocks.size()),
                                                  OneSequence::kBlockSize, kv_heads, dim);
  cpu_backend().gqa_store({.kv = as_tensor(kv),
                           .k_norm = as_tensor(k_norm),
                           .eps = eps,
                           .rope = rope,
                           .positions = Tensor(positions.data(), DType::kInt32, {total}),
                           .cache = cache.get(),
                           .rows = all.rows({})});
  Floats out = empty({count, heads, dim});
  cpu_backend().gqa_attention(
      {.q = as_tensor(q),
       .q_norm = as_tensor(q_norm),
       .eps = eps,
       .rope = rope,
       .positions = Tensor(positions.data() + context_len, DType::kInt32, {count}),
       .scale = finite("scale", scale),
       .causal = boolean("causal", causal),
       .window = within("window", window, 0, std::numeric_limits<int64_t>::max()),
       .cache = cache.get(),
       .rows = sequence.rows({}),
       .out = as_tensor(out)});
  return out;
}

}  // namespace

void register_attention(py::module_& m) {
  m.def("op_mla_attention", &mla_attention, py::arg("q"), py::arg("kv"), py::arg("w_uk"),
        py::arg("norm_weight"), py::arg("eps"), py::arg("cos_sin"), py::arg("interleaved"),
        py::arg("parents"), py::arg("prefix_len"), py::arg("scale"));
  m.def("op_gqa_attention", &gqa_attention, py::arg("q"), py::arg("k"), py::arg("v"),
        py::arg("q_norm"), py::arg("k_norm"), py::arg("eps"), py::arg("cos_sin"),
        py::arg("context_len"), py::arg("causal"), py::arg("window"), py::arg("scale"));
}

}  // namespace kdt
