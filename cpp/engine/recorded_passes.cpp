#include "engine/recorded_passes.h"

namespace kdt {

RecordedPasses::RecordedPasses(Backend& backend)
    : backend_(backend), active_(backend.record([] {}) != nullptr) {}

bool RecordedPasses::run(const Key& key, const std::function<void()>& body) {
  if (!active_) {
    body();
    return true;
  }
  const auto found = by_key_.find(key);
  if (found == by_key_.end()) {
    body();
    passes_.push_front({key, nullptr});
    by_key_[key] = passes_.begin();
    if (passes_.size() > kMost) {
      by_key_.erase(passes_.back().key);
      retired_.push_back(std::move(passes_.back().recording));
      passes_.pop_back();
    }
    return false;
  }
  passes_.splice(passes_.begin(), passes_, found->second);
  Pass& pass = passes_.front();
  const bool recorded = pass.recording != nullptr;
  if (!recorded) {
    retired_.clear();
    try {
      pass.recording = backend_.record(body);
    } catch (...) {  // it comes as new: the failure may have given back what its ops work in
      by_key_.erase(found);
      passes_.pop_front();
      throw;
    }
  }
  pass.recording->run();
  return recorded;
}

}  // namespace kdt
