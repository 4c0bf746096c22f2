#include "engine/shard.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <memory>
#include <random>
#include <sstream>
#include <stdexcept>
#include <vector>

#include "engine/checkpoints.h"
#include "model/draft_model.h"
#include "model/loader.h"
#include "model/shard_cache.h"
#include "model/target_model.h"

namespace kdt {
namespace {

namespace fs = std::filesystem;

constexpr uint64_t kMaxCopiedBytes = uint64_t{256} << 20;  // of a file that is no weights
constexpr uint64_t kSpareBytes = uint64_t{64} << 20;       // left free on the disk

std::string gigabytes(uint64_t bytes) {
  std::ostringstream out;
  out.precision(3);
  out << static_cast<double>(bytes) / 1e9 << " GB (" << bytes << " bytes)";
  return out.str();
}

bool is_rank_file_name(const std::string& name) {
  int rank = 0, size = 0;
  return std::sscanf(name.c_str(), "rank-%4d-of-%4d.kdts", &rank, &size) == 2 &&
         name == rank_file_name(rank, size);
}

// Whether a file of this name is copied into a cache.
bool is_copied(const std::string& name) {
  return !name.ends_with(".safetensors") && !name.ends_with(".safetensors.index.json");
}

// What a killed writer of a checkpoint's cache left in a folder; throws std::invalid_argument for
// anything else, because it is somebody's.
std::vector<fs::path> leftovers(const fs::path& folder, const std::string& model,
                                const std::string& drafter, const fs::path& out) {
  std::vector<fs::path> found, copies;
  bool has_ranks = false;
  const auto refuse = [&](const fs::path& path) {
    throw std::invalid_argument(join("out is ", out.string(), ", but ", folder.string(), " holds ",
                                     path.filename().string(),
                                     ", which is not of a kdtree shard that was killed"));
  };
  for (const fs::directory_entry& entry : fs::directory_iterator(folder)) {
    const std::string name = entry.path().filename().string();
    const fs::file_type type = entry.symlink_status().type();
    if (type == fs::file_type::directory && name == "drafter" && !drafter.empty()) {
      for (fs::path& path : leftovers(entry.path(), drafter, "", out))
        found.push_back(std::move(path));
    } else if (type == fs::file_type::regular && is_rank_file_name(name)) {
      has_ranks = true;
    } else if (type == fs::file_type::regular && is_copied(name) &&
               ((name.starts_with("kdtree_") && name.ends_with(".json")) ||
                fs::is_regular_file(fs::path(model) / name))) {
      copies.push_back(entry.path());
    } else {
      refuse(entry.path());
    }
    found.push_back(entry.path());
  }
  // The ranks' files are made first.
  if (!has_ranks && !copies.empty()) refuse(copies.front());
  return found;
}

// A folder beside `out` that becomes it, or is removed with all it holds. Two processes cannot have
// the same; what a killed one left is removed.
class PartialFolder {
 public:
  explicit PartialFolder(const ShardOptions& options)
      : out_(fs::path(options.out).lexically_normal()) {
    const std::string& out = options.out;
    if (!out_.has_filename()) out_ = out_.parent_path();  // "DIR/"
    std::error_code error;
    KDT_CHECK_ARGUMENT(out_.has_filename() && out_ != "." && out_ != "..", "out is '", out,
                       "'; want a folder's name");
    KDT_CHECK_ARGUMENT(!fs::exists(fs::symlink_status(out_, error)) ||
                           (fs::is_directory(fs::symlink_status(out_, error)) &&
                            fs::is_empty(out_, error) && !error),
                       "out is ", out_.string(), ", which is there already: name a new folder");
    const fs::path parent = out_.parent_path();
    KDT_CHECK_ARGUMENT(parent.empty() || fs::is_directory(parent, error), "out is ", out_.string(),
                       ": there is no folder ", parent.string());
    path_ = out_;
    path_ += ".partial";
    fs::create_directory(path_, error);
    KDT_CHECK(!error, path_.string(), ": cannot create: ", error.message());
    fd_ = open(path_.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    KDT_CHECK(fd_ >= 0, path_.string(), ": cannot open: ", std::strerror(errno));
    if (flock(fd_, LOCK_EX | LOCK_NB) != 0) {
      close(fd_);
      throw Error(join(path_.string(), ": another kdtree shard is writing it"));
    }
    try {
      for (const fs::path& left : leftovers(path_, options.model, options.drafter, out_))
        fs::remove(left);
    } catch (...) {
      close(fd_);
      throw;
    }
  }
  ~PartialFolder() {
    std::error_code ignored;
    if (!published_) fs::remove_all(path_, ignored);
    close(fd_);
  }
  PartialFolder(const PartialFolder&) = delete;

  std::string path() const { return path_.string(); }

  void publish() {
    sync_tree(path_);
    std::error_code error;
    fs::rename(path_, out_, error);
    KDT_CHECK(!error, out_.string(), ": cannot give ", path_.string(),
              " this name: ", error.message());
    published_ = true;
    sync(out_.parent_path().empty() ? fs::path(".") : out_.parent_path());
  }

 private:
  static void sync(const fs::path& path) {
    const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
    const bool done = fd >= 0 && fsync(fd) == 0;
    const int error = errno;
    if (fd >= 0) close(fd);
    // Some file systems cannot sync a folder.
    KDT_CHECK(done || error == EINVAL || error == EACCES, path.string(),
              ": cannot write: ", std::strerror(error));
  }
  static void sync_tree(const fs::path& folder) {
    for (const fs::directory_entry& entry : fs::recursive_directory_iterator(folder))
      sync(entry.path());
    sync(folder);
  }

  fs::path out_, path_;
  int fd_ = -1;
  bool published_ = false;
};

// Files of a checkpoint's folder that are no weights: config.json, the tokenizer's and so on.
std::vector<fs::path> other_files(const std::string& folder) {
  std::vector<fs::path> files;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder)) {
    const std::string name = entry.path().filename().string();
    if (entry.is_regular_file() && is_copied(name) && entry.file_size() <= kMaxCopiedBytes)
      files.push_back(entry.path());
  }
  return files;
}

uint64_t bytes_of(const std::vector<fs::path>& files) {
  uint64_t bytes = 0;
  for (const fs::path& file : files) bytes += fs::file_size(file);
  return bytes;
}

// One model's plans, all ranks' on one back end.
struct Job {
  std::string from;  // the checkpoint
  std::string to;    // the folder to write
  const TensorSource* source = nullptr;
  std::vector<std::shared_ptr<void>> models;  // what the plans fill
  std::vector<std::unique_ptr<LoadPlan>> plans;
  std::vector<std::vector<RankItem>> items;  // by rank
  std::vector<fs::path> others;
  ShardTerms terms;

