#include "model/shard_cache.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <stdexcept>

#include "core/error.h"
#include "io/json.h"
#include "io/safetensors.h"
#include "io/xxh64.h"
#include "model/config_reader.h"

namespace kdt {
namespace {

namespace fs = std::filesystem;

// A safetensors header without a file behind it: the checkpoint's tensors in a row.
constexpr const char* kTensorsFile = "kdtree_tensors.json";
constexpr uint64_t kMaxTensorsBytes = 100'000'000;
constexpr uint64_t kMaxShardsBytes = uint64_t{1} << 20;
constexpr const char* kFormat = "kdtree pre-sharded cache";
constexpr const char* kAgain = ": run kdtree shard again";

std::string hex(uint64_t value) {
  char text[17];
  std::snprintf(text, sizeof(text), "%016llx", static_cast<unsigned long long>(value));
  return text;
}

uint64_t checksum_of(const std::string& text) { return xxh64(text.data(), text.size()); }

// Of the copied config.json, from which the engine takes what the weights were made for.
uint64_t config_checksum(const std::string& folder) {
  return checksum_of(read_text_file(folder + "/config.json", kMaxConfigBytes));
}

// A path that is not UTF-8 cannot be written down: its checkpoint then counts as gone.
template <typename JsonText>
std::string text_of(const JsonText& json, int indent) {
  return json.dump(indent, ' ', false, JsonText::error_handler_t::replace) + "\n";
}

// The fields of kdtree_shards.json.
class Fields {
 public:
  Fields(std::string path, const Json& object) : path_(std::move(path)), object_(object) {}

  const std::string& text(const char* key) const {
    const auto* value = at(key).get_if<std::string>();
    return value != nullptr ? *value : fail<std::string>(key, "want a text");
  }
  uint64_t integer(const char* key, uint64_t max) const {
    const auto* value = at(key).get_if<uint64_t>();
    if (value == nullptr || *value > max) fail<int>(key, join("want 0 to ", max).c_str());
    return *value;
  }
  bool flag(const char* key) const {
    const auto* value = at(key).get_if<bool>();
    return value != nullptr ? *value : fail<bool>(key, "want true or false");
  }
  // Of 16 hexadecimal digits, because a JSON number would not hold all of them everywhere.
  uint64_t checksum(const char* key) const {
    const std::string& digits = text(key);
    if (digits.size() != 16 || digits.find_first_not_of("0123456789abcdef") != digits.npos)
      fail<int>(key, "want 16 hexadecimal digits");
    return std::stoull(digits, nullptr, 16);
  }
  std::vector<uint64_t> integers(const char* key) const {
    const auto* list = at(key).get_if<Json::Array>();
    if (list == nullptr) fail<int>(key, "want a list");
    std::vector<uint64_t> values;
    for (const Json& item : *list) {
      if (item.get_if<uint64_t>() == nullptr) fail<int>(key, "want sizes");
      values.push_back(*item.get_if<uint64_t>());
    }
    return values;
  }

 private:
  const Json& at(const char* key) const {
    const Json* value = object_.find(key);
    KDT_CHECK(value != nullptr, path_, ": ", key, " is missing");
    return *value;
  }
  template <typename T>
  [[noreturn]] const T& fail(const char* key, const char* want) const {
    throw Error(join(path_, ": ", key, " is ", at(key).text(), ", ", want));
  }

