#include <sys/stat.h>

#include "check.h"
#include "io/mmap_file.h"
#include "io/temp_dir.h"

using kdt::MmapFile;
using kdt::test::TempDir;

KDT_TEST(maps_the_bytes_of_a_file) {
  const TempDir dir;
  const MmapFile file(dir.write("x", "seven\0!"));
  EXPECT_EQ(file.size(), size_t{5});
  EXPECT_EQ(std::string(reinterpret_cast<const char*>(file.data()), file.size()), "seven");
}

KDT_TEST(an_empty_file_maps_to_no_bytes) {
  const TempDir dir;
  const MmapFile file(dir.write("x", ""));
  EXPECT_EQ(file.size(), size_t{0});
  EXPECT(file.data() == nullptr);
}

KDT_TEST(follows_a_symbolic_link) {
  const TempDir dir;
  dir.write("blob", "abc");
  std::filesystem::create_symlink("blob", dir.path("link"));
  EXPECT_EQ(MmapFile(dir.path("link")).size(), size_t{3});
}

KDT_TEST(names_the_path_it_cannot_open) {
  const TempDir dir;
  EXPECT_THROWS("missing: cannot open", MmapFile(dir.path("missing")));
  std::filesystem::create_symlink("nowhere", dir.path("dangling"));
  EXPECT_THROWS("dangling: cannot open", MmapFile(dir.path("dangling")));
  EXPECT_THROWS("not a regular file", MmapFile(dir.path(".")));
}

KDT_TEST(does_not_wait_for_the_writer_of_a_pipe) {
  const TempDir dir;
  EXPECT_EQ(mkfifo(dir.path("pipe").c_str(), 0600), 0);
  EXPECT_THROWS("pipe: not a regular file", MmapFile(dir.path("pipe")));
}

KDT_TEST(keeps_its_bytes_when_moved) {
  const TempDir dir;
  MmapFile first(dir.write("x", "abc"));
  const MmapFile second(std::move(first));
  EXPECT_EQ(second.size(), size_t{3});
  EXPECT_EQ(second.data()[2], 'c');
}

KDT_TEST(read_copies_a_part) {
  const TempDir dir;
  const MmapFile file(dir.write("x", "0123456789"));
  std::string part(4, ' ');
  file.read(3, part.size(), part.data());
  EXPECT_EQ(part, "3456");
  file.read(10, 0, part.data());
  EXPECT_THROWS("read of 4 bytes at 7", file.read(7, 4, part.data()));
  EXPECT_THROWS("read of 1 bytes at 11", file.read(11, 1, part.data()));
}

KDT_TEST(read_reports_a_file_that_became_shorter) {
  const TempDir dir;
  const MmapFile file(dir.write("x", std::string(10000, 'x')));
  std::filesystem::resize_file(dir.path("x"), 5000);
  std::string all(10000, ' ');
  EXPECT_THROWS("became shorter while open: it ends at 5000 of 10000",
                file.read(0, all.size(), all.data()));
}

KDT_TEST(text_files_have_a_bound) {
  const TempDir dir;
  dir.write("x", "0123456789");
  EXPECT_EQ(kdt::read_text_file(dir.path("x"), 10), "0123456789");
  EXPECT_THROWS("x: 10 bytes, want at most 9", kdt::read_text_file(dir.path("x"), 9));
}

KDT_TEST_MAIN
