// The test harness: KDT_TEST registers a case, EXPECT records a failure, run_tests prints the
// closing line. A program is one test file; each has `KDT_TEST_MAIN` at its end.
#pragma once

#include <cmath>
#include <cstdio>
#include <exception>
#include <sstream>
#include <string>
#include <vector>

namespace kdt::test {

struct Case {
  const char* name;
  void (*body)();
};

inline std::vector<Case>& cases() {
  static std::vector<Case> list;
  return list;
}

inline int& failures_in_case() {
  static int count = 0;
  return count;
}

inline void report(const char* file, int line, const std::string& what) {
  ++failures_in_case();
  std::printf("%s:%d: %s\n", file, line, what.c_str());
}

struct Registrar {
  Registrar(const char* name, void (*body)()) { cases().push_back({name, body}); }
};

// Runs the cases whose name contains argv[1] (all without it). Exit status 1 when one failed.
inline int run_tests(int argc, char** argv) {
  const std::string filter = argc > 1 ? argv[1] : "";
  int passed = 0, failed = 0;
  for (const Case& test : cases()) {
    if (std::string(test.name).find(filter) == std::string::npos) continue;
    failures_in_case() = 0;
    try {
      test.body();
    } catch (const std::exception& error) {
      report(test.name, 0, std::string("threw: ") + error.what());
    }
    failures_in_case() == 0 ? ++passed : ++failed;
    if (failures_in_case() != 0) std::printf("FAILED %s\n", test.name);
  }
  std::printf("%d passed, %d failed\n", passed, failed);
  return failed == 0 && passed > 0 ? 0 : 1;
}

template <typename Body>
void expect_throws(const char* file, int line, const std::string& part, Body body) {
  try {
    body();
  } catch (const std::exception& error) {
    if (std::string(error.what()).find(part) == std::string::npos) {
      report(file, line, "message \"" + std::string(error.what()) + "\" lacks \"" + part + "\"");
    }
    return;
  }
  report(file, line, "nothing was thrown; expected \"" + part + "\"");
}

template <typename A, typename B>
void expect_equal(const char* file, int line, const char* text, const A& a, const B& b) {
  if (a == b) return;
  std::ostringstream out;
  out << text << ": " << a << " != " << b;
  report(file, line, out.str());
}

// NaN on either side fails.
inline void expect_near(const char* file, int line, const char* text, double a, double b,
                        double tolerance) {
  if (std::fabs(a - b) <= tolerance) return;
  std::ostringstream out;
  out << text << ": " << a << " and " << b << " differ by more than " << tolerance;
  report(file, line, out.str());
}

}  // namespace kdt::test

#define KDT_TEST(name)                                                \
  static void name();                                                 \
  static const ::kdt::test::Registrar name##_registrar(#name, &name); \
  static void name()
#define EXPECT(condition) \
  ((condition) ? void() : ::kdt::test::report(__FILE__, __LINE__, "not so: " #condition))
#define EXPECT_EQ(a, b) ::kdt::test::expect_equal(__FILE__, __LINE__, #a " == " #b, a, b)
#define EXPECT_NEAR(a, b, tolerance) \
  ::kdt::test::expect_near(__FILE__, __LINE__, #a " ~ " #b, a, b, tolerance)
#define EXPECT_THROWS(part, ...) \
  ::kdt::test::expect_throws(__FILE__, __LINE__, part, [&] { (void)(__VA_ARGS__); })
#define KDT_TEST_MAIN \
  int main(int argc, char** argv) { return ::kdt::test::run_tests(argc, argv); }
