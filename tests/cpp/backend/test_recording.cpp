// Recordings of ops: what they give when they run, the memory they go on with, and what they
// refuse.
#include "op_test.h"

namespace kdt::test {
namespace {

constexpr int64_t kHidden = 128, kInter = 64, kExperts = 4, kTopK = 2, kWide = 40;

// Ops of several kinds on each other's results. With more than 8 rows their products work in memory
// of the back end's own.
class Pass {
 public:
  Pass(Backend& on, int64_t rows)
      : on_(on),
        rows_(rows),
        norm_(upload(on, Random(7).floats(kHidden))),
        x_(output(on, {rows, kHidden})),
        residual_(output(on, {rows, kHidden})),
        ids_(int_output(on, {rows, kTopK})),
        weights_(output(on, {rows, kTopK})),
        normed_(output(on, {rows, kHidden})),
        product_(output(on, {rows, kHidden})),
        normed_again_(output(on, {rows, kHidden})),
        sum_(output(on, {rows, kHidden})),
        wide_(output(on, {rows, kWide})) {
    const Matrix matrix = random_matrix(DType::kBFloat16, kHidden, kHidden, 1);
    linear_ = on.prepare_linear({matrix.host()});
    std::vector<Matrix> of_experts;
    for (int64_t e = 0; e < kExperts; ++e) {
      of_experts.push_back(random_matrix(DType::kInt32, kInter, kHidden, 10 + 3 * e));
      of_experts.push_back(random_matrix(DType::kInt32, kInter, kHidden, 11 + 3 * e));
      of_experts.push_back(random_matrix(DType::kInt32, kHidden, kInter, 12 + 3 * e));
    }
    std::vector<HostExpert> hosts;
    for (size_t i = 0; i < of_experts.size(); i += 3)
      hosts.push_back({of_experts[i].host(), of_experts[i + 1].host(), of_experts[i + 2].host()});
    experts_ = on.prepare_experts(hosts);
  }

  // Inputs that the seed decides; into the outputs what no op gives.
  void load(uint64_t seed) {
    Random random(seed);
    on_.upload(x_.tensor, random.floats(rows_ * kHidden).data());
    on_.upload(residual_.tensor, random.floats(rows_ * kHidden).data());
    Ints ids;
    for (int64_t i = 0; i < rows_ * kTopK; ++i)
      ids.push_back(static_cast<int32_t>(random.below(kExperts)));
    on_.upload(ids_.tensor, ids.data());
    on_.upload(weights_.tensor, random.floats(rows_ * kTopK).data());
    for (const Buffer* buffer : {&normed_, &product_, &normed_again_, &sum_, &wide_})
      on_.upload(buffer->tensor, Floats(buffer->tensor.numel(), kNan).data());
  }

  void call() {
    on_.rms_norm({.x = x_.tensor, .weight = norm_.tensor, .out = normed_.tensor, .eps = 1e-6f});
    on_.linear(normed_.tensor, *linear_, product_.tensor);
    on_.add_rms_norm(residual_.tensor, product_.tensor, norm_.tensor, 1e-6f, normed_again_.tensor);
    on_.fill_zero(sum_.tensor);
    on_.moe_experts({.x = normed_again_.tensor,
                     .ids = ids_.tensor,
                     .weights = weights_.tensor,
                     .experts = experts_.get(),
                     .out = sum_.tensor});
    on_.copy_columns(sum_.tensor, 16, wide_.tensor, 3, 32);
  }

  // All that the ops write.
  Floats results() {
    Floats all;
    for (const Buffer* buffer : {&residual_, &normed_, &product_, &normed_again_, &sum_, &wide_})
      append(all, download(on_, buffer->tensor));
    return all;
  }
  Floats called(uint64_t seed) {
    load(seed);
    call();
    return results();
  }
  Floats run(uint64_t seed, Recording& recording) {
    load(seed);
    recording.run();
    return results();
  }
  // After its ops have run.
  std::unique_ptr<Recording> record() {
    return on_.record([this] { call(); });
  }
  Backend& on() { return on_; }
  const Tensor& x() const { return x_.tensor; }
  const Tensor& normed() const { return normed_.tensor; }
  const Tensor& norm() const { return norm_.tensor; }

