// Engine, its options and outputs, and what is known of a checkpoint or this processor.
#include <pybind11/stl.h>

#include <optional>

#include "backend/measure.h"
#include "bindings/array.h"
#include "bindings/progress.h"
#include "bindings/shared_engine.h"
#include "engine/inspect.h"
#include "parallel/rendezvous.h"

namespace py = pybind11;

namespace kdt {
namespace {

// What Python sees of a tree: the arrays and the accepted slots.
struct VerifiedTree {
  DraftTree tree;
  std::vector<int32_t> accepted;
};

}  // namespace
}  // namespace kdt

namespace pybind11::detail {

// An object whose __init__ never ran, from T.__new__(T), holds nothing, and pybind11 would give it
// raw memory for a T: it is no argument for anything.
template <typename T>
struct MadeCaster : type_caster_base<T> {
  bool load(handle source, bool convert) {
    const type_info* type = get_type_info(typeid(T));
    if (isinstance(source, handle(reinterpret_cast<PyObject*>(type->type))) &&
        !reinterpret_cast<instance*>(source.ptr())->get_value_and_holder(type).holder_constructed())
      return false;
    return type_caster_base<T>::load(source, convert);
  }
};
template <>
struct type_caster<kdt::SharedEngine> : MadeCaster<kdt::SharedEngine> {};
template <>
struct type_caster<kdt::RequestOptions> : MadeCaster<kdt::RequestOptions> {};
template <>
struct type_caster<kdt::StepOutput> : MadeCaster<kdt::StepOutput> {};
template <>
struct type_caster<kdt::VerifiedTree> : MadeCaster<kdt::VerifiedTree> {};

}  // namespace pybind11::detail

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
  d["mask_token"] = c.mask_token;
  d["max_position_embeddings"] = c.max_position_embeddings;
  d["layer_causal"] = c.layer_causal;
  d["layer_window"] = c.layer_window;
  return d;
}