  std::string path_;
  const Json& object_;
};

std::map<std::string, SafetensorsView> read_tensors(const std::string& path, uint64_t checksum,
                                                    uint64_t data_bytes) {
  const std::string text = read_text_file(path, kMaxTensorsBytes);
  KDT_CHECK(checksum_of(text) == checksum, path, ": is not as ", kShardsFile,
            " has it (bad checksum)");
  const uint64_t header_bytes = text.size();
  const ReadAt read = [&](uint64_t offset, uint64_t bytes, void* out) {
    offset == 0 ? std::memcpy(out, &header_bytes, bytes)
                : std::memcpy(out, text.data() + offset - sizeof(header_bytes), bytes);
  };
  uint64_t file_bytes;
  KDT_CHECK(!__builtin_add_overflow(data_bytes, sizeof(header_bytes) + header_bytes, &file_bytes),
            path, ": the tensors have ", data_bytes, " bytes");
  return parse_safetensors(read, file_bytes, path);
}

std::string tensors_text(const TensorSource& source) {
  nlohmann::json tensors = nlohmann::json::object();
  uint64_t at = 0;
  for (const auto& [name, view] : source.tensors()) {
    tensors[name] = {
        {"dtype", view.dtype}, {"shape", view.shape}, {"data_offsets", {at, at + view.bytes}}};
    at += view.bytes;
  }
  return text_of(tensors, -1);
}

void write_file(const std::string& path, const std::string& text) {
  std::ofstream out(path, std::ios::binary | std::ios::trunc);
  out << text;
  out.close();
  KDT_CHECK(out.good(), path, ": cannot write all of its ", text.size(), " bytes");
}

}  // namespace

bool is_shard_cache(const std::string& folder) { return has_entry(folder + "/" + kShardsFile); }

std::string rank_file_name(int rank, int size) {
  return join("rank-", rank, "-of-", size, ".kdts");
}

uint64_t hash_checkpoint(const std::string& folder) {
  std::error_code missing;
  std::vector<std::string> names;
  bool has_tensors = false;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder, missing)) {
    const std::string name = entry.path().filename().string();
    const bool tensors = name.ends_with(".safetensors");
    has_tensors |= tensors;
    if (tensors || name == "config.json" || name == "model.safetensors.index.json")
      names.push_back(name);
  }
  if (!has_tensors) return 0;
  std::sort(names.begin(), names.end());
  std::string all;
  for (const std::string& name : names) {
    const std::string path = folder + "/" + name;
    const InputFile file(path);
    std::error_code unknown;
    const auto time = fs::last_write_time(path, unknown).time_since_epoch().count();
    KDT_CHECK(!unknown, path, ": cannot read its time: ", unknown.message());
    all += join(name, '\0', file.size(), ' ', time);
    uint64_t header_bytes = 0;
    if (name.ends_with(".safetensors") && file.size() >= sizeof(header_bytes)) {
      file.read(0, sizeof(header_bytes), &header_bytes);
      std::string header(
          std::min({header_bytes, uint64_t{file.size()} - sizeof(header_bytes), kMaxTensorsBytes}),
          '\0');
      file.read(sizeof(header_bytes), header.size(), header.data());
      all += join(' ', hex(xxh64(header.data(), header.size())));
    }
    all += '\n';
  }
  const uint64_t hash = xxh64(all.data(), all.size());
  return hash == 0 ? 1 : hash;
}

ShardCache::ShardCache(const std::string& folder) : folder_(folder) {
  const std::string path = folder + "/" + kShardsFile;
  const Json json = parse_json(read_text_file(path, kMaxShardsBytes), path);
  const Fields fields(path, json);
  KDT_CHECK(fields.text("format") == kFormat, path, ": format is \"", fields.text("format"),
            "\", want \"", kFormat, '"');
  const uint64_t version = fields.integer("version", UINT32_MAX);
  KDT_CHECK(version == kRankFileVersion, path, ": version is ", version,
            ", this engine reads version ", kRankFileVersion, kAgain);
  KDT_CHECK(json.find("config_xxh64") != nullptr, path,
            ": made by an older version, config_xxh64 is missing", kAgain);
  terms_.layout = fields.text("layout");
  terms_.size = static_cast<int>(fields.integer("tensor_parallel_size", kMaxRanks));
  terms_.expert_parallel = fields.flag("expert_parallel");
  terms_.source_hash = fields.checksum("source_hash");
  terms_.cache_id = fields.checksum("cache_id");
  config_checksum_ = fields.checksum("config_xxh64");
  source_folder_ = fields.text("source");
  rank_bytes_ = fields.integers("rank_bytes");
  KDT_CHECK(terms_.size >= 1 && rank_bytes_.size() == static_cast<size_t>(terms_.size), path,
            ": tensor_parallel_size is ", terms_.size, ", rank_bytes has ", rank_bytes_.size());
  tensors_ = read_tensors(folder + "/" + kTensorsFile, fields.checksum("tensors_xxh64"),
                          fields.integer("tensors_bytes", INT64_MAX));
}

