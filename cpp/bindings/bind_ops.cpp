// Ops of the CPU back end on numpy arrays, for tests and study.
#include <pybind11/stl.h>
#include <unistd.h>

#include <algorithm>
#include <limits>
#include <tuple>

#include "backend/checks.h"
#include "bindings/ops.h"

namespace py = pybind11;

namespace kdt {

Backend& cpu_backend() {
  // One for all calls: its threads sleep between them. A forked process has none of them.
  static std::unique_ptr<Backend> backend;
  static pid_t owner = 0;
  if (owner != getpid()) {
    backend = make_backend("cpu", 0);
    owner = getpid();
  }
  return *backend;
}

namespace {

py::dict build_tree(Argument logprobs_in, Argument ids_in, Argument budget_in) {
  const Floats logprobs = floats("logprobs", logprobs_in, 2);
  const Ints ids = ints("token_ids", ids_in, 2);
  check_shape("token_ids", ids, {logprobs.shape(0), logprobs.shape(1)});
  const int64_t budget = within("budget", budget_in, 0, kMaxTreeBudget);
  KDT_CHECK_ARGUMENT(logprobs.shape(0) <= kMaxTreeDepth, "logprobs has ", logprobs.shape(0),
                     " rows; want at most ", kMaxTreeDepth);
  std::vector<std::vector<int32_t>> arrays(5, std::vector<int32_t>(budget + 1));
  std::vector<double> logw(budget + 1);
  int32_t count = 0;
  const auto view = [&](int i) { return Tensor(arrays[i].data(), DType::kInt32, {budget + 1}); };
  cpu_backend().tree_build({.logprobs = as_tensor(logprobs),
                            .ids = as_tensor(ids),
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

std::pair<Ints, int> accept_tree(Argument tokens_in, Argument first_child_in,
                                 Argument next_sibling_in, Argument target_in) {
  const Ints tokens = ints("tokens", tokens_in, 1);
  const Ints first_child = ints("first_child", first_child_in, 1);
  const Ints next_sibling = ints("next_sibling", next_sibling_in, 1);
  const Ints target = ints("target_tokens", target_in, 1);
  const int64_t slots = tokens.size();
  KDT_CHECK_ARGUMENT(slots > 0, "tokens is empty; want at least the root's");
  check_shape("target_tokens", target, {slots});
  const auto check_links = [&](const char* name, const Ints& links) {
    check_shape(name, links, {slots});
    for (int64_t i = 0; i < slots; ++i) {
      const int32_t link = links.data()[i];
      KDT_CHECK_ARGUMENT(link == -1 || (link > i && link < slots), name, "[", i, "] is ", link,
                         "; want -1 or a slot after its own, of ", slots);
    }
  };
  check_links("first_child", first_child);
  check_links("next_sibling", next_sibling);
  std::vector<int32_t> accepted(slots);
  int32_t length = 0, bonus = 0;
  cpu_backend().tree_accept({.tokens = as_tensor(tokens),
                             .first_child = as_tensor(first_child),
                             .next_sibling = as_tensor(next_sibling),
                             .target = as_tensor(target),
                             .accepted = Tensor(accepted.data(), DType::kInt32, {slots}),
                             .accept_length = Tensor(&length, DType::kInt32, {1}),
                             .bonus_token = Tensor(&bonus, DType::kInt32, {1})});
  accepted.resize(length);
  return {to_array(accepted), bonus};
}

Floats rms_norm(Argument x_in, Argument weight_in, Argument eps_in) {
  const Floats x = floats("x", x_in, 2), weight = floats("weight", weight_in, 1);
  check_not_empty("weight", weight);
  check_shape("weight", weight, {x.shape(1)});
  Floats out = empty({x.shape(0), x.shape(1)});
  cpu_backend().rms_norm({.x = as_tensor(x),
                          .weight = as_tensor(weight),
                          .out = as_tensor(out),
                          .eps = positive("eps", eps_in)});
  return out;
}

Floats linear(Argument x_in, Argument weight_in, Argument scale_in) {
  const Floats x = floats("x", x_in, 2);
  const py::array weight = any_array("weight", weight_in, 2);
  const auto kind = weight.dtype();
  KDT_CHECK_ARGUMENT((weight.flags() & py::array::c_style) != 0, "weight is not C-contiguous");
  HostMatrix matrix;
  if (kind.is(py::dtype::of<float>())) {
    matrix.dtype = DType::kFloat32;
  } else if (kind.is(py::dtype::of<uint16_t>())) {
    matrix.dtype = DType::kBFloat16;
  } else {
    KDT_CHECK_ARGUMENT(kind.is(py::dtype::of<int32_t>()), "weight has dtype ", dtype_text(weight),
                       "; want float32, uint16 (bf16 bits) or int32 (int4 nibbles)");
    matrix.dtype = DType::kInt32;
  }
  const bool is_int4 = matrix.dtype == DType::kInt32;
  matrix.data = static_cast<const uint8_t*>(weight.data());
  matrix.out_features = weight.shape(0);
  matrix.in_features = weight.shape(1) * (is_int4 ? 8 : 1);
  KDT_CHECK_ARGUMENT(weight.size() > 0 && (!is_int4 || matrix.in_features % 32 == 0),
                     "weight holds [", matrix.out_features, ", ", matrix.in_features,
                     "]; want at least 1 of each",
                     is_int4 ? ", and rows of whole groups of 32" : "");
  KDT_CHECK_ARGUMENT(x.shape(1) == matrix.in_features, "x has rows of ", x.shape(1),
                     " values, weight of ", matrix.in_features, "; want as many");
  KDT_CHECK_ARGUMENT(
      scale_in.is_none() != is_int4, "scale is ",
      is_int4 ? "missing for an int4 weight" : "given for a weight that is not int4");
  py::array scale;
  if (is_int4) {
    scale = any_array("scale", scale_in, 2);
    KDT_CHECK_ARGUMENT(
        scale.dtype().is(py::dtype::of<uint16_t>()) && (scale.flags() & py::array::c_style) != 0,
        "scale has dtype ", dtype_text(scale), "; want C-contiguous uint16 (bf16 bits)");
    KDT_CHECK_ARGUMENT(
        scale.shape(0) == matrix.out_features && scale.shape(1) * 32 == matrix.in_features,
        "scale is [", scale.shape(0), ", ", scale.shape(1), "]; want [", matrix.out_features, ", ",
        matrix.in_features / 32, "]");
    matrix.scale = static_cast<const uint8_t*>(scale.data());
  }
  const auto prepared = cpu_backend().prepare_linear({matrix});
  Floats out = empty({x.shape(0), matrix.out_features});
  cpu_backend().linear(as_tensor(x), *prepared, as_tensor(out));
  return out;
}

struct TopkInput {
  Floats logits;
  int64_t k;
  float temperature;
};

TopkInput topk_input(Argument logits_in, Argument k_in, Argument temperature_in) {
  const Floats logits = floats("logits", logits_in, 2);
  const int64_t k = within("k", k_in, 1, logits.shape(1));
  const float temperature = positive("temperature", temperature_in);
  KDT_CHECK_ARGUMENT(std::isfinite(1 / temperature), "temperature is ", temperature,
                     "; want more, as logits are divided by it");
  return {logits, k, temperature};
}

std::pair<Floats, Ints> topk_logprobs(Argument logits_in, Argument k_in, Argument temperature_in) {
  const TopkInput in = topk_input(logits_in, k_in, temperature_in);
  Floats logprobs = empty({in.logits.shape(0), in.k});
  Ints ids(std::vector<py::ssize_t>{in.logits.shape(0), in.k});
  cpu_backend().topk_logprobs({.logits = as_tensor(in.logits),
                               .temperature = in.temperature,
                               .logprobs = as_tensor(logprobs),
                               .ids = as_tensor(ids)});
  return {logprobs, ids};
}

constexpr int64_t kMostIds = std::numeric_limits<int32_t>::max();

std::tuple<Floats, Ints, Floats> topk_part(Argument logits_in, Argument k_in,
                                           Argument temperature_in, Argument first_id_in) {
  const TopkInput in = topk_input(logits_in, k_in, temperature_in);
  Floats values = empty({in.logits.shape(0), in.k}), log_sums = empty({in.logits.shape(0)});
  Ints ids(std::vector<py::ssize_t>{in.logits.shape(0), in.k});
  cpu_backend().topk_logprobs(
      {.logits = as_tensor(in.logits),
       .temperature = in.temperature,
       .logprobs = as_tensor(values),
       .ids = as_tensor(ids),
       .log_sums = as_tensor(log_sums),
       .first_id = within("first_id", first_id_in, 0, kMostIds - in.logits.shape(1))});
  return {values, ids, log_sums};
}

std::pair<Floats, Ints> merge_topk(Argument values_in, Argument ids_in, Argument log_sums_in,
                                   Argument k_in) {
  const Floats values = floats("values", values_in, 3),
               log_sums = floats("log_sums", log_sums_in, 2);
  const Ints part_ids = ints("ids", ids_in, 3);
  const int64_t parts = values.shape(0), rows = values.shape(1), part_k = values.shape(2);
  check_shape("ids", part_ids, {parts, rows, part_k});
  check_shape("log_sums", log_sums, {parts, rows});
  const int64_t k = within("k", k_in, 1, parts * part_k);
  Floats logprobs = empty({rows, k});
  Ints ids(std::vector<py::ssize_t>{rows, k});
  Ints packed(std::vector<py::ssize_t>{parts, rows * (2 * part_k + 1)});
  char* to = reinterpret_cast<char*>(packed.mutable_data());
  const auto append = [&](const auto& array, int64_t part) {
    const int64_t bytes = array.nbytes() / parts;
    to = std::copy_n(reinterpret_cast<const char*>(array.data()) + part * bytes, bytes, to);
  };
  for (int64_t part = 0; part < parts; ++part) {
    append(values, part);
    append(part_ids, part);
    append(log_sums, part);
  }
  cpu_backend().merge_topk(
      {.parts = as_tensor(packed), .logprobs = as_tensor(logprobs), .ids = as_tensor(ids)});
  return {logprobs, ids};
}

std::pair<Ints, Floats> argmax_part(Argument logits_in, Argument first_id_in) {
  const Floats logits = floats("logits", logits_in, 2);
  KDT_CHECK_ARGUMENT(logits.shape(1) > 0, "logits has rows of 0 values; want at least 1");
  Ints ids(std::vector<py::ssize_t>{logits.shape(0)});
  Floats values = empty({logits.shape(0)});
  cpu_backend().argmax(
      {.logits = as_tensor(logits),
       .ids = as_tensor(ids),
       .values = as_tensor(values),
       .first_id = within("first_id", first_id_in, 0, kMostIds - logits.shape(1))});
  return {ids, values};
}

Ints argmax(Argument logits_in) { return argmax_part(logits_in, py::int_(0)).first; }

Floats embed(Argument table_in, Argument ids_in, Argument first_id_in, Argument vocab_size_in) {
  const Floats table = floats("table", table_in, 2);
  const Ints ids = ints("token_ids", ids_in, 1);
  const int64_t vocab_size = within("vocab_size", vocab_size_in, 0, kMostIds);
  const int64_t first_id = within("first_id", first_id_in, 0, vocab_size);
  const int64_t end = vocab_size == 0 ? table.shape(0) : vocab_size;
  for (int64_t i = 0; i < ids.size(); ++i) {
    const int32_t id = ids.data()[i];
    KDT_CHECK_ARGUMENT(id >= 0 && id < end, "token_ids[", i, "] is ", id,
                       "; want 0 or more and less than ", end);
  }
  Floats out = empty({ids.size(), table.shape(1)});
  cpu_backend().embed({.table = as_tensor(table),
                       .token_ids = as_tensor(ids),
                       .out = as_tensor(out),
                       .first_id = first_id,
                       .vocab_size = vocab_size});
  return out;
}

Floats silu_mul(Argument gate_up_in) {
  const Floats gate_up = floats("gate_up", gate_up_in, 2);
  KDT_CHECK_ARGUMENT(gate_up.shape(1) % 2 == 0, "gate_up has rows of ", gate_up.shape(1),
                     " values; want an even number");
  Floats out = empty({gate_up.shape(0), gate_up.shape(1) / 2});
  cpu_backend().silu_mul(as_tensor(gate_up), as_tensor(out));
  return out;
}

std::pair<Ints, Floats> moe_route(Argument logits_in, Argument bias_in, Argument top_k_in,
                                  Argument n_group_in, Argument topk_group_in,
                                  Argument norm_topk_prob, Argument scale) {
  const Floats logits = floats("logits", logits_in, 2), bias = floats("bias", bias_in, 1);
  const int64_t experts = logits.shape(1);
  check_shape("bias", bias, {experts});
  const int64_t n_group = within("n_group", n_group_in, 1, experts);
  KDT_CHECK_ARGUMENT(experts % n_group == 0, "n_group is ", n_group, "; want a divisor of ",
                     experts, " experts");
  const int64_t topk_group = within("topk_group", topk_group_in, 1, n_group);
  const int64_t top_k = within("top_k", top_k_in, 1, experts / n_group * topk_group);
  Ints ids(std::vector<py::ssize_t>{logits.shape(0), top_k});
  Floats weights = empty({logits.shape(0), top_k});
  cpu_backend().moe_route({.logits = as_tensor(logits),
                           .bias = as_tensor(bias),
                           .n_group = n_group,
                           .topk_group = topk_group,
                           .norm_topk_prob = boolean("norm_topk_prob", norm_topk_prob),
                           .routed_scaling_factor = finite("scale", scale),
                           .ids = as_tensor(ids),
                           .weights = as_tensor(weights)});
  return {ids, weights};
}

Floats moe_experts(Argument x_in, Argument ids_in, Argument weights_in, Argument gate_in,
                   Argument up_in, Argument down_in, Argument first_expert_in) {
  const Floats x = floats("x", x_in, 2), weights = floats("weights", weights_in, 2);
  const Ints ids = ints("ids", ids_in, 2);
  const Floats gate = floats("gate", gate_in, 3), up = floats("up", up_in, 3),
               down = floats("down", down_in, 3);
  check_not_empty("gate", gate);
  check_shape("up", up, {gate.shape(0), gate.shape(1), gate.shape(2)});
  check_shape("down", down, {gate.shape(0), gate.shape(2), gate.shape(1)});
  check_shape("x", x, {x.shape(0), gate.shape(2)});
  check_shape("ids", ids, {x.shape(0), ids.shape(1)});
  check_shape("weights", weights, {x.shape(0), ids.shape(1)});
  const int64_t first_expert = within("first_expert", first_expert_in, 0, kMostIds - gate.shape(0));
  std::vector<HostExpert> experts;
  const auto matrix = [](const Floats& all, int64_t expert) {
    return HostMatrix{.data = reinterpret_cast<const uint8_t*>(all.data(expert)),
                      .dtype = DType::kFloat32,
                      .out_features = all.shape(1),
                      .in_features = all.shape(2)};
  };
  for (int64_t e = 0; e < gate.shape(0); ++e)
    experts.push_back({matrix(gate, e), matrix(up, e), matrix(down, e)});
  const auto prepared = cpu_backend().prepare_experts(experts);
  Floats out = empty({x.shape(0), x.shape(1)});
  cpu_backend().fill_zero(as_tensor(out));
  cpu_backend().moe_experts({.x = as_tensor(x),
                             .ids = as_tensor(ids),
                             .weights = as_tensor(weights),
                             .experts = prepared.get(),
                             .out = as_tensor(out),
                             .first_expert = first_expert});
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
  m.def("op_topk_part", &topk_part, py::arg("logits"), py::arg("k"), py::arg("temperature") = 1.0f,
        py::arg("first_id") = 0);
  m.def("op_merge_topk", &merge_topk, py::arg("values"), py::arg("ids"), py::arg("log_sums"),
        py::arg("k"));
  m.def("op_argmax", &argmax, py::arg("logits"));
  m.def("op_argmax_part", &argmax_part, py::arg("logits"), py::arg("first_id") = 0);
  m.def("op_embed", &embed, py::arg("table"), py::arg("token_ids"), py::arg("first_id") = 0,
        py::arg("vocab_size") = 0);
  m.def("op_silu_mul", &silu_mul, py::arg("gate_up"));
  m.def("op_moe_route", &moe_route, py::arg("logits"), py::arg("bias"), py::arg("top_k"),
        py::arg("n_group"), py::arg("topk_group"), py::arg("norm_topk_prob"), py::arg("scale"));
  m.def("op_moe_experts", &moe_experts, py::arg("x"), py::arg("ids"), py::arg("weights"),
        py::arg("gate"), py::arg("up"), py::arg("down"), py::arg("first_expert") = 0);
}

}  // namespace kdt
