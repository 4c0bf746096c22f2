// Packing of weights into panels (kernels.h).
#include <algorithm>
#include <cstring>

#include "backend/check_weights.h"
#include "cpu/cpu_backend.h"

namespace kdt::cpu {
namespace {

constexpr int64_t kMaxExperts = 65536;

// Bytes of a matrix's panels and of its scales; whole cache lines.
struct PackedSize {
  int64_t panels, scales;
};

PackedSize packed_size(const MatrixShape& shape) {
  const int64_t panels = ceil_div(shape.out_features, kPanel), k = shape.in_features;
  switch (shape.dtype) {
    case DType::kFloat32:
      return {panels * k * kPanel * 4, 0};
    case DType::kBFloat16:
      return {panels * k * kPanel * 2, 0};
    default:
      return {panels * k * kPanel / 2, panels * (k / kGroup) * kPanel * 2};
  }
}

// Columns that are packed together, so that what is read and written of 32 rows stays in the first
// cache.
constexpr int64_t kColumns = 64;

// The panel's rows as read(row) gives them, null for one that is none, `columns` values of type T
// each: block by block, write(values [kPanel][kColumns], first column, how many).
template <typename T, typename Row, typename Write>
void for_blocks(int64_t columns, const Row& row, const Write& write) {
  T values[kPanel][kColumns];
  const uint8_t* rows[kPanel];
  for (int64_t n = 0; n < kPanel; ++n) {
    rows[n] = row(n);
    if (rows[n] == nullptr) std::memset(values[n], 0, sizeof(values[n]));
  }
  for (int64_t begin = 0; begin < columns; begin += kColumns) {
    const int64_t count = std::min(kColumns, columns - begin);
    for (int64_t n = 0; n < kPanel; ++n) {
      if (rows[n] != nullptr)
        std::memcpy(values[n], rows[n] + begin * sizeof(T), count * sizeof(T));
    }
    write(values, begin, count);
  }
}

// bf16: row n is the low half and row n + 16 the high half of word n of each column.
template <typename Row>
void pair_rows(int64_t columns, const Row& row, uint32_t* out) {
  for_blocks<uint16_t>(columns, row, [out](const auto& values, int64_t begin, int64_t count) {
    uint32_t* to = out + begin * 16;
    for (int64_t k = 0; k < count; ++k) {
      for (int64_t n = 0; n < 16; ++n)
        *to++ = values[n][k] | static_cast<uint32_t>(values[n + 16][k]) << 16;
    }
  });
}

// 4-byte values: row n is word n of each column.
template <typename Row>
void panel_words(int64_t columns, const Row& row, uint32_t* out) {
  for_blocks<uint32_t>(columns, row, [out](const auto& values, int64_t begin, int64_t count) {
    uint32_t* to = out + begin * kPanel;
    for (int64_t k = 0; k < count; ++k) {
      for (int64_t n = 0; n < kPanel; ++n) *to++ = values[n][k];
    }
  });
}

void pack_panel(const HostMatrix& from, const PackedMatrix& to, int64_t panel) {
  const int64_t k = to.in_features;
  const auto row = [&](int64_t n) {
    const int64_t i = panel * kPanel + n;
    return i < to.out_features ? from.row(i) : nullptr;
  };
  switch (to.dtype) {
    case DType::kFloat32:
      panel_words(k, row, to.panels + panel * k * kPanel);
      break;
    case DType::kBFloat16:
      pair_rows(k, row, to.panels + panel * k * 16);
      break;
    default: {
      panel_words(k / 8, row, to.panels + panel * (k / 8) * kPanel);
      const auto scale_row = [&](int64_t n) {
        const int64_t i = panel * kPanel + n;
        return i < to.out_features ? from.scale_row(i) : nullptr;
      };
      pair_rows(k / kGroup, scale_row, to.scales + panel * (k / kGroup) * 16);
    }
  }
}

}  // namespace

PackedMatrices make_packed(const std::vector<MatrixShape>& shapes, Arena& arena) {
  PackedMatrices packed;
  for (const MatrixShape& shape : shapes) {
    const PackedSize size = packed_size(shape);
    KDT_CHECK(!__builtin_add_overflow(packed.bytes, size.panels + size.scales, &packed.bytes),
              "weight: more bytes than memory can hold");
  }
  packed.memory = arena.allocate(packed.bytes);
  char* at = typed<char>(packed.memory);
  for (const MatrixShape& shape : shapes) {
    const PackedSize size = packed_size(shape);
    PackedMatrix matrix{shape.dtype, shape.out_features, shape.in_features};
    matrix.panels = reinterpret_cast<uint32_t*>(at);
    if (size.scales > 0) matrix.scales = reinterpret_cast<uint32_t*>(at + size.panels);
    packed.matrices.push_back(matrix);
    at += size.panels + size.scales;
  }
  return packed;
}

void CpuBackend::pack(const HostMatrix& from, const PackedMatrix& to) {
  const int64_t panels = ceil_div(to.out_features, kPanel);
  run(to.out_features * to.in_features, panels,
      [&](int64_t panel, int) { pack_panel(from, to, panel); });
}

std::unique_ptr<LinearWeight> CpuBackend::make_linear(const std::vector<MatrixShape>& stacked) {
  check_make_linear(stacked);
  auto weight = std::make_unique<CpuLinear>();
  weight->shapes = stacked;
  weight->packed = make_packed(stacked, arena_);
  weight->in_features = stacked.front().in_features;
  for (const MatrixShape& shape : stacked) weight->out_features += shape.out_features;
  return weight;
}

void CpuBackend::fill_linear(LinearWeight& weight, const std::vector<HostMatrix>& stacked) {
  const auto& linear = static_cast<const CpuLinear&>(weight);
  check_fill_linear(linear.shapes, stacked);
  for (size_t i = 0; i < stacked.size(); ++i) pack(stacked[i], linear.packed.matrices[i]);
}

std::unique_ptr<ExpertsWeight> CpuBackend::make_experts(const ExpertsShape& shape) {
  check_make_experts(shape, kMaxExperts);
  auto weight = std::make_unique<CpuExperts>();
  weight->shape = shape;
  weight->num_experts = shape.num_experts;
  weight->hidden_size = shape.hidden_size;
  weight->intermediate_size = shape.intermediate_size;
  std::vector<MatrixShape> matrices;
  for (int64_t e = 0; e < shape.num_experts; ++e) {
    for (const MatrixShape& matrix : {gate_shape(shape), gate_shape(shape), down_shape(shape)})
      matrices.push_back(matrix);
  }
  weight->packed = make_packed(matrices, arena_);
  for (int64_t e = 0; e < shape.num_experts; ++e) {
    const PackedMatrix* of_expert = &weight->packed.matrices[3 * e];
    weight->experts.push_back({of_expert[0], of_expert[1], of_expert[2]});
  }
  return weight;
}

void CpuBackend::fill_expert(ExpertsWeight& weight, int64_t index, const HostExpert& expert) {
  const auto& experts = static_cast<const CpuExperts&>(weight);
  check_fill_expert(experts.shape, index, expert);
  const CpuExperts::Expert& to = experts.experts[index];
  pack(expert.gate, to.gate);
  pack(expert.up, to.up);
  pack(expert.down, to.down);
}

}  // namespace kdt::cpu
