// Matrix products.
#include <algorithm>

#include "backend/checks.h"
#include "cpu/cpu_backend.h"

namespace kdt::cpu {

void CpuBackend::multiply(const float* x, int64_t ldx, int64_t rows, const PackedMatrix& matrix,
                          int64_t panel, int64_t count, float* out, int64_t ldo) const {
  const int64_t k = matrix.in_features;
  const int64_t columns = std::min(count * kPanel, matrix.out_features - panel * kPanel);
  out += panel * kPanel;
  const int num_rows = static_cast<int>(rows);
  switch (matrix.dtype) {
    case DType::kBFloat16:
      kernels_.gemm_bf16(x, ldx, num_rows, matrix.panels + panel * k * 16, k, out, ldo, columns);
      break;
    case DType::kFloat32:
      kernels_.gemm_f32(x, ldx, num_rows,
                        reinterpret_cast<const float*>(matrix.panels) + panel * k * kPanel,
                        k * kPanel, kPanel, k, out, ldo, columns, false);
      break;
    default:
      kernels_.gemm_int4(x, ldx, num_rows, matrix.panels + panel * (k / 8) * kPanel,
                         matrix.scales + panel * (k / kGroup) * 16, k, out, ldo, columns);
  }
}

// x: rows of in_features values (per_head: one such row for each matrix); out: rows of out_features
// values.
void CpuBackend::product(const Tensor& x, const CpuLinear& weight, const Tensor& out,
                         bool per_head) {
  const int64_t rows = out.dim(0);
  const int64_t k = weight.in_features;
  const int64_t ldx = per_head ? k * static_cast<int64_t>(weight.packed.matrices.size()) : k;
  const int64_t ldo = weight.out_features;
  const bool share = worth_sharing(rows * k * weight.out_features);
  // One task a thread while a product is short, more when it is long enough that one may fall
  // behind. Two panels at least keep the tiles of many rows wide.
  const int64_t wanted_tasks = share ? num_threads() * (rows < 8 ? 1 : 4) : 1;
  const int64_t panels = ceil_div(weight.out_features, kPanel);
  const int64_t step = std::max<int64_t>(rows < 4 ? 1 : 2, ceil_div(panels, wanted_tasks));

  // A task is up to `step` panels of one matrix.
  int64_t num_tasks = 0;
  for (const PackedMatrix& matrix : weight.packed.matrices)
    num_tasks += ceil_div(ceil_div(matrix.out_features, kPanel), step);
  const auto body = [&](int64_t task, int) {
    int64_t out_column = 0;
    for (size_t i = 0; i < weight.packed.matrices.size(); ++i) {
      const PackedMatrix& matrix = weight.packed.matrices[i];
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
  KDT_CHECK(static_cast<int64_t>(stacked.packed.matrices.size()) == x.dim(1),
            "head_linear: ", stacked.packed.matrices.size(), " matrices for ", x.dim(1), " heads");
  product(x, stacked, out, true);
}

}  // namespace kdt::cpu
