#include "engine/bench_rank.h"

#include <algorithm>

#include "backend/checks.h"
#include "core/clock.h"
#include "engine/recorded_passes.h"
#include "model/row_batch.h"
#include "model/target_model.h"
#include "parallel/worker_group.h"

namespace kdt {
namespace {

constexpr int64_t kMaxRows = kMaxTreeBudget + 1;
constexpr int64_t kChunk = 256;      // rows of a pass that fills the cache
constexpr int64_t kCacheBlock = 64;  // positions
constexpr int kWarmUps = RecordedPasses::kRuns + 1, kRuns = 9;
constexpr int kSums = 32;  // in a row

// Another's sums while `on`; else each rank goes on with its own part.
class SwitchedCommunicator final : public Communicator {
 public:
  explicit SwitchedCommunicator(Communicator& other) : other_(other) {}

  std::string describe() const override { return other_.describe(); }
  void all_reduce(const Tensor& x) override {
    ++calls;
    if (on) other_.all_reduce(x);
  }
  void all_gather(const Tensor& from, const Tensor& to) override { other_.all_gather(from, to); }

  bool on = true;
  int64_t calls = 0;

 private:
  Communicator& other_;
};

// What the ranks' threads work with; they share it, because one that is stuck may outlive a call.
struct Bench {
  std::vector<int64_t> rows;
  int64_t context = 0;
  std::vector<RankDevice> devices;
  std::vector<RankGroup*> groups;
  std::unique_ptr<Checkpoints> checkpoints;
  RankBench result;  // rank 0's thread writes it
};

template <typename Run>
double median_us(const Run& run) {
  std::vector<double> times(kRuns);
  for (int i = 0; i < kWarmUps; ++i) run();
  for (double& us : times) us = run();
  std::sort(times.begin(), times.end());
  return times[kRuns / 2];
}

// Work that ends in a sum, on all ranks: they end together, so the rank that begins last, whose
// time is the shortest, waits for nobody.
template <typename Timed>
double shortest_us(RankGroup& group, const Timed& timed) {
  group.barrier();
  const double us = timed();
  std::vector<double> all(group.size());
  group.all_gather(&us, sizeof(us), all.data());
  return *std::min_element(all.begin(), all.end());
}

class RankRun {
 public:
  RankRun(Bench& bench, int rank)
      : bench_(bench),
        group_(*bench.groups[rank]),
        backend_(make_backend(bench.devices[rank].device, bench.devices[rank].num_threads)),
        communicator_(backend_->make_communicator(group_)),
        sums_(*communicator_),
        shard_{rank, group_.size()},
        num_blocks_((bench.context + kMaxRows + kCacheBlock - 1) / kCacheBlock),
        model_({*backend_, shard_, &sums_}, bench.checkpoints->config, *bench.checkpoints->source,
               kMaxRows, bench.context + kMaxRows, {}) {
    const LoadReport report = bench_.checkpoints->load(*model_.take_plan(), &group_, nullptr);
    cache_ = model_.make_cache(num_blocks_, kCacheBlock);
    batch_ = std::make_unique<RowBatch>(*backend_, kMaxRows, 1, num_blocks_);
    passes_ = std::make_unique<RecordedPasses>(*backend_);
    values_ = backend_->allocate(DType::kFloat32, {kMaxRows, model_.config().hidden_size});
    backend_->fill_zero(values_.tensor);
    backend_->synchronize();
    // Taking memory may wait for a device on which another rank's sum waits for this one.
    group_.barrier();
    fill_cache();
    if (rank != 0) return;
    bench_.result.backend = backend_->info();
    bench_.result.communication = communicator_->describe();
    bench_.result.hidden_size = model_.config().hidden_size;
    bench_.result.load = report;
  }

  void measure() {
    for (const int64_t rows : bench_.rows) {
      RankTimes times{.rows = rows};
      set_tree(rows);
      sums_.on = false;
      for (int i = 0; i < kWarmUps; ++i) pass_us();  // all ranks record together
      group_.barrier();
      if (shard_.rank == 0) times.alone_us = median_us([&] { return pass_us(); });
      group_.barrier();
      sums_.on = true;
      times.ranks_us = median_us([&] { return shortest_us(group_, [&] { return pass_us(); }); });
      const Tensor x = values_.tensor.rows(0, rows);
      times.all_reduce_us = median_us([&] {
        return shortest_us(group_, [&] {
          const Clock clock;
          for (int i = 0; i < kSums; ++i) communicator_->all_reduce(x);
          backend_->synchronize();
          return clock.ms() * 1e3 / kSums;
        });
      });
      if (shard_.rank == 0) bench_.result.times.push_back(times);
    }
    if (shard_.rank != 0) return;
    bench_.result.num_all_reduces = calls_of_pass_;
  }

