#include <cstring>

#include "check.h"
#include "io/safetensors.h"
#include "io/temp_dir.h"

using kdt::parse_safetensors;
using kdt::SafetensorsFolder;
using kdt::SafetensorsView;
using kdt::test::open_while_cut_short;
using kdt::test::TempDir;

namespace {

std::string file_of(const std::string& header, const std::string& data) {
  const uint64_t length = header.size();
  return std::string(reinterpret_cast<const char*>(&length), sizeof(length)) + header + data;
}

std::map<std::string, SafetensorsView> parse(const std::string& file) {
  const auto read = [&](uint64_t offset, uint64_t bytes, void* out) {
    if (bytes > 0) std::memcpy(out, &file.at(offset + bytes - 1) + 1 - bytes, bytes);
  };
  return parse_safetensors(read, file.size(), "file");
}

std::string entry(const std::string& name, uint64_t begin, uint64_t end) {
  return "\"" + name + "\":{\"dtype\":\"U8\",\"shape\":[" + std::to_string(end - begin) +
         "],\"data_offsets\":[" + std::to_string(begin) + "," + std::to_string(end) + "]}";
}

// A file of u8 tensors of two bytes each, whose data is their own names.
std::string named(const std::vector<std::string>& names) {
  std::string header = "{", data;
  for (const std::string& name : names) {
    header += (data.empty() ? "" : ",") + entry(name, data.size(), data.size() + 2);
    data += (name + name).substr(0, 2);
  }
  return file_of(header + "}", data);
}

// Refused with a message that begins "file: " and holds `fault`.
void refuses(const std::string& fault, const std::string& header,
             const std::string& data = "1234") {
  EXPECT_THROWS("file: " + fault, parse(file_of(header, data)));
}

std::string tensor(const std::string& dtype, const std::string& shape, const std::string& offsets) {
  return "{\"a\":{\"dtype\":" + dtype + ",\"shape\":" + shape + ",\"data_offsets\":" + offsets +
         "}}";
}

}  // namespace

KDT_TEST(reads_tensors_in_any_order_at_any_address) {
  const std::string header =
      "{" + entry("b", 1, 3) + "," + entry("a", 0, 1) + ",\"__metadata__\":{\"k\":\"v\"}}";
  const std::string file = file_of(header, "xyz");
  const auto tensors = parse(file);
  EXPECT_EQ(tensors.size(), size_t{2});
  EXPECT_EQ(tensors.at("a").bytes, uint64_t{1});
  EXPECT_EQ(file.substr(tensors.at("b").offset, 2), "yz");
  EXPECT(tensors.at("b").shape == std::vector<int64_t>{2});
  EXPECT_EQ(tensors.at("b").dtype, "U8");
}

KDT_TEST(reads_a_scalar_and_tensors_without_elements) {
  EXPECT(parse(file_of(tensor("\"F32\"", "[]", "[0,4]"), "1234")).at("a").shape.empty());
  EXPECT_EQ(parse(file_of(tensor("\"F32\"", "[0,4]", "[0,0]"), "")).at("a").bytes, uint64_t{0});
  EXPECT_EQ(parse(file_of(tensor("\"F32\"", "[0,4611686018427387904]", "[0,0]"), "")).size(),
            size_t{1});
  EXPECT(parse(file_of("{}", "")).empty());
  EXPECT(parse(file_of("  {\"__metadata__\":null}\n\t ", "")).empty());
}

KDT_TEST(knows_the_size_of_each_dtype) {
  const std::vector<std::pair<const char*, int>> bits = {
      {"BOOL", 8},        {"F4", 4},      {"F6_E2M3", 6}, {"F6_E3M2", 6}, {"U8", 8},
      {"I8", 8},          {"F8_E5M2", 8}, {"F8_E4M3", 8}, {"F8_E8M0", 8}, {"F8_E4M3FNUZ", 8},
      {"F8_E5M2FNUZ", 8}, {"I16", 16},    {"U16", 16},    {"F16", 16},    {"BF16", 16},
      {"I32", 32},        {"U32", 32},    {"F32", 32},    {"C64", 64},    {"F64", 64},
      {"I64", 64},        {"U64", 64}};
  for (const auto& [name, size] : bits) {
    const std::string header =
        tensor("\"" + std::string(name) + "\"", "[8]", "[0," + std::to_string(size) + "]");
    EXPECT_EQ(parse(file_of(header, std::string(size, 'x'))).at("a").bytes,
              static_cast<uint64_t>(size));
  }
  refuses("tensor 'a': unknown dtype 'f32'", tensor("\"f32\"", "[1]", "[0,4]"));
  refuses("tensor 'a': 3 elements of F4 are no whole number of bytes",
          tensor("\"F4\"", "[3]", "[0,2]"), "12");
}

