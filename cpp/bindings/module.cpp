#include "bindings/array.h"
#include "bindings/gil.h"

PYBIND11_MODULE(_core, module) {
  module.doc() = "The compiled engine; its types and docstrings are in _core.pyi.";
  module.attr("__version__") = KDT_VERSION;
  // pybind11 loads numpy at its first use, once, and waits for ever where a signal handler or
  // finaliser of that moment uses it too.
  pybind11::detail::npy_api::get();
  kdt::watch_for_exit();
  kdt::register_engine(module);
  kdt::register_ops(module);
  kdt::register_attention(module);
  kdt::register_bench(module);
  kdt::register_shard(module);
  kdt::register_synth(module);
}
