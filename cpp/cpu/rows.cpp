// Ops that work on each row alone.
#include <algorithm>
#include <cstring>

#include "backend/checks.h"
#include "cpu/cpu_backend.h"

namespace kdt::cpu {

void CpuBackend::embed(const EmbedArgs& args) {
  check_embed(args);
  const Tensor& table = args.table;
  const int64_t hidden_size = table.dim(1);
  const int64_t vocab_size = args.vocab_size == 0 ? table.dim(0) : args.vocab_size;
  const int32_t* ids = args.token_ids.data<int32_t>();
  for (int64_t t = 0; t < args.token_ids.numel(); ++t) {
    KDT_CHECK(ids[t] >= 0 && ids[t] < vocab_size, "embed: token id ", ids[t], " at row ", t,
              " is outside the vocabulary of ", vocab_size);
    float* row = args.out.data<float>() + t * hidden_size;
    const int64_t at = ids[t] - args.first_id;
    if (at < 0 || at >= table.dim(0)) {
      std::fill(row, row + hidden_size, 0.0f);
    } else if (table.dtype() == DType::kFloat32) {
      std::memcpy(row, table.data<float>() + at * hidden_size, hidden_size * sizeof(float));
    } else {
      const uint16_t* from = table.data<uint16_t>() + at * hidden_size;
      for (int64_t i = 0; i < hidden_size; ++i) row[i] = bf16_to_float(from[i]);
    }
  }
}

void CpuBackend::rms_norm(const RmsNormArgs& args) {
  check_rms_norm(args);
  const int64_t n = args.weight.numel();
  for_rows(args.x.dim(0), n, [&](int64_t row) {
    kernels_.rms_norm(args.x.data<float>() + row * args.x.dim(1) + args.column,
                      args.weight.data<float>(), n, args.eps, args.out.data<float>() + row * n);
  });
}

void CpuBackend::add_rms_norm(const Tensor& residual, const Tensor& delta, const Tensor& weight,
                              float eps, const Tensor& out) {
  check_add_rms_norm(residual, delta, weight, out);
  const int64_t n = weight.numel();
  for_rows(residual.dim(0), n, [&](int64_t row) {
    float* sum = residual.data<float>() + row * n;
    kernels_.add_scaled(1.0f, delta.data<float>() + row * n, n, sum);
    kernels_.rms_norm(sum, weight.data<float>(), n, eps, out.data<float>() + row * n);
  });
}

void CpuBackend::silu_mul(const Tensor& gate_up, const Tensor& out) {
  check_silu_mul(gate_up, out);
  const int64_t n = out.dim(1);
  for_rows(out.dim(0), n * 16, [&](int64_t row) {
    const float* gate = gate_up.data<float>() + row * 2 * n;
    kernels_.silu_mul(gate, gate + n, n, out.data<float>() + row * n);
  });
}

void CpuBackend::fill_zero(const Tensor& x) {
  if (x.bytes() > 0) std::memset(x.raw(), 0, x.bytes());
}

void CpuBackend::gather_rows(const Tensor& from, const Tensor& rows, const Tensor& to) {
  check_gather_rows(from, rows, to);
  const int64_t width = from.dim(1);
  for (int64_t i = 0; i < rows.numel(); ++i) {
    const int32_t row = rows.data<int32_t>()[i];
    KDT_CHECK(row >= 0 && row < from.dim(0), "gather_rows: row ", row, " of ", from.dim(0));
    std::memcpy(to.data<float>() + i * width, from.data<float>() + row * width,
                width * sizeof(float));
  }
}

void CpuBackend::copy_columns(const Tensor& from, int64_t from_column, const Tensor& to,
                              int64_t to_column, int64_t width) {
  check_copy_columns(from, from_column, to, to_column, width);
  for (int64_t row = 0; row < from.dim(0); ++row) {
    std::memcpy(to.data<float>() + row * to.dim(1) + to_column,
                from.data<float>() + row * from.dim(1) + from_column, width * sizeof(float));
  }
}

}  // namespace kdt::cpu
