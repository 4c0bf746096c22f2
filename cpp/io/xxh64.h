// XXH64, the checksum of KDTR files (xxHash fast digest algorithm, format specification 0.1.1).
#pragma once

#include <cstddef>
#include <cstdint>

namespace kdt {

// Of data that comes in pieces.
class Xxh64 {
 public:
  static constexpr size_t kStripe = 32;  // bytes: four lanes of eight

  explicit Xxh64(uint64_t seed = 0);
  void add(const void* data, size_t bytes);               // whole stripes alone
  uint64_t finish(const void* data, size_t bytes) const;  // with the last piece, of any size

 private:
  uint64_t seed_, a_, b_, c_, d_;
  uint64_t bytes_ = 0;
};

uint64_t xxh64(const void* data, size_t bytes, uint64_t seed = 0);

}  // namespace kdt
