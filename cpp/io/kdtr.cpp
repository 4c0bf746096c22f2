#include "io/kdtr.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <fstream>
#include <functional>
#include <set>

#include "core/error.h"
#include "io/utf8.h"
#include "io/xxh64.h"

namespace kdt {
namespace {

static_assert(std::endian::native == std::endian::little, "files are read in place, little endian");

constexpr char kMagic[4] = {'K', 'D', 'T', 'R'};
constexpr uint32_t kVersion = 1;
constexpr uint64_t kHeaderBytes = 32;
constexpr uint64_t kEntryBytes = 32;  // without shape and name
constexpr uint64_t kAlignment = 64;
constexpr int kMaxDims = 8;
constexpr uint64_t kMaxArrayBytes = uint64_t{1} << 63;

template <typename T>
T load(const uint8_t* at) {
  T value;
  std::memcpy(&value, at, sizeof(value));
  return value;
}

template <typename T>
void append(std::string& out, T value) {
  out.append(reinterpret_cast<const char*>(&value), sizeof(value));
}

uint64_t align(uint64_t position, uint64_t to) { return (position + to - 1) / to * to; }

std::string shape_text(const std::vector<int64_t>& shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) text += (i ? ", " : "") + std::to_string(shape[i]);
  return text + "]";
}

// Bytes of an array of this shape. Dimensions of 0 are left out of the overflow check, so that
// their place in the shape does not matter.
uint64_t bytes_of_shape(const std::vector<int64_t>& shape, DType dtype, const std::string& where) {
  uint64_t product = dtype_bytes(dtype);
  bool empty = false;
  for (int64_t size : shape) {
    KDT_CHECK(size >= 0, where, ": oversized: dimension ", static_cast<uint64_t>(size));
    if (size == 0) {
      empty = true;
      continue;
    }
    KDT_CHECK(product <= (kMaxArrayBytes - 1) / static_cast<uint64_t>(size), where,
              ": oversized: shape ", shape_text(shape), " of ", dtype_name(dtype), " overflows");
    product *= static_cast<uint64_t>(size);
  }
  return empty ? 0 : product;
}

// Copies `bytes` bytes of the file from `offset` to `out`.
using ReadAt = std::function<void(uint64_t offset, uint64_t bytes, uint8_t* out)>;

struct Entry {
  std::string name;
  KdtrArray array;
  uint64_t offset = 0;
  uint64_t checksum = 0;
  uint64_t next = 0;  // where the following entry starts
};

// Reads the entry at `row`; every byte of it lies before `table_end`.
Entry parse_entry(const uint8_t* file, uint64_t row, uint64_t table_end, std::string where) {
  KDT_CHECK(table_end - row >= kEntryBytes, where, ": truncated: its entry ends after the table");
  const uint8_t* at = file + row;
  const uint64_t name_bytes = load<uint16_t>(at);
  const int dtype = at[2], ndim = at[3];
  const uint64_t name_at = row + kEntryBytes + 8 * static_cast<uint64_t>(ndim);
  Entry entry;
  entry.next = align(name_at + name_bytes, 8);
  KDT_CHECK(entry.next <= table_end, where, ": truncated: its entry ends after the table");
  entry.name.assign(reinterpret_cast<const char*>(file + name_at), name_bytes);
  KDT_CHECK(is_utf8(entry.name), where, ": the name is not valid UTF-8");
  KDT_CHECK(!entry.name.empty(), where, ": empty name");
  where += " '" + entry.name + "'";
  KDT_CHECK(ndim <= kMaxDims, where, ": ", ndim, " dimensions, want at most ", kMaxDims);
  KDT_CHECK(load<uint32_t>(at + 4) == 0, where, ": reserved field is ", load<uint32_t>(at + 4),
            ", want 0");
  KDT_CHECK(dtype < kNumDTypes, where, ": unknown dtype ", dtype);
  entry.array.dtype = static_cast<DType>(dtype);
  for (int i = 0; i < ndim; ++i)
    entry.array.shape.push_back(load<int64_t>(at + kEntryBytes + 8 * i));
  entry.offset = load<uint64_t>(at + 8);
  entry.array.bytes = load<uint64_t>(at + 16);
  entry.checksum = load<uint64_t>(at + 24);
  const uint64_t want = bytes_of_shape(entry.array.shape, entry.array.dtype, where);
  KDT_CHECK(want == entry.array.bytes, where, ": ", entry.array.bytes, " bytes, shape ",
            shape_text(entry.array.shape), " of ", dtype_name(entry.array.dtype), " has ", want);
  return entry;
}

// Where the table ends. `head` is the file's first kHeaderBytes.
uint64_t check_header(const uint8_t* head, uint64_t file_bytes, const std::string& source) {
  KDT_CHECK(std::memcmp(head, kMagic, sizeof(kMagic)) == 0, source, ": not a KDTR file");
  const auto version = load<uint32_t>(head + 4);
  KDT_CHECK(version == kVersion, source, ": version ", version, ", this reader knows version ",
            kVersion);
  const auto stated = load<uint64_t>(head + 8);
  KDT_CHECK(stated == file_bytes, source,
            stated > file_bytes ? ": truncated: " : ": trailing bytes: ", file_bytes,
            " bytes, the header says ", stated);
  const uint64_t table_end = kHeaderBytes + load<uint32_t>(head + 20);
  KDT_CHECK(table_end <= file_bytes, source, ": truncated: the table ends at ", table_end, " of ",
            file_bytes, " bytes");
  return table_end;
}

void check_size(uint64_t file_bytes, const std::string& source) {
  KDT_CHECK(file_bytes >= kHeaderBytes, source, ": truncated: ", file_bytes,
            " bytes, a header has ", kHeaderBytes);
}

void check_data(const Entry& entry, const ReadAt& read, const std::string& where) {
  constexpr uint64_t kPiece = uint64_t{256} << 10;
  static_assert(kPiece % Xxh64::kStripe == 0);
  const bool is_bool = entry.array.dtype == DType::kBool;
  std::vector<uint8_t> piece;
  uint64_t at = entry.offset, left = entry.array.bytes;
  bool bad_bool = false;
  const auto take = [&](uint64_t bytes) {
    piece.resize(bytes);
    read(at, bytes, piece.data());
    at += bytes, left -= bytes;
    bad_bool |= is_bool && std::any_of(piece.begin(), piece.end(), [](uint8_t b) { return b > 1; });
  };
  Xxh64 checksum;
  while (left > kPiece) {
    take(kPiece);
    checksum.add(piece.data(), piece.size());
  }
  take(left);
  KDT_CHECK(checksum.finish(piece.data(), piece.size()) == entry.checksum, where,
            ": bad checksum of its data");
  KDT_CHECK(!bad_bool, where, ": a bool that is neither 0 nor 1");
}

// `head` holds the header, checked, and the table; the arrays lie in `file`, and are checked by
// `read`, which may fail where a load from there would end the process.
std::map<std::string, KdtrArray> parse_table(const uint8_t* head, const uint8_t* file,
                                             uint64_t file_bytes, const ReadAt& read,
                                             const std::string& source) {
  const auto num_arrays = load<uint32_t>(head + 16);
  const uint64_t table_end = kHeaderBytes + load<uint32_t>(head + 20);
  KDT_CHECK(xxh64(head + kHeaderBytes, table_end - kHeaderBytes) == load<uint64_t>(head + 24),
            source, ": bad checksum of the table");
  std::map<std::string, KdtrArray> arrays;
  uint64_t row = kHeaderBytes, data_end = table_end;
  for (uint32_t index = 0; index < num_arrays; ++index) {
    Entry entry = parse_entry(head, row, table_end, join(source, ": array ", index));
    const std::string where = source + ": array '" + entry.name + "'";
    KDT_CHECK(!arrays.contains(entry.name), where, ": duplicate name");
    KDT_CHECK(entry.offset % kAlignment == 0, where, ": misaligned: offset ", entry.offset,
              ", want a multiple of ", kAlignment);
    KDT_CHECK(entry.offset >= data_end, where, ": overlapping: offset ", entry.offset,
              " is before ", data_end);
    KDT_CHECK(entry.offset <= file_bytes && entry.array.bytes <= file_bytes - entry.offset, where,
              ": truncated: ", entry.array.bytes, " bytes at ", entry.offset, " of ", file_bytes);
    entry.array.data = file + entry.offset;
    check_data(entry, read, where);
    row = entry.next;
    data_end = entry.offset + entry.array.bytes;
    arrays.emplace(entry.name, std::move(entry.array));
  }
  KDT_CHECK(row == table_end, source, ": ", table_end - row,
            " unused bytes after the table's last entry");
  KDT_CHECK(data_end == file_bytes, source, ": trailing bytes: the arrays end at ", data_end,
            " of ", file_bytes);
  return arrays;
}

}  // namespace

