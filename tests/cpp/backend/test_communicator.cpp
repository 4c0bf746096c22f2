// Sums and gathers over ranks, bit for bit, with ranks as threads of this process: on the CPU, on
// one GPU that all share, and on two where there are two.
#include <atomic>
#include <cmath>
#include <thread>

#include "core/clock.h"
#include "op_test.h"
#include "parallel/communicator.h"
#include "parallel/ranks.h"
#ifdef KDT_WITH_CUDA
#include "cuda_backend.h"
#include "device.h"
#include "nccl.h"
#ifndef KDT_EMULATOR
#define KDT_REAL_GPU
#endif
#endif

namespace kdt::test {
namespace {

struct Rank {
  RankGroup& group;
  Backend& backend;
  Communicator& communicator;
  int index, size;
};

using Body = std::function<std::string(Rank&)>;

// body on each rank, on the device of its name; it gives "" or what is wrong. Gives what the ranks
// threw.
std::vector<std::string> run_on(const std::vector<std::string>& devices, double timeout_s,
                                const Body& body) {
  const Ranks groups = make_thread_group(static_cast<int>(devices.size()), timeout_s);
  return run_ranks(groups, [&](RankGroup& group) {
    const std::unique_ptr<Backend> backend = make_backend(devices[group.rank()], 1);
    const std::unique_ptr<Communicator> communicator = backend->make_communicator(group);
    Rank rank{group, *backend, *communicator, group.rank(), group.size()};
    std::string wrong = body(rank);
    backend->synchronize();
    if (!wrong.empty()) throw Error(wrong);
  });
}

// Without errors: on one device with some numbers of ranks, and on several devices.
void expect_on_ranks(const std::vector<int>& sizes, const Body& body) {
  const auto expect = [&](const std::vector<std::string>& devices) {
    for (const std::string& error : run_on(devices, 60, body)) {
      if (!error.empty()) report(__FILE__, __LINE__, join(devices.size(), " ranks: ", error));
    }
  };
  for (const int size : sizes) expect(std::vector<std::string>(size, device()));
#ifdef KDT_REAL_GPU
  std::vector<std::string> devices;
  for (int i = 0; on_gpu() && i < cuda::device_count(); ++i) devices.push_back(join("cuda:", i));
  if (devices.size() > 1) expect(devices);
#endif
}

// While it exists, sums go one way.
class Way {
 public:
  explicit Way(const char* way) { setenv("KDTREE_ALL_REDUCE", way, 1); }
  ~Way() { unsetenv("KDTREE_ALL_REDUCE"); }
};

// What a rank brings: of many sizes, so that the order of a sum shows.
Floats part(int rank, int64_t count, uint64_t seed) {
  Random random(seed * 64 + rank);
  Floats x(count);
  for (float& v : x) v = std::ldexp(random.uniform(), static_cast<int>(random.below(12)));
  return x;
}

Floats ordered_sum(int size, int64_t count, uint64_t seed) {
  Floats sum = part(0, count, seed);
  for (int rank = 1; rank < size; ++rank) {
    const Floats x = part(rank, count, seed);
    for (int64_t i = 0; i < count; ++i) sum[i] += x[i];
  }
  return sum;
}

std::vector<Shape> shapes() {
  std::vector<Shape> shapes = {{1, 1}, {1, 5}, {2, 64}, {3, 100}, {1, 1025}, {5, 333}};
  if (large_cases()) {
    for (int64_t rows : {1, 2, 3, 8, 16, 65, 257}) shapes.push_back({rows, 7168});
  }
  return shapes;
}

std::string check_sums(Rank& r) {
  uint64_t seed = 0;
  for (const Shape& shape : shapes()) {
    const int64_t count = shape[0] * shape[1];
    const Buffer x = upload(r.backend, part(r.index, count, ++seed), shape);
    r.communicator.all_reduce(x.tensor);
    if (!same_bits(download(r.backend, x.tensor), ordered_sum(r.size, count, seed)))
      return join("rank ", r.index, ": the sum of ", x.tensor.to_string());
  }
  return "";
}

KDT_TEST(sums_are_in_rank_order_at_any_size) { expect_on_ranks({1, 2, 3, 4}, check_sums); }

KDT_TEST(the_order_of_a_sum_shows) {
  const Floats forward = ordered_sum(3, 100, 1);
  Floats backward = part(2, 100, 1);
  for (int rank = 1; rank >= 0; --rank) {
    const Floats x = part(rank, 100, 1);
    for (size_t i = 0; i < x.size(); ++i) backward[i] += x[i];
  }
  EXPECT(!same_bits(forward, backward));
}

std::string check_fused(Rank& r) {
  std::vector<Shape> shapes = {{1, 1}, {3, 7}, {5, 64}, {2, 1023}, {3, 1024}, {2, 1025}};
  if (large_cases()) append(shapes, {{1, 7168}, {8, 7168}, {65, 7168}, {257, 7168}, {5, 7167},
                                     {3, 40000}, {2, 30001}});
  uint64_t seed = 100;
  for (const Shape& shape : shapes) {
    const int64_t count = shape[0] * shape[1];
    ++seed;
    const Floats delta = part(r.index, count, seed);
    const Buffer residual = upload(r.backend, part(60, count, seed), shape),
                 weight = upload(r.backend, part(61, shape[1], seed)),
                 x = upload(r.backend, delta, shape), out = output(r.backend, shape),
                 other_residual = upload(r.backend, part(60, count, seed), shape),
                 other_x = upload(r.backend, delta, shape), other_out = output(r.backend, shape);
    r.communicator.all_reduce_add_rms_norm(residual.tensor, x.tensor, weight.tensor, 1e-6f,
                                           out.tensor);
    r.communicator.all_reduce(other_x.tensor);
    r.backend.add_rms_norm(other_residual.tensor, other_x.tensor, weight.tensor, 1e-6f,
                           other_out.tensor);
    if (!same_bits(download(r.backend, residual.tensor),
                   download(r.backend, other_residual.tensor)))
      return join("rank ", r.index, ": the residual of ", x.tensor.to_string());
    if (!same_bits(download(r.backend, out.tensor), download(r.backend, other_out.tensor)))
      return join("rank ", r.index, ": the norm of ", x.tensor.to_string());
  }
  return "";
}

KDT_TEST(sum_and_norm_in_one_give_the_bits_of_two_ops) { expect_on_ranks({1, 2, 4}, check_fused); }

// Any element type and alignment.
template <typename T>
std::string check_gather_of(Rank& r, int64_t count, int64_t skip) {
  const auto values = [&](int rank) {
    std::vector<T> x(count + skip);
    for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<T>(i * 7 + rank * 13 + 1);
    return x;
  };
  const Buffer from = upload(r.backend, values(r.index));
  const Buffer to = upload(r.backend, std::vector<T>(count * r.size), {r.size, count});
  r.communicator.all_gather(from.tensor.rows(skip, count), to.tensor);
  std::vector<T> want;
  for (int rank = 0; rank < r.size; ++rank) append(want, slice(values(rank), skip, count));
  if (!same_bits(download<T>(r.backend, to.tensor), want))
    return join("rank ", r.index, ": gathered ", to.tensor.to_string(), " from ", skip);
  return "";
}

std::string check_gathers(Rank& r) {
  for (const int64_t count : {1, 3, 64, 1500, large_cases() ? 1000003 : 2049}) {
    for (const int64_t skip : {0, 1, 4}) {
      std::string wrong = check_gather_of<float>(r, count, skip);
      if (wrong.empty()) wrong = check_gather_of<int32_t>(r, count, skip);
      if (wrong.empty()) wrong = check_gather_of<uint16_t>(r, count, skip);
      if (wrong.empty()) wrong = check_gather_of<double>(r, count, skip);
      if (!wrong.empty()) return wrong;
    }
  }
  return "";
}

KDT_TEST(gathers_are_in_rank_order) { expect_on_ranks({1, 2, 4}, check_gathers); }

KDT_TEST(wrong_shapes_are_refused) {
  expect_on_ranks({2}, [](Rank& r) {
    const Buffer x = output(r.backend, {2, 3}), ints = int_output(r.backend, {2, 3});
    const auto message = [](const auto& call) -> std::string {
      try {
        call();
      } catch (const Error& error) {
        return error.what();
      }
      return "";
    };
    if (!holds(message([&] { r.communicator.all_reduce(ints.tensor); }), "all_reduce: x is i32"))
      return "i32 was summed";
    if (!holds(message([&] { r.communicator.all_gather(x.tensor, x.tensor); }), "all_gather: from"))
      return "gathered to a wrong shape";
    return "";
  });
}

// Work of a random length on the device, so that ranks come late there too.
void delay(Rank& r, Random& random, const Tensor& busy) {
  if (random.below(4) == 0) std::this_thread::sleep_for(std::chrono::microseconds(random.below(300)));
  if (random.below(3) == 0) r.backend.fill_zero(busy.rows(0, random.below(busy.dim(0))));
}

// One call after another, of all kinds and changing sizes, none waited for.
std::string check_many(Rank& r) {
  const int calls = large_cases() ? 1000 : 60;
  const int64_t n = large_cases() ? 7168 : 96;
  Random delays(r.index + 1), sizes(5);  // the latter the same on all ranks
  const Buffer busy = output(r.backend, {large_cases() ? 4096 : 16, 1024});
  const Buffer weight = upload(r.backend, part(60, n, 7));
  struct Call {
    int kind;
    uint64_t seed;
    Shape shape;
    Buffer x, more, out;
  };
  std::vector<Call> made;
  for (int i = 0; i < calls; ++i) {
    Call& call = made.emplace_back();
    call.kind = static_cast<int>(sizes.below(3));
    call.seed = 1000 + i;
    call.shape = {1 + sizes.below(large_cases() ? 8 : 3), n};
    const int64_t count = call.shape[0] * n;
    call.x = upload(r.backend, part(r.index, count, call.seed), call.shape);
    if (call.kind == 1) call.more = upload(r.backend, part(61, count, call.seed), call.shape);
    if (call.kind == 1) call.out = output(r.backend, call.shape);
    if (call.kind == 2) call.out = output(r.backend, {r.size, call.shape[0], n});
  }
  r.backend.synchronize();
  r.group.barrier();
  for (Call& call : made) {
    delay(r, delays, busy.tensor);
    if (call.kind == 0) r.communicator.all_reduce(call.x.tensor);
    if (call.kind == 1)
      r.communicator.all_reduce_add_rms_norm(call.more.tensor, call.x.tensor, weight.tensor, 1e-5f,
                                             call.out.tensor);
    if (call.kind == 2) r.communicator.all_gather(call.x.tensor, call.out.tensor);
  }
  r.backend.synchronize();
  for (const Call& call : made) {
    const int64_t count = call.shape[0] * n;
    Floats want;
    if (call.kind < 2) want = ordered_sum(r.size, count, call.seed);
    if (call.kind == 1) {
      Floats residual = part(61, count, call.seed);
      for (int64_t i = 0; i < count; ++i) residual[i] += want[i];
      want = residual;
    }
    for (int rank = 0; rank < r.size && call.kind == 2; ++rank)
      append(want, part(rank, count, call.seed));
    const Tensor& got = call.kind == 0   ? call.x.tensor
                        : call.kind == 1 ? call.more.tensor
                                         : call.out.tensor;
    if (!same_bits(download(r.backend, got), want))
      return join("rank ", r.index, ": call ", call.seed - 1000, " of kind ", call.kind);
  }
  return "";
}

KDT_TEST(many_calls_with_late_ranks) { expect_on_ranks({2, 4}, check_many); }

KDT_TEST(a_rank_that_never_comes_ends_the_others) {
  constexpr double kTimeout = 1.5;
  const Clock clock;
  std::atomic<bool> later_throws = false;
  const std::vector<std::string> errors =
      run_on(std::vector<std::string>(3, device()), kTimeout, [&](Rank& r) -> std::string {
        if (r.index == 1) {
          sleep_ms(4000);
          return "";
        }
        const Buffer x = upload(r.backend, part(r.index, 6, 1), {2, 3});
        try {
          r.communicator.all_reduce(x.tensor);
          r.backend.synchronize();
        } catch (const Error&) {
          EXPECT(clock.ms() < 4000);
          try {
            r.communicator.all_reduce(x.tensor);
          } catch (const Error&) {
            later_throws = true;
          }
          throw;
        }
        return "the sum ended";
      });
  for (const int rank : {0, 2}) {
    if (!holds(errors[rank], "rank 1") || holds(errors[rank], "the sum ended"))
      report(__FILE__, __LINE__, join("rank ", rank, " threw '", errors[rank], "'"));
  }
  EXPECT(later_throws);
}

KDT_TEST(what_one_rank_says_ends_the_others) {
#ifdef KDT_EMULATOR
  if (on_gpu()) return;  // its kernels run in the host's call, which so looks for nothing
#endif
  const Clock clock;
  const std::vector<std::string> errors =
      run_on(std::vector<std::string>(2, device()), 60, [&](Rank& r) -> std::string {
        if (r.index == 1) {
          sleep_ms(200);
          r.group.abort("rank 1: out of cheese");
          return "";
        }
        const Buffer x = upload(r.backend, part(r.index, 6, 1), {2, 3});
        r.communicator.all_reduce(x.tensor);
        r.backend.synchronize();
        return "the sum ended";
      });
  EXPECT_EQ(errors[0], std::string("rank 1: out of cheese"));
  EXPECT(clock.ms() < 20000);
}

#ifdef KDT_EMULATOR
// Waits that end at once: rank 0 adds up before the others' parts are there.
KDT_TEST(a_wait_left_out_gives_wrong_sums) {
  if (!on_gpu()) return;
  const auto wrong = [](bool skip_waits) {
    const std::vector<std::string> errors =
        run_on({"cuda", "cuda"}, 20, [&](Rank& r) -> std::string {
          r.group.barrier();
          if (r.index == 0) emulator::skip_waits = skip_waits;
          r.group.barrier();
          if (r.index == 1) sleep_ms(100);
          const Buffer x = upload(r.backend, part(r.index, 96, 1), {96});
          r.communicator.all_reduce(x.tensor);
          return same_bits(download(r.backend, x.tensor), ordered_sum(2, 96, 1)) ? "" : "wrong";
        });
    emulator::skip_waits = false;
    return errors[0];
  };
  EXPECT_EQ(wrong(false), std::string());
  EXPECT_EQ(wrong(true), std::string("wrong"));
}
#endif

KDT_TEST(ways_that_cannot_be_taken_are_errors) {
  if (!on_gpu()) return;
  const auto error_of = [](const char* asked) {
    const Way way(asked);
    return run_on({"cuda", "cuda"}, 20, [](Rank&) { return std::string(); })[0];
  };
  EXPECT(holds(error_of("fast"), "KDTREE_ALL_REDUCE is 'fast'; want 'auto', 'push' or 'nccl'"));
  EXPECT(holds(error_of("nccl"), "ranks that share a device need KDTREE_ALL_REDUCE=push"));
  EXPECT_EQ(error_of("push"), std::string());
}

#ifdef KDT_REAL_GPU
// Ten sums in a graph, replayed with other inputs, with ranks late at random.
std::string check_graph(Rank& r) {
  constexpr int kCalls = 10;
  const int replays = large_cases() ? 100 : 10;
  constexpr int64_t kWidth = 7168;
  const int64_t rows[kCalls] = {1, 2, 3, 8, 16, 1, 65, 1, 5, 33};
  const cudaStream_t stream = dynamic_cast<cuda::CudaBackend&>(r.backend).stream();
  std::vector<Buffer> x;
  for (const int64_t n : rows) x.push_back(output(r.backend, {n, kWidth}));
  const Buffer busy = output(r.backend, {4096, 1024});
  r.backend.synchronize();
  cudaGraph_t graph = nullptr;
  KDT_CUDA_CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  for (const Buffer& buffer : x) r.communicator.all_reduce(buffer.tensor);
  KDT_CUDA_CHECK(cudaStreamEndCapture(stream, &graph));
  cudaGraphExec_t executable = nullptr;
  KDT_CUDA_CHECK(cudaGraphInstantiate(&executable, graph, 0));
  r.group.barrier();
  Random random(r.index);
  std::string wrong;
  for (int replay = 0; replay < replays && wrong.empty(); ++replay) {
    for (int i = 0; i < kCalls; ++i)
      r.backend.upload(x[i].tensor, part(r.index, rows[i] * kWidth, replay * 16 + i).data());
    delay(r, random, busy.tensor);
    KDT_CUDA_CHECK(cudaGraphLaunch(executable, stream));
    // A sum outside of the graph takes the same numbers of calls.
    const Buffer plain = upload(r.backend, part(r.index, 77, replay), {77});
    r.communicator.all_reduce(plain.tensor);
    for (int i = 0; i < kCalls && wrong.empty(); ++i) {
      if (!same_bits(download(r.backend, x[i].tensor),
                     ordered_sum(r.size, rows[i] * kWidth, replay * 16 + i)))
        wrong = join("rank ", r.index, ": sum ", i, " of replay ", replay);
    }
    if (!same_bits(download(r.backend, plain.tensor), ordered_sum(r.size, 77, replay)))
      wrong = join("rank ", r.index, ": the sum after replay ", replay);
  }
  // Destroying a graph may wait for the device, where another rank may wait for this one.
  r.group.barrier();
  static_cast<void>(cudaGraphExecDestroy(executable));
  static_cast<void>(cudaGraphDestroy(graph));
  return wrong;
}

KDT_TEST(graphs_can_be_replayed) {
  if (!on_gpu()) return;
  const Way way("push");
  expect_on_ranks({2, 4}, check_graph);
}

bool has_nccl() {
  try {
    cuda::nccl_version();
    return true;
  } catch (const Error& error) {
    std::printf("without NCCL: %s\n", error.what());
    return false;
  }
}

KDT_TEST(nccl_with_one_rank) {
  if (!on_gpu() || !has_nccl()) return;
  const Way way("nccl");
  for (const Body& body : {Body(check_sums), Body(check_fused), Body(check_gathers)}) {
    EXPECT_EQ(run_on({"cuda"}, 60, body)[0], std::string());
  }
}

KDT_TEST(nccl_with_a_device_a_rank) {
  if (!on_gpu() || cuda::device_count() < 2 || !has_nccl()) return;
  std::vector<std::string> devices;
  for (int i = 0; i < cuda::device_count(); ++i) devices.push_back(join("cuda:", i));
  for (const char* asked : {"nccl", "auto"}) {
    const Way way(asked);
    for (const Body& body :
         {Body(check_sums), Body(check_fused), Body(check_gathers), Body(check_many)}) {
      for (const std::string& error : run_on(devices, 60, body)) EXPECT_EQ(error, std::string());
    }
  }
  const Way way("nccl");
  const std::vector<std::string> errors = run_on(devices, 2, [](Rank& r) -> std::string {
    const Buffer x = upload(r.backend, part(r.index, 6, 1), {2, 3});
    r.communicator.all_reduce(x.tensor);
    r.backend.synchronize();
    if (r.index == 1) {
      sleep_ms(6000);
      return "";
    }
    r.communicator.all_reduce(x.tensor);
    r.backend.synchronize();
    return "the sum ended";
  });
  EXPECT(holds(errors[0], "has not come"));
}

// Printed, not compared: microseconds of a call, the least of several runs.
std::string time_calls(Rank& r) {
  constexpr int kRuns = 5, kCalls = 50;
  constexpr int64_t kWidth = 7168;
  if (r.index == 0) std::printf("  %d ranks: %s\n", r.size, r.communicator.describe().c_str());
  for (const int64_t rows : {1, 2, 3, 8, 16, 65, 257}) {
    const Buffer x = output(r.backend, {rows, kWidth}), residual = output(r.backend, {rows, kWidth}),
                 out = output(r.backend, {rows, kWidth}), weight = output(r.backend, {kWidth});
    const auto least_us = [&](const auto& call) {
      double least = kInfinity;
      for (int run = 0; run < kRuns; ++run) {
        r.backend.synchronize();
        r.group.barrier();
        const Clock clock;
        for (int i = 0; i < kCalls; ++i) call();
        r.backend.synchronize();
        least = std::min(least, clock.ms() * 1e3 / kCalls);
      }
      return least;
    };
    const double sum = least_us([&] { r.communicator.all_reduce(x.tensor); });
    const double fused = least_us([&] {
      r.communicator.all_reduce_add_rms_norm(residual.tensor, x.tensor, weight.tensor, 1e-6f,
                                             out.tensor);
    });
    const double two = least_us([&] {
      r.communicator.all_reduce(x.tensor);
      r.backend.add_rms_norm(residual.tensor, x.tensor, weight.tensor, 1e-6f, out.tensor);
    });
    if (r.index == 0)
      std::printf("    %3d x %d: sum %.1f us, with norm %.1f us in one, %.1f us in two\n",
                  static_cast<int>(rows), static_cast<int>(kWidth), sum, fused, two);
  }
  return "";
}

KDT_TEST(times) {
  if (!on_gpu() || !large_cases()) return;
  for (const char* asked : {"push", "auto"}) {
    const Way way(asked);
    std::printf("  KDTREE_ALL_REDUCE=%s\n", asked);
    expect_on_ranks({1, 2, 4}, time_calls);
  }
}
#endif

}  // namespace
}  // namespace kdt::test

int main(int argc, char** argv) {
  // Ranks that share a device need a queue each, as one waits for what another has yet to start.
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
  const int skipped = kdt::test::skip_status();
  return skipped != 0 ? skipped : kdt::test::run_tests(argc, argv);
}
