#include "io/read_plan.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <tuple>
#include <unordered_map>

#include "core/error.h"

namespace kdt {
namespace {

uint64_t align_up(uint64_t value, uint64_t to) { return (value + to - 1) / to * to; }

// All wanted tensors by file and offset, and each one's number in that order.
struct Sorted {
  std::vector<const NamedTensor*> tensors;
  std::unordered_map<const NamedTensor*, int64_t> number;

  explicit Sorted(const std::vector<StreamPart>& parts) {
    for (const StreamPart& part : parts) {
      for (const NamedTensor* tensor : part.tensors) number.emplace(tensor, 0);
    }
    for (const auto& [tensor, unused] : number) tensors.push_back(tensor);
    const auto place = [](const NamedTensor* t) {
      const SafetensorsView& view = t->second;
      return std::tuple(view.file == nullptr ? std::string() : view.file->path(), view.offset,
                        view.bytes, std::string_view(t->first));
    };
    std::sort(tensors.begin(), tensors.end(),
              [&](const NamedTensor* a, const NamedTensor* b) { return place(a) < place(b); });
    for (size_t i = 0; i < tensors.size(); ++i) number[tensors[i]] = static_cast<int64_t>(i);
  }
};

// Lays out the tensors of one batch, given by their numbers in ascending order, and cuts the reads.
void place_tensors(const Sorted& sorted, const std::vector<int64_t>& numbers, uint64_t read_bytes,
                   ReadPlan::Batch& batch, std::map<int64_t, uint64_t>& places) {
  for (size_t i = 0; i < numbers.size();) {
    const NamedTensor* first = sorted.tensors[numbers[i]];
    const SafetensorsView& begin = first->second;
    const uint64_t place =
        align_up(batch.bytes, ReadPlan::kBlock) + begin.offset % ReadPlan::kBlock;
    uint64_t end = begin.offset;
    size_t last = i;
    for (; last < numbers.size(); ++last) {
      const SafetensorsView& view = sorted.tensors[numbers[last]]->second;
      // Only neighbours, so that no read passes over what another batch wants.
      if (last > i && (numbers[last] != numbers[last - 1] + 1 || view.file != begin.file ||
                       view.offset < end || view.offset - end >= ReadPlan::kMaxGap))
        break;
      places[numbers[last]] = place + (view.offset - begin.offset);
      end = view.offset + view.bytes;
    }
    size_t tensor = i;  // the first that is in the read
    for (uint64_t at = begin.offset; at < end;) {
      const uint64_t next = std::min(end, at / ReadPlan::kBlock * ReadPlan::kBlock + read_bytes);
      const auto ends_before = [&](size_t t) {
        const SafetensorsView& view = sorted.tensors[numbers[t]]->second;
        return view.offset + view.bytes <= at;
      };
      while (tensor + 1 < last && ends_before(tensor)) ++tensor;
      batch.reads.push_back({begin.file, at, next - at, place + (at - begin.offset),
                             sorted.tensors[numbers[tensor]]});
      at = next;
    }
    batch.bytes = place + (end - begin.offset);
    i = last;
  }
}

}  // namespace

ReadPlan plan_reads(const std::vector<StreamPart>& parts, uint64_t batch_bytes,
                    uint64_t read_bytes) {
  const Sorted sorted(parts);
  ReadPlan plan;
  for (const NamedTensor* tensor : sorted.tensors) plan.wanted_bytes += tensor->second.bytes;
  const auto first_of = [&](int64_t part) {
    auto first = static_cast<int64_t>(sorted.tensors.size());
    for (const NamedTensor* tensor : parts[part].tensors)
      first = std::min(first, sorted.number.at(tensor));
    return first;
  };
  std::vector<int64_t> first(parts.size());
  for (size_t i = 0; i < parts.size(); ++i) first[i] = first_of(static_cast<int64_t>(i));
  plan.order.resize(parts.size());
  std::iota(plan.order.begin(), plan.order.end(), 0);
  std::stable_sort(plan.order.begin(), plan.order.end(),
                   [&](int64_t a, int64_t b) { return first[a] < first[b]; });

  plan.places.resize(parts.size());
  std::vector<int64_t> batch_of(sorted.tensors.size(), -1);
  const auto size = static_cast<int64_t>(parts.size());
  for (int64_t begin = 0; begin < size;) {
    ReadPlan::Batch batch;
    batch.begin = begin;
    std::vector<int64_t> numbers;
    uint64_t bytes = 0;
    int64_t end = begin;
    for (; end < size; ++end) {
      const StreamPart& part = parts[plan.order[end]];
      const bool same = end > begin && first[plan.order[end]] == first[plan.order[end - 1]];
      uint64_t more = part.extra_bytes;
      for (const NamedTensor* tensor : part.tensors) more += tensor->second.bytes;
      if (end > begin && !same && bytes + more > batch_bytes) break;
      bytes += same ? part.extra_bytes : more;
      for (const NamedTensor* tensor : part.tensors) {
        const int64_t number = sorted.number.at(tensor);
        const auto batch_number = static_cast<int64_t>(plan.batches.size());
        if (batch_of[number] == batch_number) continue;
        KDT_CHECK(batch_of[number] < 0, "tensor '", tensor->first,
                  "' is part of two weights that begin with others");
        batch_of[number] = batch_number;
        numbers.push_back(number);
      }
    }
    std::sort(numbers.begin(), numbers.end());
    std::map<int64_t, uint64_t> places;
    place_tensors(sorted, numbers, read_bytes, batch, places);
    for (int64_t i = begin; i < end; ++i) {
      const StreamPart& part = parts[plan.order[i]];
      ReadPlan::Place& place = plan.places[plan.order[i]];
      place.batch = static_cast<int64_t>(plan.batches.size());
      for (const NamedTensor* tensor : part.tensors)
        place.tensors.push_back(places.at(sorted.number.at(tensor)));
      place.extra = align_up(batch.bytes, 64);
      if (part.extra_bytes > 0) batch.bytes = place.extra + part.extra_bytes;
    }
    batch.end = begin = end;
    plan.batches.push_back(std::move(batch));
  }
  return plan;
}

}  // namespace kdt