KDT_TEST(refuses_a_header_that_does_not_fit_the_file) {
  const std::string good = named({"a", "b"});
  EXPECT_EQ(parse(good).size(), size_t{2});
  for (size_t size = 0; size < 8; ++size)
    EXPECT_THROWS("file: truncated: " + std::to_string(size), parse(good.substr(0, size)));
  for (size_t size = 8; size < good.size(); ++size)
    EXPECT_THROWS("truncated", parse(good.substr(0, size)));
  EXPECT_THROWS("file: 1 bytes after the last tensor", parse(good + "x"));
  std::string bad = good;
  for (uint64_t length : {uint64_t{0}, uint64_t{100'000'001}, uint64_t{1} << 63, UINT64_MAX}) {
    std::memcpy(bad.data(), &length, sizeof(length));
    EXPECT_THROWS(length == 0 ? "file: not valid JSON" : "file: a header of ", parse(bad));
  }
}

KDT_TEST(refuses_a_header_that_is_not_its_json) {
  refuses("not valid JSON", "{\"a\":");
  refuses("not valid JSON", std::string("{}\0\0", 4));
  refuses("not valid JSON", "\xEF\xBB\xBF{}");
  refuses("not valid JSON", "{\"\xff\":{}}");
  refuses("the header is [], want an object", "[]");
  refuses("duplicate key 'a'", "{" + entry("a", 0, 4) + "," + entry("a", 0, 4) + "}");
  refuses("duplicate key 'dtype'",
          R"({"a":{"dtype":"U8","dtype":"U8","shape":[4],"data_offsets":[0,4]}})");
  refuses("__metadata__ is [], want an object of strings", R"({"__metadata__":[]})");
  refuses("__metadata__ 'k' is 1, want a string", R"({"__metadata__":{"k":1}})");
}

KDT_TEST(refuses_a_field_that_is_missing_or_of_another_type) {
  refuses("tensor 'a': is null, want an object", R"({"a":null})");
  refuses("tensor 'a': no field 'dtype'", R"({"a":{"shape":[4],"data_offsets":[0,4]}})");
  refuses("tensor 'a': no field 'shape'", R"({"a":{"dtype":"U8","data_offsets":[0,4]}})");
  refuses("tensor 'a': no field 'data_offsets'", R"({"a":{"dtype":"U8","shape":[4]}})");
  refuses("tensor 'a': dtype is 7, want a string", tensor("7", "[4]", "[0,4]"));
  refuses("tensor 'a': shape is 4, want an array", tensor("\"U8\"", "4", "[0,4]"));
  refuses("tensor 'a': shape holds -4, want an integer", tensor("\"U8\"", "[-4]", "[0,4]"));
  refuses("tensor 'a': shape holds 4.0, want an integer", tensor("\"U8\"", "[4.0]", "[0,4]"));
  refuses("tensor 'a': shape holds \"4\", want an integer", tensor("\"U8\"", "[\"4\"]", "[0,4]"));
  refuses("tensor 'a': data_offsets is [0, 4, 4], want two integers",
          tensor("\"U8\"", "[4]", "[0,4,4]"));
  refuses("tensor 'a': data_offsets is [4], want two integers", tensor("\"U8\"", "[4]", "[4]"));
  refuses("tensor 'a': data_offsets holds 0, want an integer", tensor("\"U8\"", "[4]", "[-0,4]"));
}

KDT_TEST(refuses_offsets_that_do_not_cover_the_data) {
  refuses("tensor 'a': data_offsets [4, 0] are reversed", tensor("\"U8\"", "[4]", "[4,0]"));
  refuses("tensor 'a': data_offsets [1, 4] leave a hole after 0", tensor("\"U8\"", "[3]", "[1,4]"));
  refuses("tensor 'b': data_offsets [3, 4] leave a hole after 2",
          "{" + entry("a", 0, 2) + "," + entry("b", 3, 4) + "}");
  refuses("tensor 'b': data_offsets [1, 4] overlap data before 2",
          "{" + entry("a", 0, 2) + "," + entry("b", 1, 4) + "}");
  refuses("tensor 'a': data_offsets [0, 4] hold 4 bytes, its shape has 5",
          tensor("\"U8\"", "[5]", "[0,4]"));
  refuses("tensor 'a': truncated: its data ends at 5 of 4 bytes", tensor("\"U8\"", "[5]", "[0,5]"));
  refuses("2 bytes after the last tensor", tensor("\"U8\"", "[2]", "[0,2]"));
}

KDT_TEST(refuses_a_shape_that_overflows) {
  refuses("tensor 'a': the size of its shape overflows",
          tensor("\"U8\"", "[4611686018427387904,8]", "[0,4]"));
  refuses("tensor 'a': the size of its shape overflows",
          tensor("\"F64\"", "[4611686018427387904]", "[0,4]"));
  refuses("tensor 'a': the size of its shape overflows",
          tensor("\"U8\"", "[4611686018427387904,8,0]", "[0,0]"), "");
  refuses("tensor 'a': dimension 18446744073709551615 is too large",
          tensor("\"U8\"", "[18446744073709551615]", "[0,4]"));
}

KDT_TEST(a_folder_holds_one_file) {
  const TempDir dir;
  dir.write("model.safetensors", named({"a", "b"}));
  const SafetensorsFolder folder(dir.path("."));
  EXPECT_EQ(folder.total_bytes(), uint64_t{4});
  EXPECT(folder.find("c") == nullptr);
  const SafetensorsView* b = folder.find("b");
  std::string bytes(2, ' ');
  folder.read(*b, bytes.data());
  EXPECT_EQ(bytes, "bb");
}

