// Generated checkpoints.
#include <pybind11/stl.h>

#include <memory>

#include "bindings/array.h"
#include "bindings/gil.h"
#include "model/synth.h"

namespace py = pybind11;

namespace kdt {
namespace {

py::dict synth_checkpoint(py::handle like, py::handle drafter_in, const py::kwargs& numbers) {
  SynthOptions options{.like = text("like", like)};
  for (const auto& [key, value] : numbers) {
    const std::string name = text("the option", key);
    options.number(name) = integer(name.c_str(), value);
  }
  KDT_CHECK_ARGUMENT(options.seed >= 0, "seed is ", options.seed, "; want 0 or more");
  const bool drafter = boolean("drafter", drafter_in);
  SynthModel model;
  std::shared_ptr<const SynthSource> source;
  {
    const GilRelease release;
    model = make_synth_model(options);
    source = std::make_shared<SynthSource>(
        model, drafter ? SynthSource::Part::kDrafter : SynthSource::Part::kTarget,
        static_cast<uint64_t>(options.seed));
  }
  py::list shards;
  for (const SynthShard& shard : source->shards()) {
    py::dict d;
    d["file"] = shard.file;
    d["header"] = py::bytes(source->header(shard));
    d["offset"] = shard.offset;
    d["bytes"] = shard.bytes;
    shards.append(d);
  }
  py::dict d;
  d["config"] = drafter ? model.drafter_config_json : model.config_json;
  d["generation_config"] = drafter ? "" : model.generation_config_json;
  d["vocab_size"] = model.config.vocab_size;
  d["num_tensors"] = source->tensors().size();
  d["bytes"] = source->total_bytes();
  d["bytes_by_part"] = source->bytes_by_part();
  d["shards"] = shards;
  d["read"] = py::cpp_function(
      [source](py::handle offset_in, py::handle out) {
        const int64_t offset = integer("offset", offset_in);
        KDT_CHECK_ARGUMENT(offset >= 0, "offset is ", offset, "; want 0 or more");
        KDT_CHECK_ARGUMENT(PyObject_CheckBuffer(out.ptr()), "out is ", shown(out),
                           "; want a buffer");
        const py::buffer_info info = py::reinterpret_borrow<py::buffer>(out).request(true);
        KDT_CHECK_ARGUMENT(info.ndim == 1 && info.strides[0] == info.itemsize, "out has ",
                           info.ndim, " dimensions or gaps; want one without");
        const GilRelease release;
        source->read_range(nullptr, static_cast<uint64_t>(offset), info.size * info.itemsize,
                           info.ptr);
      },
      py::arg("offset"), py::arg("out"));
  return d;
}

}  // namespace

void register_synth(py::module_& module) {
  module.def("synth_checkpoint", &synth_checkpoint, py::arg("like"), py::kw_only(),
             py::arg("drafter") = false);
}

}  // namespace kdt
