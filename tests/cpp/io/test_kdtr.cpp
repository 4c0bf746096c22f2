#include <cstring>
#include <limits>

#include "check.h"
#include "io/kdtr.h"
#include "io/temp_dir.h"
#include "io/xxh64.h"

using kdt::DType;
using kdt::KdtrArray;
using kdt::KdtrFile;
using kdt::parse_kdtr;
using kdt::write_kdtr;
using kdt::test::open_while_cut_short;
using kdt::test::read_file;
using kdt::test::TempDir;

namespace {

template <typename T>
KdtrArray array(DType dtype, std::vector<int64_t> shape, const std::vector<T>& values) {
  return {dtype, std::move(shape), reinterpret_cast<const uint8_t*>(values.data()),
          values.size() * sizeof(T)};
}

template <typename T>
void put(std::string& file, size_t at, T value) {
  std::memcpy(file.data() + at, &value, sizeof(value));
}

// One entry of a table and what may be wrong with it.
struct Row {
  std::string name = "a";
  uint8_t dtype = 8;  // f32
  uint8_t ndim = 1;
  uint32_t reserved = 0;
  uint64_t offset = 128, bytes = 8;
  std::vector<uint64_t> shape = {2};
};

// A file with these rows and `data_bytes` bytes of `fill` behind them, its checksums right whatever
// the rows say.
std::string file_of(const std::vector<Row>& rows, size_t data_bytes, char fill = 0) {
  std::string table;
  for (const Row& row : rows) {
    std::string entry(32 + 8 * row.shape.size(), '\0');
    put(entry, 0, static_cast<uint16_t>(row.name.size()));
    put(entry, 2, row.dtype);
    put(entry, 3, row.ndim);
    put(entry, 4, row.reserved);
    put(entry, 8, row.offset);
    put(entry, 16, row.bytes);
    const std::string data(std::min<uint64_t>(row.bytes, 1 << 20), fill);
    put(entry, 24, kdt::xxh64(data.data(), data.size()));
    for (size_t i = 0; i < row.shape.size(); ++i) put(entry, 32 + 8 * i, row.shape[i]);
    entry += row.name;
    entry.resize((entry.size() + 7) / 8 * 8);
    table += entry;
  }
  std::string file(32, '\0');
  std::memcpy(file.data(), "KDTR", 4);
  put(file, 4, uint32_t{1});
  put(file, 16, static_cast<uint32_t>(rows.size()));
  put(file, 20, static_cast<uint32_t>(table.size()));
  put(file, 24, kdt::xxh64(table.data(), table.size()));
  file += table;
  if (data_bytes > 0) file.resize((file.size() + 63) / 64 * 64, '\0');
  file.append(data_bytes, fill);
  put(file, 8, static_cast<uint64_t>(file.size()));
  return file;
}

std::map<std::string, KdtrArray> parse(const std::string& file) {
  return parse_kdtr(reinterpret_cast<const uint8_t*>(file.data()), file.size(), "file");
}

// The file with its table's checksum put right.
std::string sealed(std::string file) {
  uint32_t table_bytes;
  std::memcpy(&table_bytes, file.data() + 20, sizeof(table_bytes));
  put(file, 24, kdt::xxh64(file.data() + 32, table_bytes));
  return file;
}

}  // namespace

