// Loading: what arrives, that all ranks get it from one reading, and how a load ends early.
#include <chrono>
#include <thread>

#include "checkpoint_files.h"
#include "io/safetensors.h"
#include "model/loader.h"
#include "parallel/worker_group.h"

namespace kdt::test {
namespace {

const std::string kUp = "layers.0.mlp.up_proj";

// A plan without a back end's weights: each item has modules of its own, whose bytes `look` gets.
using Look = std::function<void(const std::string&, const HostMatrix&)>;
void list(LoadPlan& plan, const std::vector<std::string>& modules, const Look& look) {
  for (const std::string& module : modules) {
    plan.items().push_back(
        {.name = module,
         .make = [] {},
         .parts = {{{module},
                    [=](const std::vector<HostMatrix>& whole) { look(module, whole.at(0)); }}},
         .memory = nullptr,
         .drop = nullptr});
  }
}

std::vector<std::string> modules_of(const WeightSpecs& specs) {
  std::vector<std::string> names;
  for (const auto& [name, spec] : specs) {
    if (spec.kind != WeightSpec::Kind::kIgnored) names.push_back(name);
  }
  return names;
}

// The small checkpoint in a folder of its own.
struct Files {
  Tensors tensors;
  TempDir dir;
  std::unique_ptr<SafetensorsFolder> source;
  explicit Files(const Tensors& t = small_tensors()) : tensors(t) {
    tensors.write(dir);
    source = std::make_unique<SafetensorsFolder>(dir.path(""));
  }
  std::string path() const { return dir.path("model.safetensors"); }
  bool has(const std::string& name, const HostMatrix& m) const {
    const bool int4 = m.dtype == DType::kInt32;
    const bool vector = m.in_features == 1 && tensors.entries.contains(name);
    const auto& data =
        tensors.entries.at(vector ? name : name + (int4 ? ".weight_packed" : ".weight"));
    const bool same = std::memcmp(data.bytes.data(), m.data, data.bytes.size()) == 0;
    if (!int4)
      return same && m.out_features * m.row_bytes() == static_cast<int64_t>(data.bytes.size());
    const auto& scale = tensors.entries.at(name + ".weight_scale");
    return same && std::memcmp(scale.bytes.data(), m.scale, scale.bytes.size()) == 0;
  }
};

// A buffer of which a batch has a quarter: a few tensors each.
StreamOptions narrow() {
  StreamOptions options;
  options.buffer_bytes = 32 << 10;
  options.read_bytes = 4096;
  return options;
}

KDT_TEST(every_module_arrives_whole_and_is_read_once) {
  Files files;
  files.tensors.add("layers.0.self_attn.rotary_emb.inv_freq", "F32", {1 << 16});  // not wanted
  files.tensors.write(files.dir);
  const SafetensorsFolder source(files.dir.path(""));
  for (const bool direct : {false, true}) {
    LoadPlan plan(backend(), source, int4_specs(), {});
    int right = 0, count = 0;
    list(plan, modules_of(int4_specs()), [&](const std::string& name, const HostMatrix& m) {
      ++count;
      right += files.has(name, m) ? 1 : 0;
    });
    int64_t done = -1, total = 0;
    bool ascending = true;
    const LoadReport report = Loader(1, narrow()).load(plan, nullptr, [&](int64_t d, int64_t all) {
      ascending = ascending && d >= done && d <= all;
      done = d;
      total = all;
    });
    EXPECT_EQ(count, static_cast<int>(plan.items().size()));
    EXPECT_EQ(right, count);
    int64_t wanted = 0;
    for (const auto& [name, entry] : files.tensors.entries)
      wanted += name.ends_with("inv_freq") ? 0 : static_cast<int64_t>(entry.bytes.size());
    EXPECT_EQ(report.bytes, wanted);
    EXPECT(report.buffer_bytes > 0 && report.buffer_bytes <= 32 << 10);
    EXPECT(ascending);
    EXPECT_EQ(done, wanted);
    EXPECT_EQ(total, static_cast<int64_t>(source.total_bytes()));
    if (!direct) const_cast<SafetensorsFolder&>(source).use_direct_io();
  }
}

KDT_TEST(values_get_to_the_back_end) {
  const Files files;
  LoadPlan plan(backend(), *files.source, int4_specs(), {});
  Buffer norm, q_norm, table;
  std::unique_ptr<LinearWeight> k_proj;
  plan.vector("norm.weight", &norm);
  plan.vector("layers.0.self_attn.q_norm.weight", &q_norm);
  plan.table("fc", &table);
  plan.linear({"layers.0.self_attn.k_proj"}, &k_proj);
  load_checkpoint(plan, {});
  const auto expected = [&](const std::string& name) {
    const Tensors::Entry& entry = files.tensors.entries.at(name);
    Floats values;
    for (size_t i = 0; i < entry.bytes.size(); i += Tensors::bytes_of(entry.dtype)) {
      float value;
      uint16_t bits;
      std::memcpy(&bits, &entry.bytes[i], 2);
      if (entry.dtype == "BF16") {
        value = bf16_to_float(bits);
      } else {
        std::memcpy(&value, &entry.bytes[i], 4);
      }
      values.push_back(value);
    }
    return values;
  };
  EXPECT(same_bits(download(backend(), norm.tensor), expected("norm.weight")));
  EXPECT(
      same_bits(download(backend(), q_norm.tensor), expected("layers.0.self_attn.q_norm.weight")));
  EXPECT(table.tensor.dtype() == DType::kBFloat16 && table.tensor.dim(0) == 32 &&
         table.tensor.dim(1) == 64);
  std::vector<uint8_t> bytes(32 * 64 * 2);
  backend().download(bytes.data(), table.tensor);
  EXPECT(bytes == files.tensors.entries.at("fc.weight").bytes);
  EXPECT(k_proj->out_features == 16 && k_proj->in_features == 32);
}

KDT_TEST(a_weight_shape_that_lies_is_found_on_the_way) {
  Tensors t = small_tensors();
  t.add_shape<int64_t>(kUp, {64, 31});
  const Files files(t);
  LoadPlan plan(backend(), *files.source, int4_specs(), {});
  list(plan, {"fc", kUp}, [](const std::string&, const HostMatrix&) {});
  EXPECT_THROWS(kUp + ".weight_shape: holds [64, 31], want [64, 32]", load_checkpoint(plan, {}));
}

KDT_TEST(fp8_is_widened_once_and_then_sliced) {
  DraftConfig config = small_drafter();
  config.intermediate_size = 320;
  WeightSpecs specs = draft_weight_specs(config);
  for (auto& [name, spec] : specs) spec.fp8 = spec.kind == WeightSpec::Kind::kMatrix;
  Tensors t = small_tensors();
  for (const char* part : {".weight_packed", ".weight_scale", ".weight_shape"})
    t.entries.erase(kUp + part);
  const std::string down = "layers.0.mlp.down_proj";
  t.add("layers.0.mlp.gate_proj.weight", "BF16", {320, 32});
  t.add(kUp + ".weight", "F8_E4M3", {320, 32});
  t.add(kUp + ".weight_scale_inv", "F32", {3, 1});
  t.add(down + ".weight", "F8_E4M3", {32, 320});
  t.add(down + ".weight_scale_inv", "F32", {1, 3});
  const float scales[] = {1, 0.5, 4};
  for (const std::string& name : {kUp, down})
    std::memcpy(t.entries[name + ".weight_scale_inv"].bytes.data(), scales, sizeof(scales));
  const auto value_at = [&](const std::string& name, int64_t i, float scale) {
    // Codes below 0x40 are at most 1.875.
    const uint8_t code = t.entries.at(name + ".weight").bytes[i];
    const int exponent = code >> 3, mantissa = code & 7;
    return scale *
           (exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10));
  };
  const Files files(t);
  // Rank 1 of 2: rows 160 to 320 of up_proj, columns 160 to 320 of down_proj.
  LoadPlan plan(backend(), *files.source, specs, {.rank = 1, .size = 2});
  EXPECT(plan.dtype(kUp) == DType::kBFloat16);
  std::unique_ptr<LinearWeight> up, lower;
  plan.linear({kUp}, &up);
  plan.linear({down}, &lower);
  int wrong = 0;
  list(plan, {kUp, down}, [&](const std::string& name, const HostMatrix& m) {
    EXPECT(m.dtype == DType::kBFloat16);
    for (int64_t r = 0; r < m.out_features; ++r) {
      for (int64_t c = 0; c < m.in_features; ++c) {
        uint16_t bits;
        std::memcpy(&bits, m.row(r) + 2 * c, 2);
        const double want =
            value_at(name, r * m.in_features + c, scales[(name == kUp ? r : c) / 128]);
        wrong += bf16_to_float(bits) != want ? 1 : 0;
      }
    }
  });
  const LoadReport report = load_checkpoint(plan, {});
  EXPECT_EQ(wrong, 0);
  // Of the file, with the matrix that lies between the two.
  EXPECT_EQ(report.bytes, 2 * (320 * 32 + 12) + 320 * 32 * 2);
  const auto product = [&](const LinearWeight& weight, int64_t column) {
    Floats x(weight.in_features, 0.0f);
    x[column] = 1;
    const Buffer in = upload(backend(), x, {1, weight.in_features});
    const Buffer out = output(backend(), {1, weight.out_features});
    backend().linear(in.tensor, weight, out.tensor);
    return download(backend(), out.tensor);
  };
  const Floats of_up = product(*up, 5), of_down = product(*lower, 100);
  EXPECT(up->out_features == 160 && lower->in_features == 160);
  EXPECT_EQ(of_up.at(100), static_cast<float>(value_at(kUp, 260 * 32 + 5, scales[2])));
  EXPECT_EQ(of_down.at(7), static_cast<float>(value_at(down, 7 * 320 + 260, scales[2])));