KDT_TEST(a_folder_holds_the_shards_of_its_index) {
  const TempDir dir;
  dir.write("model-1.safetensors", named({"a", "b"}));
  dir.write("blob", named({"c"}));
  std::filesystem::create_symlink("blob", dir.path("model-2.safetensors"));
  dir.write(
      "model.safetensors.index.json",
      R"({"metadata":{},"weight_map":{"a":"model-1.safetensors","b":"model-1.safetensors","c":"model-2.safetensors"}})");
  const SafetensorsFolder folder(dir.path("."));
  EXPECT_EQ(folder.tensors().size(), size_t{3});
  std::string bytes(2, ' ');
  folder.read(*folder.find("c"), bytes.data());
  EXPECT_EQ(bytes, "cc");
}

KDT_TEST(refuses_a_folder_whose_files_do_not_agree) {
  const TempDir dir;
  const auto open = [&] { SafetensorsFolder folder(dir.path(".")); };
  const auto index = [&](const std::string& map) {
    dir.write("model.safetensors.index.json", "{\"weight_map\":" + map + "}");
  };
  EXPECT_THROWS("nowhere: no such folder", SafetensorsFolder(dir.path("nowhere")));
  EXPECT_THROWS("neither model.safetensors nor model.safetensors.index.json", open());
  index("{}");
  EXPECT_THROWS("weight_map is empty", open());
  index("[]");
  EXPECT_THROWS("no object 'weight_map'", open());
  index(R"({"a": 1})");
  EXPECT_THROWS("weight_map 'a' is 1, want the name of a file", open());
  index(R"({"a":"\u0000"})");
  EXPECT_THROWS(R"(weight_map 'a' is "\u0000", want the name of a file)", open());
  for (const char* name : {"", ".", "..", "../x", "/etc/passwd", "sub/x"}) {
    index("{\"a\": \"" + std::string(name) + "\"}");
    EXPECT_THROWS("want the name of a file in the same folder", open());
  }
  index(R"({"a": "m1", "b": "m1", "b": "m2"})");
  EXPECT_THROWS("duplicate key 'b'", open());

  index(R"({"a": "m1", "b": "m2"})");
  dir.write("m1", named({"a"}));
  EXPECT_THROWS("m2: cannot open", open());
  dir.write("m2", named({"c", "b"}));
  EXPECT_THROWS("m2: tensor 'c' is not named by model.safetensors.index.json", open());
  dir.write("m2", named({"a", "b"}));
  EXPECT_THROWS("m2: tensor 'a' belongs to m1 by the index", open());
  dir.write("m2", named({}));
  EXPECT_THROWS("tensor 'b' is not in m2, where the index puts it", open());
  dir.write("m2", named({"b"}).substr(0, 20));
  EXPECT_THROWS("m2: truncated", open());
  dir.write("m2", named({"b"}));
  open();
  dir.write("model-3.safetensors", named({"d"}));
  EXPECT_THROWS("model-3.safetensors is not named by model.safetensors.index.json", open());
  std::filesystem::remove(dir.path("model-3.safetensors"));
  dir.write("model-\xff.safetensors", named({"d"}));
  EXPECT_THROWS("whose name is not UTF-8 is not named by model.safetensors.index.json", open());
  std::filesystem::remove(dir.path("model-\xff.safetensors"));
  dir.write("model.safetensors", named({"a"}));
  EXPECT_THROWS("both model.safetensors and model.safetensors.index.json", open());
}

KDT_TEST(reports_a_file_that_became_shorter) {
  const TempDir dir;
  const std::string file = file_of("{" + entry("a", 0, 9000) + "}", std::string(9000, 'x'));
  dir.write("model.safetensors", file);
  const SafetensorsFolder folder(dir.path("."));
  std::filesystem::resize_file(dir.path("model.safetensors"), file.size() - 1);
  std::string bytes(9000, ' ');
  EXPECT_THROWS("model.safetensors: the file became shorter while open",
                folder.read(*folder.find("a"), bytes.data()));
}

KDT_TEST(a_file_cut_short_while_it_is_opened_is_an_error) {
  const TempDir dir;
  std::string header = "{", map = "{";
  for (int i = 0; i < 2000; ++i) {
    const std::string name = "tensor" + std::to_string(i);
    header += (i ? "," : "") + entry(name, 2 * i, 2 * i + 2);
    map += (i ? ",\"" : "\"") + name + "\":\"m1\"";
  }
  const std::map<std::string, std::string> files = {
      {"m1", file_of(header + "}", std::string(4000, 'x'))},
      {"model.safetensors.index.json", "{\"weight_map\":" + map + "}}"}};
  for (const auto& [name, bytes] : files) dir.write(name, bytes);
  for (const auto& [name, bytes] : files)
    open_while_cut_short(dir, name, bytes, [&] { SafetensorsFolder folder(dir.path(".")); });
}

KDT_TEST_MAIN
