#include "io/safetensors.h"

#include <algorithm>
#include <array>
#include <filesystem>
#include <set>
#include <string_view>

#include "core/error.h"
#include "io/json.h"
#include "io/utf8.h"

namespace kdt {
namespace {

constexpr uint64_t kLengthBytes = 8;
constexpr uint64_t kMaxHeaderBytes = 100'000'000;
constexpr uint64_t kMaxIndexBytes = 100'000'000;
constexpr const char* kSingleFile = "model.safetensors";
constexpr const char* kIndexFile = "model.safetensors.index.json";

struct DTypeBits {
  std::string_view name;
  uint64_t bits;
};
constexpr std::array<DTypeBits, 22> kDTypes = {{
    {"BOOL", 8},        {"F4", 4},      {"F6_E2M3", 6}, {"F6_E3M2", 6}, {"U8", 8},
    {"I8", 8},          {"F8_E5M2", 8}, {"F8_E4M3", 8}, {"F8_E8M0", 8}, {"F8_E4M3FNUZ", 8},
    {"F8_E5M2FNUZ", 8}, {"I16", 16},    {"U16", 16},    {"F16", 16},    {"BF16", 16},
    {"I32", 32},        {"U32", 32},    {"F32", 32},    {"C64", 64},    {"F64", 64},
    {"I64", 64},        {"U64", 64},
}};

// A tensor as its header entry states it, before its offsets are compared with the others'.
struct Stated {
  std::string name;
  SafetensorsView view;
  uint64_t begin = 0, end = 0;
};

const Json& field(const Json& entry, const char* key, const std::string& where) {
  const Json* value = entry.find(key);
  KDT_CHECK(value != nullptr, where, ": no field '", key, "'");
  return *value;
}

uint64_t unsigned_value(const Json& json, const char* key, const std::string& where) {
  const auto* value = json.get_if<uint64_t>();
  KDT_CHECK(value != nullptr, where, ": ", key, " holds ", json.text(),
            ", want an integer that is not negative");
  return *value;
}

uint64_t bytes_of(const SafetensorsView& view, const std::string& where) {
  const auto* dtype = std::find_if(kDTypes.begin(), kDTypes.end(), [&](const DTypeBits& known) {
    return known.name == view.dtype;
  });
  KDT_CHECK(dtype != kDTypes.end(), where, ": unknown dtype '", view.dtype, "'");
  uint64_t count = 1, bits = 0;
  bool overflow = false;
  for (int64_t size : view.shape)
    overflow |= __builtin_mul_overflow(count, static_cast<uint64_t>(size), &count);
  overflow |= __builtin_mul_overflow(count, dtype->bits, &bits);
  KDT_CHECK(!overflow, where, ": the size of its shape overflows");
  KDT_CHECK(bits % 8 == 0, where, ": ", count, " elements of ", view.dtype,
            " are no whole number of bytes");
  return bits / 8;
}

Stated parse_entry(const std::string& name, const Json& entry, const std::string& where) {
  KDT_CHECK(entry.get_if<Json::Object>() != nullptr, where, ": is ", entry.text(),
            ", want an object");
  Stated stated;
  stated.name = name;
  const Json& dtype = field(entry, "dtype", where);
  KDT_CHECK(dtype.get_if<std::string>() != nullptr, where, ": dtype is ", dtype.text(),
            ", want a string");
  stated.view.dtype = *dtype.get_if<std::string>();
  const Json& shape = field(entry, "shape", where);
  KDT_CHECK(shape.get_if<Json::Array>() != nullptr, where, ": shape is ", shape.text(),
            ", want an array");
  for (const Json& size : *shape.get_if<Json::Array>()) {
    const uint64_t value = unsigned_value(size, "shape", where);
    KDT_CHECK(value <= INT64_MAX, where, ": dimension ", value, " is too large");
    stated.view.shape.push_back(static_cast<int64_t>(value));
  }
  const Json& offsets = field(entry, "data_offsets", where);
  const auto* pair = offsets.get_if<Json::Array>();
  KDT_CHECK(pair != nullptr && pair->size() == 2, where, ": data_offsets is ", offsets.text(),
            ", want two integers");
  stated.begin = unsigned_value((*pair)[0], "data_offsets", where);
  stated.end = unsigned_value((*pair)[1], "data_offsets", where);
  return stated;
}

void check_metadata(const Json& metadata, const std::string& source) {
  if (metadata.is_null()) return;
  const auto* object = metadata.get_if<Json::Object>();
  KDT_CHECK(object != nullptr, source, ": __metadata__ is ", metadata.text(),
            ", want an object of strings");
  for (const auto& [key, value] : *object) {
    KDT_CHECK(value.get_if<std::string>() != nullptr, source, ": __metadata__ '", key, "' is ",
              value.text(), ", want a string");
  }
}

bool is_file_name(const std::string& name) {
  return !name.empty() && name != "." && name != ".." && name.find('/') == name.npos &&
         name.find('\0') == name.npos;
}

// Tensor name to shard file.
std::map<std::string, std::string> read_index(const std::string& path) {
  const Json index = parse_json(read_text_file(path, kMaxIndexBytes), path);
  const Json* weight_map = index.find("weight_map");
  KDT_CHECK(weight_map != nullptr && weight_map->get_if<Json::Object>() != nullptr, path,
            ": no object 'weight_map'");
  std::map<std::string, std::string> shards;
  for (const auto& [name, value] : *weight_map->get_if<Json::Object>()) {
    const auto* shard = value.get_if<std::string>();
    KDT_CHECK(shard != nullptr && is_file_name(*shard), path, ": weight_map '", name, "' is ",
              value.text(), ", want the name of a file in the same folder");
    shards.emplace(name, *shard);
  }
  KDT_CHECK(!shards.empty(), path, ": weight_map is empty");
  return shards;
}

}  // namespace

std::map<std::string, SafetensorsView> parse_safetensors(const ReadAt& read, uint64_t file_bytes,
                                                         const std::string& source) {
  KDT_CHECK(file_bytes >= kLengthBytes, source, ": truncated: ", file_bytes,
            " bytes, want at least ", kLengthBytes);
  uint64_t header_bytes;
  read(0, sizeof(header_bytes), &header_bytes);
  KDT_CHECK(header_bytes <= kMaxHeaderBytes, source, ": a header of ", header_bytes,
            " bytes, want at most ", kMaxHeaderBytes);
  KDT_CHECK(header_bytes <= file_bytes - kLengthBytes, source, ": truncated: a header of ",
            header_bytes, " bytes in a file of ", file_bytes);
  const uint64_t data_begin = kLengthBytes + header_bytes, data_bytes = file_bytes - data_begin;
  std::string text(header_bytes, '\0');
  read(kLengthBytes, header_bytes, text.data());
  const Json header = parse_json(text, source);
  const auto* entries = header.get_if<Json::Object>();
  KDT_CHECK(entries != nullptr, source, ": the header is ", header.text(), ", want an object");

  std::vector<Stated> stated;
  for (const auto& [name, entry] : *entries) {
    if (name == "__metadata__") {
      check_metadata(entry, source);
    } else {
      stated.push_back(parse_entry(name, entry, source + ": tensor '" + name + "'"));
    }
  }
  std::sort(stated.begin(), stated.end(), [](const Stated& a, const Stated& b) {
    return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
  });

  // The tensors cover the data one after another, without a hole and to its end.
  std::map<std::string, SafetensorsView> tensors;
  uint64_t position = 0;
  for (Stated& s : stated) {
    const std::string where = source + ": tensor '" + s.name + "'";
    KDT_CHECK(s.begin <= s.end, where, ": data_offsets [", s.begin, ", ", s.end, "] are reversed");
    KDT_CHECK(s.begin == position, where, ": data_offsets [", s.begin, ", ", s.end,
              s.begin < position ? "] overlap data before " : "] leave a hole after ", position);
    s.view.bytes = bytes_of(s.view, where);
    KDT_CHECK(s.view.bytes == s.end - s.begin, where, ": data_offsets [", s.begin, ", ", s.end,
              "] hold ", s.end - s.begin, " bytes, its shape has ", s.view.bytes);
    KDT_CHECK(s.end <= data_bytes, where, ": truncated: its data ends at ", s.end, " of ",
              data_bytes, " bytes");
    s.view.offset = data_begin + s.begin;
    position = s.end;
    tensors.emplace(std::move(s.name), std::move(s.view));
  }
  KDT_CHECK(position == data_bytes, source, ": ", data_bytes - position,
            " bytes after the last tensor");
  return tensors;
}

SafetensorsFolder::SafetensorsFolder(const std::string& folder) : folder_(folder) {
  namespace fs = std::filesystem;
  std::error_code ignored;
  KDT_CHECK(fs::is_directory(folder, ignored), folder, ": no such folder");
  const bool single = fs::exists(fs::path(folder) / kSingleFile, ignored);
  const bool indexed = fs::exists(fs::path(folder) / kIndexFile, ignored);
  KDT_CHECK(single || indexed, folder, ": neither ", kSingleFile, " nor ", kIndexFile);
  KDT_CHECK(!single || !indexed, folder, ": both ", kSingleFile, " and ", kIndexFile,
            "; remove one");
  if (single) {
    add_file(kSingleFile, nullptr);
    return;
  }
  const std::map<std::string, std::string> weight_map =
      read_index((fs::path(folder) / kIndexFile).string());
  std::set<std::string> shards;
  for (const auto& [name, shard] : weight_map) shards.insert(shard);
  for (const std::string& shard : shards) add_file(shard, &weight_map);
  for (const auto& [name, shard] : weight_map) {
    KDT_CHECK(tensors_.contains(name), folder, ": tensor '", name, "' is not in ", shard,
              ", where the index puts it");
  }
  std::error_code unlisted;
  const fs::directory_iterator entries(folder, unlisted);
  KDT_CHECK(!unlisted, folder, ": cannot list its files: ", unlisted.message());
  for (const fs::directory_entry& entry : entries) {
    const std::string name = entry.path().filename().string();
    KDT_CHECK(
        !name.starts_with("model-") || !name.ends_with(".safetensors") || shards.contains(name),
        folder, ": ", is_utf8(name) ? name : "a file model-*.safetensors whose name is not UTF-8",
        " is not named by ", kIndexFile);
  }
}

void SafetensorsFolder::use_direct_io() {
  for (const auto& file : files_) file->use_direct_io();
}

void SafetensorsFolder::add_file(const std::string& name,
                                 const std::map<std::string, std::string>* weight_map) {
  const std::string path = (std::filesystem::path(folder_) / name).string();
  files_.push_back(std::make_unique<InputFile>(path));
  const InputFile* file = files_.back().get();
  const ReadAt read = [file](uint64_t offset, uint64_t bytes, void* out) {
    file->read(offset, bytes, out);
  };
  for (auto& [tensor, view] : parse_safetensors(read, file->size(), path)) {
    view.file = file;
    if (weight_map != nullptr) {
      const auto owner = weight_map->find(tensor);
      KDT_CHECK(owner != weight_map->end(), path, ": tensor '", tensor, "' is not named by ",
                kIndexFile);
      KDT_CHECK(owner->second == name, path, ": tensor '", tensor, "' belongs to ", owner->second,
                " by the index");
    }
    tensors_.emplace(tensor, std::move(view));
  }
}

}  // namespace kdt
