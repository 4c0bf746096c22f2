// Passes that cost the host one call when they come again.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <vector>

#include "backend/backend.h"

namespace kdt {

// Runs a pass's ops the first time it comes, records them the second time, and from then on runs
// the recording. To be destroyed before what the ops work with.
class RecordedPasses {
 public:
  static constexpr size_t kMost = 64;  // recordings; those used last stay

  // What decides the arguments of a pass's ops: which pass it is, then what its user likes.
  using Key = std::array<int64_t, 4>;

  explicit RecordedPasses(Backend& backend);

  // `body`: as of Backend::record. Returns whether this took what it will take again, and not more.
  bool run(const Key& key, const std::function<void()>& body);
  // Whether the back end records.
  bool active() const { return active_; }

 private:
  struct Pass {
    Key key{};
    std::unique_ptr<Recording> recording;  // null: it came once
  };

  Backend& backend_;
  const bool active_;
  std::list<Pass> passes_;  // used last first
  std::map<Key, std::list<Pass>::iterator> by_key_;
  std::vector<std::unique_ptr<Recording>> retired_;  // end where all ranks meet
};

}  // namespace kdt
