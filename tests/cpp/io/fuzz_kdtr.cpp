// Any bytes are a valid file or an Error. Random changes rarely keep the checksums, so a second
// reading gets them put right first: then the checks behind them are reached.
#include <cstdlib>
#include <cstring>
#include <vector>

#include "core/error.h"
#include "io/kdtr.h"
#include "io/xxh64.h"

namespace {

void read(const uint8_t* data, size_t size) {
  try {
    for (const auto& [name, array] : kdt::parse_kdtr(data, size, "input")) {
      if (array.data < data || array.bytes > static_cast<uint64_t>(data + size - array.data))
        std::abort();
    }
  } catch (const kdt::Error&) {
  }
}

template <typename T>
void put(std::vector<uint8_t>& file, uint64_t at, T value) {
  std::memcpy(file.data() + at, &value, sizeof(value));
}

template <typename T>
T get(const std::vector<uint8_t>& file, uint64_t at) {
  T value;
  std::memcpy(&value, file.data() + at, sizeof(value));
  return value;
}

void repair(std::vector<uint8_t>& file) {
  if (file.size() < 32) return;
  put(file, 8, static_cast<uint64_t>(file.size()));
  const uint64_t table_bytes = std::min<uint64_t>(get<uint32_t>(file, 20), file.size() - 32);
  put(file, 20, static_cast<uint32_t>(table_bytes));
  for (uint64_t row = 32; row + 32 <= 32 + table_bytes;) {
    const auto offset = get<uint64_t>(file, row + 8), bytes = get<uint64_t>(file, row + 16);
    if (offset <= file.size() && bytes <= file.size() - offset) {
      put(file, row + 24, kdt::xxh64(file.data() + offset, bytes));
    }
    row += (32 + 8 * uint64_t{file[row + 3]} + get<uint16_t>(file, row) + 7) / 8 * 8;
  }
  put(file, 24, kdt::xxh64(file.data() + 32, table_bytes));
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  read(data, size);
  std::vector<uint8_t> file(data, data + size);
  repair(file);
  read(file.data(), file.size());
  return 0;
}
