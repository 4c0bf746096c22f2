// XXH64, the checksum of KDTR files (xxHash fast digest algorithm, format specification 0.1.1).
#pragma once

#include <cstddef>
#include <cstdint>

namespace kdt {

uint64_t xxh64(const void* data, size_t bytes, uint64_t seed = 0);

}  // namespace kdt