  t.entries[kUp + ".weight"].bytes[150 * 32 + 3] = 0xff;
  const Files broken(t);
  LoadPlan refused(backend(), *broken.source, specs, {});
  list(refused, {kUp}, [](const std::string&, const HostMatrix&) {});
  EXPECT_THROWS(kUp + ".weight[150, 3] is NaN", load_checkpoint(refused, {}));
}

// ---------------------------------------------------------------- several ranks

// What the ranks' threads share, which one that is stuck may use for longer than a test.
struct Run {
  Files files;
  Loader loader;
  std::function<void(int rank, const std::string&, const HostMatrix&)> look;
  std::function<void(int rank, LoadPlan&)> change = [](int, LoadPlan&) {};
  std::vector<LoadReport> reports;
  Run(int num_ranks, const StreamOptions& options)
      : loader(num_ranks, options), reports(num_ranks) {}
};

void load_on(WorkerGroup& group, const std::shared_ptr<Run>& run) {
  std::vector<RankGroup*> ranks;
  for (int i = 0; i < group.size(); ++i) ranks.push_back(&group.rank(i));
  group.run([run, ranks](int i) {
    LoadPlan plan(backend(), *run->files.source, int4_specs(), {});
    list(plan, modules_of(int4_specs()), [&](const std::string& name, const HostMatrix& m) {
      if (run->look) run->look(i, name, m);
    });
    run->change(i, plan);
    run->reports[i] = run->loader.load(plan, ranks[i], {});
  });
}

KDT_TEST(all_ranks_get_all_modules_from_one_reading) {
  for (int repeat = 0; repeat < 100; ++repeat) {
    WorkerGroup group(4, 30);
    const auto run = std::make_shared<Run>(4, narrow());
    std::atomic<int> right = 0;
    run->look = [&](int, const std::string& name, const HostMatrix& m) {
      right += run->files.has(name, m) ? 1 : 0;
    };
    load_on(group, run);
    EXPECT_EQ(right.load(), 4 * static_cast<int>(modules_of(int4_specs()).size()));
    int64_t all = 0;
    for (const auto& [name, entry] : run->files.tensors.entries)
      all += static_cast<int64_t>(entry.bytes.size());
    for (const LoadReport& report : run->reports) EXPECT_EQ(report.bytes, all);
    run->look = nullptr;
  }
}

KDT_TEST(a_rank_that_fails_ends_all_with_its_name) {
  for (int repeat = 0; repeat < 100; ++repeat) {
    WorkerGroup group(3, 30);
    const auto run = std::make_shared<Run>(3, narrow());
    const std::string at = repeat % 2 == 0 ? "fc" : "layers.0.self_attn.o_proj";
    run->look = [at](int rank, const std::string& name, const HostMatrix&) {
      if (rank == 1 && name == at) throw Error("out of room");
    };
    std::string said;
    try {
      load_on(group, run);
    } catch (const Error& error) {
      said = error.what();
    }
    EXPECT_EQ(said, "rank 1: out of room");
  }
}

KDT_TEST(a_rank_whose_weights_do_not_fit_ends_all) {
  WorkerGroup group(3, 30);
  const auto run = std::make_shared<Run>(3, narrow());
  run->change = [](int rank, LoadPlan& plan) {
    if (rank == 2) plan.items().back().make = [] { throw Error("no memory on the device"); };
  };
  EXPECT_THROWS("rank 2: " + run->files.source->name() + ": norm.weight: no memory on the device",
                load_on(group, run));
}

KDT_TEST(a_file_cut_short_ends_all_ranks_with_its_name) {
  for (int repeat = 0; repeat < 50; ++repeat) {
    WorkerGroup group(3, 30);
    const auto run = std::make_shared<Run>(3, narrow());
    std::filesystem::resize_file(run->files.path(), 8000 + 200 * repeat);
    std::string said;
    try {
      load_on(group, run);
    } catch (const Error& error) {
      said = error.what();
    }
    // The ranks have nothing to do with it.
    EXPECT(said.starts_with(run->files.path() + ": the file became shorter while open"));
  }
}

KDT_TEST(a_group_that_ends_ends_the_load) {
  WorkerGroup group(2, 30);
  const auto run = std::make_shared<Run>(2, narrow());
  run->look = [&group](int rank, const std::string&, const HostMatrix&) {
    if (rank == 0) group.rank(1).abort("the power is gone");
  };
  EXPECT_THROWS("the power is gone", load_on(group, run));
}

KDT_TEST(a_rank_that_takes_nothing_more_is_named_in_time) {
  const auto run = std::make_shared<Run>(3, narrow());
  const auto back = std::make_shared<std::atomic<bool>>(false);
  run->look = [back](int rank, const std::string& name, const HostMatrix&) {
    while (rank == 1 && name == "fc" && !*back)
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
  };
  WorkerGroup group(3, 0.3);
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_THROWS("rank 1 took no more weights for 0.3 s", load_on(group, run));
  EXPECT(std::chrono::steady_clock::now() - begin < std::chrono::seconds(10));
  *back = true;
}

KDT_TEST(plans_that_differ_are_refused) {
  for (const bool shorter : {true, false}) {
    WorkerGroup group(2, 30);
    const auto run = std::make_shared<Run>(2, narrow());
    run->change = [shorter](int rank, LoadPlan& plan) {
      if (rank == 1 && shorter) plan.items().pop_back();
      if (rank == 1 && !shorter) std::swap(plan.items()[0], plan.items()[1]);
    };
    EXPECT_THROWS("the ranks' plans differ", load_on(group, run));
  }
}

}  // namespace
}  // namespace kdt::test

KDT_OP_TEST_MAIN
