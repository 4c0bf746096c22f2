// The order of packed weights: the inverse gives a checkpoint's matrix back, and the fragments are
// those of the instruction.
#include "../backend/op_test.h"
#include "check.h"
#include "repack.h"

namespace kdt::cuda {
namespace {

using test::Matrix;
using test::random_matrix;

std::vector<PanelRow> rows_of(const HostMatrix& matrix) {
  std::vector<PanelRow> rows(kPanelRows);
  for (int64_t i = 0; i < std::min(kPanelRows, matrix.out_features); ++i) rows[i] = {&matrix, i};
  return rows;
}

std::vector<uint8_t> packed(const std::vector<PanelRow>& rows, const HostMatrix& like) {
  const StreamShape shape = stream_shape(like.dtype, like.in_features);
  std::vector<uint8_t> out(shape.panel_bytes(), 0xEE);
  pack_panel(rows.data(), like.dtype, like.in_features, out.data());
  return out;
}

template <typename T>
T read(const std::vector<uint8_t>& from, int64_t byte) {
  T value;
  std::memcpy(&value, from.data() + byte, sizeof(T));
  return value;
}

KDT_TEST(the_inverse_gives_the_matrix_back) {
  for (DType dtype : {DType::kInt32, DType::kBFloat16}) {
    for (int64_t in : {32, 64, 96, 160, 7168}) {
      for (int64_t out : {1, 15, 16, 17, 32}) {
        const Matrix m = random_matrix(dtype, out, in, out * 10000 + in);
        const HostMatrix host = m.host();
        const int64_t row_bytes = static_cast<int64_t>(m.data.size()) / out;
        std::vector<uint8_t> values(kPanelRows * row_bytes, 0xEE),
            scale(kPanelRows * in / 16, 0xEE);
        unpack_panel(packed(rows_of(host), host).data(), dtype, in, values.data(), scale.data());
        EXPECT(std::equal(m.data.begin(), m.data.end(), values.begin()));
        EXPECT(std::equal(m.scale.begin(), m.scale.end(), scale.begin()));
        // A row that is none is zeros: nibbles of 8 with a scale of 0.
        const uint8_t zero = dtype == DType::kInt32 ? 0x88 : 0;
        EXPECT(std::all_of(values.begin() + m.data.size(), values.end(),
                           [&](uint8_t byte) { return byte == zero; }));
        if (dtype == DType::kInt32)
          EXPECT(std::all_of(scale.begin() + m.scale.size(), scale.end(),
                             [](uint8_t byte) { return byte == 0; }));
      }
    }
  }
}

KDT_TEST(odd_columns_of_bf16) {
  for (int64_t in : {1, 7, 31, 33, 70}) {
    const Matrix m = random_matrix(DType::kBFloat16, 32, in, in);
    const HostMatrix host = m.host();
    const std::vector<uint8_t> panel = packed(rows_of(host), host);
    std::vector<uint8_t> values(m.data.size(), 0xEE);
    unpack_panel(panel.data(), DType::kBFloat16, in, values.data(), nullptr);
    EXPECT(values == m.data);
    // What is behind the columns is zero, so that it adds nothing.
    int64_t nonzero = 0, expected = 0;
    for (size_t i = 0; i < panel.size(); i += 2) nonzero += read<uint16_t>(panel, i) != 0;
    for (size_t i = 0; i < values.size(); i += 2) expected += read<uint16_t>(values, i) != 0;
    EXPECT_EQ(nonzero, expected);
  }
}

// Register `a` of lane (g, t) holds rows g + 8 (a % 2) and columns 2t + 8 (a / 2), + 1 of the
// instruction's 16; the column order inside a group of 32 gives a lane eight neighbours.
int64_t row_of(int64_t lane, int64_t a) { return lane / 4 + a % 2 * 8; }
int64_t column_of(int64_t lane, int64_t fragment, int64_t a, int64_t half) {
  return fragment / 2 * 32 + lane % 4 * 8 + fragment % 2 * 4 + a / 2 * 2 + half;
}

KDT_TEST(int4_fragments) {
  const Matrix m = random_matrix(DType::kInt32, 32, 128, 3);
  const HostMatrix host = m.host();
  const std::vector<uint8_t> panel = packed(rows_of(host), host);
  for (int64_t chunk = 0; chunk < 2; ++chunk) {
    for (int64_t stripe = 0; stripe < 2; ++stripe) {
      const int64_t at = (chunk * 2 + stripe) * 576;
      for (int64_t lane = 0; lane < 32; ++lane) {
        for (int64_t fragment = 0; fragment < 4; ++fragment) {
          const auto word = read<uint32_t>(panel, at + lane * 16 + fragment * 4);
          for (int64_t a = 0; a < 4; ++a) {
            for (int64_t half = 0; half < 2; ++half) {
              const int64_t row = row_of(lane, a);
              const auto scale =
                  read<uint16_t>(panel, at + 512 + row % 8 * 8 + row / 8 * 4 + fragment / 2 * 2);
              const int nibble = static_cast<int>(word >> (4 * (a + 4 * half)) & 15u);
              EXPECT_EQ((nibble - 8) * static_cast<double>(bf16_to_float(scale)),
                        m.values[(stripe * 16 + row) * 128 + chunk * 64 +
                                 column_of(lane, fragment, a, half)]);
            }
          }
        }
      }
    }
  }
}

KDT_TEST(bf16_fragments) {
  const Matrix m = random_matrix(DType::kBFloat16, 32, 96, 4);
  const HostMatrix host = m.host();
  const std::vector<uint8_t> panel = packed(rows_of(host), host);
  for (int64_t i = 0; i < static_cast<int64_t>(panel.size()) / 2; ++i) {
    const int64_t half = i % 2, a = i / 2 % 4, lane = i / 8 % 32, fragment = i / 256 % 2;
    const int64_t stripe = i / 512 % 2, chunk = i / 1024;
    EXPECT_EQ(bf16_to_float(read<uint16_t>(panel, i * 2)),
              m.values[(stripe * 16 + row_of(lane, a)) * 96 + chunk * 32 +
                       column_of(lane, fragment, a, half)]);
  }
}

KDT_TEST(rows_come_from_several_matrices) {
  const Matrix a = random_matrix(DType::kInt32, 16, 64, 5),
               b = random_matrix(DType::kInt32, 16, 64, 6);
  const HostMatrix first = a.host(), second = b.host();
  std::vector<PanelRow> rows(kPanelRows);
  for (int64_t i = 0; i < kPanelRows; ++i)
    rows[i] = {i / 8 % 2 == 0 ? &first : &second, i / 16 * 8 + i % 8};
  std::vector<uint8_t> values(kPanelRows * 32), scale(kPanelRows * 4);
  unpack_panel(packed(rows, first).data(), DType::kInt32, 64, values.data(), scale.data());
  for (int64_t i = 0; i < kPanelRows; ++i) {
    const Matrix& from = i / 8 % 2 == 0 ? a : b;
    const int64_t row = i / 16 * 8 + i % 8;
    EXPECT(std::equal(values.begin() + i * 32, values.begin() + (i + 1) * 32,
                      from.data.begin() + row * 32));
    EXPECT(std::equal(scale.begin() + i * 4, scale.begin() + (i + 1) * 4,
                      from.scale.begin() + row * 4));
  }
}

KDT_TEST(no_stream_of_f32) {
  EXPECT_THROWS("cuda: no stream of f32", stream_shape(DType::kFloat32, 64));
}

}  // namespace
}  // namespace kdt::cuda

KDT_TEST_MAIN
