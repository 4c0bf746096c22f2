// Pre-sharded caches: what is written is what a rank would have loaded, and nothing else is loaded.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>

#include "engine/inspect.h"
#include "io/xxh64.h"
#include "shard_files.h"

namespace kdt::test {
namespace {

KDT_TEST(a_cache_holds_what_the_ranks_load) {
  for (const std::string preset : {"tiny", "plain", "nested"}) {
    for (const auto& [size, expert_parallel] :
         std::vector<std::pair<int, bool>>{{1, false}, {2, true}, {4, true}}) {
      const TempDir dir;
      const std::string model = preset_folder(preset), out = dir.path("out");
      std::vector<int64_t> told;
      ShardOptions options = options_of(model, out + "/", size, expert_parallel);
      options.progress = [&](int64_t done, int64_t total) {
        EXPECT(done <= total && (told.empty() || done >= told.back()));
        told.push_back(done);
      };
      const ShardSummary summary = shard_checkpoint(options);
      EXPECT_EQ(told.back(), summary.written_bytes);
      EXPECT_EQ(summary.layout, backend().weight_layout());
      int64_t written = 0;
      for (int rank = 0; rank < size; ++rank) {
        EXPECT(weights_of(out, rank, size, expert_parallel) ==
               weights_of(model, rank, size, expert_parallel));
        for (const std::string& folder : {out, out + "/drafter"})
          written += static_cast<int64_t>(fs::file_size(folder + "/" + rank_file_name(rank, size)));
      }
      EXPECT_EQ(summary.written_bytes, written);
      // Each byte once: tensors that the model does not use are not read, and nothing twice.
      int64_t wanted = 0;
      for (const std::string& folder : {model, model + "/drafter"}) {
        const SafetensorsFolder files(folder);
        for (const auto& [name, view] : files.tensors()) {
          if (!name.starts_with("vision") && !name.starts_with("mm_") &&
              !name.ends_with("inv_freq"))
            wanted += static_cast<int64_t>(view.bytes);
        }
      }
      EXPECT_EQ(summary.read_bytes, wanted);
      const CheckpointReport report = inspect_checkpoint(out, true);
      EXPECT_EQ(report.faults.size(), size_t{0});
      EXPECT_EQ(report.cache.tensor_parallel_size, size);
      EXPECT(!fs::exists(out + ".partial"));
    }
  }
}

KDT_TEST(a_cache_needs_no_checkpoint) {
  Made made;
  const Weights before = weights_of(made.model, 1, 2, true);
  fs::remove_all(made.model);
  EXPECT(weights_of(made.out, 1, 2, true) == before);
}

// Descriptors of this process that read a file past the page cache.
int direct_reads(const std::string& path) {
  int count = 0;
  for (const fs::directory_entry& entry : fs::directory_iterator("/proc/self/fd")) {
    std::error_code gone;
    if (fs::read_symlink(entry.path(), gone) != path) continue;
    const int fd = std::stoi(entry.path().filename().string());
    count += (fcntl(fd, F_GETFL) & O_DIRECT) != 0 ? 1 : 0;
  }
  return count;
}

KDT_TEST(reads_past_the_page_cache_give_the_same) {
  Made made;
  ShardCache through(made.out), past(made.out);
  past.use_direct_io();
  const ModelConfig config = load_model_config(made.out);
  Weights weights[2];
  for (int i = 0; i < 2; ++i) {
    TargetModel target({backend(), {1, 2, true}}, config, i == 0 ? through : past, 1, 1, {});
    const auto plan = target.take_plan();
    int direct = 0;
    (i == 0 ? through : past).load(*plan, [&](int64_t, int64_t) {
      direct = std::max(direct, direct_reads(fs::canonical(made.rank(1))));
    });
    const int possible = open(made.rank(1).c_str(), O_RDONLY | O_DIRECT);
    EXPECT_EQ(direct, i == 1 && possible >= 0 ? 1 : 0);
    if (possible >= 0) close(possible);
    weights[i] = memory_of(*plan);
  }
  EXPECT(weights[0] == weights[1] && !weights[0].empty());
}

// A rank's file is read once, from its beginning to its end.
KDT_TEST(each_byte_of_a_rank_is_read_once) {
  Made made;
  std::ifstream io("/proc/self/io");
  if (!io) return;
  const auto bytes_read = [] {
    std::ifstream counters("/proc/self/io");
    std::string name;
    int64_t value = 0;
    counters >> name >> value;
    return value;
  };
  const ShardCache cache(made.out);
  const ModelConfig config = load_model_config(made.out);
  TargetModel target({backend(), {0, 2, true}}, config, cache, 1, 1, {});
  const auto plan = target.take_plan();
  const int64_t before = bytes_read();
  cache.load(*plan, {});
  const int64_t read = bytes_read() - before, size = cache.bytes(0);
  EXPECT(read > size - 4096);  // but for the gap behind the table
  EXPECT(read < size + 4096);  // and the counters
}

KDT_TEST(another_use_than_the_caches_is_refused) {
  Made made;
  expect_fault(load_fault(made.out), "");
  expect_fault(load_fault(made.out, 1, false),
               "tensor_parallel_size is 1, but " + made.out + " is a pre-sharded cache for 2");
  expect_fault(load_fault(made.out, 4), "tensor_parallel_size is 4, but");
  expect_fault(load_fault(made.out, 2, false), "expert_parallel is false, but");
  EXPECT_THROWS("is a pre-sharded cache already",
                shard_checkpoint(options_of(made.out, made.dir.path("again"))));
  replace_in(made.out + "/" + kShardsFile, "\"layout\": \"", "\"layout\": \"other-");
  expect_fault(load_fault(made.out), "a pre-sharded cache in the weight layout 'other-");
}

KDT_TEST(a_stale_cache_is_refused) {
  for (const std::string what : {"time", "header", "size", "one more", "config"}) {
    Made made;
    const std::string file = made.model + "/model-00001-of-00002.safetensors";
    KDT_CHECK(fs::exists(file), file, ": missing");
    const auto time = fs::last_write_time(file);
    if (what == "time") fs::last_write_time(file, time + std::chrono::seconds(1));
    if (what == "header") {
      replace_in(file, "F16", "F16");
      flip(file, 9);
      fs::last_write_time(file, time);
    }
    if (what == "size") {
      fs::resize_file(file, fs::file_size(file) + 1);
      fs::last_write_time(file, time);
    }
    if (what == "one more") fs::copy_file(file, made.model + "/more.safetensors");
    if (what == "config") replace_in(made.model + "/config.json", "{", "{ ");
    expect_fault(load_fault(made.out),
                 made.out + ": stale: the checkpoint " + made.model + " has changed since");
    EXPECT_EQ(inspect_checkpoint(made.out).faults.size(), size_t{1});
  }
}

KDT_TEST(a_checkpoint_that_cannot_be_read_is_not_missed) {
  Made made;
  const std::string file = made.model + "/model-00001-of-00002.safetensors";
  fs::remove(file);
  fs::create_symlink(made.dir.path("gone"), file);
  expect_fault(load_fault(made.out), "");
  EXPECT_EQ(load_fault(made.out), std::string());
  EXPECT_EQ(inspect_checkpoint(made.out).faults.size(), size_t{0});
  // To write one it is wanted.
  expect_fault(
      [&]() -> std::string {
        try {
          shard_checkpoint(options_of(made.model, made.dir.path("again")));
        } catch (const std::exception& error) {
          return error.what();
        }
        return "";
      }(),
      file);
}

// A rank that loads alone hears of the end of its group, from a checkpoint and from a cache.
KDT_TEST(a_load_ends_with_its_group) {
  Made made;
  for (const std::string& folder : {made.model, made.out}) {
    Checkpoints checkpoints(engine_of(folder, 2, true), 1);
    TargetModel target({backend(), {1, 2, true}}, checkpoints.config, *checkpoints.source, 1, 1,
                       {});
    const auto plan = target.take_plan();
    const auto group = make_thread_group(2, 30);
    group[0]->abort("rank 0 has burnt");
    EXPECT_THROWS("rank 0 has burnt", checkpoints.load(*plan, group[1].get(), {}));
  }
  // And in the midst of it.
  Checkpoints checkpoints(engine_of(made.out, 2, true), 1);
  TargetModel target({backend(), {1, 2, true}}, checkpoints.config, *checkpoints.source, 1, 1, {});
  const auto plan = target.take_plan();
  const auto group = make_thread_group(2, 30);
  int calls = 0;
  EXPECT_THROWS("rank 0 has burnt", checkpoints.load(*plan, group[1].get(), [&](int64_t, int64_t) {
    if (++calls == 1) group[0]->abort("rank 0 has burnt");
  }));
  EXPECT_EQ(calls, 1);
}

KDT_TEST(a_weight_without_memory_is_named) {
  Made made;
  const ShardCache cache(made.out);
  const ModelConfig config = load_model_config(made.out);
  TargetModel target({backend(), {0, 2, true}}, config, cache, 1, 1, {});
  const auto plan = target.take_plan();
  LoadItem& item = plan->items().at(3);
  item.make = [] { throw Error("no memory for 7 bytes"); };
  EXPECT_THROWS(made.out + ": " + item.name + ": no memory for 7 bytes", cache.load(*plan, {}));
}

KDT_TEST(spoilt_rank_files_are_refused) {
  const auto spoilt = [](const std::string& part, const auto& spoil) {
    Made made;
    spoil(made);
    expect_fault(load_fault(made.out), part);
    bool found = false;
    for (const std::string& fault : inspect_checkpoint(made.out, true).faults)
      found = found || fault.find(part) != std::string::npos;
    EXPECT(found);
  };
  const auto rewrite_header = [](const std::string& path, size_t at, uint32_t value) {
    overwrite(path, at, std::string(reinterpret_cast<const char*>(&value), sizeof(value)));
    const uint64_t sum = xxh64(read_file(path).data(), 96);
    overwrite(path, 96, std::string(reinterpret_cast<const char*>(&sum), sizeof(sum)));
  };
  spoilt("rank-0-of-2.kdts: missing", [](Made& m) { fs::remove(m.rank(0)); });
  spoilt("rank-0-of-2.kdts: truncated: 100 bytes, a header has 104",
         [](Made& m) { fs::resize_file(m.rank(0), 100); });
  spoilt("rank-0-of-2.kdts: truncated: ",
         [](Made& m) { fs::resize_file(m.rank(0), fs::file_size(m.rank(0)) - 1); });
  spoilt(", the header says ",
         [](Made& m) { fs::resize_file(m.rank(0), fs::file_size(m.rank(0)) + 1); });
  spoilt("not a rank's file of a pre-sharded cache",
         [](Made& m) { overwrite(m.rank(0), 0, "GGUF"); });
  spoilt("not written to its end",
         [](Made& m) { overwrite(m.rank(0), 0, std::string(104, '\0')); });
  spoilt("version 2, this engine reads version 1",
         [&](Made& m) { rewrite_header(m.rank(0), 4, 2); });
  spoilt("holds rank 7, want rank 0", [&](Made& m) { rewrite_header(m.rank(0), 32, 7); });
  spoilt("one of 8 ranks, want one of 2", [&](Made& m) { rewrite_header(m.rank(0), 36, 8); });
  spoilt("expert_parallel is 0, want 1", [&](Made& m) { rewrite_header(m.rank(0), 40, 0); });
  spoilt("the items end at ", [&](Made& m) { rewrite_header(m.rank(0), 44, 1); });
  spoilt("truncated: the table ends in it",
         [&](Made& m) { rewrite_header(m.rank(0), 44, 1 << 30); });
  spoilt("weight layout 'Apu-",
         [&](Made& m) { rewrite_header(m.rank(0), 64, 'A' | 'p' << 8 | 'u' << 16 | '-' << 24); });
  spoilt("bad checksum of the header", [](Made& m) { flip(m.rank(0), 40); });
  spoilt("bad checksum of the table", [](Made& m) { flip(m.rank(0), 200); });
  spoilt("bad checksum of the data of '",
         [](Made& m) { flip(m.rank(0), fs::file_size(m.rank(0)) - 1); });
  spoilt("holds rank 1, want rank 0", [](Made& m) {
    fs::copy_file(m.rank(1), m.rank(0), fs::copy_options::overwrite_existing);
  });
  // Of the same checkpoint, and alike in every byte but the cache's number.
  spoilt("belongs to another cache than the files beside it", [](Made& m) {
    const std::string other = m.dir.path("other");
    shard_checkpoint(options_of(m.model, other));
    fs::copy_file(other + "/rank-0-of-2.kdts", m.rank(0), fs::copy_options::overwrite_existing);
  });
}

KDT_TEST(spoilt_descriptions_are_refused) {
  const auto spoilt = [](const std::string& from, const std::string& to, const std::string& part) {
    Made made;
    replace_in(made.out + "/" + kShardsFile, from, to);
    expect_fault(load_fault(made.out), made.out + "/" + kShardsFile + part);
  };
  spoilt("kdtree pre-sharded cache", "x", ": format is \"x\", want \"kdtree pre-sharded cache\"");
  spoilt("\"version\": 1", "\"version\": 9", ": version is 9, this engine reads version 1");
  spoilt("\"version\": 1", "\"version\": -1", ": version is -1, want 0 to ");
  spoilt("\"layout\"", "\"layput\"", ": layout is missing");
  spoilt("\"expert_parallel\": true", "\"expert_parallel\": 0",
         ": expert_parallel is 0, want true or false");
  spoilt("\"tensor_parallel_size\": 2", "\"tensor_parallel_size\": 3",
         ": tensor_parallel_size is 3, rank_bytes has 2");
  spoilt("\"cache_id\": \"", "\"cache_id\": \"x", ": cache_id is ");
  spoilt("{", "[", ": not valid JSON");
  Made made;
  flip(made.out + "/kdtree_tensors.json", 300);
  expect_fault(load_fault(made.out), "kdtree_tensors.json: is not as kdtree_shards.json has it");
}

// Weights are those that config.json asks for, by name and by size.
KDT_TEST(other_weights_than_the_configs_are_refused) {
  Made made;
  const ShardCache cache(made.out);
  const ModelConfig config = load_model_config(made.out);
  const auto fault_of = [&](const auto& change) -> std::string {
    TargetModel model({backend(), {0, 2, true}}, config, cache, 1, 1, {});
    const auto plan = model.take_plan();
    change(plan->items());
    try {
      cache.load(*plan, {});
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  using Items = std::vector<LoadItem>;
  EXPECT_EQ(fault_of([](Items&) {}), std::string());
  expect_fault(fault_of([](Items& items) { items[2].name = "x"; }), ", config.json asks for 'x'");
  expect_fault(fault_of([](Items& items) { items.pop_back(); }), ", config.json asks for none");
  expect_fault(fault_of([](Items& items) {
                 LoadItem& item = items.back();
                 item.memory = [memory = item.memory] {
                   std::vector<Tensor> less = memory();
                   less.pop_back();
                   return less;
                 };
               }),
               " bytes, config.json asks for ");
}

// Numbers that no tensor's shape tells: the weights would be computed with in another way.
KDT_TEST(an_edited_config_is_refused) {
  for (const std::string folder : {"", "/drafter"}) {
    Made made;
    const std::string path = made.out + folder + "/config.json";
    replace_in(path, "\"rope_theta\": ", "\"rope_theta\": 1");
    const std::string fault = path + ": changed since this pre-sharded cache was made";
    expect_fault(load_fault(made.out), fault + ": run kdtree shard again");
    expect_fault(join(inspect_checkpoint(made.out + folder).faults.at(0)), fault);
    replace_in(path, "\"rope_theta\": 1", "\"rope_theta\": ");
    EXPECT_EQ(load_fault(made.out), std::string());
  }
  Made made;  // what only says where to stop may be edited
  replace_in(made.out + "/generation_config.json", "509", "508");
  EXPECT_EQ(load_fault(made.out), std::string());
  replace_in(made.out + "/" + kShardsFile, "\"config_xxh64\"", "\"config_xxh65\"");
  expect_fault(load_fault(made.out), ": made by an older version, config_xxh64 is missing");
}

KDT_TEST(a_folders_name_may_be_any_text) {
  for (const std::string name : {"a \"b\" \\ \n \x01 \u4e16", "\xff"}) {  // the last is not UTF-8
    Made made;
    const std::string model = made.dir.path(name), out = made.dir.path("named");
    fs::rename(made.model, model);
    shard_checkpoint(options_of(model, out));
    EXPECT_EQ(load_fault(out), std::string());
    if (name == "\xff") continue;
    EXPECT_EQ(ShardCache(out).source_folder(), model);
    std::ofstream(model + "/config.json", std::ios::app) << "\n";
    expect_fault(load_fault(out), "stale: the checkpoint ");
  }
}

}  // namespace
}  // namespace kdt::test

KDT_MODEL_TEST_MAIN
