// Pre-sharded caches, and what a model needs of memory.
#include <pybind11/stl.h>

#include "bindings/array.h"
#include "bindings/progress.h"
#include "engine/memory_plan.h"
#include "engine/shard.h"

namespace py = pybind11;

namespace kdt {
namespace {

py::dict shard(py::handle model, py::handle out, py::handle drafter, py::handle device,
               py::handle num_threads, py::handle tensor_parallel_size, py::handle expert_parallel,
               py::handle progress) {
  ShardOptions options;
  options.model = text("model", model);
  options.out = text("out", out);
  if (!drafter.is_none()) options.drafter = text("drafter", drafter);
  options.device = text("device", device);
  options.num_threads = integer<int>("num_threads", num_threads);
  options.tensor_parallel_size = integer<int>("tensor_parallel_size", tensor_parallel_size);
  options.expert_parallel = boolean("expert_parallel", expert_parallel);
  options.progress = seldom_progress(progress);
  ShardSummary summary;
  {
    const GilRelease release;
    summary = shard_checkpoint(options);
  }
  py::dict d;
  d["layout"] = summary.layout;
  d["read_bytes"] = summary.read_bytes;
  d["written_bytes"] = summary.written_bytes;
  return d;
}

py::dict plan(py::handle model_in, py::handle drafter_in, py::handle tensor_parallel_size,
              py::handle expert_parallel, py::handle gpu_memory, py::handle overhead,
              py::handle max_model_len, py::handle max_num_seqs, py::handle prefill_chunk_size) {
  const std::string model = text("model", model_in);
  const std::string drafter = drafter_in.is_none() ? "" : text("drafter", drafter_in);
  MemoryOptions options;
  options.tensor_parallel_size = integer<int>("tensor_parallel_size", tensor_parallel_size);
  options.expert_parallel = boolean("expert_parallel", expert_parallel);
  options.gpu_memory = integer("gpu_memory", gpu_memory);
  if (!overhead.is_none()) options.overhead = integer("overhead", overhead);
  options.max_model_len = integer("max_model_len", max_model_len);
  options.max_num_seqs = integer("max_num_seqs", max_num_seqs);
  options.prefill_chunk_size = integer("prefill_chunk_size", prefill_chunk_size);
  MemoryPlan plan;
  {
    const GilRelease release;
    plan = plan_memory(model, drafter, options);
  }
  py::dict d;
  d["tensor_parallel_size"] = options.tensor_parallel_size;
  d["expert_parallel"] = options.expert_parallel;
  d["weights_by_part"] = plan.weights_by_part;
  d["weights"] = plan.weights;
  d["workspace"] = plan.workspace;
  d["overhead"] = plan.overhead;
  d["kv_bytes_per_token"] = plan.kv_bytes_per_token;
  d["draft_kv_bytes_per_token"] = plan.draft_kv_bytes_per_token;
  d["max_model_len"] = plan.max_model_len;
  d["max_num_seqs"] = options.max_num_seqs;
  d["cache_tokens"] = plan.cache_tokens;
  d["gpu_memory"] = options.gpu_memory;
  d["kv_tokens_fit"] = plan.kv_tokens_fit;
  d["sequences_fit"] = plan.sequences_fit;
  d["faults"] = plan.faults;
  return d;
}

}  // namespace

void register_shard(py::module_& module) {
  module.def("shard_checkpoint", &shard, py::arg("model"), py::arg("out"),
             py::arg("drafter") = py::none(), py::kw_only(), py::arg("device") = "cpu",
             py::arg("num_threads") = 0, py::arg("tensor_parallel_size") = 1,
             py::arg("expert_parallel") = false, py::arg("progress") = py::none());
  module.def("plan_memory", &plan, py::arg("model"), py::arg("drafter") = py::none(), py::kw_only(),
             py::arg("tensor_parallel_size") = 1, py::arg("expert_parallel") = false,
             py::arg("gpu_memory") = 0, py::arg("overhead") = py::none(),
             py::arg("max_model_len") = 0, py::arg("max_num_seqs") = 8,
             py::arg("prefill_chunk_size") = 256);
}

}  // namespace kdt
