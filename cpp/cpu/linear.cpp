// Packing of weights into panels, and the matrix products over them.
#include <algorithm>
#include <cstring>

#include "backend/checks.h"
#include "cpu/cpu_backend.h"

namespace kdt::cpu {
namespace {

uint32_t read_word(const uint8_t* data, int64_t index) {
  uint32_t word;
  std::memcpy(&word, data + index * 4, sizeof(word));
  return word;
}

uint16_t read_half(const uint8_t* data, int64_t index) {
  uint16_t half;
  std::memcpy(&half, data + index * 2, sizeof(half));
  return half;
}

// Pairs row n (low half) with row n + 16 (high half) of a [rows, columns] array of bf16, panel by
// panel.
std::shared_ptr<void> pair_rows(Arena& arena, const uint8_t* data, int64_t rows, int64_t columns) {
  const int64_t panels = ceil_div(rows, kPanel);
  std::shared_ptr<void> memory = arena.allocate(panels * columns * 16 * 4);
  uint32_t* words = typed<uint32_t>(memory);
  for (int64_t panel = 0; panel < panels; ++panel) {
    for (int64_t n = 0; n < kPanel && panel * kPanel + n < rows; ++n) {
      const uint8_t* row = data + (panel * kPanel + n) * columns * 2;
      uint32_t* out = words + panel * columns * 16 + n % 16;
      const int shift = n < 16 ? 0 : 16;
      for (int64_t k = 0; k < columns; ++k) {
        out[k * 16] |= static_cast<uint32_t>(read_half(row, k)) << shift;
      }
    }
  }
  return memory;
}

// Transposes a [rows, columns] array of 4-byte values into panels of 32 rows.
std::shared_ptr<void> panel_words(Arena& arena, const uint8_t* data, int64_t rows,
                                  int64_t columns) {
  const int64_t panels = ceil_div(rows, kPanel);
  std::shared_ptr<void> memory = arena.allocate(panels * columns * kPanel * 4);
  uint32_t* words = typed<uint32_t>(memory);
  for (int64_t n = 0; n < rows; ++n) {
    uint32_t* out = words + n / kPanel * columns * kPanel + n % kPanel;
    for (int64_t k = 0; k < columns; ++k) out[k * kPanel] = read_word(data, n * columns + k);
  }
  return memory;
}

}  // namespace

PackedMatrix pack_matrix(const HostMatrix& matrix, Arena& arena) {
  const int64_t n = matrix.out_features;
  const int64_t k = matrix.in_features;
  KDT_CHECK(n > 0 && k > 0, "weight: shape [", n, ", ", k, "]");
  PackedMatrix packed;
  packed.dtype = matrix.dtype;
  packed.out_features = n;
  packed.in_features = k;
  switch (matrix.dtype) {
    case DType::kBFloat16:
      packed.panels = pair_rows(arena, matrix.data, n, k);
      break;
    case DType::kFloat32:
      packed.panels = panel_words(arena, matrix.data, n, k);
      break;
    case DType::kInt32:
      KDT_CHECK(k % kGroup == 0, "int4 weight: in_features ", k, " is not a multiple of ", kGroup);
      KDT_CHECK(matrix.scale != nullptr, "int4 weight: no scale");
      packed.panels = panel_words(arena, matrix.data, n, k / 8);
      packed.scales = pair_rows(arena, matrix.scale, n, k / kGroup);
      break;
    default:
      throw Error(
          join("weight: dtype ", dtype_name(matrix.dtype), "; want f32, bf16 or int4 (i32)"));
  }
  return packed;
}

std::unique_ptr<LinearWeight> CpuBackend::prepare_linear(const std::vector<HostMatrix>& stacked) {
  KDT_CHECK(!stacked.empty(), "prepare_linear: no matrix");
  auto weight = std::make_unique<CpuLinear>();
  weight->in_features = stacked.front().in_features;
  for (const HostMatrix& matrix : stacked) {
    KDT_CHECK(matrix.in_features == weight->in_features, "prepare_linear: in_features ",
              matrix.in_features, " beside ", weight->in_features);
    weight->matrices.push_back(pack_matrix(matrix, arena_));
    weight->out_features += matrix.out_features;
  }
  return weight;
}

void CpuBackend::multiply(const float* x, int64_t ldx, int64_t rows, const PackedMatrix& matrix,
                          int64_t panel, int64_t count, float* out, int64_t ldo) const {
  const int64_t k = matrix.in_features;
  const int64_t columns = std::min(count * kPanel, matrix.out_features - panel * kPanel);
  out += panel * kPanel;
  const int num_rows = static_cast<int>(rows);
  switch (matrix.dtype) {
    case DType::kBFloat16:
      kernels_.gemm_bf16(x, ldx, num_rows, typed<uint32_t>(matrix.panels) + panel * k * 16, k, out,
                         ldo, columns);
      break;
    case DType::kFloat32:
      kernels_.gemm_f32(x, ldx, num_rows, typed<float>(matrix.panels) + panel * k * kPanel,
                        k * kPanel, kPanel, k, out, ldo, columns, false);
      break;
    default:
      kernels_.gemm_int4(
          x, ldx, num_rows, typed<uint32_t>(matrix.panels) + panel * (k / 8) * kPanel,
          typed<uint32_t>(matrix.scales) + panel * (k / kGroup) * 16, k, out, ldo, columns);
  }
}

// x: rows of in_features values (per_head: one such row for each matrix); out: rows of out_features
// values.
void CpuBackend::product(const Tensor& x, const CpuLinear& weight, const Tensor& out,
                         bool per_head) {
  const int64_t rows = out.dim(0);
  const int64_t k = weight.in_features;
  const int64_t ldx = per_head ? k * static_cast<int64_t>(weight.matrices.size()) : k;
  const int64_t ldo = weight.out_features;
  const bool share = worth_sharing(rows * k * weight.out_features);
  // One task a thread while a product is short, more when it is long enough that one may fall
  // behind. Two panels at least keep the tiles of many rows wide.
  const int64_t wanted_tasks = share ? num_threads() * (rows < 8 ? 1 : 4) : 1;
  const int64_t panels = ceil_div(weight.out_features, kPanel);
  const int64_t step = std::max<int64_t>(rows < 4 ? 1 : 2, ceil_div(panels, wanted_tasks));

  // A task is up to `step` panels of one matrix.
  int64_t num_tasks = 0;
  for (const PackedMatrix& matrix : weight.matrices)
    num_tasks += ceil_div(ceil_div(matrix.out_features, kPanel), step);
  const auto body = [&](int64_t task, int) {
    int64_t out_column = 0;
    for (size_t i = 0; i < weight.matrices.size(); ++i) {
      const PackedMatrix& matrix = weight.matrices[i];
      const int64_t matrix_panels = ceil_div(matrix.out_features, kPanel);
      const int64_t matrix_tasks = ceil_div(matrix_panels, step);
      if (task < matrix_tasks) {
        const int64_t panel = task * step;
        multiply(x.data<float>() + (per_head ? static_cast<int64_t>(i) * k : 0), ldx, rows, matrix,
                 panel, std::min(step, matrix_panels - panel), out.data<float>() + out_column, ldo);
        return;
      }
      task -= matrix_tasks;
      out_column += matrix.out_features;
    }
  };
  run(rows * k * weight.out_features, num_tasks, body);
}

void CpuBackend::linear(const Tensor& x, const LinearWeight& weight, const Tensor& out) {
  check_linear(x, weight, out);
  product(x, static_cast<const CpuLinear&>(weight), out, false);
}

void CpuBackend::head_linear(const Tensor& x, const LinearWeight& weight, const Tensor& out) {
  check_head_linear(x, weight, out);
  const auto& stacked = static_cast<const CpuLinear&>(weight);
  KDT_CHECK(static_cast<int64_t>(stacked.matrices.size()) == x.dim(1),
            "head_linear: ", stacked.matrices.size(), " matrices for ", x.dim(1), " heads");
  product(x, stacked, out, true);
}

}  // namespace kdt::cpu
