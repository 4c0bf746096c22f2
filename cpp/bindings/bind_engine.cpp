// Engine, its options and outputs, and what is known of a checkpoint or this processor.
#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include <mutex>
#include <optional>

#include "bindings/array.h"
#include "engine/engine.h"
#include "engine/inspect.h"

namespace py = pybind11;

namespace kdt {
namespace {

py::dict describe(const ModelConfig& c) {
  py::dict d;
  d["model_type"] = c.model_type;
  d["vocab_size"] = c.vocab_size;
  d["hidden_size"] = c.hidden_size;
  d["intermediate_size"] = c.intermediate_size;
  d["moe_intermediate_size"] = c.moe_intermediate_size;
  d["num_hidden_layers"] = c.num_hidden_layers;
  d["num_attention_heads"] = c.num_attention_heads;
  d["q_lora_rank"] = c.q_lora_rank;
  d["kv_lora_rank"] = c.kv_lora_rank;
  d["qk_nope_head_dim"] = c.qk_nope_head_dim;
  d["qk_rope_head_dim"] = c.qk_rope_head_dim;
  d["v_head_dim"] = c.v_head_dim;
  d["n_routed_experts"] = c.n_routed_experts;
  d["n_shared_experts"] = c.n_shared_experts;
  d["num_experts_per_tok"] = c.num_experts_per_tok;
  d["first_k_dense_replace"] = c.first_k_dense_replace;
  d["routed_scaling_factor"] = c.routed_scaling_factor;
  d["rms_norm_eps"] = c.rms_norm_eps;
  d["latent_rms_norm_eps"] = c.latent_rms_norm_eps;
  d["max_position_embeddings"] = c.max_position_embeddings;
  d["rope_theta"] = c.rope.rope_theta;
  d["rope_type"] = c.rope.yarn ? "yarn" : "default";
  d["rope_factor"] = c.rope.factor;
  d["int4_group_size"] = c.int4_group_size;
  d["eos_token_ids"] = c.eos_token_ids;
  d["bos_token_id"] = c.bos_token_id;
  return d;
}

py::dict describe(const DraftConfig& c) {
  py::dict d;
  d["vocab_size"] = c.vocab_size;
  d["hidden_size"] = c.hidden_size;
  d["intermediate_size"] = c.intermediate_size;
  d["num_hidden_layers"] = c.num_hidden_layers;
  d["num_attention_heads"] = c.num_attention_heads;
  d["num_key_value_heads"] = c.num_key_value_heads;
  d["head_dim"] = c.head_dim;
  d["block_size"] = c.block_size;
  d["target_layer_ids"] = c.target_layer_ids;
  d["mask_token_id"] = c.mask_token_id;
  d["max_position_embeddings"] = c.max_position_embeddings;
  d["layer_causal"] = c.layer_causal;
  d["layer_window"] = c.layer_window;
  return d;
}

py::dict inspect(const std::string& folder) {
  const CheckpointReport report = inspect_checkpoint(folder);
  py::dict d = report.is_drafter ? describe(report.drafter) : describe(report.model);
  d["kind"] = report.is_drafter ? "drafter" : "target";
  d["num_tensors"] = report.num_tensors;
  d["total_bytes"] = report.total_bytes;
  d["bytes_by_dtype"] = report.bytes_by_dtype;
  d["bytes_by_part"] = report.bytes_by_part;
  d["unknown_tensors"] = report.unknown;
  d["faults"] = report.faults;
  return d;
}

py::dict measure(int num_threads, int64_t cache_bytes) {
  CpuCeilings c;
  {
    const py::gil_scoped_release release;
    c = measure_cpu(num_threads, cache_bytes);
  }
  py::dict d;
  d["isa"] = c.isa;
  d["num_threads"] = c.num_threads;
  d["fma_gflops"] = c.fma_gflops;
  d["read_gb_s"] = c.read_gb_s;
  d["cache_gb_s"] = c.cache_gb_s;
  d["cache_bytes"] = c.cache_bytes;
  return d;
}

// An engine for Python, where any thread may call and a finaliser may run in any: one call at a
// time, the GIL released while it waits and works.
class SharedEngine {
 public:
  explicit SharedEngine(const EngineOptions& options) : engine_(options) {}

  template <typename Call>
  auto use(const Call& call) {
    const py::gil_scoped_release release;
    const std::lock_guard lock(mutex_);
    return call(engine_);
  }

