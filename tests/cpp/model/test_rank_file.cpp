// The format of a rank's file; test_shard_cache.cpp has the files of models.
#include "backend/op_test.h"
#include "io/temp_dir.h"
#include "io/xxh64.h"
#include "model/rank_file.h"

namespace kdt::test {
namespace {

// Items without memory, pieces without bytes, and pieces over the borders of blocks.
KDT_TEST(items_of_all_sizes) {
  const TempDir dir;
  Backend& on = backend();
  const ShardTerms terms{.layout = "any", .size = 1, .source_hash = 1, .cache_id = 2};
  const std::vector<std::vector<int64_t>> sizes = {
      {}, {0}, {1}, {4096, 1}, {(8 << 20) - 4096, 31}, {17 << 20}, {0, 5, 0}, {}};
  std::vector<std::string> values;
  std::vector<RankItem> items;
  uint64_t at = 4096;
  for (size_t i = 0; i < sizes.size(); ++i) {
    items.push_back({"item" + std::to_string(i), {}});
    for (const int64_t bytes : sizes[i]) {
      at = (at + 4095) / 4096 * 4096;
      items.back().pieces.push_back({.offset = at, .bytes = static_cast<uint64_t>(bytes)});
      at += static_cast<uint64_t>(bytes);
      values.emplace_back(static_cast<size_t>(bytes), static_cast<char>('a' + values.size()));
    }
  }
  const std::string path = dir.path("rank");
  RankFileWriter writer(path, items);
  for (size_t i = items.size(), v = values.size(); i-- > 0;) {
    std::vector<Buffer> memory;
    std::vector<Tensor> tensors;
    v -= items[i].pieces.size();
    for (size_t p = 0; p < items[i].pieces.size(); ++p) {
      const auto bytes = static_cast<int64_t>(values[v + p].size());
      memory.push_back(on.allocate(DType::kUInt8, {bytes}));
      on.upload(memory.back().tensor, values[v + p].data());
      tensors.push_back(memory.back().tensor);
    }
    writer.write(i, on, tensors);
  }
  writer.finish(terms, 0);
  const RankFile file(path, terms, 0);
  file.verify({});
  EXPECT_EQ(file.items().size(), sizes.size());
  const std::string all = read_file(path);
  size_t v = 0;
  for (const RankItem& item : file.items()) {
    for (const RankPiece& piece : item.pieces) {
      EXPECT(all.substr(piece.offset, piece.bytes) == values[v]);
      EXPECT_EQ(piece.checksum, xxh64(values[v].data(), values[v].size()));
      ++v;
    }
  }
  std::string spoilt = all;
  spoilt[all.size() - (17 << 20)] ^= 1;
  dir.write("rank", spoilt);
  EXPECT_THROWS("bad checksum of the data of 'item5'", RankFile(path, terms, 0).verify({}));
}

}  // namespace
}  // namespace kdt::test

KDT_TEST_MAIN