int64_t KdtrArray::numel() const { return static_cast<int64_t>(bytes / dtype_bytes(dtype)); }

std::map<std::string, KdtrArray> parse_kdtr(const uint8_t* file, uint64_t file_bytes,
                                            const std::string& source) {
  check_size(file_bytes, source);
  check_header(file, file_bytes, source);
  const ReadAt read = [file](uint64_t offset, uint64_t bytes, uint8_t* out) {
    std::copy_n(file + offset, bytes, out);
  };
  return parse_table(file, file, file_bytes, read, source);
}

KdtrFile::KdtrFile(const std::string& path) : file_(path) {
  check_size(file_.size(), path);
  std::vector<uint8_t> head(kHeaderBytes);
  file_.read(0, kHeaderBytes, head.data());
  head.resize(check_header(head.data(), file_.size(), path));
  file_.read(kHeaderBytes, head.size() - kHeaderBytes, head.data() + kHeaderBytes);
  const ReadAt read = [this](uint64_t offset, uint64_t bytes, uint8_t* out) {
    file_.read(offset, bytes, out);
  };
  arrays_ = parse_table(head.data(), file_.data(), file_.size(), read, path);
}

const KdtrArray& KdtrFile::at(const std::string& name) const {
  const auto found = arrays_.find(name);
  KDT_CHECK(found != arrays_.end(), file_.path(), ": no array '", name, "'");
  return found->second;
}

