// Any bytes are a valid file or an Error; every view lies inside the file.
#include <cstdlib>

#include "core/error.h"
#include "io/safetensors.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  try {
    uint64_t covered = 0;
    for (const auto& [name, view] : kdt::parse_safetensors(data, size, "input")) {
      if (view.data < data || view.bytes > static_cast<uint64_t>(data + size - view.data))
        std::abort();
      covered += view.bytes;
    }
    if (covered > size) std::abort();
  } catch (const kdt::Error&) {
  }
  return 0;
}
