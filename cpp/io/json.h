// JSON values of untrusted files. The parser library is included in json.cpp alone.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace kdt {

struct Json {
  using Array = std::vector<Json>;
  struct Member;
  using Object = std::vector<Member>;  // in the order of the text, no key twice

  // Integers are uint64_t, those with a minus sign int64_t; other numbers are double.
  std::variant<std::nullptr_t, bool, int64_t, uint64_t, double, std::string, Array, Object> value;

  template <typename T>
  const T* get_if() const;
  bool is_null() const;
  // nullptr when this is no object or has no such key.
  const Json* find(std::string_view key) const;
  // For messages: the value as JSON, cut after some 60 characters.
  std::string text() const;
};

struct Json::Member {
  std::string key;
  Json value;
};

template <typename T>
const T* Json::get_if() const {
  return std::get_if<T>(&value);
}

inline bool Json::is_null() const { return value.index() == 0; }

// Throws Error with `source` in front for anything that is not one JSON value in UTF-8, for a key
// twice in one object and for more than 127 levels.
Json parse_json(std::string_view text, const std::string& source);

}  // namespace kdt
