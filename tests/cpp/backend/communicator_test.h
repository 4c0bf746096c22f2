// What the tests of communicators share: ranks on threads, what each brings, and checks of whole
// families of calls, bit for bit.
#pragma once

#include <cmath>
#include <functional>
#include <string>
#include <thread>
#include <vector>

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

struct Rank {
  RankGroup& group;
  Backend& backend;
  Communicator& communicator;
  int index, size;
};

using Body = std::function<std::string(Rank&)>;

// body on each rank, on the device of its name; it gives "" or what is wrong. Gives what the ranks
// threw.
inline std::vector<std::string> run_on(const std::vector<std::string>& devices, double timeout_s,
                                       const Body& body) {
  const Ranks groups = make_thread_group(static_cast<int>(devices.size()), timeout_s);
  return run_ranks(groups, [&](RankGroup& group) {
    const std::unique_ptr<Backend> backend = make_backend(devices[group.rank()], 1);
    const std::unique_ptr<Communicator> communicator = backend->make_communicator(group);
    Rank rank{group, *backend, *communicator, group.rank(), group.size()};
    std::string wrong = body(rank);
    if (wrong.empty()) backend->synchronize();
    if (wrong.empty()) return;
    group.abort(wrong);
    throw Error(wrong);
  });
}

// Without errors: on one device with some numbers of ranks, and on several devices.
inline void expect_on_ranks(const std::vector<int>& sizes, const Body& body) {
  const auto expect = [&](const std::vector<std::string>& devices) {
    for (const std::string& error : run_on(devices, large_cases() ? 60 : 10, body)) {
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
inline Floats part(int rank, int64_t count, uint64_t seed) {
  Random random(seed * 64 + rank);
  Floats x(count);
  for (float& v : x) v = std::ldexp(random.uniform(), static_cast<int>(random.below(12)));
  return x;
}

inline Floats ordered_sum(int size, int64_t count, uint64_t seed) {
  Floats sum = part(0, count, seed);
  for (int rank = 1; rank < size; ++rank) {
    const Floats x = part(rank, count, seed);
    for (int64_t i = 0; i < count; ++i) sum[i] += x[i];
  }
  return sum;
}

inline std::vector<Shape> shapes() {
  std::vector<Shape> shapes = {{1, 1}, {1, 5}, {2, 64}, {3, 100}, {1, 1025}, {5, 333}};
  if (large_cases()) {
    for (int64_t rows : {1, 2, 3, 8, 16, 65, 257}) shapes.push_back({rows, 7168});
  }
  return shapes;
}

inline std::string check_sums(Rank& r) {
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

inline std::string check_gathers(Rank& r) {
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

// Work of a random length on the device, so that ranks come late there too.
inline void delay(Rank& r, Random& random, const Tensor& busy) {
  if (random.below(4) == 0)
    std::this_thread::sleep_for(std::chrono::microseconds(random.below(300)));
  if (random.below(3) == 0) r.backend.fill_zero(busy.rows(0, random.below(busy.dim(0))));
}

// A sum and the op that follows it in a layer.
inline void add_rms_norm(Rank& r, const Tensor& residual, const Tensor& delta, const Tensor& weight,
                         const Tensor& out) {
  r.communicator.all_reduce(delta);
  r.backend.add_rms_norm(residual, delta, weight, 1e-5f, out);
}

// One call after another, of all kinds and changing sizes, none waited for.
inline std::string check_many(Rank& r) {
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
      add_rms_norm(r, call.more.tensor, call.x.tensor, weight.tensor, call.out.tensor);
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

// A pass of all three kinds, recorded and run again and again with other inputs, between calls of
// other sizes, with ranks late at random.
inline std::string check_recorded(Rank& r) {
  constexpr int kRuns = 20;
  const int64_t n = large_cases() ? 7168 : 96, rows = 3, long_n = large_cases() ? 200000 : 1100;
  const Buffer weight = upload(r.backend, part(60, n, 7)),
               busy = output(r.backend, {large_cases() ? 4096 : 16, 1024});
  struct Pass {
    Buffer x, residual, delta, normed, mine, all;
  };
  const auto make = [&] {
    return Pass{output(r.backend, {1, long_n}), output(r.backend, {rows, n}),
                output(r.backend, {rows, n}),   output(r.backend, {rows, n}),
                output(r.backend, {rows, n}),   output(r.backend, {r.size, rows, n})};
  };
  const auto load = [&](const Pass& pass, uint64_t seed) {
    r.backend.upload(pass.x.tensor, part(r.index, long_n, seed).data());
    r.backend.upload(pass.residual.tensor, part(61, rows * n, seed).data());
    r.backend.upload(pass.delta.tensor, part(r.index, rows * n, seed + 1).data());
    r.backend.upload(pass.mine.tensor, part(r.index, rows * n, seed + 2).data());
    for (const Buffer* out : {&pass.normed, &pass.all})
      r.backend.upload(out->tensor, Floats(out->tensor.numel(), kNan).data());
  };
  const auto call = [&](const Pass& pass) {
    add_rms_norm(r, pass.residual.tensor, pass.delta.tensor, weight.tensor, pass.normed.tensor);
    r.communicator.all_reduce(pass.x.tensor);
    r.communicator.all_gather(pass.mine.tensor, pass.all.tensor);
  };
  const auto results = [&](const Pass& pass) {
    Floats all;
    for (const Buffer* buffer : {&pass.x, &pass.residual, &pass.normed, &pass.all})
      append(all, download(r.backend, buffer->tensor));
    return all;
  };
  // Taking memory may wait for the device, where another rank may wait for this one.
  const auto all_have_memory = [&] {
    r.backend.synchronize();
    r.group.barrier();
  };
  const Pass recorded = make(), called = make();
  load(recorded, 1);
  all_have_memory();
  call(recorded);
  r.backend.synchronize();
  if (!r.backend.records()) return on_gpu() ? "nothing is recorded" : "";
  const auto recording = r.backend.record([&] { call(recorded); });
  // A larger sum takes other memory to work in; somebody else gets the old.
  const Buffer larger = upload(r.backend, Floats(4 * long_n, 1.0f), {4, long_n});
  all_have_memory();
  r.communicator.all_reduce(larger.tensor);
  all_have_memory();
  std::vector<Buffer> others;
  for (int i = 0; i < 8; ++i) others.push_back(upload(r.backend, Floats(long_n, 3.5f)));
  all_have_memory();
  Random delays(r.index + 1);
  std::string wrong;
  for (int run = 0; run < kRuns && wrong.empty(); ++run) {
    const uint64_t seed = 2000 + 4 * run;
    load(recorded, seed);
    load(called, seed);
    delay(r, delays, busy.tensor);
    recording->run();
    delay(r, delays, busy.tensor);
    call(called);
    const Floats got = results(recorded);
    if (!same_bits(got, results(called))) wrong = join("rank ", r.index, ": run ", run);
    if (!same_bits(slice(got, 0, long_n), ordered_sum(r.size, long_n, seed)))
      wrong = join("rank ", r.index, ": the sum of run ", run);
  }
  for (const Buffer& other : others) {
    if (wrong.empty() && !same_bits(download(r.backend, other.tensor), Floats(long_n, 3.5f)))
      wrong = join("rank ", r.index, ": a run wrote to another's memory");
  }
  // So may the end of a recording.
  if (wrong.empty()) r.group.barrier();
  return wrong;
}

}  // namespace kdt::test

// Instead of KDT_OP_TEST_MAIN. Ranks that share a device need a queue each, as one waits for what
// another has yet to start.
#define KDT_COMMUNICATOR_TEST_MAIN                                      \
  int main(int argc, char** argv) {                                     \
    setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);                     \
    const int skipped = ::kdt::test::skip_status();                     \
    return skipped != 0 ? skipped : ::kdt::test::run_tests(argc, argv); \
  }
