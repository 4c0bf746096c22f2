// The file readers for the Python tests: one line of output a file, "ok" or "refused MESSAGE".
//   io_tool safetensors FILE...
//   io_tool kdtr FILE...
//   io_tool kdtr-copy FROM TO     reads one file and writes its arrays, in the order of their names
#include <cstdio>
#include <string>

#include "core/error.h"
#include "io/kdtr.h"
#include "io/mmap_file.h"
#include "io/safetensors.h"

namespace {

void read(const std::string& kind, const std::string& path) {
  if (kind == "kdtr") {
    const kdt::KdtrFile file(path);
    return;
  }
  const kdt::InputFile file(path);
  const auto read_at = [&](uint64_t offset, uint64_t bytes, void* out) {
    file.read(offset, bytes, out);
  };
  kdt::parse_safetensors(read_at, file.size(), path);
}

void copy(const std::string& from, const std::string& to) {
  const kdt::KdtrFile file(from);
  kdt::write_kdtr(to, {file.arrays().begin(), file.arrays().end()});
}

}  // namespace

int main(int argc, char** argv) {
  const std::string command = argc > 2 ? argv[1] : "";
  try {
    if (command == "kdtr-copy" && argc == 4) {
      copy(argv[2], argv[3]);
      return 0;
    }
  } catch (const kdt::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  if (command != "safetensors" && command != "kdtr") return 2;
  for (int i = 2; i < argc; ++i) {
    try {
      read(command, argv[i]);
      std::puts("ok");
    } catch (const kdt::Error& error) {
      std::string message = error.what();
      for (char& c : message) c = c == '\n' ? ' ' : c;
      std::printf("refused %s\n", message.c_str());
    }
  }
  return 0;
}
