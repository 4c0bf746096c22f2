// Files that come in blocks, read ahead.
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <system_error>
#include <thread>

#include "check.h"
#include "io/block_reader.h"
#include "io/temp_dir.h"

namespace kdt::test {
namespace {

namespace fs = std::filesystem;

KDT_TEST(blocks_of_a_file_come_in_order) {
  const TempDir dir;
  std::string bytes;
  while (bytes.size() < 9 * BlockReader::kBlockBytes + 5) bytes += std::to_string(bytes.size());
  const InputFile file(dir.write("a", bytes));
  for (const size_t begin : {size_t{0}, size_t{4096}, bytes.size() - 3, bytes.size()}) {
    BlockReader reader(file, begin, bytes.size());
    std::string got;
    while (true) {
      const auto block = reader.next();
      if (block.empty()) break;
      got.append(reinterpret_cast<const char*>(block.data()), block.size());
    }
    EXPECT(got == bytes.substr(begin));
  }
  // Left in the middle.
  BlockReader(file, 0, bytes.size()).next();
  BlockReader reader(file, 0, bytes.size());
  fs::resize_file(dir.path("a"), 2 * BlockReader::kBlockBytes);
  EXPECT_THROWS("became shorter", [&] {
    while (!reader.next().empty()) {
    }
  }());
}

// A process that may start no thread, told apart by what it writes.
KDT_TEST(a_reader_needs_a_thread) {
  const TempDir dir;
  const InputFile file(dir.write("a", "bytes"));
  int ends[2];
  KDT_CHECK(pipe(ends) == 0, "no pipe");
  const pid_t pid = fork();
  if (pid == 0) {
    // The limit is none for root: be somebody else.
    if (getuid() == 0 && setuid(65534) != 0) _exit(77);
    const rlimit none{0, 0};
    setrlimit(RLIMIT_NPROC, &none);
    std::string text = "nothing was thrown";
    try {
      BlockReader reader(file, 0, file.size());
    } catch (const std::exception& error) {
      text = error.what();
    }
    try {
      std::thread([] {}).join();
      text = "";  // a system without this limit
    } catch (const std::system_error&) {
    }
    _exit(write(ends[1], text.data(), text.size()) == static_cast<ssize_t>(text.size()) ? 0 : 1);
  }
  close(ends[1]);
  std::string text(1000, '\0');
  text.resize(std::max<ssize_t>(0, read(ends[0], text.data(), text.size())));
  close(ends[0]);
  int status = 0;
  waitpid(pid, &status, 0);
  if (WIFEXITED(status) && (WEXITSTATUS(status) == 77 || (status == 0 && text.empty()))) {
    std::printf("skipped: no limit of threads here\n");
    return;
  }
  EXPECT_EQ(status, 0);
  if (!text.starts_with(dir.path("a") + ": no thread to read it: "))
    report(__FILE__, __LINE__, "fault is '" + text + "'");
}

}  // namespace
}  // namespace kdt::test

KDT_TEST_MAIN
