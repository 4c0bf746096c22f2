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

// Runs a pass's ops the first kRuns times it comes, then records them, and from then on runs the
// recording. To be destroyed before what the ops work with.
class RecordedPasses {
 public:
  // Recording costs about as much as a pass, so one that seldom comes is not recorded.
  static constexpr int kRuns = 2;
  static constexpr size_t kMost = 64;  // passes; those that came last are remembered

  // What decides the arguments of a pass's ops: which pass it is, and its shapes.
  using Key = std::array<int64_t, 3>;

  explicit RecordedPasses(Backend& backend) : backend_(backend) {}

  // `body`: as of Backend::record. False when the next time of this pass will be shorter: it was
  // not a recording that ran, though the back end records.
  bool run(const Key& key, const std::function<void()>& body);
  bool active() const { return backend_.records(); }

 private:
  struct Pass {
    Key key{};
    int runs = 0;
    std::unique_ptr<Recording> recording;
  };

  Backend& backend_;
  std::list<Pass> passes_;  // came last first
  std::map<Key, std::list<Pass>::iterator> by_key_;
  std::vector<std::unique_ptr<Recording>> retired_;  // end where all ranks meet
};

}  // namespace kdt
