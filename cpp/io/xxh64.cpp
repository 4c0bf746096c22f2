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

Xxh64::Xxh64(uint64_t seed)
    : seed_(seed), a_(seed + kPrime1 + kPrime2), b_(seed + kPrime2), c_(seed), d_(seed - kPrime1) {}

void Xxh64::add(const void* data, size_t bytes) {
  const uint8_t* at = static_cast<const uint8_t*>(data);
  // In registers.
  uint64_t a = a_, b = b_, c = c_, d = d_;
  for (size_t left = bytes; left >= kStripe; at += kStripe, left -= kStripe) {
    a = round(a, load<uint64_t>(at));
    b = round(b, load<uint64_t>(at + 8));
    c = round(c, load<uint64_t>(at + 16));
    d = round(d, load<uint64_t>(at + 24));
  }
  a_ = a, b_ = b, c_ = c, d_ = d;
  bytes_ += bytes;
}

uint64_t Xxh64::finish(const void* data, size_t bytes) const {
  Xxh64 all = *this;
  const size_t stripes = bytes / kStripe * kStripe;
  all.add(data, stripes);
  const uint8_t* at = static_cast<const uint8_t*>(data) + stripes;
  size_t left = bytes - stripes;
  uint64_t hash = seed_ + kPrime5;
  if (all.bytes_ > 0) {
    hash =
        std::rotl(all.a_, 1) + std::rotl(all.b_, 7) + std::rotl(all.c_, 12) + std::rotl(all.d_, 18);
    for (uint64_t lane : {all.a_, all.b_, all.c_, all.d_}) hash = merge(hash, lane);
  }
  hash += all.bytes_ + left;
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

uint64_t xxh64(const void* data, size_t bytes, uint64_t seed) {
  return Xxh64(seed).finish(data, bytes);
}

}  // namespace kdt