KDT_TEST(every_dtype_comes_back_with_its_bytes) {
  const TempDir dir;
  const std::vector<uint8_t> bytes = {0, 1, 1, 0};
  const std::vector<int32_t> ints = {INT32_MIN, -1, INT32_MAX};
  const std::vector<int64_t> longs = {INT64_MIN, INT64_MAX};
  const std::vector<uint64_t> ulongs = {UINT64_MAX};
  const std::vector<uint16_t> halves = {0x3c00, 0x7fc0, 1, 2, 3, 4};
  const std::vector<float> floats = {1.5f, -0.0f, std::numeric_limits<float>::infinity()};
  const std::vector<double> doubles = {1e300};
  const std::vector<std::pair<std::string, KdtrArray>> arrays = {
      {"bool", array(DType::kBool, {2, 2}, bytes)},
      {"u8", array(DType::kUInt8, {4}, bytes)},
      {"i8", array(DType::kInt8, {1, 4, 1}, bytes)},
      {"i32", array(DType::kInt32, {3}, ints)},
      {"i64", array(DType::kInt64, {2}, longs)},
      {"u64", array(DType::kUInt64, {}, ulongs)},
      {"f16", array(DType::kFloat16, {6}, halves)},
      {"bf16", array(DType::kBFloat16, {2, 3}, halves)},
      {"f32", array(DType::kFloat32, {3}, floats)},
      {"f64", array(DType::kFloat64, {1, 1, 1, 1, 1, 1, 1, 1}, doubles)},
      {"none", {DType::kFloat32, {0, 7}, nullptr, 0}},
      {"\xc3\xbc", array(DType::kUInt8, {4}, bytes)},
  };
  write_kdtr(dir.path("x.kdtr"), arrays);
  const KdtrFile file(dir.path("x.kdtr"));
  EXPECT_EQ(file.arrays().size(), arrays.size());
  for (const auto& [name, want] : arrays) {
    const KdtrArray& got = file.at(name);
    EXPECT(got.dtype == want.dtype);
    EXPECT(got.shape == want.shape);
    EXPECT_EQ(got.bytes, want.bytes);
    EXPECT(got.bytes == 0 || std::memcmp(got.data, want.data, got.bytes) == 0);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(got.data) % 64, uintptr_t{0});
  }
  EXPECT_EQ(file.at("i32").as<int32_t>()[2], INT32_MAX);
  EXPECT_EQ(file.at("f64").numel(), 1);
  EXPECT_EQ(file.at("none").numel(), 0);
}

KDT_TEST(the_bytes_are_those_of_the_specification) {
  const TempDir dir;
  const std::vector<uint8_t> zeros(8);
  write_kdtr(dir.path("x.kdtr"), {{"a", array(DType::kFloat32, {2}, std::vector<float>(2))},
                                  {"b", array(DType::kUInt8, {8}, zeros)}});
  const Row b{.name = "b", .dtype = 1, .offset = 192, .shape = {8}};
  EXPECT(read_file(dir.path("x.kdtr")) == file_of({Row{}, b}, 64 + 8));
}

KDT_TEST(a_file_without_arrays_is_its_header) {
  const TempDir dir;
  write_kdtr(dir.path("x.kdtr"), {});
  EXPECT_EQ(read_file(dir.path("x.kdtr")).size(), size_t{32});
  EXPECT(KdtrFile(dir.path("x.kdtr")).arrays().empty());
}

KDT_TEST(reads_files_that_python_wrote) {
  const KdtrFile file(std::string(KDT_TEST_DATA) + "/golden_dflash.kdtr");
  EXPECT(!file.arrays().empty());
}

KDT_TEST(names_an_array_that_is_not_there) {
  const TempDir dir;
  write_kdtr(dir.path("x.kdtr"), {});
  EXPECT_THROWS("x.kdtr: no array 'w'", KdtrFile(dir.path("x.kdtr")).at("w"));
}

KDT_TEST(refuses_a_header_that_is_wrong) {
  const std::string good = file_of({Row{}}, 8);
  EXPECT_EQ(parse(good).at("a").numel(), 2);
  EXPECT_THROWS("file: truncated: 0 bytes", parse(""));
  EXPECT_THROWS("file: truncated: 31 bytes", parse(good.substr(0, 31)));
  EXPECT_THROWS("file: truncated: 135 bytes, the header says 136", parse(good.substr(0, 135)));
  EXPECT_THROWS("file: trailing bytes: 137 bytes, the header says 136", parse(good + "x"));
  std::string bad = good;
  bad[3] = 'X';
  EXPECT_THROWS("file: not a KDTR file", parse(bad));
  for (uint32_t version : {0u, 2u, UINT32_MAX}) {
    bad = good;
    put(bad, 4, version);
    EXPECT_THROWS("file: version " + std::to_string(version), parse(bad));
  }
  bad = good;
  put(bad, 20, UINT32_MAX);
  EXPECT_THROWS("file: truncated: the table ends at 4294967327 of 136", parse(bad));
  bad = good;
  bad[40] ^= 1;
  EXPECT_THROWS("file: bad checksum of the table", parse(bad));
}

