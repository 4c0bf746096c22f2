// A folder for one test program's files, removed at its end.
#pragma once

#include <atomic>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>

#include "check.h"
#include "core/error.h"

namespace kdt::test {

class TempDir {
 public:
  TempDir() {
    std::string name = (std::filesystem::temp_directory_path() / "kdt-test-XXXXXX").string();
    if (mkdtemp(name.data()) == nullptr) throw std::runtime_error("no temporary folder: " + name);
    path_ = name;
  }
  ~TempDir() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TempDir(const TempDir&) = delete;

  std::string path(const std::string& name) const { return (path_ / name).string(); }

  // Writes a file and returns its path.
  std::string write(const std::string& name, std::string_view bytes) const {
    std::ofstream out(path(name), std::ios::binary | std::ios::trunc);
    out << bytes;
    out.close();
    if (!out.good()) throw std::runtime_error("cannot write " + path(name));
    return path(name);
  }

 private:
  std::filesystem::path path_;
};

inline std::string read_file(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return std::string(std::istreambuf_iterator<char>(in), {});
}

// Calls `open` again and again, while the file is cut short and mended again and again: it succeeds
// or throws Error.
template <typename Open>
void open_while_cut_short(const TempDir& dir, const std::string& name, const std::string& bytes,
                          Open open) {
  std::atomic<bool> stop = false;
  std::thread writer([&] {
    while (!stop) {
      std::filesystem::resize_file(dir.path(name), 100);
      dir.write(name, bytes);
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  });
  int opened = 0, refused = 0;
  while (opened + refused < 3000 && (opened < 20 || refused < 20)) {
    try {
      open();
      ++opened;
    } catch (const Error&) {
      ++refused;
    }
  }
  stop = true;
  writer.join();
  EXPECT(opened > 0 && refused > 0);
}

}  // namespace kdt::test
