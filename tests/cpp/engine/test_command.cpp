// Calls on their way between processes: what arrives is what was sent, or it is refused.
#include <cstring>

#include "check.h"
#include "engine/command.h"

namespace kdt::test {
namespace {

Command full() {
  Command c;
  c.kind = Command::Kind::kTreeLogits;
  c.token_ids = {1, -2, int64_t{1} << 40};
  c.tokens = {7};
  c.parents = {-1, 0};
  c.request_id = 12345678901;
  c.options = {.max_tokens = 9,
               .stop_token_ids = {3, 4},
               .ignore_eos = true,
               .method = "ddtree",
               .tree_budget = 60,
               .tree_topk = 8,
               .draft_temperature = 0.75,
               .temperature = 0.6,
               .top_k = 40,
               .top_p = 0.95,
               .min_p = 0.05,
               .seed = int64_t{1} << 62};
  return c;
}

KDT_TEST(what_was_sent_arrives) {
  for (const Command& sent : {full(), Command()}) {
    const Command got = Command::decode(sent.encode());
    EXPECT(got.kind == sent.kind);
    EXPECT(got.token_ids == sent.token_ids);
    EXPECT(got.tokens == sent.tokens);
    EXPECT(got.parents == sent.parents);
    EXPECT_EQ(got.request_id, sent.request_id);
    EXPECT_EQ(got.options.max_tokens, sent.options.max_tokens);
    EXPECT(got.options.stop_token_ids == sent.options.stop_token_ids);
    EXPECT_EQ(got.options.ignore_eos, sent.options.ignore_eos);
    EXPECT_EQ(got.options.method, sent.options.method);
    EXPECT_EQ(got.options.tree_budget, sent.options.tree_budget);
    EXPECT_EQ(got.options.tree_topk, sent.options.tree_topk);
    EXPECT_EQ(got.options.draft_temperature, sent.options.draft_temperature);
    EXPECT_EQ(got.options.temperature, sent.options.temperature);
    EXPECT_EQ(got.options.top_k, sent.options.top_k);
    EXPECT_EQ(got.options.top_p, sent.options.top_p);
    EXPECT_EQ(got.options.min_p, sent.options.min_p);
    EXPECT_EQ(got.options.seed, sent.options.seed);
  }
}

KDT_TEST(a_call_cut_short_anywhere_is_refused) {
  const std::string bytes = full().encode();
  for (size_t size = 0; size < bytes.size(); ++size)
    EXPECT_THROWS("a call of ", Command::decode(bytes.substr(0, size)));
  EXPECT_THROWS(join("a call of ", bytes.size() + 1, " bytes, want ", bytes.size()),
                Command::decode(bytes + "x"));
}

// The list of token_ids stands behind the kind.
KDT_TEST(a_list_longer_than_the_call_is_refused) {
  const std::string bytes = full().encode();
  for (const uint64_t count :
       {uint64_t{bytes.size()}, bytes.size() + uint64_t{1}, uint64_t{1} << 61, UINT64_MAX}) {
    std::string spoilt = bytes;
    std::memcpy(&spoilt[1], &count, sizeof(count));
    EXPECT_THROWS(count <= bytes.size() ? "is cut short" : join(" with a list of ", count),
                  Command::decode(spoilt));
  }
}

KDT_TEST(kinds_and_flags_that_are_none_are_refused) {
  const std::string bytes = full().encode();
  for (const int kind : {6, 7, 255}) {
    std::string spoilt = bytes;
    spoilt[0] = static_cast<char>(kind);
    EXPECT_THROWS(join("a call of number ", kind), Command::decode(spoilt));
  }
  // The flag is the only byte in which these differ.
  Command other = full();
  other.options.ignore_eos = false;
  const std::string with_false = other.encode();
  size_t at = 0;
  while (at < bytes.size() && bytes[at] == with_false[at]) ++at;
  KDT_CHECK(at < bytes.size(), "ignore_eos is not sent");
  for (const int flag : {2, 128, 255}) {
    std::string spoilt = bytes;
    spoilt[at] = static_cast<char>(flag);
    EXPECT_THROWS(join("a call with a flag of ", flag), Command::decode(spoilt));
  }
}

}  // namespace
}  // namespace kdt::test

KDT_TEST_MAIN
