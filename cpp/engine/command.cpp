#include "engine/command.h"

#include <cstring>
#include <type_traits>

#include "core/error.h"

namespace kdt {
namespace {

// The fields in one order, for both ways.
template <typename Fields, typename Visit>
void visit_fields(Fields& c, const Visit& visit) {
  visit(c.kind);
  visit(c.token_ids);
  visit(c.tokens);
  visit(c.parents);
  visit(c.request_id);
  visit(c.options.max_tokens);
  visit(c.options.stop_token_ids);
  visit(c.options.ignore_eos);
  visit(c.options.method);
  visit(c.options.tree_budget);
  visit(c.options.tree_topk);
  visit(c.options.draft_temperature);
  visit(c.options.temperature);
  visit(c.options.top_k);
  visit(c.options.top_p);
  visit(c.options.min_p);
  visit(c.options.seed);
}

template <typename T>
concept List = requires(T t) { t.resize(0); };

}  // namespace

std::string Command::encode() const {
  std::string bytes;
  visit_fields(*this, [&](const auto& field) {
    const auto append = [&](const void* data, size_t size) {
      bytes.append(static_cast<const char*>(data), size);
    };
    if constexpr (List<std::remove_cvref_t<decltype(field)>>) {
      const uint64_t count = field.size();
      append(&count, sizeof(count));
      append(field.data(), count * sizeof(field[0]));
    } else {
      append(&field, sizeof(field));
    }
  });
  return bytes;
}

Command Command::decode(const std::string& bytes) {
  Command command;
  size_t at = 0;
  const auto take = [&](void* data, uint64_t size) {
    KDT_CHECK(size <= bytes.size() - at, "a call of ", bytes.size(), " bytes is cut short");
    if (size > 0) std::memcpy(data, bytes.data() + at, size);
    at += size;
  };
  visit_fields(command, [&](auto& field) {
    if constexpr (List<std::remove_cvref_t<decltype(field)>>) {
      uint64_t count = 0;
      take(&count, sizeof(count));
      KDT_CHECK(count <= bytes.size(), "a call of ", bytes.size(), " bytes with a list of ", count);
      field.resize(count);
      take(field.data(), count * sizeof(field[0]));
    } else if constexpr (std::is_same_v<std::remove_cvref_t<decltype(field)>, bool>) {
      uint8_t byte = 0;
      take(&byte, sizeof(byte));
      KDT_CHECK(byte <= 1, "a call with a flag of ", static_cast<int>(byte));
      field = byte == 1;
    } else {
      take(&field, sizeof(field));
    }
  });
  KDT_CHECK(command.kind <= Kind::kClose, "a call of number ", static_cast<int>(command.kind));
  KDT_CHECK(at == bytes.size(), "a call of ", bytes.size(), " bytes, want ", at);
  return command;
}

CommandResult run_command(Engine& engine, const Command& c) {
  CommandResult result;
  switch (c.kind) {
    case Command::Kind::kAddRequest:
      result.request_id = engine.add_request(c.token_ids, c.options);
      return result;
    case Command::Kind::kStep:
      result.outputs = engine.step();
      return result;
    case Command::Kind::kAbort:
      result.was_there = engine.abort(c.request_id);
      return result;
    case Command::Kind::kLogits:
      result.logits = engine.logits(c.token_ids);
      return result;
    case Command::Kind::kTreeLogits:
      result.logits = engine.tree_logits(c.token_ids, c.tokens, c.parents);
      return result;
    case Command::Kind::kClose:
      return result;
  }
  throw Error(join("no call of number ", static_cast<int>(c.kind)));
}

}  // namespace kdt