KDT_TEST(refuses_a_table_that_its_entries_do_not_fill) {
  std::string bad = file_of({Row{}}, 8);
  put(bad, 16, uint32_t{2});
  EXPECT_THROWS("file: array 1: truncated: its entry ends after the table", parse(bad));
  put(bad, 16, UINT32_MAX);
  EXPECT_THROWS("file: array 1: truncated", parse(bad));
  put(bad, 16, uint32_t{0});
  EXPECT_THROWS("file: 48 unused bytes after the table's last entry", parse(bad));
  bad = file_of({Row{}}, 8);
  put(bad, 32, uint16_t{60000});
  EXPECT_THROWS("file: array 0: truncated: its entry ends after the table", parse(sealed(bad)));
  bad = file_of({Row{}}, 8);
  put(bad, 35, uint8_t{255});
  EXPECT_THROWS("file: array 0: truncated: its entry ends after the table", parse(sealed(bad)));
}

KDT_TEST(refuses_an_array_that_is_wrong) {
  const auto refuses = [](const std::string& fault, const Row& row, size_t data_bytes = 8,
                          char fill = 0) {
    EXPECT_THROWS("file: array " + fault, parse(file_of({row}, data_bytes, fill)));
  };
  refuses("0: empty name", {.name = ""});
  refuses("0: the name is not valid UTF-8", {.name = "\xff\xfe"});
  refuses("0 'a': unknown dtype 10", {.dtype = 10});
  refuses("0 'a': unknown dtype 255", {.dtype = 255});
  refuses("0 'a': reserved field is 7", {.reserved = 7});
  refuses("0 'a': 9 dimensions, want at most 8",
          {.ndim = 9, .bytes = 4, .shape = std::vector<uint64_t>(9, 1)}, 4);
  refuses("0 'a': 8 bytes, shape [3] of f32 has 12", {.shape = {3}});
  refuses("0 'a': 8 bytes, shape [2] of f64 has 16", {.dtype = 9});
  refuses("0 'a': oversized: shape [4611686018427387904, 8] of f32",
          {.ndim = 2, .shape = {uint64_t{1} << 62, 8}});
  refuses("0 'a': oversized", {.ndim = 2, .shape = {uint64_t{1} << 32, uint64_t{1} << 32}});
  refuses("0 'a': oversized: dimension 9223372036854775808", {.shape = {uint64_t{1} << 63}});
  refuses("0 'a': oversized", {.ndim = 3, .bytes = 0, .shape = {uint64_t{1} << 62, 8, 0}}, 0);
  refuses("'a': misaligned: offset 132", {.offset = 132}, 12);
  refuses("'a': overlapping: offset 64 is before 80", {.offset = 64});
  refuses("'a': overlapping: offset 0 is before 80", {.offset = 0});
  refuses("'a': truncated: 8 bytes at 192 of 136", {.offset = 192});
  refuses("'a': truncated", {.offset = UINT64_MAX - 63});
  refuses("'a': truncated: 16 bytes at 128 of 136", {.bytes = 16, .shape = {4}});
  refuses("'a': a bool that is neither 0 nor 1", {.dtype = 0, .shape = {8}}, 8, 2);
}

KDT_TEST(refuses_what_is_wrong_between_arrays) {
  const Row b{.name = "b", .offset = 192};
  EXPECT_EQ(parse(file_of({Row{}, b}, 72)).size(), size_t{2});
  EXPECT_THROWS("'a': duplicate name", parse(file_of({Row{}, Row{.offset = 192}}, 72)));
  EXPECT_THROWS("'b': overlapping: offset 128 is before 136",
                parse(file_of({Row{}, Row{.name = "b"}}, 8)));
  EXPECT_THROWS("'b': overlapping", parse(file_of({Row{.offset = 192}, Row{.name = "b"}}, 72)));
  EXPECT_THROWS("file: trailing bytes: the arrays end at 136 of 140", parse(file_of({Row{}}, 12)));
  std::string bad = file_of({Row{}}, 8);
  bad[130] ^= 1;
  EXPECT_THROWS("file: array 'a': bad checksum of its data", parse(bad));
}

