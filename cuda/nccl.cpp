#include "nccl.h"

#include <dlfcn.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <vector>

#include "cuda_backend.h"
#include "kernels/all_reduce.h"

namespace kdt::cuda {
namespace {

// What is used of NCCL's interface, the same in all of its versions 2.
struct UniqueId {
  char internal[128];
};
constexpr int kSuccess = 0, kInProgress = 7;
constexpr int kUint8 = 1, kFloat32 = 7;

struct Nccl {
  int (*get_version)(int*);
  int (*get_unique_id)(UniqueId*);
  int (*comm_init_rank)(ncclComm**, int, UniqueId, int);
  int (*comm_destroy)(ncclComm*);
  int (*comm_abort)(ncclComm*);
  int (*comm_get_async_error)(ncclComm*, int*);
  int (*all_gather)(const void*, void*, size_t, int, ncclComm*, cudaStream_t);
  int (*send)(const void*, size_t, int, int, ncclComm*, cudaStream_t);
  int (*receive)(void*, size_t, int, int, ncclComm*, cudaStream_t);
  int (*group_start)();
  int (*group_end)();
  const char* (*error_string)(int);
};

std::mutex& path_mutex() {
  static std::mutex mutex;
  return mutex;
}
std::string& library_path() {
  static std::string path;
  return path;
}

template <typename Function>
void find(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  KDT_CHECK(function != nullptr, "nccl: the library lacks ", name);
}

void* open_library() {
  const char* variable = std::getenv("KDTREE_NCCL_LIBRARY");
  std::vector<std::string> names;
  if (variable != nullptr && *variable != '\0') {
    names = {variable};  // asked for, so nothing else will do
  } else {
    const std::lock_guard lock(path_mutex());
    if (!library_path().empty()) names.push_back(library_path());
    names.push_back("libnccl.so.2");
  }
  std::string tried;
  for (const std::string& name : names) {
    if (void* library = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL)) return library;
    const char* why = dlerror();
    tried += join(tried.empty() ? "" : "; ", why == nullptr ? name : why);
  }
  throw Error(join("nccl: the library was not found (", tried,
                   "); install it with `pip install kdtree-engine[nccl]`, or name libnccl.so.2 in "
                   "KDTREE_NCCL_LIBRARY"));
}

// Loaded once; a failure is tried again by the next call.
const Nccl& nccl() {
  static const Nccl functions = [] {
#ifdef KDT_EMULATOR
    throw Error("nccl: the emulator has none");
#endif
    // We never ask NCCL for sums on the NVLink switch (they are not in rank order), but it would
    // set up memory for them when a group is made.
    setenv("NCCL_NVLS_ENABLE", "0", 0);
    void* const library = open_library();
    Nccl f{};
    find(library, "ncclGetVersion", f.get_version);
    find(library, "ncclGetUniqueId", f.get_unique_id);
    find(library, "ncclCommInitRank", f.comm_init_rank);
    find(library, "ncclCommDestroy", f.comm_destroy);
    find(library, "ncclCommAbort", f.comm_abort);
    find(library, "ncclCommGetAsyncError", f.comm_get_async_error);
    find(library, "ncclAllGather", f.all_gather);
    find(library, "ncclSend", f.send);
    find(library, "ncclRecv", f.receive);
    find(library, "ncclGroupStart", f.group_start);
    find(library, "ncclGroupEnd", f.group_end);
    find(library, "ncclGetErrorString", f.error_string);
    return f;
  }();
  return functions;
}

void check(int status, const char* what) {
  KDT_CHECK(status == kSuccess, "nccl: ", nccl().error_string(status), " (", status, ") from ",
            what);
}

// Above this many bytes each rank adds up a range only: more steps, but 2 (size - 1) / size times
// the message moves instead of size - 1 times.
constexpr int64_t kWholeBytes = 256 << 10;

}  // namespace

void set_nccl_library(const std::string& path) {
  const std::lock_guard lock(path_mutex());
  library_path() = path;
}

int nccl_version() {
  int version = 0;
  check(nccl().get_version(&version), "ncclGetVersion");
  return version;
}

NcclRanks::NcclRanks(CudaBackend& backend, RankGroup& group) : backend_(backend), group_(group) {
  KDT_CUDA_CHECK(cudaSetDevice(backend.device()));
  // All ranks know whether all have the library before any waits in it for the others.
  std::string fault;
  UniqueId id{};
  try {
    if (group.rank() == 0) check(nccl().get_unique_id(&id), "ncclGetUniqueId");
    nccl();
  } catch (const Error& error) {
    fault = error.what();
  }
  const char mine = fault.empty() ? 1 : 0;
  std::vector<char> all(group.size());
  group.all_gather(&mine, 1, all.data());
  KDT_CHECK(fault.empty(), fault);
  for (int rank = 0; rank < group.size(); ++rank)
    KDT_CHECK(all[rank] == 1, "nccl: rank ", rank, " has no NCCL");
  group.broadcast(&id, sizeof(id));
  check(nccl().comm_init_rank(&comm_, group.size(), id, group.rank()), "ncclCommInitRank");
  try {
    KDT_CUDA_CHECK(
        cudaHostAlloc(reinterpret_cast<void**>(&progress_), sizeof(uint64_t), cudaHostAllocMapped));
    *progress_ = 0;
    KDT_CUDA_CHECK(
        cudaHostGetDevicePointer(reinterpret_cast<void**>(&device_progress_), progress_, 0));
    if (group.size() > 1) watchdog_ = std::thread([this] { watch(); });
  } catch (...) {
    stop();  // waits for no other rank
    static_cast<void>(cudaFreeHost(progress_));
    throw;
  }
}

