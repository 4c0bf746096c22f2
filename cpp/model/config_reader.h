// Reads the keys of a config.json with their bounds. Every message names the file, the key and the
// value.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

#include "io/json.h"
#include "model/config.h"

namespace kdt {

// Bounds that no real model reaches and that keep every product of sizes inside 64 bits.
inline constexpr int64_t kMaxVocab = int64_t{1} << 24;
inline constexpr int64_t kMaxWidth = int64_t{1} << 20;
inline constexpr int64_t kMaxLayers = 1024;
inline constexpr int64_t kMaxHeads = 4096;
inline constexpr int64_t kMaxHeadDim = 4096;
inline constexpr int64_t kMaxExperts = 65536;
inline constexpr int64_t kMaxPositions = int64_t{1} << 30;
inline constexpr int64_t kMaxConfigBytes = int64_t{1} << 24;

class ConfigReader {
 public:
  // `object` must outlive the reader. `prefix` goes before the keys in messages, for example
  // "text_config.". Throws Error when it is no object.
  ConfigReader(std::string source, const Json& object, std::string prefix = "");

  // nullptr when the key is absent or null.
  const Json* find(std::string_view key) const;
  // Whether the key is there, null included.
  bool contains(std::string_view key) const { return object_->find(key) != nullptr; }

  // Without a fallback the key is required.
  int64_t integer(std::string_view key, int64_t min, int64_t max) const;
  int64_t integer(std::string_view key, int64_t min, int64_t max, int64_t fallback) const;
  double number(std::string_view key, double min, double max) const;
  double number(std::string_view key, double min, double max, double fallback) const;
  bool boolean(std::string_view key) const;
  bool boolean(std::string_view key, bool fallback) const;
  std::string string(std::string_view key, std::string_view fallback) const;
  // One integer or a list of them; empty when absent.
  std::vector<int64_t> integers(std::string_view key, int64_t min, int64_t max) const;
  std::vector<std::string> strings(std::string_view key) const;
  ConfigReader child(std::string_view key) const;

  // Throws Error when the key is there with any other value.
  void expect_text(std::string_view key, std::string_view value) const;
  void expect_flag(std::string_view key, bool value) const;
  void expect_number(std::string_view key, double value) const;
  // Throws Error unless the key is absent, null, false or an empty object.
  void expect_none(std::string_view key) const;
  // Throws Error for a key outside the list.
  void expect_only(std::initializer_list<std::string_view> keys) const;

  // "FILE: PREFIX.KEY"
  std::string where(std::string_view key) const;
  // Throws Error "FILE: KEY is VALUE, `what`", or "FILE: KEY is missing, `what`".
  [[noreturn]] void fail(std::string_view key, const std::string& what) const;

 private:
  const Json& required(std::string_view key, const std::string& what) const;

  std::string source_;
  const Json* object_;
  std::string prefix_;
};

// From rope_parameters or rope_scaling, and rope_theta in either place.
RopeConfig read_rope(const ConfigReader& config);

// Refuses keys of other models that change the arithmetic, unless they say that it is unchanged.
void expect_plain_arithmetic(const ConfigReader& config);

}  // namespace kdt
