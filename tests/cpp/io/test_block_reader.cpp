// Files that come in blocks, read ahead.
#include <filesystem>

#include "check.h"
#include "io/block_reader.h"
#include "io/temp_dir.h"

namespace kdt::test {
namespace {

namespace fs = std::filesystem;

KDT_TEST(blocks_of_a_file_come_in_order) {
  const TempDir dir;
  std::string bytes;
  while (bytes.size() < 9 * BlockReader::kBlockBytes + 5) bytes += std::to_string(bytes.size());
  const InputFile file(dir.write("a", bytes));
  for (const size_t begin : {size_t{0}, size_t{4096}, bytes.size() - 3, bytes.size()}) {
    BlockReader reader(file, begin, bytes.size());
    std::string got;
    while (true) {
      const auto block = reader.next();
      if (block.empty()) break;
      got.append(reinterpret_cast<const char*>(block.data()), block.size());
    }
    EXPECT(got == bytes.substr(begin));
  }
  // Left in the middle.
  BlockReader(file, 0, bytes.size()).next();
  BlockReader reader(file, 0, bytes.size());
  fs::resize_file(dir.path("a"), 2 * BlockReader::kBlockBytes);
  EXPECT_THROWS("became shorter", [&] {
    while (!reader.next().empty()) {
    }
  }());
}

}  // namespace
}  // namespace kdt::test

KDT_TEST_MAIN