NcclRanks::~NcclRanks() {
  if (watchdog_.joinable()) {
    {
      const std::lock_guard lock(mutex_);
      ending_ = true;
    }
    wake_.notify_all();
    watchdog_.join();
  }
  static_cast<void>(cudaSetDevice(backend_.device()));
  if (!stopped_ && !group_.aborted().empty()) stop();
  static_cast<void>(cudaStreamSynchronize(backend_.stream()));
  if (!stopped_) static_cast<void>(nccl().comm_destroy(comm_));
  static_cast<void>(cudaFreeHost(progress_));
}

void NcclRanks::check_open() const {
  if (stopped_) throw Error(join("nccl: the group has ended: ", group_.aborted()));
}

void NcclRanks::started() {
  check_open();
  begin_wait();
}

void NcclRanks::begin_wait() {
  const std::lock_guard lock(mutex_);
  if (!busy_) since_ = Clock();
  busy_ = true;
}

void NcclRanks::end_wait() {
  const std::lock_guard lock(mutex_);
  busy_ = false;
}

void NcclRanks::add_up(const float* parts, float* out, int64_t count) {
  launch_ordered_sum({.parts = parts,
                      .out = out,
                      .num_parts = group_.size(),
                      .count = count,
                      .progress = device_progress_},
                     backend_.stream());
}

void NcclRanks::all_reduce(float* x, int64_t count) {
  started();
  const int64_t size = group_.size();
  const int64_t range = count * 4 > kWholeBytes && size > 1 ? count / size : 0;
  const int64_t rest = count - range * size;
  const int64_t needed = std::max(range, rest) * size * 4;
  if (needed > parts_bytes_) {
    parts_.reset();
    parts_bytes_ = 0;
    parts_ = backend_.stream_memory(needed);
    parts_bytes_ = needed;
  }
  backend_.keep(parts_);
  if (range > 0) reduce_ranges(x, range);
  if (rest == 0) return;
  float* const tail = x + range * size;
  check(nccl().all_gather(tail, parts_.get(), rest, kFloat32, comm_, backend_.stream()),
        "ncclAllGather");
  add_up(typed<float>(parts_), tail, rest);
}

// x [size, range]: rank r adds up x[r], then all get it.
void NcclRanks::reduce_ranges(float* x, int64_t range) {
  const cudaStream_t stream = backend_.stream();
  check(nccl().group_start(), "ncclGroupStart");
  for (int rank = 0; rank < group_.size(); ++rank) {
    check(nccl().send(x + rank * range, range, kFloat32, rank, comm_, stream), "ncclSend");
    check(nccl().receive(typed<float>(parts_) + rank * range, range, kFloat32, rank, comm_, stream),
          "ncclRecv");
  }
  check(nccl().group_end(), "ncclGroupEnd");
  float* const mine = x + group_.rank() * range;
  add_up(typed<float>(parts_), mine, range);
  check(nccl().all_gather(mine, x, range, kFloat32, comm_, stream), "ncclAllGather");
}

void NcclRanks::all_gather(const void* from, void* to, int64_t bytes) {
  started();
  check(nccl().all_gather(from, to, bytes, kUint8, comm_, backend_.stream()), "ncclAllGather");
}

void NcclRanks::stop() {
  if (stopped_.exchange(true)) return;
  static_cast<void>(nccl().comm_abort(comm_));
}

bool NcclRanks::stream_is_busy() const {
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  const cudaError_t status = cudaStreamIsCapturing(backend_.stream(), &capture);
  return status == cudaSuccess && capture == cudaStreamCaptureStatusNone &&
         cudaStreamQuery(backend_.stream()) == cudaErrorNotReady;
}

void NcclRanks::watch() {
  static_cast<void>(cudaSetDevice(backend_.device()));
  const auto progress = [&] { return std::atomic_ref(*progress_).load(); };
  uint64_t seen = progress();
  std::unique_lock lock(mutex_);
  while (!ending_) {
    wake_.wait_for(lock, std::chrono::milliseconds(100));
    if (ending_) return;
    if (const uint64_t now = progress(); now != seen) {
      seen = now;
      since_ = Clock();
    }
    bool late = busy_ && since_.ms() > group_.timeout_s() * 1e3;
    if (late && !stream_is_busy()) late = busy_ = false;  // nobody has waited for what is done
    lock.unlock();
    int status = kSuccess;
    if (nccl().comm_get_async_error(comm_, &status) == kSuccess && status != kSuccess &&
        status != kInProgress) {
      group_.abort(join("rank ", group_.rank(), ": nccl: ", nccl().error_string(status)));
    } else if (late) {
      group_.abort(join("rank ", group_.rank(), ": nothing was summed by NCCL within ",
                        group_.timeout_s(), " s: a rank has not come"));
    }
    const bool ended = !group_.aborted().empty();
    lock.lock();
    if (ended) {
      stop();
      return;
    }
  }
}

}  // namespace kdt::cuda
