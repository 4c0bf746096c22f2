#include "model/loader.h"

#include <algorithm>
#include <chrono>

#include "model/fp8.h"

namespace kdt {
namespace {

using SteadyClock = std::chrono::steady_clock;

// Values that one task widens, whole blocks of rows.
constexpr int64_t kWidenedAtOnce = int64_t{4} << 20;

int64_t rows_at_once(int64_t columns) {
  return std::max<int64_t>(1, kWidenedAtOnce / std::max<int64_t>(columns, 1) / kFp8Block) *
         kFp8Block;
}

const NamedTensor* named(const TensorSource& source, const std::string& name) {
  const auto found = source.tensors().find(name);
  return found == source.tensors().end() ? nullptr : &*found;
}

// Ends a load that waits for a rank which takes nothing.
class Watch {
 public:
  Watch(const TensorStream& stream, RankGroup* group) : stream_(stream), group_(group) {}

  // True once the time-out has passed without a move, though the readers wait for the ranks.
  bool is_late() {
    if (group_ == nullptr) return false;
    const auto now = SteadyClock::now();
    if (stream_.moves() != moves_ || stream_.reading()) {
      moves_ = stream_.moves();
      since_ = now;
    }
    return std::chrono::duration<double>(now - since_).count() > group_->timeout_s();
  }

