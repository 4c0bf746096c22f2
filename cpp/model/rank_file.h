// One rank's weights as they lie in a back end's memory: a file of a pre-sharded cache.
// docs/adr/0019 has the layout.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "backend/backend.h"
#include "io/mmap_file.h"
#include "model/loader.h"

namespace kdt {

inline constexpr uint32_t kRankFileVersion = 1;

// What all rank files of a cache share.
struct ShardTerms {
  std::string layout;  // Backend::weight_layout(), at most 31 bytes
  int size = 1;
  bool expert_parallel = false;
  uint64_t source_hash = 0;  // of the checkpoint, hash_checkpoint()
  uint64_t cache_id = 0;     // drawn when the cache is made
};

struct RankPiece {
  uint64_t offset = 0, bytes = 0, checksum = 0;
};

// A LoadItem, and the pieces of its memory().
struct RankItem {
  std::string name;
  std::vector<RankPiece> pieces;
};

// Names and sizes of a plan's items, which are made and dropped one by one for it. The offsets are
// those in the rank's file.
std::vector<RankItem> rank_items(LoadPlan& plan);
uint64_t rank_file_bytes(const std::vector<RankItem>& items);

// Writes a file whose header comes last, so that no other is taken for a whole one.
class RankFileWriter {
 public:
  RankFileWriter(const std::string& path, std::vector<RankItem> items);
  ~RankFileWriter();
  RankFileWriter(RankFileWriter&&) noexcept;

  // Writes an item from its memory on the device. In any order, each item once.
  void write(size_t index, Backend& backend, const std::vector<Tensor>& memory);
  void finish(const ShardTerms& terms, int rank);

 private:
  void write_at(uint64_t offset, const void* data, size_t bytes);

  std::string path_;
  int fd_ = -1;
  std::vector<RankItem> items_;
  std::vector<uint8_t> staged_;
};

class RankFile {
 public:
  // Throws Error when the file is not what `terms` and `rank` say, or is not whole.
  RankFile(const std::string& path, const ShardTerms& terms, int rank);

  // Makes the plan's items and fills them in one pass over the file. Throws Error when they are not
  // those of the file, or its data are not those that were written. `progress` gets bytes of the
  // file.
  void load(LoadPlan& plan, const LoadProgress& progress) const;
  // Throws Error for data that are not those that were written.
  void verify(const LoadProgress& progress) const;

  void use_direct_io() { file_.use_direct_io(); }  // InputFile's
  uint64_t bytes() const { return file_.size(); }
  const std::vector<RankItem>& items() const { return items_; }

 private:
  InputFile file_;
  std::vector<RankItem> items_;
};

}  // namespace kdt
