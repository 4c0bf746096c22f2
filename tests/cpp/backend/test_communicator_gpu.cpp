// Communicators on real GPUs: graphs, NCCL, and times.
#include <cstdio>

#include "communicator_test.h"

namespace kdt::test {
namespace {

// Ten sums in a recording, run with other inputs, with ranks late at random.
std::string check_graph(Rank& r) {
  constexpr int kCalls = 10;
  const int replays = large_cases() ? 100 : 10;
  constexpr int64_t kWidth = 7168;
  const int64_t rows[kCalls] = {1, 2, 3, 8, 16, 1, 65, 1, 5, 33};
  std::vector<Buffer> x;
  for (const int64_t n : rows) x.push_back(output(r.backend, {n, kWidth}));
  const Buffer busy = output(r.backend, {4096, 1024});
  r.backend.synchronize();
  const auto recording = r.backend.record([&] {
    for (const Buffer& buffer : x) r.communicator.all_reduce(buffer.tensor);
  });
  Random random(r.index);
  std::string wrong;
  for (int replay = 0; replay < replays && wrong.empty(); ++replay) {
    for (int i = 0; i < kCalls; ++i)
      r.backend.upload(x[i].tensor, part(r.index, rows[i] * kWidth, replay * 16 + i).data());
    delay(r, random, busy.tensor);
    recording->run();
    // A sum outside of it takes the same numbers of calls.
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
  // To end a recording may wait for the device, where another rank may wait for this one.
  r.group.barrier();
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
  for (const Body& body : {Body(check_sums), Body(check_gathers), Body(check_recorded)}) {
    EXPECT_EQ(run_on({"cuda"}, 60, body)[0], std::string());
  }
}

std::vector<std::string> all_devices() {
  std::vector<std::string> devices;
  for (int i = 0; i < cuda::device_count(); ++i) devices.push_back(join("cuda:", i));
  return devices;
}

KDT_TEST(nccl_with_a_device_a_rank) {
  if (!on_gpu() || cuda::device_count() < 2 || !has_nccl()) return;
  const std::vector<std::string> devices = all_devices();
  for (const char* asked : {"nccl", "auto"}) {
    const Way way(asked);
    for (const Body& body :
         {Body(check_sums), Body(check_gathers), Body(check_many), Body(check_recorded)}) {
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
    const Buffer x = output(r.backend, {rows, kWidth}),
                 residual = output(r.backend, {rows, kWidth}),
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
    const double with_norm =
        least_us([&] { add_rms_norm(r, residual.tensor, x.tensor, weight.tensor, out.tensor); });
    if (r.index == 0)
      std::printf("    %3d x %d: sum %.1f us, with norm %.1f us\n", static_cast<int>(rows),
                  static_cast<int>(kWidth), sum, with_norm);
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
  if (cuda::device_count() < 2 || !has_nccl()) return;
  const Way way("nccl");
  std::printf("  KDTREE_ALL_REDUCE=nccl\n");
  for (const std::string& error : run_on(all_devices(), 60, time_calls))
    EXPECT_EQ(error, std::string());
}

}  // namespace
}  // namespace kdt::test

KDT_COMMUNICATOR_TEST_MAIN