// Throws what a signal handler raised.
void not_interrupted() {
  const GilAcquire acquire;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

py::dict inspect(py::handle folder_in, py::handle verify_in, py::handle progress_in) {
  const std::string folder = text("folder", folder_in);
  const bool verify = boolean("verify", verify_in);
  const LoadProgress progress = seldom_progress(progress_in);
  CheckpointReport report;
  {
    const GilRelease release;
    report = inspect_checkpoint(folder, verify, progress);
  }
  py::dict d = report.is_drafter ? describe(report.drafter) : describe(report.model);
  d["kind"] = report.is_drafter ? "drafter" : "target";
  d["num_tensors"] = report.num_tensors;
  d["total_bytes"] = report.total_bytes;
  d["bytes_by_dtype"] = report.bytes_by_dtype;
  d["bytes_by_part"] = report.bytes_by_part;
  d["unknown_tensors"] = report.unknown;
  if (const CacheReport& cache = report.cache; cache.tensor_parallel_size > 0) {
    py::dict of_cache;
    of_cache["layout"] = cache.layout;
    of_cache["source"] = cache.source;
    of_cache["tensor_parallel_size"] = cache.tensor_parallel_size;
    of_cache["expert_parallel"] = cache.expert_parallel;
    of_cache["rank_bytes"] = cache.rank_bytes;
    d["cache"] = of_cache;
  }
  d["faults"] = report.faults;
  return d;
}

py::dict measure(py::handle num_threads, py::handle cache_bytes) {
  const int threads = integer<int>("num_threads", num_threads);
  const int64_t bytes = integer("cache_bytes", cache_bytes);
  CpuCeilings c;
  {
    const GilRelease release;
    c = measure_cpu(threads, bytes);
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

std::unique_ptr<SharedEngine> make_engine(py::handle model, py::handle drafter, py::handle device,
                                          py::handle num_threads, py::handle max_model_len,
                                          py::handle max_num_seqs, py::handle prefill_chunk_size,
                                          py::handle latent_rms_norm_eps,
                                          py::handle tensor_parallel_size,
                                          py::handle expert_parallel, py::handle timeout_s,
                                          const py::object& progress) {
  EngineOptions options;
  options.model = text("model", model);
  if (!drafter.is_none()) options.drafter = text("drafter", drafter);
  options.device = text("device", device);
  options.num_threads = integer<int>("num_threads", num_threads);
  options.max_model_len = integer("max_model_len", max_model_len);
  options.max_num_seqs = integer("max_num_seqs", max_num_seqs);
  options.prefill_chunk_size = integer("prefill_chunk_size", prefill_chunk_size);
  options.latent_rms_norm_eps = number("latent_rms_norm_eps", latent_rms_norm_eps);
  options.tensor_parallel_size = integer<int>("tensor_parallel_size", tensor_parallel_size);
  options.expert_parallel = boolean("expert_parallel", expert_parallel);
  options.timeout_s = number("timeout_s", timeout_s);
  options.interrupted = not_interrupted;
  // What the progress function raised, in whichever thread.
  const auto raised = std::make_shared<std::optional<py::error_already_set>>();
  if (!progress.is_none()) {
    KDT_CHECK_ARGUMENT(PyCallable_Check(progress.ptr()), "progress is ", shown(progress),
                       "; want a function or None");
    // A rank that was given up may call it after this function has returned.
    const std::shared_ptr<PyObject> call(Py_NewRef(progress.ptr()), [](PyObject* object) {
      try {
        const GilAcquire acquire;
        Py_DECREF(object);
      } catch (const Error&) {  // the interpreter has ended, and all objects with it
      }
    });
    // Python hears of it a few hundred times at most, however many tensors there are.
    options.progress = [call, raised, told = int64_t{0}](int64_t done, int64_t total) mutable {
      if (done < total && done - told < total / 256) return;
      told = done;
      const GilAcquire acquire;
      // Without objects that unwinding would release, should Python end the thread in there.
      PyObject* result = PyObject_CallFunction(call.get(), "LL", static_cast<long long>(done),
                                               static_cast<long long>(total));
      if (result == nullptr) {
        *raised = py::error_already_set();
        throw Error("the progress function raised an exception");
      }
      Py_DECREF(result);
    };
  }
  try {
    const GilRelease release;
    return std::make_unique<SharedEngine>(options);
  } catch (const Error&) {
    if (*raised) throw std::exchange(*raised, std::nullopt).value();
    throw;
  }
}

py::dict stats(SharedEngine& shared) {
  struct Counters {
    EngineStats stats;
    int64_t active, waiting, kv_tokens_free;
    CostModel costs;
  };
  const Counters c = shared.look([](const EngineGroup& group) {
    const Engine& e = group.first();
    return Counters{e.stats(), e.num_active(), e.num_waiting(), e.kv_tokens_free(), e.costs()};
  });
  const BackendInfo info = shared.loaded().backend_info();
  py::dict d;
  d["target_forwards"] = c.stats.target_forwards;
  d["draft_forwards"] = c.stats.draft_forwards;
  d["generated_tokens"] = c.stats.generated_tokens;
  d["prefill_tokens"] = c.stats.prefill_tokens;
  d["prefill_ms"] = c.stats.prefill_ms;
  d["draft_ms"] = c.stats.draft_ms;
  d["build_ms"] = c.stats.build_ms;
  d["verify_ms"] = c.stats.verify_ms;
  d["commit_ms"] = c.stats.commit_ms;
  d["active_requests"] = c.active;
  d["waiting_requests"] = c.waiting;
  d["kv_tokens_free"] = c.kv_tokens_free;
  d["verify_cost"] = c.costs.points();
  d["draft_cost_ms"] = c.costs.draft_ms();
  d["model_bytes"] = shared.loaded().model_bytes();
  const LoadReport& load = shared.loaded().load_report();
  d["load_bytes"] = load.bytes;
  d["load_reads"] = load.reads;
  d["load_seconds"] = load.seconds;
  d["load_buffer_bytes"] = load.buffer_bytes;
  d["device"] = info.device;
  d["isa"] = info.isa;
  d["num_threads"] = info.num_threads;
  d["tensor_parallel_size"] = shared.loaded().num_ranks();
  d["communication"] = shared.loaded().communication();
  return d;
}

py::dict config(const SharedEngine& shared) {
  const Engine& engine = shared.loaded();
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

RequestOptions request_options(py::handle value) {
  py::detail::make_caster<RequestOptions> caster;
  KDT_CHECK_ARGUMENT(!value.is_none() && caster.load(value, false), "options is ", shown(value),
                     "; want RequestOptions");
  return static_cast<RequestOptions&>(caster);
}

Array<float> rows_of(const SharedEngine& shared, const std::vector<float>& values) {
  const auto vocab = static_cast<py::ssize_t>(shared.loaded().model_config().vocab_size);
  return to_array(values, {static_cast<py::ssize_t>(values.size()) / vocab, vocab});
}

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
  py::class_<RequestOptions> options(module, "RequestOptions");
  const auto field = [&](const char* name, auto member, auto parse) {
    options.def_property(
        name, [member](const RequestOptions& o) { return o.*member; },
        [=](RequestOptions& o, py::handle value) { o.*member = parse(name, value); });
  };
  field("max_tokens", &RequestOptions::max_tokens, integer<int64_t>);
  field("stop_token_ids", &RequestOptions::stop_token_ids, integers);
  field("ignore_eos", &RequestOptions::ignore_eos, boolean);
  field("method", &RequestOptions::method, text);
  field("tree_budget", &RequestOptions::tree_budget, integer<int64_t>);
  field("tree_topk", &RequestOptions::tree_topk, integer<int64_t>);
  field("draft_temperature", &RequestOptions::draft_temperature, number);
  field("temperature", &RequestOptions::temperature, number);
  field("top_k", &RequestOptions::top_k, integer<int64_t>);
  field("top_p", &RequestOptions::top_p, number);
  field("min_p", &RequestOptions::min_p, number);
  field("seed", &RequestOptions::seed, integer<int64_t>);
  options.def(
      py::init([](py::handle max_tokens, py::handle stop_token_ids, py::handle ignore_eos,
                  py::handle method, py::handle tree_budget, py::handle tree_topk,
                  py::handle draft_temperature, py::handle temperature, py::handle top_k,
                  py::handle top_p, py::handle min_p, py::handle seed) {
        return RequestOptions{.max_tokens = integer("max_tokens", max_tokens),
                              .stop_token_ids = integers("stop_token_ids", stop_token_ids),
                              .ignore_eos = boolean("ignore_eos", ignore_eos),
                              .method = text("method", method),
                              .tree_budget = integer("tree_budget", tree_budget),
                              .tree_topk = integer("tree_topk", tree_topk),
                              .draft_temperature = number("draft_temperature", draft_temperature),
                              .temperature = number("temperature", temperature),
                              .top_k = integer("top_k", top_k),
                              .top_p = number("top_p", top_p),
                              .min_p = number("min_p", min_p),
                              .seed = integer("seed", seed)};
      }),
      py::arg("max_tokens") = 16, py::arg("stop_token_ids") = py::tuple(),
      py::arg("ignore_eos") = false, py::arg("method") = "", py::arg("tree_budget") = 0,
      py::arg("tree_topk") = 0, py::arg("draft_temperature") = 1.0, py::arg("temperature") = 0.0,
      py::arg("top_k") = 0, py::arg("top_p") = 1.0, py::arg("min_p") = 0.0, py::arg("seed") = 0);

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

  py::class_<SharedEngine>(module, "Engine")
      .def(py::init(&make_engine), py::arg("model"), py::arg("drafter") = py::none(),
           py::arg("device") = "cpu", py::kw_only(), py::arg("num_threads") = 0,
           py::arg("max_model_len") = 0, py::arg("max_num_seqs") = 8,
           py::arg("prefill_chunk_size") = 256, py::arg("latent_rms_norm_eps") = 0.0,
           py::arg("tensor_parallel_size") = 1, py::arg("expert_parallel") = false,
           py::arg("timeout_s") = 300.0, py::arg("progress") = py::none())
      .def(
          "add_request",
          [](SharedEngine& shared, py::handle prompt, py::handle options) {
            const std::vector<int64_t> ids = integers("prompt_token_ids", prompt);
            const RequestOptions request = request_options(options);
            return shared.use([&](EngineGroup& e) { return e.add_request(ids, request); });
          },
          py::arg("prompt_token_ids"), py::arg("options"))
      .def("step",
           [](SharedEngine& shared) { return shared.use([](EngineGroup& e) { return e.step(); }); })
      .def(
          "generate",
          [](SharedEngine& shared, py::handle prompt, py::handle options) {
            const std::vector<int64_t> ids = integers("prompt_token_ids", prompt);
            const RequestOptions request = request_options(options);
            return shared.use(
                [&](EngineGroup& e) { return e.generate(ids, request, not_interrupted); });
          },
          py::arg("prompt_token_ids"), py::arg("options"))
      .def_property_readonly("is_leader", [](SharedEngine& shared) { return shared.is_leader(); })
      .def("follow",
           [](SharedEngine& shared) {
             shared.use([](EngineGroup& e) {
               e.follow(not_interrupted);
               return 0;
             });
           })
      .def("has_unfinished",
           [](SharedEngine& shared) {
             return shared.look([](const EngineGroup& e) { return e.first().has_unfinished(); });
           })
      .def(
          "abort",
          [](SharedEngine& shared, py::handle id) {
            return shared.abort(integer("request_id", id));
          },
          py::arg("request_id"))
      .def(
          "logits",
          [](SharedEngine& shared, py::handle token_ids) {
            const std::vector<int64_t> ids = integers("token_ids", token_ids);
            return rows_of(shared, shared.use([&](EngineGroup& e) { return e.logits(ids); }));
          },
          py::arg("token_ids"))
      .def(
          "tree_logits",
          [](SharedEngine& shared, py::handle prefix, py::handle tokens, py::handle parents) {
            const std::vector<int64_t> prefix_ids = integers("prefix_token_ids", prefix);
            const std::vector<int64_t> token_ids = integers("tokens", tokens);
            const std::vector<int64_t> links = integers("parents", parents);
            return rows_of(shared, shared.use([&](EngineGroup& e) {
              return e.tree_logits(prefix_ids, token_ids, links);
            }));
          },
          py::arg("prefix_token_ids"), py::arg("tokens"), py::arg("parents"))
      .def("stats", &stats)
      .def("config", &config);

  module.def("inspect_checkpoint", &inspect, py::arg("folder"), py::arg("verify") = false,
             py::arg("progress") = py::none());
  module.def("missing_ranks", &net::missing_ranks);
  module.def(
      "set_nccl_library", [](py::handle path) { set_nccl_library(text("path", path)); },
      py::arg("path"));
  module.def("measure_cpu", &measure, py::arg("num_threads") = 0,
             py::arg("cache_bytes") = int64_t{16} << 20);
}

}  // namespace kdt