 private:
  // Of rank 0's part of the vocabulary: alone it has no other embeddings, and rows of zeros would
  // all be routed to the same experts.
  int32_t token(int64_t i) const { return static_cast<int32_t>(7919 * i % model_.vocab_local()); }

  void begin_batch(int64_t prefix_len) {
    std::vector<int32_t> blocks(num_blocks_);
    for (int64_t i = 0; i < num_blocks_; ++i) blocks[i] = static_cast<int32_t>(i);
    batch_->clear();
    batch_->begin_sequence(prefix_len, blocks);
  }

  void fill_cache() {
    for (int64_t begin = 0; begin < bench_.context; begin += kChunk) {
      std::vector<int32_t> tokens(std::min(kChunk, bench_.context - begin));
      for (size_t i = 0; i < tokens.size(); ++i) tokens[i] = token(begin + static_cast<int64_t>(i));
      begin_batch(begin);
      batch_->add_chain(tokens.data(), static_cast<int64_t>(tokens.size()), begin);
      batch_->upload();
      model_.forward(*batch_, *cache_);
      backend_->synchronize();
    }
  }

  // Each slot has two children, as long as there are rows.
  void set_tree(int64_t rows) {
    begin_batch(bench_.context);
    std::vector<int64_t> depths(rows);
    for (int64_t slot = 0; slot < rows; ++slot) {
      const int64_t parent = slot == 0 ? -1 : (slot - 1) / 2;
      depths[slot] = slot == 0 ? 0 : depths[parent] + 1;
      batch_->add_row(token(bench_.context + slot), bench_.context + depths[slot],
                      static_cast<int32_t>(parent));
    }
    batch_->upload();
    backend_->synchronize();
  }

  double pass_us() {
    const Clock clock;
    passes_->run({batch_->num_rows(), sums_.on ? 1 : 0}, [&] {
      const int64_t before = sums_.calls;
      model_.forward(*batch_, *cache_);
      calls_of_pass_ = sums_.calls - before;
    });
    backend_->synchronize();
    return clock.ms() * 1e3;
  }

  Bench& bench_;
  RankGroup& group_;
  std::unique_ptr<Backend> backend_;
  std::unique_ptr<Communicator> communicator_;
  SwitchedCommunicator sums_;
  const Shard shard_;
  const int64_t num_blocks_;
  TargetModel model_;
  std::unique_ptr<KvCache> cache_;
  std::unique_ptr<RowBatch> batch_;
  Buffer values_;
  int64_t calls_of_pass_ = 0;
  std::unique_ptr<RecordedPasses> passes_;
};

void run_rank(Bench& bench, int rank) {
  RankRun run(bench, rank);
  run.measure();
  // Nobody frees memory that another rank still writes to.
  bench.groups[rank]->barrier();
}

}  // namespace

RankBench bench_rank(const EngineOptions& options, const std::vector<int64_t>& rows,
                     int64_t context) {
  const int size = options.tensor_parallel_size;
  KDT_CHECK_ARGUMENT(size >= 2 && size <= kMaxRanks, "tensor_parallel_size is ", size,
                     "; want 2 to ", kMaxRanks);
  KDT_CHECK_ARGUMENT(!rows.empty(), "rows is empty");
  for (const int64_t n : rows)
    KDT_CHECK_ARGUMENT(n >= 1 && n <= kMaxRows, "rows has ", n, "; want 1 to ", kMaxRows);
  const auto bench = std::make_shared<Bench>();
  bench->rows = rows;
  bench->context = context;
  bench->devices = rank_devices(options.device, options.num_threads, size, 0, size);
  bench->checkpoints = std::make_unique<Checkpoints>(options, size);
  const int64_t most = bench->checkpoints->config.max_position_embeddings - kMaxRows;
  KDT_CHECK_ARGUMENT(context >= 0 && context <= most, "context is ", context, "; want 0 to ", most,
                     ", which leaves room for a tree");
  WorkerGroup workers(size, options.timeout_s);
  for (int i = 0; i < size; ++i) bench->groups.push_back(&workers.rank(i));
  workers.run([bench](int i) { run_rank(*bench, i); });
  return std::move(bench->result);
}

}  // namespace kdt
