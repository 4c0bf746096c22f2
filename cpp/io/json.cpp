#include "io/json.h"

#include <algorithm>
#include <charconv>
#include <cstddef>
#include <nlohmann/json.hpp>
#include <sstream>
#include <utility>

#include "core/error.h"
#include "io/utf8.h"

namespace kdt {
namespace {

// What the safetensors package allows; it also bounds the recursion of ~Json.
constexpr size_t kMaxDepth = 127;
constexpr size_t kMaxText = 60;

// Builds the value while the text is read, so that a key which comes twice is seen.
class Builder : public nlohmann::json_sax<nlohmann::json> {
 public:
  explicit Builder(const std::string& source) : source_(source) {}

  Json take() { return std::move(root_); }

  bool null() override { return add({nullptr}); }
  bool boolean(bool value) override { return add({value}); }
  bool number_integer(int64_t value) override { return add({value}); }
  bool number_unsigned(uint64_t value) override { return add({value}); }
  bool number_float(double value, const std::string&) override { return add({value}); }
  bool string(std::string& value) override { return add({std::move(value)}); }
  bool binary(nlohmann::json::binary_t&) override { return false; }  // never in text
  bool start_object(size_t) override { return open(Json::Object{}); }
  bool start_array(size_t) override { return open(Json::Array{}); }
  bool end_array() override { return close(); }

  bool key(std::string& value) override {
    std::get<Json::Object>(open_.back().value).push_back({std::move(value), {}});
    return true;
  }

  bool end_object() override {
    std::vector<std::string_view> keys;
    for (const auto& [key, value] : std::get<Json::Object>(open_.back().value)) keys.push_back(key);
    std::sort(keys.begin(), keys.end());
    const auto twice = std::adjacent_find(keys.begin(), keys.end());
    KDT_CHECK(twice == keys.end(), source_, ": duplicate key '", *twice, "'");
    return close();
  }

  bool parse_error(size_t position, const std::string&,
                   const nlohmann::json::exception& error) override {
    // The library quotes what it read last, which may be any bytes; a message is UTF-8.
    const std::string what = std::string(error.what()).substr(0, 200);
    throw Error(
        join(source_, ": not valid JSON: ", is_utf8(what) ? what : join("byte ", position)));
  }

 private:
  // Puts a finished value into the container that is open, or makes it the root.
  bool add(Json value) {
    if (open_.empty()) {
      root_ = std::move(value);
    } else if (auto* array = std::get_if<Json::Array>(&open_.back().value)) {
      array->push_back(std::move(value));
    } else {
      std::get<Json::Object>(open_.back().value).back().value = std::move(value);
    }
    return true;
  }

  template <typename Container>
  bool open(Container container) {
    KDT_CHECK(open_.size() < kMaxDepth, source_, ": JSON with more than ", kMaxDepth, " levels");
    open_.push_back({std::move(container)});
    return true;
  }

  bool close() {
    Json value = std::move(open_.back());
    open_.pop_back();
    return add(std::move(value));
  }

  const std::string& source_;
  Json root_;
  std::vector<Json> open_;  // the containers around the place in the text, outermost first
};

// Shortest digits that read back as the same number, and never those of an integer.
std::string number_text(double value) {
  char buffer[32];
  std::string text(buffer, std::to_chars(buffer, buffer + sizeof(buffer), value).ptr);
  return text.find_first_of(".e") == text.npos ? text + ".0" : text;
}

void print(std::ostringstream& out, const Json& json) {
  if (out.tellp() > static_cast<std::streamoff>(kMaxText)) return;
  if (const auto* array = json.get_if<Json::Array>()) {
    const char* separator = "[";
    for (const Json& item : *array) {
      if (out.tellp() > static_cast<std::streamoff>(kMaxText)) return;
      out << std::exchange(separator, ", ");
      print(out, item);
    }
    out << (array->empty() ? "[]" : "]");
  } else if (const auto* object = json.get_if<Json::Object>()) {
    const char* separator = "{";
    for (const auto& [key, value] : *object) {
      if (out.tellp() > static_cast<std::streamoff>(kMaxText)) return;
      out << std::exchange(separator, ", ") << '"' << key << "\": ";
      print(out, value);
    }
    out << (object->empty() ? "{}" : "}");
  } else if (const auto* text = json.get_if<std::string>()) {
    out << '"' << *text << '"';
  } else if (const auto* flag = json.get_if<bool>()) {
    out << (*flag ? "true" : "false");
  } else if (const auto* negative = json.get_if<int64_t>()) {
    out << *negative;
  } else if (const auto* integer = json.get_if<uint64_t>()) {
    out << *integer;
  } else if (const auto* number = json.get_if<double>()) {
    out << number_text(*number);
  } else {
    out << "null";
  }
}

}  // namespace

const Json* Json::find(std::string_view key) const {
  const auto* object = get_if<Object>();
  if (object == nullptr) return nullptr;
  for (const auto& [name, value] : *object) {
    if (name == key) return &value;
  }
  return nullptr;
}

std::string Json::text() const {
  std::ostringstream out;
  print(out, *this);
  std::string text = out.str();
  if (text.size() <= kMaxText) return text;
  size_t end = kMaxText;
  while ((text[end] & 0xC0) == 0x80) --end;  // not inside a UTF-8 character
  return text.substr(0, end) + "...";
}

Json parse_json(std::string_view text, const std::string& source) {
  // The library skips a byte order mark and takes a zero byte for the end of the text.
  KDT_CHECK(!text.starts_with("\xEF\xBB\xBF"), source,
            ": not valid JSON: it starts with a byte order mark");
  KDT_CHECK(text.find('\0') == text.npos, source, ": not valid JSON: a zero byte at ",
            text.find('\0'));
  Builder builder(source);
  nlohmann::json::sax_parse(text.begin(), text.end(), &builder);
  return builder.take();
}

}  // namespace kdt
