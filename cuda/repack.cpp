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

// Four nibbles of row g and four of row g + 8 to a fragment's word, and back.
uint32_t interleave(uint32_t upper, uint32_t lower) {
  const uint32_t even = (upper & 0x0F0Fu) | (lower & 0x0F0Fu) << 4;
  const uint32_t odd = (upper >> 4 & 0x0F0Fu) | (lower & 0xF0F0u);
  return even | odd << 16;
}
uint32_t upper_of(uint32_t word) { return (word & 0x0F0Fu) | (word >> 16 & 0x0F0Fu) << 4; }
uint32_t lower_of(uint32_t word) { return (word >> 4 & 0x0F0Fu) | (word >> 16 & 0xF0F0u); }

// Eight nibbles of a row from column 8 * word on.
uint32_t nibbles(const PanelRow& row, int64_t word, int64_t words) {
  if (row.matrix == nullptr || word >= words) return kZeroNibbles;
  return read<uint32_t>(row.matrix->data, row.row * words + word);
}

// Scale of a group; 0 behind the last.
uint16_t scale_of(const PanelRow& row, int64_t group, int64_t groups) {
  if (row.matrix == nullptr || group >= groups) return 0;
  return read<uint16_t>(row.matrix->scale, row.row * groups + group);
}

void pack_int4(const PanelRow* rows, int64_t in_features, int64_t chunk, uint8_t* out) {
  const int64_t words = in_features / 8, groups = in_features / 32;
  for (int64_t g = 0; g < 8; ++g) {
    const PanelRow &upper = rows[g], &lower = rows[g + 8];
    for (int64_t t = 0; t < 4; ++t) {
      for (int64_t group = 0; group < 2; ++group) {
        const int64_t word = chunk * 8 + group * 4 + t;
        const uint32_t a = nibbles(upper, word, words), b = nibbles(lower, word, words);
        const int64_t to = (g * 4 + t) * 4 + group * 2;
        write(out, to, interleave(a & 0xFFFFu, b & 0xFFFFu));
        write(out, to + 1, interleave(a >> 16, b >> 16));
      }
    }
    for (int64_t group = 0; group < 2; ++group) {
      write(out + 512, g * 4 + group, scale_of(upper, chunk * 2 + group, groups));
      write(out + 512, g * 4 + 2 + group, scale_of(lower, chunk * 2 + group, groups));
    }
  }
}

void unpack_int4(const uint8_t* in, int64_t in_features, int64_t chunk, uint8_t* values,
                 uint8_t* scale) {
  const int64_t words = in_features / 8, groups = in_features / 32;
  for (int64_t g = 0; g < 8; ++g) {
    for (int64_t group = 0; group < 2 && chunk * 2 + group < groups; ++group) {
      for (int64_t t = 0; t < 4; ++t) {
        const int64_t from = (g * 4 + t) * 4 + group * 2, word = chunk * 8 + group * 4 + t;
        const auto first = read<uint32_t>(in, from), second = read<uint32_t>(in, from + 1);
        write(values, g * words + word, upper_of(first) | upper_of(second) << 16);
        write(values, (g + 8) * words + word, lower_of(first) | lower_of(second) << 16);
      }
      const int64_t at = chunk * 2 + group;
      write(scale, g * groups + at, read<uint16_t>(in + 512, g * 4 + group));
      write(scale, (g + 8) * groups + at, read<uint16_t>(in + 512, g * 4 + 2 + group));
    }
  }
}

// Calls body(row, column, index) for the pairs of values of a chunk of bf16 in their order.
template <typename Body>
void for_pairs(int64_t chunk, const Body& body) {
  int64_t index = 0;
  for (int64_t fragment = 0; fragment < 2; ++fragment) {
    for (int64_t lane = 0; lane < 32; ++lane) {
      for (int64_t a = 0; a < 4; ++a) {
        const int64_t k = lane % 4 * 8 + fragment * 4 + a / 2 * 2;
        body(lane / 4 + a % 2 * 8, chunk * 32 + k, index++);
      }
    }
  }
}

void pack_bf16(const PanelRow* rows, int64_t in_features, int64_t chunk, uint8_t* out) {
  for_pairs(chunk, [&](int64_t row, int64_t column, int64_t index) {
    const HostMatrix* matrix = rows[row].matrix;
    const int64_t present = matrix == nullptr ? 0 : std::clamp<int64_t>(in_features - column, 0, 2);
    uint32_t pair = 0;
    if (present > 0)
      std::memcpy(&pair, matrix->data + (rows[row].row * in_features + column) * 2, present * 2);
    write(out, index, pair);
  });
}

void unpack_bf16(const uint8_t* in, int64_t in_features, int64_t chunk, uint8_t* values) {
  for_pairs(chunk, [&](int64_t row, int64_t column, int64_t index) {
    const int64_t present = std::clamp<int64_t>(in_features - column, 0, 2);
    if (present > 0)
      std::memcpy(values + (row * in_features + column) * 2, in + index * 4, present * 2);
  });
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
  for (int64_t chunk = 0; chunk < shape.num_chunks; ++chunk) {
    for (int64_t stripe = 0; stripe < 2; ++stripe, out += shape.chunk_bytes) {
      const PanelRow* from = rows + stripe * kStripeRows;
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
