// Timing of ops.
#include "backend/backend.h"
#include "bindings/array.h"
#include "bindings/gil.h"

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

}  // namespace

void register_bench(py::module_& module) {
  module.def("bench_ops", &timed_ops, py::arg("device"), py::arg("only") = "");
}

}  // namespace kdt
