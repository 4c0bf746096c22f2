#include "io/xxh64.h"

#include <bit>
#include <cstring>
#include <initializer_list>

namespace kdt {
namespace {

static_assert(std::endian::native == std::endian::little, "files are read in place, little endian");

constexpr uint64_t kPrime1 = 0x9E3779B185EBCA87u;
constexpr uint64_t kPrime2 = 0xC2B2AE3D27D4EB4Fu;
constexpr uint64_t kPrime3 = 0x165667B19E3779F9u;
constexpr uint64_t kPrime4 = 0x85EBCA77C2B2AE63u;
constexpr uint64_t kPrime5 = 0x27D4EB2F165667C5u;
constexpr size_t kStripe = 32;  // four lanes of eight bytes

template <typename T>
uint64_t load(const uint8_t* at) {
  T value;
  std::memcpy(&value, at, sizeof(value));
  return value;
}

uint64_t round(uint64_t accumulator, uint64_t lane) {
  return std::rotl(accumulator + lane * kPrime2, 31) * kPrime1;
}

uint64_t merge(uint64_t hash, uint64_t accumulator) {
  return (hash ^ round(0, accumulator)) * kPrime1 + kPrime4;
}

}  // namespace

uint64_t xxh64(const void* data, size_t bytes, uint64_t seed) {
  const uint8_t* at = static_cast<const uint8_t*>(data);
  size_t left = bytes;
  uint64_t hash = seed + kPrime5;
  if (bytes >= kStripe) {
    uint64_t a = seed + kPrime1 + kPrime2, b = seed + kPrime2, c = seed, d = seed - kPrime1;
    for (; left >= kStripe; at += kStripe, left -= kStripe) {
      a = round(a, load<uint64_t>(at));
      b = round(b, load<uint64_t>(at + 8));
      c = round(c, load<uint64_t>(at + 16));
      d = round(d, load<uint64_t>(at + 24));
    }
    hash = std::rotl(a, 1) + std::rotl(b, 7) + std::rotl(c, 12) + std::rotl(d, 18);
    for (uint64_t lane : {a, b, c, d}) hash = merge(hash, lane);
  }
  hash += bytes;
  for (; left >= 8; at += 8, left -= 8) {
    hash = std::rotl(hash ^ round(0, load<uint64_t>(at)), 27) * kPrime1 + kPrime4;
  }
  if (left >= 4) {
    hash = std::rotl(hash ^ load<uint32_t>(at) * kPrime1, 23) * kPrime2 + kPrime3;
    at += 4, left -= 4;
  }
  for (; left > 0; ++at, --left) hash = std::rotl(hash ^ *at * kPrime5, 11) * kPrime1;
  hash = (hash ^ hash >> 33) * kPrime2;
  hash = (hash ^ hash >> 29) * kPrime3;
  return hash ^ hash >> 32;
}

}  // namespace kdt