 private:
  Engine engine_;
  std::mutex mutex_;
};

std::unique_ptr<SharedEngine> make_engine(
    const std::string& model, const std::optional<std::string>& drafter, const std::string& device,
    int num_threads, int64_t max_model_len, int64_t max_num_seqs, int64_t prefill_chunk_size,
    double latent_rms_norm_eps,
    const std::optional<std::function<void(int64_t, int64_t)>>& progress) {
  EngineOptions options;
  options.model = model;
  options.drafter = drafter.value_or("");
  options.device = device;
  options.num_threads = num_threads;
  options.max_model_len = max_model_len;
  options.max_num_seqs = max_num_seqs;
  options.prefill_chunk_size = prefill_chunk_size;
  options.latent_rms_norm_eps = latent_rms_norm_eps;
  if (progress) {
    // Python hears of it a few hundred times at most, however many tensors there are.
    options.progress = [call = *progress, told = int64_t{0}](int64_t done, int64_t total) mutable {
      if (done < total && done - told < total / 256) return;
      told = done;
      const py::gil_scoped_acquire acquire;
      call(done, total);
    };
  }
  const py::gil_scoped_release release;
  return std::make_unique<SharedEngine>(options);
}

py::dict stats(const Engine& engine) {
  const py::gil_scoped_acquire acquire;
  const EngineStats& s = engine.stats();
  const BackendInfo info = engine.backend_info();
  py::dict d;
  d["target_forwards"] = s.target_forwards;
  d["draft_forwards"] = s.draft_forwards;
  d["generated_tokens"] = s.generated_tokens;
  d["prefill_tokens"] = s.prefill_tokens;
  d["prefill_ms"] = s.prefill_ms;
  d["draft_ms"] = s.draft_ms;
  d["build_ms"] = s.build_ms;
  d["verify_ms"] = s.verify_ms;
  d["commit_ms"] = s.commit_ms;
  d["active_requests"] = engine.num_active();
  d["waiting_requests"] = engine.num_waiting();
  d["kv_tokens_free"] = engine.kv_tokens_free();
  d["verify_cost"] = engine.costs().points();
  d["draft_cost_ms"] = engine.costs().draft_ms();
  d["model_bytes"] = engine.model_bytes();
  d["device"] = info.device;
  d["isa"] = info.isa;
  d["num_threads"] = info.num_threads;
  return d;
}

py::dict config(const Engine& engine) {
  const py::gil_scoped_acquire acquire;
  py::dict d;
  d["model"] = describe(engine.model_config());
  if (engine.draft_config() != nullptr) {
    d["drafter"] = describe(*engine.draft_config());
  } else {
    d["drafter"] = py::none();
  }
  d["max_model_len"] = engine.max_model_len();
  return d;
}

// What Python sees of a tree: the arrays and the accepted slots.
struct VerifiedTree {
  DraftTree tree;
  std::vector<int32_t> accepted;
};

std::optional<VerifiedTree> verified_tree(const StepOutput& output) {
  if (output.tree.num_nodes() == 0) return std::nullopt;
  return VerifiedTree{output.tree, output.accepted};
}

template <auto kMember>
auto tree_array() {
  return [](const VerifiedTree& t) { return to_array(t.tree.*kMember); };
}

}  // namespace

py::array_t<bool> visibility(const std::vector<int32_t>& parents) {
  const auto n = static_cast<py::ssize_t>(parents.size());
  py::array_t<bool> array({n, n});
  auto view = array.mutable_unchecked<2>();
  for (py::ssize_t i = 0; i < n; ++i) {
    for (py::ssize_t j = 0; j < n; ++j) view(i, j) = j == i || (j < i && view(parents[i], j));
  }
  return array;
}

void register_engine(py::module_& module) {
  py::class_<RequestOptions>(module, "RequestOptions")
      .def(py::init([](int64_t max_tokens, std::vector<int64_t> stop_token_ids, bool ignore_eos,
                       std::string method, int64_t tree_budget, int64_t tree_topk,
                       double draft_temperature) {
             return RequestOptions{
                 max_tokens, std::move(stop_token_ids), ignore_eos, std::move(method), tree_budget,
                 tree_topk,  draft_temperature};
           }),
           py::arg("max_tokens") = 16, py::arg("stop_token_ids") = std::vector<int64_t>(),
           py::arg("ignore_eos") = false, py::arg("method") = "", py::arg("tree_budget") = 0,
           py::arg("tree_topk") = 0, py::arg("draft_temperature") = 1.0)
      .def_readwrite("max_tokens", &RequestOptions::max_tokens)
      .def_readwrite("stop_token_ids", &RequestOptions::stop_token_ids)
      .def_readwrite("ignore_eos", &RequestOptions::ignore_eos)
      .def_readwrite("method", &RequestOptions::method)
      .def_readwrite("tree_budget", &RequestOptions::tree_budget)
      .def_readwrite("tree_topk", &RequestOptions::tree_topk)
      .def_readwrite("draft_temperature", &RequestOptions::draft_temperature);

  py::class_<VerifiedTree>(module, "Tree")
      .def_property_readonly("tokens", tree_array<&DraftTree::tokens>())
      .def_property_readonly("parents", tree_array<&DraftTree::parents>())
      .def_property_readonly("depths", tree_array<&DraftTree::depths>())
      .def_property_readonly("first_child", tree_array<&DraftTree::first_child>())
      .def_property_readonly("next_sibling", tree_array<&DraftTree::next_sibling>())
      .def_property_readonly("logw", tree_array<&DraftTree::logw>())
      .def_property_readonly("visibility",
                             [](const VerifiedTree& t) { return visibility(t.tree.parents); })
      .def_property_readonly("accepted",
                             [](const VerifiedTree& t) { return to_array(t.accepted); });

  py::class_<StepOutput>(module, "StepOutput")
      .def_readonly("request_id", &StepOutput::request_id)
      .def_readonly("token_ids", &StepOutput::token_ids)
      .def_readonly("accept_length", &StepOutput::accept_length)
      .def_readonly("num_prefilled", &StepOutput::num_prefilled)
      .def_readonly("prompt_length", &StepOutput::prompt_length)
      .def_readonly("finished", &StepOutput::finished)
      .def_readonly("finish_reason", &StepOutput::finish_reason)
      .def_readonly("stop_token_id", &StepOutput::stop_token_id)
      .def_readonly("root_token_id", &StepOutput::root_token_id)
      .def_property_readonly("tree", &verified_tree)
      .def_readonly("draft_ms", &StepOutput::draft_ms)
      .def_readonly("build_ms", &StepOutput::build_ms)
      .def_readonly("verify_ms", &StepOutput::verify_ms)
      .def_readonly("commit_ms", &StepOutput::commit_ms);

  using Ids = std::vector<int64_t>;
  const auto rows_of = [](const Engine& engine, const std::vector<float>& values) {
    const py::gil_scoped_acquire acquire;
    const auto vocab = static_cast<py::ssize_t>(engine.model_config().vocab_size);
    return to_array(values, {static_cast<py::ssize_t>(values.size()) / vocab, vocab});
  };
  py::class_<SharedEngine>(module, "Engine")
      .def(py::init(&make_engine), py::arg("model"), py::arg("drafter") = py::none(),
           py::arg("device") = "cpu", py::kw_only(), py::arg("num_threads") = 0,
           py::arg("max_model_len") = 0, py::arg("max_num_seqs") = 8,
           py::arg("prefill_chunk_size") = 256, py::arg("latent_rms_norm_eps") = 0.0,
           py::arg("progress") = py::none())
      .def(
          "add_request",
          [](SharedEngine& shared, const Ids& prompt, const RequestOptions& options) {
            return shared.use([&](Engine& e) { return e.add_request(prompt, options); });
          },
          py::arg("prompt_token_ids"), py::arg("options"))
      .def("step",
           [](SharedEngine& shared) { return shared.use([](Engine& e) { return e.step(); }); })
      .def(
          "generate",
          [](SharedEngine& shared, const Ids& prompt, const RequestOptions& options) {
            const auto not_interrupted = [] {
              const py::gil_scoped_acquire acquire;
              if (PyErr_CheckSignals() != 0) throw py::error_already_set();
            };
            return shared.use(
                [&](Engine& e) { return e.generate(prompt, options, not_interrupted); });
          },
          py::arg("prompt_token_ids"), py::arg("options"))
      .def("has_unfinished",
           [](SharedEngine& shared) {
             return shared.use([](Engine& e) { return e.has_unfinished(); });
           })
      .def(
          "abort",
          [](SharedEngine& shared, int64_t id) {
            return shared.use([&](Engine& e) { return e.abort(id); });
          },
          py::arg("request_id"))
      .def(
          "logits",
          [rows_of](SharedEngine& shared, const Ids& token_ids) {
            return shared.use([&](Engine& e) { return rows_of(e, e.logits(token_ids)); });
          },
          py::arg("token_ids"))
      .def(
          "tree_logits",
          [rows_of](SharedEngine& shared, const Ids& prefix, const Ids& tokens,
                    const Ids& parents) {
            return shared.use(
                [&](Engine& e) { return rows_of(e, e.tree_logits(prefix, tokens, parents)); });
          },
          py::arg("prefix_token_ids"), py::arg("tokens"), py::arg("parents"))
      .def("stats", [](SharedEngine& shared) { return shared.use(&stats); })
      .def("config", [](SharedEngine& shared) { return shared.use(&config); });

  module.def("inspect_checkpoint", &inspect, py::arg("folder"));
  module.def("measure_cpu", &measure, py::arg("num_threads") = 0,
             py::arg("cache_bytes") = int64_t{16} << 20);
}

}  // namespace kdt
