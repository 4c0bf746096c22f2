#include "check.h"
#include "io/json.h"
#include "io/utf8.h"

using kdt::Json;
using kdt::parse_json;

namespace {

Json parse(std::string_view text) { return parse_json(text, "file"); }

std::string nested(size_t levels) { return std::string(levels, '[') + std::string(levels, ']'); }

}  // namespace

KDT_TEST(reads_each_kind_of_value) {
  const Json json =
      parse(R"( {"a": [null, true, -5, 18446744073709551615, 1.5e2, "x\u00e9"], "b": {}} )");
  const auto& items = *json.find("a")->get_if<Json::Array>();
  EXPECT(items[0].is_null());
  EXPECT(*items[1].get_if<bool>());
  EXPECT_EQ(*items[2].get_if<int64_t>(), -5);
  EXPECT_EQ(*items[3].get_if<uint64_t>(), UINT64_MAX);
  EXPECT_EQ(*items[4].get_if<double>(), 150.0);
  EXPECT_EQ(*items[5].get_if<std::string>(), "x\xc3\xa9");
  EXPECT(json.find("b")->get_if<Json::Object>()->empty());
  EXPECT(json.find("c") == nullptr);
  EXPECT(json.find("a")->find("b") == nullptr);
}

KDT_TEST(keeps_the_order_of_keys) {
  const Json json = parse(R"({"z": 1, "a": 2})");
  const auto& members = *json.get_if<Json::Object>();
  EXPECT_EQ(members[0].key, "z");
  EXPECT_EQ(members[1].key, "a");
}

KDT_TEST(refuses_a_key_twice_in_one_object) {
  EXPECT_THROWS("file: duplicate key 'a'", parse(R"({"a": 1, "b": 2, "a": 1})"));
  EXPECT_THROWS("file: duplicate key 'a'", parse(R"([{"x": {"a": 1, "\u0061": 2}}])"));
  EXPECT(!parse(R"([{"a": 1}, {"a": 1, "b": {"a": 1}}])").is_null());
}

KDT_TEST(refuses_what_is_not_one_json_value) {
  for (const std::string& text :
       {std::string(""), std::string("{"), std::string("{}x"), std::string("{} {}"),
        std::string("{\"a\":1,}"), std::string("[1 2]"), std::string("{'a':1}"), std::string("01"),
        std::string("1e400"), std::string("nul"), std::string("\"\x01\""),
        std::string("\"\\ud800\""), std::string("\"\xff\""), std::string("\"\xed\xa0\x80\""),
        std::string("{}\f"), std::string("{}/**/"), std::string("NaN"),
        std::string("\xEF\xBB\xBF{}"), std::string("{}\0", 3)}) {
    EXPECT_THROWS("file: not valid JSON", parse(text));
  }
}

KDT_TEST(a_message_is_utf8_whatever_the_text_is) {
  for (int byte = 1; byte < 256; ++byte) {
    for (const char* before : {"", "{\"", "{\"a\": 12"}) {
      try {
        parse(std::string(before) + static_cast<char>(byte) + "\xff");
      } catch (const std::exception& error) {
        EXPECT(kdt::is_utf8(error.what()));
      }
    }
  }
}

KDT_TEST(refuses_more_than_127_levels) {
  EXPECT(!parse(nested(127)).is_null());
  EXPECT_THROWS("more than 127 levels", parse(nested(128)));
  EXPECT_THROWS("more than 127 levels", parse(std::string(1000000, '[')));
}

KDT_TEST(prints_a_value_for_a_message) {
  EXPECT_EQ(parse(R"({"a": [1, -2, null, true, "x", {}, [], 0.5, 2.0]})").text(),
            R"({"a": [1, -2, null, true, "x", {}, [], 0.5, 2.0]})");
  const std::string cut =
      parse("\"" + std::string(59, 'x') + "\xc3\xa9" + std::string(100, 'y') + "\"").text();
  EXPECT(cut.ends_with("..."));
  EXPECT(kdt::is_utf8(cut));
  EXPECT(parse("[" + std::string(1000, '[').substr(0, 100) + std::string(100, ']') + "]")
             .text()
             .size() <= 64);
}

KDT_TEST(utf8_is_checked_as_the_standard_says) {
  for (const char* good : {"", "a", "\xc3\xa9", "\xe2\x82\xac", "\xf0\x9f\x98\x80", "\xed\x9f\xbf",
                           "\xf4\x8f\xbf\xbf"}) {
    EXPECT(kdt::is_utf8(good));
  }
  for (const char* bad : {"\x80", "\xc0\xaf", "\xc1\xbf", "\xe0\x9f\xbf", "\xed\xa0\x80",
                          "\xf0\x8f\xbf\xbf", "\xf4\x90\x80\x80", "\xf5\x80\x80\x80", "\xff",
                          "\xc3", "\xe2\x82", "\xf0\x9f\x98", "\xe2\x28\xa1", "a\xc3("}) {
    EXPECT(!kdt::is_utf8(bad));
  }
}

KDT_TEST_MAIN
