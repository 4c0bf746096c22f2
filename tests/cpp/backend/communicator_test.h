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

inline std::string check_fused(Rank& r) {
  std::vector<Shape> shapes = {{1, 1}, {3, 7}, {5, 64}, {2, 1023}, {3, 1024}, {2, 1025}};
  if (large_cases())
    append(shapes,
           {{1, 7168}, {8, 7168}, {65, 7168}, {257, 7168}, {5, 7167}, {3, 40000}, {2, 30001}});
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

}  // namespace kdt::test

// Instead of KDT_OP_TEST_MAIN. Ranks that share a device need a queue each, as one waits for what
// another has yet to start.
#define KDT_COMMUNICATOR_TEST_MAIN                                      \
  int main(int argc, char** argv) {                                     \
    setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);                     \
    const int skipped = ::kdt::test::skip_status();                     \
    return skipped != 0 ? skipped : ::kdt::test::run_tests(argc, argv); \
  }
