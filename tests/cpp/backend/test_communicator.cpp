// Sums and gathers over ranks, bit for bit, with ranks as threads of this process: on the CPU, on
// one GPU that all share, and on two where there are two.
#include <atomic>

#include "communicator_test.h"

namespace kdt::test {
namespace {

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

KDT_TEST(gathers_are_in_rank_order) { expect_on_ranks({1, 2, 4}, check_gathers); }

// What the call throws; "" for nothing.
template <typename Call>
std::string message(const Call& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

KDT_TEST(wrong_shapes_are_refused) {
  expect_on_ranks({2}, [](Rank& r) {
    const Buffer x = output(r.backend, {2, 3}), ints = int_output(r.backend, {2, 3});
    if (!holds(message([&] { r.communicator.all_reduce(ints.tensor); }), "all_reduce: x is i32"))
      return "i32 was summed";
    if (!holds(message([&] { r.communicator.all_gather(x.tensor, x.tensor); }), "all_gather: from"))
      return "gathered to a wrong shape";
    return "";
  });
}

KDT_TEST(many_calls_with_late_ranks) { expect_on_ranks({2, 4}, check_many); }

KDT_TEST(recordings_give_the_bits_of_their_calls) { expect_on_ranks({1, 2, 4}, check_recorded); }

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

KDT_TEST(ranks_go_on_when_all_have_recorded) {
  if (!on_gpu()) return;
  std::atomic<int> recorded = 0;
  const std::vector<std::string> errors =
      run_on(std::vector<std::string>(2, device()), 20, [&](Rank& r) -> std::string {
        const Buffer x = upload(r.backend, part(r.index, 6, 1), {2, 3});
        r.backend.synchronize();
        r.group.barrier();
        r.communicator.all_reduce(x.tensor);
        r.backend.synchronize();
        if (r.index == 1) sleep_ms(200);
        const auto recording = r.backend.record([&] {
          r.communicator.all_reduce(x.tensor);
          ++recorded;
        });
        return recorded == 2 ? "" : "went on alone";
      });
  for (const std::string& error : errors) EXPECT_EQ(error, "");
}

KDT_TEST(recordings_of_a_group_that_has_ended_are_refused) {
  if (!on_gpu()) return;
  std::string reason, of_run, of_record;  // of rank 0
  run_on(std::vector<std::string>(2, device()), 1.5, [&](Rank& r) -> std::string {
    const Buffer x = upload(r.backend, part(r.index, 6, 1), {2, 3});
    const auto sum = [&] { r.communicator.all_reduce(x.tensor); };
    r.backend.synchronize();
    r.group.barrier();
    sum();
    r.backend.synchronize();
    const auto recording = r.backend.record(sum);
    if (r.index == 1) {
      sleep_ms(4000);
      return "";
    }
    recording->run();
    reason = message([&] { r.backend.synchronize(); });
    of_run = message([&] { recording->run(); });
    of_record = message([&] { r.backend.record(sum); });
    return "";
  });
  EXPECT(holds(reason, "rank 0: the all-reduce did not end within 1.5 s: rank 1 has not come"));
  EXPECT_EQ(of_run, "the group has ended: " + reason);
  EXPECT_EQ(of_record, of_run);
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

KDT_TEST(ranks_on_the_cpu_have_one_way) {
  const auto error_of = [](const char* asked) {
    const Way way(asked);
    return run_on({"cpu", "cpu"}, 20, [](Rank&) { return std::string(); })[0];
  };
  EXPECT_EQ(error_of("push"),
            std::string("KDTREE_ALL_REDUCE is 'push'; ranks on the CPU have one way, want 'auto'"));
  EXPECT_EQ(error_of("auto") + error_of(""), std::string());
}

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

}  // namespace
}  // namespace kdt::test

KDT_COMMUNICATOR_TEST_MAIN
