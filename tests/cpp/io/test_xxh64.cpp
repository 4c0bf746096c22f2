#include <array>

#include "check.h"
#include "io/xxh64.h"

namespace {

struct Vector {
  size_t bytes;
  uint64_t seed, hash;
};

// Of the first bytes of the pattern below, by the xxhash package 4.1.0. They reach each part of the
// algorithm: no, one and several stripes, and tails of 8, 4 and 1 bytes.
constexpr Vector kVectors[] = {
    {0, 0, 0xef46db3751d8e999u},   {0, 0x9e3779b97f4a7c15u, 0xc4349fc93c010000u},
    {1, 0, 0xa96c7f0ce858bbb7u},   {1, 0x9e3779b97f4a7c15u, 0x585882422a6165e7u},
    {3, 0, 0xbed43740ee6332bbu},   {3, 0x9e3779b97f4a7c15u, 0x45fa1406538fa168u},
    {4, 0, 0xfa212ae44b3bb23du},   {4, 0x9e3779b97f4a7c15u, 0xa65107f22943365au},
    {7, 0, 0x2744460dd675d2c0u},   {7, 0x9e3779b97f4a7c15u, 0xc9b637e2c4599de2u},
    {8, 0, 0x994b676b71ce94ddu},   {8, 0x9e3779b97f4a7c15u, 0xce592d5f53e192ecu},
    {12, 0, 0xb92f588ce720786eu},  {12, 0x9e3779b97f4a7c15u, 0xbc37a5ae43141b1au},
    {31, 0, 0x6711d55e306b5d8fu},  {31, 0x9e3779b97f4a7c15u, 0x24c4e99ab0404b5eu},
    {32, 0, 0x07f7b8e3bc5d6e25u},  {32, 0x9e3779b97f4a7c15u, 0x046e99bbda1a814bu},
    {33, 0, 0x09f85eeb4e1cbe9fu},  {33, 0x9e3779b97f4a7c15u, 0xd7fe2bfee6e4cdedu},
    {63, 0, 0xb7c9968c066cb6a5u},  {63, 0x9e3779b97f4a7c15u, 0xbd457f9ea47180c8u},
    {64, 0, 0x50d4159a0411632eu},  {64, 0x9e3779b97f4a7c15u, 0xa768f350a8e4fcf6u},
    {95, 0, 0x928c35b989d3c594u},  {95, 0x9e3779b97f4a7c15u, 0x028e6faeca324f57u},
    {200, 0, 0x3b8cc7eaa63f107eu}, {200, 0x9e3779b97f4a7c15u, 0xcd5273f408a4cfbcu},
};

}  // namespace

KDT_TEST(equals_the_reference_at_any_alignment) {
  for (size_t shift = 0; shift < 8; ++shift) {
    std::array<uint8_t, 208> buffer{};
    for (size_t i = 0; i < 200; ++i) buffer[shift + i] = static_cast<uint8_t>(i * 131 + 7);
    for (const Vector& v : kVectors) {
      EXPECT_EQ(kdt::xxh64(buffer.data() + shift, v.bytes, v.seed), v.hash);
    }
  }
}

KDT_TEST(pieces_make_the_same_hash) {
  std::array<uint8_t, 200> buffer{};
  for (size_t i = 0; i < buffer.size(); ++i) buffer[i] = static_cast<uint8_t>(i * 131 + 7);
  for (const Vector& v : kVectors) {
    kdt::Xxh64 hash(v.seed);
    size_t at = 0;
    for (; v.bytes - at >= kdt::Xxh64::kStripe; at += kdt::Xxh64::kStripe) {
      hash.add(buffer.data() + at, kdt::Xxh64::kStripe);
    }
    EXPECT_EQ(hash.finish(buffer.data() + at, v.bytes - at), v.hash);
  }
}

KDT_TEST(takes_no_bytes_at_a_null_pointer) {
  EXPECT_EQ(kdt::xxh64(nullptr, 0), 0xef46db3751d8e999u);
}

KDT_TEST_MAIN
