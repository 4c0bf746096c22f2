// Which passes are run, recorded and replayed, on a back end that tells what it was asked for.
#include <utility>

#include "backend/spoiled_backend.h"
#include "engine/recorded_passes.h"

namespace kdt::test {
namespace {

class Teller : public Spoiled {
 public:
  explicit Teller(bool records = true)
      : Spoiled(make_backend("cpu", 1), "", nullptr), records_(records) {}

  bool records() const override { return records_; }
  std::unique_ptr<Recording> record(const std::function<void()>& body) override {
    noted_.clear();
    recording_ = true;
    const Ended end{recording_};
    body();
    KDT_CHECK(!refuses_recordings, "no recordings today");
    return std::make_unique<Told>(*this, noted_);
  }

  // An op.
  void op(int64_t id) {
    told_ += join(recording_ ? "note " : "op ", id, " ");
    if (recording_) noted_.push_back(id);
  }
  // What was asked for since the last call.
  std::string told() { return std::exchange(told_, ""); }

  bool refuses_recordings = false, refuses_runs = false;
  int64_t num_recordings = 0;  // that exist

 private:
  struct Ended {
    bool& flag;
    ~Ended() { flag = false; }
  };
  struct Told final : Recording {
    Told(Teller& teller, std::vector<int64_t> ids) : on(teller), ops(std::move(ids)) {
      ++on.num_recordings;
    }
    ~Told() override {
      --on.num_recordings;
      for (const int64_t id : ops) on.told_ += join("end ", id, " ");
    }
    void run() override {
      KDT_CHECK(!on.refuses_runs, "no runs today");
      for (const int64_t id : ops) on.told_ += join("run ", id, " ");
    }
    Teller& on;
    std::vector<int64_t> ops;
  };