void ShardCache::check(int size, bool expert_parallel) const {
  KDT_CHECK_ARGUMENT(size == terms_.size, "tensor_parallel_size is ", size, ", but ", folder_,
                     " is a pre-sharded cache for ", terms_.size);
  KDT_CHECK_ARGUMENT(expert_parallel == terms_.expert_parallel, "expert_parallel is ",
                     expert_parallel ? "true" : "false", ", but ", folder_,
                     " is a pre-sharded cache made with",
                     terms_.expert_parallel ? " it" : "out it");
  KDT_CHECK(config_checksum(folder_) == config_checksum_, folder_,
            "/config.json: changed since this pre-sharded cache was made", kAgain);
  uint64_t hash = 0;
  try {
    hash = hash_checkpoint(source_folder_);
  } catch (const std::runtime_error&) {  // Error, and those of the file system
  }
  // The checkpoint may be gone or out of reach: a cache does not need it.
  KDT_CHECK(hash == 0 || hash == terms_.source_hash, folder_, ": stale: the checkpoint ",
            source_folder_, " has changed since this pre-sharded cache was made", kAgain);
}

RankFile ShardCache::open_rank(int rank) const {
  const std::string path = folder_ + "/" + rank_file_name(rank, terms_.size);
  KDT_CHECK(has_entry(path), path, ": missing");
  RankFile file(path, terms_, rank);
  KDT_CHECK(file.bytes() == rank_bytes_.at(rank), path, ": ", file.bytes(), " bytes, ", kShardsFile,
            " says ", rank_bytes_[rank]);
  return file;
}

void ShardCache::load(LoadPlan& plan, const LoadProgress& progress) const {
  const std::string layout = plan.backend().weight_layout();
  KDT_CHECK(layout == terms_.layout, folder_, ": a pre-sharded cache in the weight layout '",
            terms_.layout, "', device '", plan.backend().info().device, "' has ",
            layout.empty() ? "none" : "'" + layout + "'",
            ": use the device it was made for, or the checkpoint");
  RankFile file = open_rank(plan.shard().rank);
  if (direct_io_) file.use_direct_io();
  file.load(plan, progress);
}

void ShardCache::read_range(const InputFile*, uint64_t, uint64_t, void*) const {
  throw Error(folder_ + ": a pre-sharded cache does not hold the checkpoint's tensors");
}

std::unique_ptr<TensorSource> open_weights(const std::string& folder, int size,
                                           bool expert_parallel) {
  if (!is_shard_cache(folder)) return std::make_unique<SafetensorsFolder>(folder);
  auto cache = std::make_unique<ShardCache>(folder);
  cache->check(size, expert_parallel);
  return cache;
}

int64_t bytes_to_load(const TensorSource& source, int rank) {
  const auto* cache = dynamic_cast<const ShardCache*>(&source);
  return cache != nullptr ? cache->bytes(rank) : static_cast<int64_t>(source.total_bytes());
}

void write_shards_file(const std::string& folder, const ShardTerms& terms,
                       const std::string& source_folder, const TensorSource& tensors,
                       const std::vector<uint64_t>& rank_bytes) {
  const std::string list = tensors_text(tensors);
  KDT_CHECK(list.size() <= kMaxTensorsBytes, folder, ": a list of tensors of ", list.size(),
            " bytes, want at most ", kMaxTensorsBytes);
  write_file(folder + "/" + kTensorsFile, list);
  const nlohmann::ordered_json shards = {{"format", kFormat},
                                         {"version", kRankFileVersion},
                                         {"layout", terms.layout},
                                         {"tensor_parallel_size", terms.size},
                                         {"expert_parallel", terms.expert_parallel},
                                         {"source", source_folder},
                                         {"source_hash", hex(terms.source_hash)},
                                         {"cache_id", hex(terms.cache_id)},
                                         {"config_xxh64", hex(config_checksum(folder))},
                                         {"tensors_xxh64", hex(checksum_of(list))},
                                         {"tensors_bytes", tensors.total_bytes()},
                                         {"rank_bytes", rank_bytes}};
  write_file(folder + "/" + kShardsFile, text_of(shards, 2));
}

}  // namespace kdt
