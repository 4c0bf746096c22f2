// The folder that a pre-sharded cache is written into: nothing half-made stays, nothing of others
// goes.
#include <fcntl.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <unistd.h>

#include <csignal>

#include "shard_files.h"

namespace kdt::test {
namespace {

bool is_clean(const Made& made, const std::string& out) {
  for (const auto& entry : fs::directory_iterator(made.dir.path(".")))
    if (entry.path().string().find(fs::path(out).filename().string()) != std::string::npos)
      return false;
  return true;
}

KDT_TEST(nothing_is_left_of_what_fails) {
  Made made;
  const std::string out = made.dir.path("second");
  // Somebody stops it, at any time.
  for (int calls = 0; calls < 40; calls += 9) {
    ShardOptions options = options_of(made.model, out);
    int left = calls;
    options.progress = [&](int64_t, int64_t) {
      if (left-- == 0) throw std::runtime_error("stop");
    };
    EXPECT_THROWS("stop", shard_checkpoint(options));
    EXPECT(is_clean(made, out));
  }
  // The disk is full.
  rlimit old;
  getrlimit(RLIMIT_FSIZE, &old);
  signal(SIGXFSZ, SIG_IGN);
  for (const rlim_t bytes : {rlim_t{100}, rlim_t{50000}, rlim_t{300000}}) {
    const rlimit limit{bytes, old.rlim_max};
    setrlimit(RLIMIT_FSIZE, &limit);
    std::string fault;
    try {
      shard_checkpoint(options_of(made.model, out));
    } catch (const Error& error) {
      fault = error.what();
    }
    setrlimit(RLIMIT_FSIZE, &old);
    expect_fault(fault, "cannot write at ");
    EXPECT(is_clean(made, out));
  }
  // The checkpoint is changed meanwhile.
  ShardOptions options = options_of(made.model, out);
  options.progress = [&](int64_t, int64_t) {
    const std::string file = made.model + "/model-00001-of-00002.safetensors";
    fs::last_write_time(file, fs::last_write_time(file) + std::chrono::seconds(1));
  };
  EXPECT_THROWS("model: changed while it was read", shard_checkpoint(options));
  EXPECT(is_clean(made, out));
  // The checkpoint ends too soon.
  const std::string file = made.model + "/model-00002-of-00002.safetensors";
  fs::resize_file(file, fs::file_size(file) - 1);
  EXPECT_THROWS("truncated", shard_checkpoint(options_of(made.model, out)));
  EXPECT(is_clean(made, out));
}

KDT_TEST(folders_that_cannot_be_written_are_refused) {
  Made made;
  const auto refused = [&](const std::string& out, const std::string& part) {
    EXPECT_THROWS(part, shard_checkpoint(options_of(made.model, out)));
  };
  refused(made.out, ", which is there already");
  refused(made.model, ", which is there already");
  refused(made.dir.path("none/there"), "there is no folder");
  refused("", "want a folder's name");
  refused("/", "out is ");
  const std::string out = made.dir.path("second"), partial = out + ".partial";
  EXPECT_THROWS("tensor_parallel_size is 3, which does not divide num_attention_heads",
                shard_checkpoint(options_of(made.model, out, 3)));
  EXPECT(is_clean(made, out));
  // Another process is at it.
  fs::create_directory(partial);
  const int fd = open(partial.c_str(), O_RDONLY | O_DIRECTORY);
  KDT_CHECK(flock(fd, LOCK_EX) == 0, "cannot lock");
  refused(out, "another kdtree shard is writing it");
  EXPECT(fs::exists(partial));
  close(fd);
  // It was killed, and left something; and the folder is there, empty.
  std::ofstream(partial + "/rank-0-of-2.kdts") << "half";
  fs::create_directory(out);
  shard_checkpoint(options_of(made.model, out));
  EXPECT_EQ(load_fault(out), std::string());
  EXPECT(!fs::exists(partial));
  // What another made is not removed.
  const auto kept = [&](const std::string& name, const std::string& part) {
    fs::create_directories((partial / fs::path(name)).parent_path());
    std::ofstream(partial + "/" + name) << "mine";
    refused(made.dir.path("second"), part + ", which is not of a kdtree shard that was killed");
    EXPECT_EQ(read_file(partial + "/" + name), std::string("mine"));
    fs::remove_all(partial);
  };
  fs::remove_all(out);
  for (const char* name : {"notes.txt", "model.safetensors", "rank-0-of-2.kdts.old",
                           "rank-00-of-2.kdts", "kdtree_/x", "config.json", "drafter/thesis.pdf"}) {
    const std::string first = name;
    kept(name, "second, but " + partial + (first.starts_with("drafter") ? "/drafter" : "") +
                   " holds " +
                   (first == "kdtree_/x" ? "kdtree_" : fs::path(first).filename().string()));
  }
  fs::create_directory(partial);
  std::ofstream(partial + "/rank-0-of-2.kdts") << "half";
  kept("notes.txt", "notes.txt");
  // All that a killed one may leave.
  fs::create_directories(partial + "/drafter");
  for (const char* name : {"rank-0-of-2.kdts", "rank-1-of-2.kdts", "config.json",
                           "kdtree_tensors.json", "kdtree_shards.json", "drafter/rank-0-of-2.kdts"})
    std::ofstream(partial + "/" + name) << "half";
  shard_checkpoint(options_of(made.model, out));
  EXPECT_EQ(load_fault(out), std::string());
  fs::create_directory_symlink(made.model, made.dir.path("third.partial"));
  refused(made.dir.path("third"), "third.partial");
  EXPECT(fs::exists(made.model + "/config.json"));
}

}  // namespace
}  // namespace kdt::test

KDT_MODEL_TEST_MAIN