void write_kdtr(const std::string& path,
                const std::vector<std::pair<std::string, KdtrArray>>& arrays) {
  uint64_t table_bytes = 0;
  std::set<std::string> names;
  for (const auto& [name, array] : arrays) {
    const std::string where = path + ": array '" + name + "'";
    KDT_CHECK(!name.empty() && name.size() <= 65535, where, ": the name has ", name.size(),
              " bytes, want 1 to 65535");
    KDT_CHECK(is_utf8(name), where, ": the name is not valid UTF-8");
    KDT_CHECK(names.insert(name).second, where, ": duplicate name");
    KDT_CHECK(array.shape.size() <= kMaxDims, where, ": ", array.shape.size(),
              " dimensions, want at most ", kMaxDims);
    const uint64_t want = bytes_of_shape(array.shape, array.dtype, where);
    KDT_CHECK(want == array.bytes, where, ": ", array.bytes, " bytes, shape ",
              shape_text(array.shape), " of ", dtype_name(array.dtype), " has ", want);
    KDT_CHECK(array.bytes == 0 || array.data != nullptr, where, ": no data");
    table_bytes += align(kEntryBytes + 8 * array.shape.size() + name.size(), 8);
  }
  KDT_CHECK(table_bytes <= UINT32_MAX && arrays.size() <= UINT32_MAX, path, ": a table of ",
            table_bytes, " bytes, want at most ", UINT32_MAX);
  std::string table;
  uint64_t end = kHeaderBytes + table_bytes;
  for (const auto& [name, array] : arrays) {
    const uint64_t offset = align(end, kAlignment);
    end = offset + array.bytes;
    append(table, static_cast<uint16_t>(name.size()));
    append(table, static_cast<uint8_t>(array.dtype));
    append(table, static_cast<uint8_t>(array.shape.size()));
    append(table, uint32_t{0});
    append(table, offset);
    append(table, array.bytes);
    append(table, xxh64(array.data, array.bytes));
    for (int64_t size : array.shape) append(table, size);
    table += name;
    table.resize(align(table.size(), 8));
  }
  std::string header(kMagic, sizeof(kMagic));
  append(header, kVersion);
  append(header, end);
  append(header, static_cast<uint32_t>(arrays.size()));
  append(header, static_cast<uint32_t>(table_bytes));
  append(header, xxh64(table.data(), table.size()));

  std::ofstream out(path, std::ios::binary | std::ios::trunc);
  KDT_CHECK(out.is_open(), path, ": cannot create");
  out << header << table;
  uint64_t position = kHeaderBytes + table_bytes;
  for (const auto& [name, array] : arrays) {
    const std::string gap(align(position, kAlignment) - position, '\0');
    out << gap;
    out.write(reinterpret_cast<const char*>(array.data), static_cast<std::streamsize>(array.bytes));
    position += gap.size() + array.bytes;
  }
  out.close();
  KDT_CHECK(out.good(), path, ": cannot write all of its ", end, " bytes");
}

}  // namespace kdt
