#include "model/rank_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <utility>

#include "core/error.h"
#include "io/block_reader.h"
#include "io/utf8.h"
#include "io/xxh64.h"

namespace kdt {
namespace {

static_assert(std::endian::native == std::endian::little, "files are written as memory holds them");

constexpr char kMagic[4] = {'K', 'D', 'T', 'S'};
constexpr uint64_t kAlignment = 4096;  // of every piece
constexpr uint64_t kMaxTableBytes = uint64_t{64} << 20;
constexpr size_t kStaged = size_t{16} << 20;

struct Header {
  char magic[4];
  uint32_t version;
  uint64_t file_bytes;
  uint64_t source_hash;
  uint64_t cache_id;
  uint32_t rank, size;
  uint32_t expert_parallel;
  uint32_t num_items;
  uint64_t table_bytes;
  uint64_t table_checksum;
  char layout[32];    // ends with zeros
  uint64_t checksum;  // of what stands before it
};
static_assert(sizeof(Header) == 104);

constexpr uint64_t align(uint64_t value, uint64_t to) { return (value + to - 1) / to * to; }

// Per item: u16 bytes of its name, u16 pieces, u32 zero; offset, bytes and checksum of each piece;
// the name, and zeros to a multiple of 8.
uint64_t table_bytes(const std::vector<RankItem>& items) {
  uint64_t bytes = 0;
  for (const RankItem& item : items)
    bytes += 8 + item.pieces.size() * sizeof(RankPiece) + align(item.name.size(), 8);
  return bytes;
}

uint64_t data_begin(uint64_t bytes_of_table) {
  return align(sizeof(Header) + bytes_of_table, kAlignment);
}

template <typename T>
void append(std::string& to, const T& value) {
  to.append(reinterpret_cast<const char*>(&value), sizeof(value));
}

Tensor as_bytes(const Tensor& tensor) {
  return Tensor(tensor.raw(), DType::kUInt8, {tensor.bytes()});
}

std::string layout_of(const Header& header) {
  return std::string(header.layout, strnlen(header.layout, sizeof(header.layout)));
}

Header read_header(const InputFile& file) {
  const std::string& path = file.path();
  Header header;
  KDT_CHECK(file.size() >= sizeof(header), path, ": truncated: ", file.size(),
            " bytes, a header has ", sizeof(header));
  file.read(0, sizeof(header), &header);
  KDT_CHECK(std::memcmp(header.magic, kMagic, sizeof(kMagic)) == 0, path,
            ": not a rank's file of a pre-sharded cache, or not written to its end");
  KDT_CHECK(header.version == kRankFileVersion, path, ": version ", header.version,
            ", this engine reads version ", kRankFileVersion, ": run kdtree shard again");
  KDT_CHECK(header.checksum == xxh64(&header, offsetof(Header, checksum)), path,
            ": bad checksum of the header");
  return header;
}

std::vector<RankItem> parse_table(const std::string& table, const Header& header,
                                  const std::string& path) {
  std::vector<RankItem> items;
  uint64_t at = 0, data = data_begin(table.size());
  const auto take = [&](void* to, uint64_t bytes) {
    KDT_CHECK(bytes <= table.size() - at, path, ": item ", items.size(),
              ": truncated: the table ends in it");
    if (bytes > 0) std::memcpy(to, table.data() + at, bytes);
    at += bytes;
  };
  for (uint32_t i = 0; i < header.num_items; ++i) {
    uint16_t name_bytes, num_pieces;
    uint32_t zero;
    take(&name_bytes, sizeof(name_bytes));
    take(&num_pieces, sizeof(num_pieces));
    take(&zero, sizeof(zero));
    RankItem item;
    item.pieces.resize(num_pieces);
    take(item.pieces.data(), num_pieces * sizeof(RankPiece));
    item.name.resize(align(name_bytes, 8));
    take(item.name.data(), item.name.size());
    item.name.resize(name_bytes);
    KDT_CHECK(is_utf8(item.name), path, ": item ", i, ": the name is not valid UTF-8");
    for (const RankPiece& piece : item.pieces) {
      KDT_CHECK(piece.offset == align(data, kAlignment) && piece.offset <= header.file_bytes &&
                    piece.bytes <= header.file_bytes - piece.offset,
                path, ": item '", item.name, "': ", piece.bytes, " bytes at ", piece.offset,
                ", want a place after ", data, " of ", header.file_bytes);
      data = piece.offset + piece.bytes;
    }
    items.push_back(std::move(item));
  }
  KDT_CHECK(at == table.size() && data == header.file_bytes, path, ": the items end at ", data,
            " of ", header.file_bytes, " bytes");
  return items;
}

// Gives the pieces' data in order: take(item, piece, offset in the piece, bytes of it).
template <typename Take>
void for_data(const InputFile& file, const std::vector<RankItem>& items, const Take& take,
              const LoadProgress& progress) {
  uint64_t begin = file.size();
  for (auto item = items.rbegin(); item != items.rend(); ++item) {
    if (!item->pieces.empty()) begin = item->pieces.front().offset;
  }
  BlockReader reader(file, begin, file.size());
  std::span<const uint8_t> block;
  uint64_t position = begin;  // of the block in the file
  for (size_t i = 0; i < items.size(); ++i) {
    for (size_t p = 0; p < items[i].pieces.size(); ++p) {
      const RankPiece& piece = items[i].pieces[p];
      Xxh64 checksum;
      uint64_t done = 0;
      while (true) {
        while (position + block.size() <= piece.offset + done && done < piece.bytes) {
          position += block.size();
          block = reader.next();
          if (progress) progress(static_cast<int64_t>(position), static_cast<int64_t>(file.size()));
        }
        const uint64_t from = piece.offset + done - position;
        const uint64_t bytes =
            done == piece.bytes ? 0 : std::min<uint64_t>(block.size() - from, piece.bytes - done);
        const auto part = block.subspan(bytes == 0 ? 0 : from, bytes);
        if (bytes > 0) take(i, p, done, part);
        done += bytes;
        if (done == piece.bytes) {
          KDT_CHECK(checksum.finish(part.data(), part.size()) == piece.checksum, file.path(),
                    ": bad checksum of the data of '", items[i].name, "'");
          break;
        }
        checksum.add(part.data(), part.size());  // to the end of a block, which is whole stripes
      }
    }
  }
  if (progress) progress(static_cast<int64_t>(file.size()), static_cast<int64_t>(file.size()));
}

}  // namespace

std::vector<RankItem> rank_items(LoadPlan& plan) {
  std::vector<RankItem> items;
  for (LoadItem& planned : plan.items()) {
    RankItem item{planned.name, {}};
    plan.make(planned);
    for (const Tensor& tensor : planned.memory())
      item.pieces.push_back({.bytes = static_cast<uint64_t>(tensor.bytes())});
    planned.drop();
    KDT_CHECK(item.name.size() <= UINT16_MAX && item.pieces.size() <= UINT16_MAX, "item '",
              item.name, "': its name or its pieces are more than a rank's file can hold");
    items.push_back(std::move(item));
  }
  uint64_t position = data_begin(table_bytes(items));
  for (RankItem& item : items) {
    for (RankPiece& piece : item.pieces) {
      piece.offset = align(position, kAlignment);
      position = piece.offset + piece.bytes;
    }
  }
  return items;
}

uint64_t rank_file_bytes(const std::vector<RankItem>& items) {
  for (auto item = items.rbegin(); item != items.rend(); ++item) {
    if (!item->pieces.empty()) return item->pieces.back().offset + item->pieces.back().bytes;
  }
  return data_begin(table_bytes(items));
}

RankFileWriter::RankFileWriter(const std::string& path, std::vector<RankItem> items)
    : path_(path),
      fd_(open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666)),
      items_(std::move(items)) {
  KDT_CHECK(fd_ >= 0, path, ": cannot create: ", std::strerror(errno));
}

