#include "repack.h"

#include <algorithm>
#include <cstring>

#include "ceil_div.h"
#include "core/error.h"

namespace kdt::cuda {
namespace {

constexpr uint32_t kZeroNibbles = 0x88888888u;  // a nibble holds the value plus 8

template <typename T>
T read(const uint8_t* from, int64_t index) {
  T value;
  std::memcpy(&value, from + index * static_cast<int64_t>(sizeof(T)), sizeof(T));
  return value;
}

template <typename T>
void write(uint8_t* to, int64_t index, T value) {
  std::memcpy(to + index * static_cast<int64_t>(sizeof(T)), &value, sizeof(T));
}

// Eight nibbles of row g and eight of row g + 8 to the words of two fragments, and half of one word
// back.
void interleave(uint32_t upper, uint32_t lower, uint32_t* words) {
  const uint32_t even = (upper & 0x0F0F0F0Fu) | (lower & 0x0F0F0F0Fu) << 4;
  const uint32_t odd = (upper >> 4 & 0x0F0F0F0Fu) | (lower & 0xF0F0F0F0u);
  words[0] = (even & 0xFFFFu) | odd << 16;
  words[1] = even >> 16 | (odd & 0xFFFF0000u);
}
uint32_t upper_of(uint32_t word) { return (word & 0x0F0Fu) | (word >> 16 & 0x0F0Fu) << 4; }
uint32_t lower_of(uint32_t word) { return (word >> 4 & 0x0F0Fu) | (word >> 16 & 0xF0F0u); }

// Where a row's values and scales are; null for a row that is none.
struct RowStart {
  const uint8_t* values = nullptr;
  const uint8_t* scale = nullptr;
};

// Scale of a group; 0 for a row that is none.
uint16_t scale_of(const RowStart& row, int64_t group) {
  return row.scale == nullptr ? uint16_t{0} : read<uint16_t>(row.scale, group);
}

// The 64 values of a row from a chunk's first column on, or zeros.
void read_nibbles(const RowStart& row, int64_t chunk, int64_t groups, uint32_t (&words)[8]) {
  if (row.values != nullptr && groups == 2) {
    std::memcpy(words, row.values + chunk * 32, 32);
    return;
  }
  std::fill(words, words + 8, kZeroNibbles);
  if (row.values != nullptr) std::memcpy(words, row.values + chunk * 32, 16);
}

void pack_int4(const RowStart* rows, int64_t in_features, int64_t chunk, uint8_t* out) {
  const int64_t groups = std::min<int64_t>(2, in_features / 32 - chunk * 2);
  for (int64_t g = 0; g < 8; ++g) {
    uint32_t upper[8], lower[8], words[16];
    read_nibbles(rows[g], chunk, groups, upper);
    read_nibbles(rows[g + 8], chunk, groups, lower);
    for (int64_t i = 0; i < 2; ++i) {
      for (int64_t t = 0; t < 4; ++t)
        interleave(upper[i * 4 + t], lower[i * 4 + t], words + t * 4 + i * 2);
      const bool exists = i < groups;
      write(out + 512, g * 4 + i, exists ? scale_of(rows[g], chunk * 2 + i) : uint16_t{0});
      write(out + 512, g * 4 + 2 + i, exists ? scale_of(rows[g + 8], chunk * 2 + i) : uint16_t{0});
    }
    std::memcpy(out + g * 64, words, sizeof(words));
  }
}

void unpack_int4(const uint8_t* in, int64_t in_features, int64_t chunk, uint8_t* values,
                 uint8_t* scale) {
  const int64_t words = in_features / 8, groups = in_features / 32;
  for (int64_t g = 0; g < 8; ++g) {
    for (int64_t i = 0; i < 2 && chunk * 2 + i < groups; ++i) {
      const int64_t group = chunk * 2 + i;
      for (int64_t t = 0; t < 4; ++t) {
        const int64_t from = (g * 4 + t) * 4 + i * 2, word = group * 4 + t;
        const auto first = read<uint32_t>(in, from), second = read<uint32_t>(in, from + 1);
        write(values, g * words + word, upper_of(first) | upper_of(second) << 16);
        write(values, (g + 8) * words + word, lower_of(first) | lower_of(second) << 16);
      }
      write(scale, g * groups + group, read<uint16_t>(in + 512, g * 4 + i));
      write(scale, (g + 8) * groups + group, read<uint16_t>(in + 512, g * 4 + 2 + i));
    }
  }
}

// Eight values of a row, four pairs, go to the lane (row % 8, t): two pairs to each fragment, to
// a[0] and a[2] of the upper rows, a[1] and a[3] of the lower ones.
int64_t pair_index(int64_t row, int64_t t, int64_t pair) {
  return (pair / 2 * 32 + row % 8 * 4 + t) * 4 + pair % 2 * 2 + row / 8;
}

// Bytes of the eight values from `column` on that a row has.
int64_t present_bytes(int64_t column, int64_t columns) {
  return std::clamp<int64_t>(columns - column, 0, 8) * 2;
}

void pack_bf16(const RowStart* rows, int64_t in_features, int64_t chunk, uint8_t* out) {
  for (int64_t row = 0; row < kStripeRows; ++row) {
    const uint8_t* from = rows[row].values;
    for (int64_t t = 0; t < 4; ++t) {
      const int64_t column = chunk * 32 + t * 8, bytes = present_bytes(column, in_features);
      uint32_t pairs[4] = {};
      if (from != nullptr && bytes == sizeof(pairs)) {
        std::memcpy(pairs, from + column * 2, sizeof(pairs));
      } else if (from != nullptr && bytes > 0) {
        std::memcpy(pairs, from + column * 2, bytes);
      }
      for (int64_t i = 0; i < 4; ++i) write(out, pair_index(row, t, i), pairs[i]);
    }
  }
}

void unpack_bf16(const uint8_t* in, int64_t in_features, int64_t chunk, uint8_t* values) {
  for (int64_t row = 0; row < kStripeRows; ++row) {
    for (int64_t t = 0; t < 4; ++t) {
      const int64_t column = chunk * 32 + t * 8, bytes = present_bytes(column, in_features);
      uint32_t pairs[4];
      for (int64_t i = 0; i < 4; ++i) pairs[i] = read<uint32_t>(in, pair_index(row, t, i));
      if (bytes > 0) std::memcpy(values + (row * in_features + column) * 2, pairs, bytes);
    }
  }
}

}  // namespace

StreamShape stream_shape(DType dtype, int64_t in_features) {
  const bool is_int4 = dtype == DType::kInt32;
  KDT_CHECK(is_int4 || dtype == DType::kBFloat16, "cuda: no stream of ", dtype_name(dtype));
  const int64_t chunk_k = is_int4 ? 64 : 32;
  return {chunk_k, is_int4 ? 576 : 1024, ceil_div(in_features, chunk_k)};
}

void pack_panel(const PanelRow* rows, DType dtype, int64_t in_features, uint8_t* out) {
  const StreamShape shape = stream_shape(dtype, in_features);
  RowStart starts[kPanelRows];
  for (int64_t i = 0; i < kPanelRows; ++i) {
    if (rows[i].matrix == nullptr) continue;
    starts[i].values = rows[i].matrix->row(rows[i].row);
    if (dtype == DType::kInt32) starts[i].scale = rows[i].matrix->scale_row(rows[i].row);
  }
  for (int64_t chunk = 0; chunk < shape.num_chunks; ++chunk) {
    for (int64_t stripe = 0; stripe < 2; ++stripe, out += shape.chunk_bytes) {
      const RowStart* from = starts + stripe * kStripeRows;
      dtype == DType::kInt32 ? pack_int4(from, in_features, chunk, out)
                             : pack_bf16(from, in_features, chunk, out);
    }
  }
}

void unpack_panel(const uint8_t* panel, DType dtype, int64_t in_features, uint8_t* values,
                  uint8_t* scale) {
  const StreamShape shape = stream_shape(dtype, in_features);
  const bool is_int4 = dtype == DType::kInt32;
  const int64_t stripe_bytes = kStripeRows * in_features * (is_int4 ? 1 : 4) / 2;
  for (int64_t chunk = 0; chunk < shape.num_chunks; ++chunk) {
    for (int64_t stripe = 0; stripe < 2; ++stripe, panel += shape.chunk_bytes) {
      uint8_t* to = values + stripe * stripe_bytes;
      is_int4 ? unpack_int4(panel, in_features, chunk, to, scale + stripe * in_features)
              : unpack_bf16(panel, in_features, chunk, to);
    }
  }
}

}  // namespace kdt::cuda
