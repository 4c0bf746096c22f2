// Timing of ops.
#include "backend/measure.h"
#include "bindings/array.h"
#include "bindings/gil.h"
#include "engine/bench_rank.h"

namespace py = pybind11;

namespace kdt {
namespace {

py::list timed_ops(py::handle device_in, py::handle only_in) {
  const std::string device = text("device", device_in), only = text("only", only_in);
  std::vector<OpTime> times;
  {
    const GilRelease release;
    times = bench_ops(device, only);
  }
  py::list records;
  for (const OpTime& t : times) {
    py::dict record;
    record["op"] = t.op;
    record["shape"] = t.shape;
    record["us"] = t.us;
    record["bytes"] = t.bytes;
    record["operations"] = t.operations;
    records.append(record);
  }
  return records;
}

py::dict timed_ranks(py::handle model, py::handle device, py::handle size, py::handle rows_in,
                     py::handle context_in) {
  EngineOptions options;
  options.model = text("model", model);
  options.device = text("device", device);
  options.tensor_parallel_size = integer<int>("tensor_parallel_size", size);
  const std::vector<int64_t> rows = integers("rows", rows_in);
  const int64_t context = integer("context", context_in);
  RankBench bench;
  {
    const GilRelease release;
    bench = bench_rank(options, rows, context);
  }
  py::list times;
  for (const RankTimes& t : bench.times) {
    py::dict record;
    record["rows"] = t.rows;
    record["alone_us"] = t.alone_us;
    record["ranks_us"] = t.ranks_us;
    record["all_reduce_us"] = t.all_reduce_us;
    times.append(record);
  }
  py::dict d;
  d["isa"] = bench.backend.isa;
  d["communication"] = bench.communication;
  d["hidden_size"] = bench.hidden_size;
  d["num_all_reduces"] = bench.num_all_reduces;
  d["load_bytes"] = bench.load.bytes;
  d["load_seconds"] = bench.load.seconds;
  d["times"] = times;
  return d;
}

}  // namespace

void register_bench(py::module_& module) {
  module.def("bench_ops", &timed_ops, py::arg("device"), py::arg("only") = "");
  module.def("bench_rank", &timed_ranks, py::arg("model"), py::kw_only(), py::arg("device"),
             py::arg("tensor_parallel_size"), py::arg("rows"), py::arg("context"));
}

}  // namespace kdt