RankFileWriter::RankFileWriter(RankFileWriter&& other) noexcept
    : path_(std::move(other.path_)),
      fd_(std::exchange(other.fd_, -1)),
      items_(std::move(other.items_)),
      staged_(std::move(other.staged_)) {}

RankFileWriter::~RankFileWriter() {
  if (fd_ >= 0) close(fd_);
}

void RankFileWriter::write_at(uint64_t offset, const void* data, size_t bytes) {
  size_t done = 0;
  while (done < bytes) {
    const ssize_t count = pwrite(fd_, static_cast<const char*>(data) + done, bytes - done,
                                 static_cast<off_t>(offset + done));
    if (count < 0 && errno == EINTR) continue;
    KDT_CHECK(count > 0, path_, ": cannot write at ", offset + done, " of ",
              rank_file_bytes(items_), " bytes: ", std::strerror(count < 0 ? errno : ENOSPC));
    done += static_cast<size_t>(count);
  }
}

void RankFileWriter::write(size_t index, Backend& backend, const std::vector<Tensor>& memory) {
  RankItem& item = items_.at(index);
  KDT_CHECK(memory.size() == item.pieces.size(), "item '", item.name, "': ", memory.size(),
            " pieces of memory, planned were ", item.pieces.size());
  for (size_t p = 0; p < memory.size(); ++p) {
    RankPiece& piece = item.pieces[p];
    const Tensor bytes = as_bytes(memory[p]);
    KDT_CHECK(static_cast<uint64_t>(bytes.bytes()) == piece.bytes, "item '", item.name,
              "': ", bytes.bytes(), " bytes, planned were ", piece.bytes);
    Xxh64 checksum;
    uint64_t done = 0;
    while (true) {
      const uint64_t count = std::min<uint64_t>(kStaged, piece.bytes - done);
      staged_.resize(count);
      backend.download(staged_.data(),
                       bytes.rows(static_cast<int64_t>(done), static_cast<int64_t>(count)));
      write_at(piece.offset + done, staged_.data(), count);
      done += count;
      if (done == piece.bytes) break;
      checksum.add(staged_.data(), count);
    }
    piece.checksum = checksum.finish(staged_.data(), staged_.size());
  }
}

