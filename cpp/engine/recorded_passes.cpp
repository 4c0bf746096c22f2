#include "engine/recorded_passes.h"

namespace kdt {

bool RecordedPasses::run(const Key& key, const std::function<void()>& body) {
  if (!active()) {
    body();
    return true;
  }
  auto found = by_key_.find(key);
  if (found == by_key_.end()) {
    passes_.emplace_front().key = key;
    found = by_key_.emplace(key, passes_.begin()).first;
    if (passes_.size() > kMost) {
      by_key_.erase(passes_.back().key);
      if (passes_.back().recording) retired_.push_back(std::move(passes_.back().recording));
      passes_.pop_back();
    }
  } else {
    passes_.splice(passes_.begin(), passes_, found->second);
  }
  Pass& pass = passes_.front();
  const bool replayed = pass.recording != nullptr;
  try {
    if (pass.runs < kRuns) {
      body();
      ++pass.runs;
      return false;
    }
    if (!replayed) {
      retired_.clear();
      pass.recording = backend_.record(body);
    }
  } catch (...) {  // it comes as new: the failure may have given back what its ops work in
    by_key_.erase(found);
    passes_.pop_front();
    throw;
  }
  pass.recording->run();
  return replayed;
}

}  // namespace kdt