 private:
  Backend& on_;
  int64_t rows_;
  Buffer norm_, x_, residual_, ids_, weights_, normed_, product_, normed_again_, sum_, wide_;
  std::unique_ptr<LinearWeight> linear_;
  std::unique_ptr<ExpertsWeight> experts_;
};

// Takes what memory was given back and fills it; then says whether it is as it was.
class Others {
 public:
  explicit Others(Backend& on) : on_(on) {
    for (int i = 0; i < kCount; ++i) buffers_.push_back(upload(on, Floats(kSize, kValue)));
  }
  bool untouched() {
    for (const Buffer& buffer : buffers_) {
      if (!same_bits(download(on_, buffer.tensor), Floats(kSize, kValue))) return false;
    }
    return true;
  }

 private:
  static constexpr int kCount = 64, kSize = 1024;
  static constexpr float kValue = 3.5f;
  Backend& on_;
  std::vector<Buffer> buffers_;
};

// The back end works, and records, as if nothing had happened.
void expect_usable(Pass& pass) {
  const Floats want = pass.called(5);
  const auto recording = pass.record();
  EXPECT(same_bits(pass.run(5, *recording), want));
}

KDT_TEST(a_back_end_whose_calls_cost_little_records_nothing) {
  EXPECT_EQ(backend().records(), on_gpu());
  if (on_gpu()) return;
  bool called = false;
  EXPECT_THROWS(": nothing is recorded here", backend().record([&] { called = true; }));
  EXPECT(!called);
}

KDT_TEST(nothing_runs_while_it_is_recorded) {
  if (!on_gpu()) return;
  Pass pass(backend(), 12);
  const Floats after = pass.called(1);
  pass.load(1);
  const Floats before = pass.results();
  EXPECT(!same_bits(before, after));
  const auto recording = pass.record();
  EXPECT(same_bits(pass.results(), before));
  recording->run();
  EXPECT(same_bits(pass.results(), after));
}

KDT_TEST(a_recording_gives_the_bits_of_its_ops_for_any_input) {
  if (!on_gpu()) return;
  for (const int64_t rows : {1, 12}) {
    Pass pass(backend(), rows);
    std::vector<Floats> want;
    for (const uint64_t seed : {1, 2, 3}) want.push_back(pass.called(seed));
    EXPECT(!same_bits(want[0], want[1]) && !same_bits(want[1], want[2]));
    const auto recording = pass.record();
    for (const uint64_t seed : {1, 2, 3, 1})
      EXPECT(same_bits(pass.run(seed, *recording), want[seed - 1]));
  }
}

KDT_TEST(it_runs_in_order_with_other_ops) {
  if (!on_gpu()) return;
  Backend& b = backend();
  Pass pass(b, 12);
  const Floats start = Random(9).floats(pass.x().numel());
  const Buffer from = upload(b, start, {12, kHidden}), kept = output(b, {12, kHidden});
  const auto between = [&](const auto& run) {
    pass.load(4);
    for (int i = 0; i < 3; ++i) {  // each on what the one before gave; none is waited for
      b.copy_columns(i == 0 ? from.tensor : pass.normed(), 0, pass.x(), 0, kHidden);
      run();
      b.copy_columns(pass.normed(), 0, kept.tensor, 0, kHidden);
    }
    Floats all = pass.results();
    append(all, download(b, kept.tensor));
    return all;
  };
  const Floats want = between([&] { pass.call(); });
  const auto recording = pass.record();
  EXPECT(same_bits(between([&] { recording->run(); }), want));
}

KDT_TEST(it_goes_on_with_its_memory_when_a_larger_op_took_other) {
  if (!on_gpu()) return;
  const auto on = make_backend(device(), 2);
  Pass pass(*on, 12), larger(*on, 70);
  const Floats want = pass.called(1), other_want = pass.called(2);
  const auto recording = pass.record();
  larger.load(3);
  larger.call();
  Others others(*on);
  EXPECT(same_bits(pass.run(1, *recording), want));
  EXPECT(same_bits(pass.run(2, *recording), other_want));
  EXPECT(others.untouched());
}

KDT_TEST(recordings_alternate) {
  if (!on_gpu()) return;
  const auto on = make_backend(device(), 2);
  Pass small(*on, 10), large(*on, 40);
  std::vector<Floats> want_small, want_large;
  for (const uint64_t seed : {0, 1, 2}) want_small.push_back(small.called(seed));
  const auto small_recording = small.record();  // before the other has taken more memory
  for (const uint64_t seed : {0, 1, 2}) want_large.push_back(large.called(seed));
  auto large_recording = large.record();
  for (const uint64_t seed : {0, 1, 2, 0}) {
    EXPECT(same_bits(small.run(seed, *small_recording), want_small[seed]));
    EXPECT(same_bits(large.run(seed, *large_recording), want_large[seed]));
  }
  large_recording.reset();
  EXPECT(same_bits(small.run(1, *small_recording), want_small[1]));
}

KDT_TEST(an_empty_recording_does_nothing) {
  if (!on_gpu()) return;
  Pass pass(backend(), 2);
  const auto recording = backend().record([] {});
  pass.load(1);
  const Floats before = pass.results();
  recording->run();
  EXPECT(same_bits(pass.results(), before));
}

KDT_TEST(what_is_no_op_is_refused) {
  if (!on_gpu()) return;
  Pass pass(backend(), 12);
  pass.called(1);
  Backend& b = pass.on();
  Floats values(pass.x().numel());
  const auto record = [&](const auto& last) {
    b.record([&] {
      pass.call();
      last();
    });
  };
  EXPECT_THROWS("cuda: an upload is no op to record",
                record([&] { b.upload(pass.x(), values.data()); }));
  expect_usable(pass);
  EXPECT_THROWS("cuda: a download is no op to record",
                record([&] { b.download(values.data(), pass.x()); }));
  expect_usable(pass);
  EXPECT_THROWS("cuda: waiting is no op to record", record([&] { b.synchronize(); }));
  expect_usable(pass);
  EXPECT_THROWS("cuda: 24 bytes are taken while a graph is captured",
                record([&] { b.allocate(DType::kFloat32, {6}); }));
  expect_usable(pass);
}

KDT_TEST(a_recording_inside_of_another_is_refused) {
  if (!on_gpu()) return;
  Pass pass(backend(), 12);
  const Floats want = pass.called(1);
  EXPECT_THROWS("cuda: a recording inside of another", pass.on().record([&] { pass.record(); }));
  expect_usable(pass);
  // The outer one goes on if it likes.
  const auto recording = pass.on().record([&] {
    EXPECT_THROWS("cuda: a recording inside of another", pass.record());
    pass.call();
  });
  EXPECT(same_bits(pass.run(1, *recording), want));
}

KDT_TEST(ops_that_would_take_more_memory_are_refused) {
  if (!on_gpu()) return;
  const auto on = make_backend(device(), 2);
  Pass small(*on, 10), large(*on, 70);
  const Floats want = small.called(1);
  const auto recording = small.record();
  EXPECT_THROWS("run its ops once before", large.record());
  Others others(*on);
  EXPECT(same_bits(small.run(1, *recording), want));
  EXPECT(others.untouched());
  expect_usable(large);
  expect_usable(small);
  EXPECT(same_bits(small.run(1, *recording), want));
}

KDT_TEST(errors_of_ops_are_those_of_the_recording) {
  if (!on_gpu()) return;
  Pass pass(backend(), 12);
  pass.called(1);
  const auto wrong = [&] {
    pass.call();
    pass.on().rms_norm({.x = pass.x(), .weight = pass.x(), .out = pass.normed(), .eps = 1e-6f});
  };
  EXPECT_THROWS("rms_norm: ", pass.on().record(wrong));
  expect_usable(pass);
  EXPECT_THROWS("of the caller's own", pass.on().record([&] {
    pass.call();
    throw std::runtime_error("of the caller's own");
  }));
  expect_usable(pass);
}

KDT_TEST(values_out_of_range_are_found_when_it_runs) {
  if (!on_gpu()) return;
  Backend& b = backend();
  const Buffer table = upload(b, Random(1).floats(5 * 8), {5, 8}), ids = upload(b, Ints{4, 0, 1}),
               out = output(b, {3, 8});
  const auto embed = [&] {
    b.embed({.table = table.tensor, .token_ids = ids.tensor, .out = out.tensor, .vocab_size = 5});
  };
  embed();
  const Floats want = download(b, out.tensor);
  b.upload(ids.tensor, Ints{4, 5, 1}.data());
  const auto recording = b.record(embed);
  b.synchronize();
  for (int i = 0; i < 2; ++i) {
    recording->run();
    EXPECT_THROWS("cuda: token id 5 at row 1 is out of range", b.synchronize());
  }
  b.upload(ids.tensor, Ints{4, 0, 1}.data());
  recording->run();
  EXPECT(same_bits(download(b, out.tensor), want));
}

}  // namespace
}  // namespace kdt::test

KDT_OP_TEST_MAIN