void RankFileWriter::finish(const ShardTerms& terms, int rank) {
  std::string table;
  for (const RankItem& item : items_) {
    append(table, static_cast<uint16_t>(item.name.size()));
    append(table, static_cast<uint16_t>(item.pieces.size()));
    append(table, uint32_t{0});
    for (const RankPiece& piece : item.pieces) append(table, piece);
    table += item.name;
    table.resize(align(table.size(), 8));
  }
  KDT_CHECK(table.size() <= kMaxTableBytes, path_, ": a table of ", table.size(),
            " bytes, want at most ", kMaxTableBytes);
  Header header{};
  std::memcpy(header.magic, kMagic, sizeof(kMagic));
  header.version = kRankFileVersion;
  header.file_bytes = rank_file_bytes(items_);
  header.source_hash = terms.source_hash;
  header.cache_id = terms.cache_id;
  header.rank = static_cast<uint32_t>(rank);
  header.size = static_cast<uint32_t>(terms.size);
  header.expert_parallel = terms.expert_parallel ? 1 : 0;
  header.num_items = static_cast<uint32_t>(items_.size());
  header.table_bytes = table.size();
  header.table_checksum = xxh64(table.data(), table.size());
  KDT_CHECK(terms.layout.size() < sizeof(header.layout), "weight layout '", terms.layout,
            "': its name is too long");
  std::copy(terms.layout.begin(), terms.layout.end(), header.layout);
  header.checksum = xxh64(&header, offsetof(Header, checksum));
  write_at(sizeof(header), table.data(), table.size());
  // It may end with an empty piece.
  KDT_CHECK(ftruncate(fd_, static_cast<off_t>(header.file_bytes)) == 0, path_, ": cannot write ",
            header.file_bytes, " bytes: ", std::strerror(errno));
  write_at(0, &header, sizeof(header));
}