  uint64_t rank_bytes() const {
    uint64_t bytes = 0;
    for (const auto& of_rank : items) bytes += rank_file_bytes(of_rank);
    return bytes;
  }
};

// Writes all ranks' files while the checkpoint is read once. Each item has memory from its first
// part to its last. `wrote` gets the bytes that have been added. Returns the bytes read.
int64_t write_ranks(Job& job, const std::function<void(uint64_t)>& wrote) {
  const int size = job.terms.size;
  std::vector<RankFileWriter> writers;
  std::vector<std::vector<LoadItem>> items(size);  // by rank
  for (int rank = 0; rank < size; ++rank) {
    writers.emplace_back(job.to + "/" + rank_file_name(rank, size), job.items[rank]);
    items[rank] = std::move(job.plans[rank]->items());
  }
  // Rank 0's plan is read, with items that stand for those of all ranks.
  LoadPlan& plan = *job.plans[0];
  plan.items().clear();
  std::vector<size_t> filled(items[0].size());
  for (size_t i = 0; i < items[0].size(); ++i) {
    LoadItem all{items[0][i].name, [] {}, {}, [] { return std::vector<Tensor>(); }, [] {}};
    const size_t parts = items[0][i].parts.size();
    for (size_t part = 0; part < parts; ++part) {
      all.parts.push_back({items[0][i].parts[part].modules, [&, i, part, parts](const auto& whole) {
                             for (int rank = 0; rank < size; ++rank) {
                               if (filled[i] == 0) job.plans[rank]->make(items[rank][i]);
                               items[rank][i].parts[part].fill(whole);
                             }
                             if (++filled[i] < parts) return;
                             for (int rank = 0; rank < size; ++rank) {
                               LoadItem& item = items[rank][i];
                               writers[rank].write(i, plan.backend(), item.memory());
                               item.drop();
                               for (const RankPiece& piece : job.items[rank][i].pieces)
                                 wrote(piece.bytes);
                             }
                           }});
    }
    plan.items().push_back(std::move(all));
  }
  const int64_t read = load_checkpoint(plan, {}).bytes;
  for (int rank = 0; rank < size; ++rank) {
    writers[rank].finish(job.terms, rank);
    // The table and what lies between the pieces.
    uint64_t rest = rank_file_bytes(job.items[rank]);
    for (const RankItem& item : job.items[rank])
      for (const RankPiece& piece : item.pieces) rest -= piece.bytes;
    wrote(rest);
  }
  return read;
}

int64_t write_job(Job& job, const std::function<void(uint64_t)>& wrote) {
  const int64_t read = write_ranks(job, wrote);
  for (const fs::path& file : job.others) {
    std::error_code error;
    fs::copy_file(file, fs::path(job.to) / file.filename(), error);
    KDT_CHECK(!error, job.to, "/", file.filename().string(), ": cannot copy ", file.string(), ": ",
              error.message());
  }
  std::vector<uint64_t> rank_bytes;
  for (const auto& of_rank : job.items) rank_bytes.push_back(rank_file_bytes(of_rank));
  write_shards_file(job.to, job.terms, fs::absolute(job.from).lexically_normal().string(),
                    *job.source, rank_bytes);
  KDT_CHECK(hash_checkpoint(job.from) == job.terms.source_hash, job.from,
            ": changed while it was read");
  return read;
}

}  // namespace