 private:
  const TensorStream& stream_;
  RankGroup* group_;
  uint64_t moves_ = 0;
  SteadyClock::time_point since_ = SteadyClock::now();
};

}  // namespace

Loader::Loader(int num_ranks, const StreamOptions& options)
    : num_ranks_(num_ranks), options_(options) {}

StreamPart Loader::stream_part(const LoadPlan& plan, const LoadPart& part,
                               std::vector<Module>& modules) const {
  const TensorSource& source = plan.source();
  StreamPart wanted;
  const auto add = [&](const std::string& name) {
    const NamedTensor* tensor = named(source, name);
    if (tensor == nullptr) return -1;
    wanted.tensors.push_back(tensor);
    return static_cast<int>(wanted.tensors.size()) - 1;
  };
  // What is widened: (module, first row).
  std::vector<std::pair<size_t, int64_t>> tasks;
  for (const std::string& name : part.modules) {
    const WeightSpec& spec = plan.spec(name);
    Module module;
    module.name = name;
    module.matrix.out_features = spec.out;
    module.matrix.in_features = spec.kind == WeightSpec::Kind::kVector ? 1 : spec.in;
    module.matrix.dtype = plan.dtype(name);
    if (module.matrix.dtype == DType::kInt32) {
      module.data = add(name + ".weight_packed");
      module.scale = add(name + ".weight_scale");
      module.shape = add(name + ".weight_shape");
    } else {
      module.data = add(spec.kind == WeightSpec::Kind::kVector ? name : name + ".weight");
    }
    if (wanted.tensors[module.data]->second.dtype == "F8_E4M3") {
      module.scale = add(name + ".weight_scale_inv");
      module.extra = static_cast<int64_t>(wanted.extra_bytes);
      wanted.extra_bytes += (spec.out * spec.in * 2 + 63) / 64 * 64;
      for (int64_t row = 0; row < spec.out; row += rows_at_once(spec.in))
        tasks.emplace_back(modules.size(), row);
    }
    modules.push_back(module);
  }
  if (tasks.empty()) return wanted;
  wanted.num_tasks = static_cast<int64_t>(tasks.size());
  wanted.finish = [tasks, modules, &source](const std::vector<const uint8_t*>& tensors,
                                            uint8_t* extra, int64_t task) {
    const auto& [index, begin] = tasks[task];
    const Module& m = modules[index];
    const int64_t rows = m.matrix.out_features, columns = m.matrix.in_features;
    auto* out = reinterpret_cast<uint16_t*>(extra + m.extra) + begin * columns;
    try {
      widen_fp8({tensors[m.data], tensors[m.scale], rows, columns}, begin,
                std::min(rows, begin + rows_at_once(columns)), out);
    } catch (const Error& error) {
      throw Error(join(source.name(), ": ", m.name, ".", error.what()));
    }
  };
  return wanted;
}

// The first rank's plan says what is read.
std::shared_ptr<Loader::Shared> Loader::begin(const LoadPlan& plan, int rank, int& index) {
  const std::lock_guard lock(mutex_);
  if (!shared_) {
    auto shared = std::make_shared<Shared>();
    shared->taken = std::make_unique<std::atomic<int64_t>[]>(num_ranks_);
    std::vector<StreamPart> wanted;
    for (const LoadItem& item : plan.items()) {
      for (const LoadPart& part : item.parts)
        wanted.push_back(stream_part(plan, part, shared->parts.emplace_back()));
    }
    shared->stream =
        std::make_unique<TensorStream>(plan.source(), std::move(wanted), num_ranks_, options_);
    shared_ = std::move(shared);
  }
  size_t part_index = 0;
  for (const LoadItem& item : plan.items()) {
    for (const LoadPart& part : item.parts) {
      const bool same =
          part_index < shared_->parts.size() &&
          std::ranges::equal(part.modules, shared_->parts[part_index], {}, {}, &Module::name);
      KDT_CHECK(same, "the ranks' plans differ at ", item.name);
      ++part_index;
    }
  }
  KDT_CHECK(part_index == shared_->parts.size(), "the ranks' plans differ in length");
  std::shared_ptr<Shared> shared = shared_;
  index = static_cast<int>(shared->ranks.size());
  shared->ranks.push_back(rank);
  // From here on it lives as long as a rank is at work.
  if (static_cast<int>(shared->ranks.size()) == num_ranks_) shared_.reset();
  return shared;
}

HostMatrix Loader::whole(const LoadPlan& plan, const Module& module,
                         const TensorStream::Bytes& bytes) const {
  if (module.shape >= 0) {
    const std::string tensor = module.name + ".weight_shape";
    const std::string fault = weight_shape_fault(
        tensor, *plan.source().find(tensor), bytes.tensors[module.shape], plan.spec(module.name));
    KDT_CHECK(fault.empty(), plan.source().name(), ": ", fault);
  }
  HostMatrix matrix = module.matrix;
  matrix.data = module.extra < 0 ? bytes.tensors[module.data] : bytes.extra + module.extra;
  if (matrix.dtype == DType::kInt32) matrix.scale = bytes.tensors[module.scale];
  return matrix;
}

void Loader::fill(LoadPlan& plan, Shared& shared, int index, RankGroup* group,
                  const LoadProgress& progress) const {
  TensorStream& stream = *shared.stream;
  const auto total = static_cast<int64_t>(plan.source().total_bytes());
  Watch watch(stream, group);
  const auto meanwhile = [&] {
    if (progress) progress(stream.bytes_read(), total);
    if (group == nullptr) return;
    const std::string ended = group->aborted();
    KDT_CHECK(ended.empty(), ended);
    if (!watch.is_late()) return;
    const auto* slowest = std::min_element(shared.taken.get(), shared.taken.get() + num_ranks_);
    throw Error(join("rank ", shared.ranks[slowest - shared.taken.get()],
                     " took no more weights for ", group->timeout_s(), " s"));
  };
  // Before the first value, so that what does not fit is known soon.
  for (LoadItem& item : plan.items()) plan.make(item);
  std::vector<LoadPart*> parts;
  for (LoadItem& item : plan.items()) {
    for (LoadPart& part : item.parts) parts.push_back(&part);
  }
  for (const int64_t part : stream.order()) {
    const TensorStream::Bytes bytes = stream.wait(part, meanwhile);
    std::vector<HostMatrix> modules;
    for (const Module& module : shared.parts[part]) modules.push_back(whole(plan, module, bytes));
    parts[part]->fill(modules);
    stream.done(part);
    ++shared.taken[index];
  }
  if (progress) progress(stream.bytes_read(), total);
}

LoadReport Loader::load(LoadPlan& plan, RankGroup* group, const LoadProgress& progress) {
  // A rank that does not get here is missed at once.
  if (group != nullptr) group->barrier();
  std::shared_ptr<Shared> shared;
  try {
    int index = 0;
    shared = begin(plan, group == nullptr ? 0 : group->rank(), index);
    fill(plan, *shared, index, group, progress);
  } catch (const std::exception& error) {
    if (group != nullptr) {
      // The others get the cause's own words: the readers', or this rank's with its name.
      std::string cause = shared ? shared->stream->failure() : "";
      if (cause.empty()) cause = group->aborted();
      if (cause.empty()) cause = join("rank ", group->rank(), ": ", error.what());
      group->abort(cause);
      if (shared) shared->stream->fail(cause);
    }
    throw;
  }
  return shared->stream->report();
}

LoadReport load_checkpoint(LoadPlan& plan, const LoadProgress& progress) {
  return Loader(1).load(plan, nullptr, progress);
}

}  // namespace kdt