RankFile::RankFile(const std::string& path, const ShardTerms& terms, int rank) : file_(path) {
  const Header header = read_header(file_);
  KDT_CHECK(file_.size() >= header.file_bytes, path, ": truncated: ", file_.size(), " bytes of ",
            header.file_bytes);
  KDT_CHECK(file_.size() == header.file_bytes, path, ": ", file_.size(), " bytes, the header says ",
            header.file_bytes);
  KDT_CHECK(header.cache_id == terms.cache_id && header.source_hash == terms.source_hash, path,
            ": belongs to another cache than the files beside it");
  KDT_CHECK(header.rank == static_cast<uint32_t>(rank), path, ": holds rank ", header.rank,
            ", want rank ", rank);
  KDT_CHECK(header.size == static_cast<uint32_t>(terms.size), path, ": one of ", header.size,
            " ranks, want one of ", terms.size);
  KDT_CHECK(header.expert_parallel == (terms.expert_parallel ? 1u : 0u), path,
            ": expert_parallel is ", header.expert_parallel, ", want ", terms.expert_parallel);
  KDT_CHECK(layout_of(header) == terms.layout, path, ": weight layout '", layout_of(header),
            "', want '", terms.layout, "'");
  KDT_CHECK(
      header.table_bytes <= kMaxTableBytes && header.table_bytes <= file_.size() - sizeof(header),
      path, ": truncated: a table of ", header.table_bytes, " bytes in a file of ", file_.size());
  std::string table(header.table_bytes, '\0');
  file_.read(sizeof(header), table.size(), table.data());
  KDT_CHECK(xxh64(table.data(), table.size()) == header.table_checksum, path,
            ": bad checksum of the table");
  items_ = parse_table(table, header, path);
}

void RankFile::load(LoadPlan& plan, const LoadProgress& progress) const {
  std::vector<LoadItem>& planned = plan.items();
  for (size_t i = 0; i < std::max(planned.size(), items_.size()); ++i) {
    const std::string have = i < items_.size() ? "'" + items_[i].name + "'" : "none";
    const std::string want = i < planned.size() ? "'" + planned[i].name + "'" : "none";
    KDT_CHECK(have == want, file_.path(), ": weight ", i, " is ", have, ", config.json asks for ",
              want);
  }
  Backend& backend = plan.backend();
  std::vector<Tensor> memory;  // of item `made` - 1
  size_t made = 0;
  const auto make_to = [&](size_t index) {
    for (; made <= index; ++made) {
      const RankItem& item = items_[made];
      plan.make(planned[made]);
      memory = planned[made].memory();
      bool same = memory.size() == item.pieces.size();
      for (size_t p = 0; same && p < memory.size(); ++p)
        same = static_cast<uint64_t>(memory[p].bytes()) == item.pieces[p].bytes;
      uint64_t have = 0, want = 0;
      for (const RankPiece& piece : item.pieces) have += piece.bytes;
      for (const Tensor& tensor : memory) want += static_cast<uint64_t>(tensor.bytes());
      KDT_CHECK(same, file_.path(), ": weight '", item.name, "' has ", have,
                " bytes, config.json asks for ", want);
    }
  };
  for_data(
      file_, items_,
      [&](size_t i, size_t p, uint64_t offset, std::span<const uint8_t> data) {
        make_to(i);
        backend.upload(as_bytes(memory[p]).rows(static_cast<int64_t>(offset),
                                                static_cast<int64_t>(data.size())),
                       data.data());
      },
      progress);
  if (!planned.empty()) make_to(planned.size() - 1);
  backend.synchronize();
}

void RankFile::verify(const LoadProgress& progress) const {
  for_data(file_, items_, [](size_t, size_t, uint64_t, std::span<const uint8_t>) {}, progress);
}

}  // namespace kdt
