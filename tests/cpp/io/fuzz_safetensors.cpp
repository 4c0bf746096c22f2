// Any bytes are a valid file or an Error; every view lies inside the file.
#include <cstdlib>
#include <cstring>

#include "core/error.h"
#include "io/safetensors.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  try {
    uint64_t covered = 0;
    const auto read = [&](uint64_t offset, uint64_t bytes, void* out) {
      if (offset > size || bytes > size - offset) std::abort();
      std::memcpy(out, data + offset, bytes);
    };
    for (const auto& [name, view] : kdt::parse_safetensors(read, size, "input")) {
      if (view.offset > size || view.bytes > size - view.offset) std::abort();
      covered += view.bytes;
    }
    if (covered > size) std::abort();
  } catch (const kdt::Error&) {
  }
  return 0;
}