KDT_TEST(no_prefix_and_no_flipped_byte_is_read_as_another_file) {
  const std::string good = file_of({Row{}, Row{.name = "b", .offset = 192}}, 72);
  for (size_t size = 0; size < good.size(); ++size)
    EXPECT_THROWS("file: ", parse(good.substr(0, size)));
  for (size_t at = 0; at < good.size(); ++at) {
    std::string bad = good;
    bad[at] ^= 0x11;
    const bool padding = at >= 136 && at < 192;  // between the two arrays: outside every check
    if (padding) {
      EXPECT_EQ(parse(bad).size(), size_t{2});
    } else {
      EXPECT_THROWS("file: ", parse(bad));
    }
  }
}

KDT_TEST(the_writer_refuses) {
  const TempDir dir;
  const std::vector<float> two(2);
  const KdtrArray good = array(DType::kFloat32, {2}, two);
  const auto refuses = [&](const std::string& fault, const std::string& name, const KdtrArray& a) {
    EXPECT_THROWS(fault, write_kdtr(dir.path("x.kdtr"), {{name, a}}));
    EXPECT(!std::filesystem::exists(dir.path("x.kdtr")));
  };
  refuses("the name has 0 bytes", "", good);
  refuses("the name has 65536 bytes", std::string(65536, 'n'), good);
  refuses("not valid UTF-8", "\xff", good);
  refuses("9 dimensions", "a", {DType::kFloat32, std::vector<int64_t>(9, 1), good.data, 4});
  refuses("8 bytes, shape [3] of f32 has 12", "a", {DType::kFloat32, {3}, good.data, 8});
  refuses("oversized: dimension", "a", {DType::kFloat32, {-1}, good.data, 8});
  refuses("no data", "a", {DType::kFloat32, {2}, nullptr, 8});
  EXPECT_THROWS("'a': duplicate name", write_kdtr(dir.path("x.kdtr"), {{"a", good}, {"a", good}}));
  EXPECT_THROWS("cannot create", write_kdtr(dir.path("no/x.kdtr"), {{"a", good}}));
  EXPECT_THROWS("cannot write all of its 136 bytes", write_kdtr("/dev/full", {{"a", good}}));
}

KDT_TEST(data_of_several_pieces_is_checked_to_its_end) {
  // Pieces have 256 KiB.
  constexpr size_t kPiece = 256 << 10;
  for (const size_t size : {kPiece - 1, kPiece, kPiece + 1, 2 * kPiece + 5}) {
    const Row row{.dtype = 0, .bytes = size, .shape = {size}};
    std::string file = file_of({row}, size, 1);
    EXPECT_EQ(parse(file).at("a").bytes, size);
    EXPECT_THROWS("a bool that is neither 0 nor 1", parse(file_of({row}, size, 2)));
    for (const size_t at : {size_t{0}, kPiece - 2, size - 1}) {
      file[128 + at] ^= 1;
      EXPECT_THROWS("'a': bad checksum of its data", parse(file));
      file[128 + at] ^= 1;
    }
  }
}

KDT_TEST(data_cut_short_while_it_is_opened_is_an_error) {
  const TempDir dir;
  const std::vector<float> values(1 << 20, 1.5f);
  write_kdtr(dir.path("x"), {{"a", array(DType::kFloat32, {1 << 20}, values)}});
  open_while_cut_short(dir, "x", read_file(dir.path("x")), [&] { KdtrFile file(dir.path("x")); });
}

KDT_TEST(a_table_cut_short_while_it_is_opened_is_an_error) {
  const TempDir dir;
  std::vector<std::pair<std::string, KdtrArray>> arrays;
  for (int i = 0; i < 2000; ++i)
    arrays.push_back({"array" + std::to_string(i), {DType::kFloat32, {0}, nullptr, 0}});
  write_kdtr(dir.path("x"), arrays);
  open_while_cut_short(dir, "x", read_file(dir.path("x")), [&] { KdtrFile file(dir.path("x")); });
}

KDT_TEST_MAIN