  const bool records_;
  bool recording_ = false;
  std::vector<int64_t> noted_;
  std::string told_;
};

// What happens when pass `id` comes, and what it returns: "typical" for true.
std::string come(RecordedPasses& passes, Teller& teller, int64_t id) {
  const bool typical = passes.run({0, id}, [&] { teller.op(id); });
  return teller.told() + (typical ? "typical" : "not typical");
}

// Pass `id` comes as new, until it is about to be recorded.
void run_before_recording(RecordedPasses& passes, Teller& teller, int64_t id) {
  for (int i = 0; i < RecordedPasses::kRuns; ++i)
    EXPECT_EQ(come(passes, teller, id), join("op ", id, " not typical"));
}

KDT_TEST(a_pass_is_run_then_recorded_then_replayed) {
  Teller teller;
  {
    RecordedPasses passes(teller);
    EXPECT(passes.active());
    EXPECT_EQ(teller.num_recordings, 0);
    run_before_recording(passes, teller, 7);
    EXPECT_EQ(teller.num_recordings, 0);
    EXPECT_EQ(come(passes, teller, 7), "note 7 run 7 not typical");
    EXPECT_EQ(come(passes, teller, 7), "run 7 typical");
    EXPECT_EQ(come(passes, teller, 7), "run 7 typical");
    EXPECT_EQ(teller.num_recordings, 1);
  }
  EXPECT_EQ(teller.num_recordings, 0);
}

KDT_TEST(each_number_of_a_key_tells_passes_apart) {
  Teller teller;
  RecordedPasses passes(teller);
  const RecordedPasses::Key keys[] = {{0, 0, 0}, {1, 0, 0}, {0, 1, 0}, {0, 0, 1}};
  static_assert(RecordedPasses::kRuns == 2);
  for (const char* want : {"op ", "op ", "note ", "run "}) {
    for (int64_t i = 0; i < 4; ++i) {
      passes.run(keys[i], [&] { teller.op(i); });
      const std::string told = teller.told();
      EXPECT_EQ(told.substr(0, told.find(' ') + 1), want);
      EXPECT(told.find(join(" ", i, " ")) != std::string::npos);
    }
  }
  EXPECT_EQ(teller.num_recordings, 4);
}

KDT_TEST(without_recordings_every_pass_is_run) {
  Teller teller(false);
  RecordedPasses passes(teller);
  EXPECT(!passes.active());
  for (int i = 0; i < 4; ++i) EXPECT_EQ(come(passes, teller, 7), "op 7 typical");
}

KDT_TEST(the_pass_that_was_used_longest_ago_is_forgotten) {
  Teller teller;
  RecordedPasses passes(teller);
  constexpr auto kMost = static_cast<int64_t>(RecordedPasses::kMost);
  for (int64_t id = 0; id < kMost; ++id) {
    run_before_recording(passes, teller, id);
    come(passes, teller, id);
  }
  EXPECT_EQ(teller.num_recordings, kMost);
  EXPECT_EQ(come(passes, teller, 0), "run 0 typical");
  // Instead of 1, whose recording ends when others are made and all ranks meet.
  EXPECT_EQ(come(passes, teller, kMost), join("op ", kMost, " not typical"));
  EXPECT_EQ(come(passes, teller, 0), "run 0 typical");
  for (int64_t id = 2; id < kMost; ++id)
    EXPECT_EQ(come(passes, teller, id), join("run ", id, " typical"));
  EXPECT_EQ(teller.num_recordings, kMost);
  run_before_recording(passes, teller, 1);  // instead of kMost, which came once
  EXPECT_EQ(come(passes, teller, 1), "end 1 note 1 run 1 not typical");
  EXPECT_EQ(teller.num_recordings, kMost);
  run_before_recording(passes, teller, kMost);  // instead of 0
  EXPECT_EQ(come(passes, teller, kMost),
            join("end 0 note ", kMost, " run ", kMost, " not typical"));
  EXPECT_EQ(teller.num_recordings, kMost);
  EXPECT_EQ(come(passes, teller, 0), "op 0 not typical");
}

KDT_TEST(a_pass_that_fails_comes_as_new) {
  Teller teller;
  RecordedPasses passes(teller);
  const auto fail = [&](int64_t id) {
    passes.run({0, id}, [&] {
      teller.op(id);
      throw Error("the pass failed");
    });
  };
  run_before_recording(passes, teller, 1);
  come(passes, teller, 1);
  // When it is run.
  EXPECT_THROWS("the pass failed", fail(7));
  EXPECT_EQ(teller.told(), "op 7 ");
  run_before_recording(passes, teller, 7);
  // When it is recorded: its ops have to run again, to take what the failure gave back.
  EXPECT_THROWS("the pass failed", fail(7));
  EXPECT_EQ(teller.told(), "note 7 ");
  run_before_recording(passes, teller, 7);
  teller.refuses_recordings = true;
  EXPECT_THROWS("no recordings today", come(passes, teller, 7));
  EXPECT_EQ(teller.told(), "note 7 ");
  teller.refuses_recordings = false;
  EXPECT_EQ(teller.num_recordings, 1);
  run_before_recording(passes, teller, 7);
  EXPECT_EQ(come(passes, teller, 7), "note 7 run 7 not typical");
  EXPECT_EQ(come(passes, teller, 7), "run 7 typical");
  EXPECT_EQ(come(passes, teller, 1), "run 1 typical");
}

KDT_TEST(a_recording_whose_run_fails_stays) {
  Teller teller;
  RecordedPasses passes(teller);
  run_before_recording(passes, teller, 7);
  for (int i = 0; i < 2; ++i) {
    teller.refuses_runs = true;
    EXPECT_THROWS("no runs today", come(passes, teller, 7));
    EXPECT_EQ(teller.told(), i == 0 ? "note 7 " : "");
    teller.refuses_runs = false;
    EXPECT_EQ(come(passes, teller, 7), "run 7 typical");
  }
}

}  // namespace
}  // namespace kdt::test

KDT_TEST_MAIN