ShardSummary shard_checkpoint(const ShardOptions& options) {
  const int size = options.tensor_parallel_size;
  check_ranks(size, options.expert_parallel);
  for (const std::string* folder : {&options.model, &options.drafter}) {
    KDT_CHECK_ARGUMENT(folder->empty() || !is_shard_cache(*folder), *folder,
                       " is a pre-sharded cache already");
  }
  PartialFolder folder(options);
  EngineOptions engine;
  engine.model = options.model;
  engine.drafter = options.drafter;
  engine.tensor_parallel_size = size;
  engine.expert_parallel = options.expert_parallel;
  const Checkpoints checkpoints(engine);
  const std::unique_ptr<Backend> backend = make_backend(options.device, options.num_threads);
  const std::string layout = backend->weight_layout();
  KDT_CHECK_ARGUMENT(!layout.empty(), "device is '", options.device,
                     "', which has no weight layout of its own; want one back end alone");

  std::vector<Job> jobs;
  uint64_t needed = kSpareBytes;
  const auto add = [&](const std::string& from, const std::string& to, const TensorSource& source,
                       const auto& make_model) {
    Job& job = jobs.emplace_back();
    job.from = from;
    job.to = to;
    job.source = &source;
    job.terms = {layout, size, options.expert_parallel, hash_checkpoint(from),
                 std::random_device()() | uint64_t{std::random_device()()} << 32};
    for (int rank = 0; rank < size; ++rank) {
      const RankContext ranks{*backend, {rank, size, options.expert_parallel}};
      auto model = make_model(ranks);
      job.plans.push_back(model->take_plan());
      job.models.push_back(std::move(model));
      job.items.push_back(rank_items(*job.plans.back()));
    }
    job.others = other_files(from);
    // The list of tensors has some 200 bytes for each.
    needed += job.rank_bytes() + bytes_of(job.others) + source.tensors().size() * 256;
  };
  // For the weights alone, so for one row of one position.
  add(options.model, folder.path(), *checkpoints.source, [&](const RankContext& ranks) {
    return std::make_shared<TargetModel>(ranks, checkpoints.config, *checkpoints.source, 1, 1,
                                         std::vector<int64_t>());
  });
  if (checkpoints.draft_source) {
    add(options.drafter, folder.path() + "/drafter", *checkpoints.draft_source,
        [&](const RankContext& ranks) {
          return std::make_shared<DraftModel>(ranks, checkpoints.draft_config,
                                              *checkpoints.draft_source, 1, 1, 1);
        });
  }
  const fs::space_info space = fs::space(folder.path());
  KDT_CHECK(space.available >= needed, options.out, ": needs ", gigabytes(needed), " for ", size,
            " ranks, only ", gigabytes(space.available), " are free on its disk");

  ShardSummary summary{.layout = layout};
  for (const Job& job : jobs) {
    summary.written_bytes += static_cast<int64_t>(job.rank_bytes());
  }
  int64_t done = 0;
  for (Job& job : jobs) {
    fs::create_directories(job.to);
    summary.read_bytes += write_job(job, [&](uint64_t bytes) {
      done += static_cast<int64_t>(bytes);
      if (options.progress) options.progress(done, summary.written_bytes);
    });
  }
  folder.publish();
  return summary;
}

}  // namespace kdt
