// What all back ends ask of a weight's shapes, and of what fills it.
#pragma once

#include "backend/backend.h"

namespace kdt {
namespace detail {

inline std::string matrix_text(const MatrixShape& s) {
  return join(s.dtype == DType::kInt32 ? "int4" : dtype_name(s.dtype), " [", s.out_features, ", ",
              s.in_features, "]");
}

inline void check_matrix_shape(const MatrixShape& s) {
  // Kernels count in 32 bits.
  constexpr int64_t kMost = 1 << 24;
  KDT_CHECK(s.out_features > 0 && s.in_features > 0, "weight: shape [", s.out_features, ", ",
            s.in_features, "]");
  KDT_CHECK(s.out_features <= kMost && s.in_features <= kMost, "weight: shape [", s.out_features,
            ", ", s.in_features, "], at most ", kMost, " of each");
  KDT_CHECK(s.dtype == DType::kFloat32 || s.dtype == DType::kBFloat16 || s.dtype == DType::kInt32,
            "weight: dtype ", dtype_name(s.dtype), "; want f32, bf16 or int4 (i32)");
  KDT_CHECK(s.dtype != DType::kInt32 || s.in_features % 32 == 0, "int4 weight: in_features ",
            s.in_features, " is not a multiple of 32");
}

// `name`: the op and what the matrix is to it.
inline void check_fill(const std::string& name, const MatrixShape& want, const HostMatrix& got) {
  const MatrixShape shape{got.out_features, got.in_features, got.dtype};
  KDT_CHECK(shape.out_features == want.out_features && shape.in_features == want.in_features &&
                shape.dtype == want.dtype,
            name, " is ", matrix_text(shape), ", want ", matrix_text(want));
  KDT_CHECK(got.data != nullptr, name, ": no data");
  KDT_CHECK(got.row_stride == 0 || got.row_stride >= got.row_bytes(), name, ": row_stride ",
            got.row_stride, " of rows of ", got.row_bytes(), " bytes");
  if (got.dtype != DType::kInt32) return;
  KDT_CHECK(got.scale != nullptr, name, ": int4 weight: no scale");
  KDT_CHECK(got.scale_row_stride == 0 || got.scale_row_stride >= got.in_features / 32 * 2, name,
            ": scale_row_stride ", got.scale_row_stride, " of rows of ", got.in_features / 32 * 2,
            " bytes");
}

}  // namespace detail

inline void check_make_linear(const std::vector<MatrixShape>& stacked) {
  KDT_CHECK(!stacked.empty(), "make_linear: no matrix");
  const MatrixShape& first = stacked.front();
  for (const MatrixShape& shape : stacked) {
    detail::check_matrix_shape(shape);
    KDT_CHECK(shape.in_features == first.in_features, "make_linear: in_features ",
              shape.in_features, " beside ", first.in_features);
    KDT_CHECK(shape.dtype == first.dtype, "make_linear: ", dtype_name(shape.dtype), " beside ",
              dtype_name(first.dtype));
  }
}

// `want`: what the weight was made for.
inline void check_fill_linear(const std::vector<MatrixShape>& want,
                              const std::vector<HostMatrix>& got) {
  KDT_CHECK(got.size() == want.size(), "fill_linear: ", got.size(), " matrices, want ",
            want.size());
  for (size_t i = 0; i < got.size(); ++i)
    detail::check_fill(join("fill_linear: matrix ", i), want[i], got[i]);
}

inline MatrixShape gate_shape(const ExpertsShape& s) {
  return {s.intermediate_size, s.hidden_size, s.gate_up_dtype};
}
inline MatrixShape down_shape(const ExpertsShape& s) {
  return {s.hidden_size, s.intermediate_size, s.down_dtype};
}

inline void check_make_experts(const ExpertsShape& shape, int64_t most_experts) {
  KDT_CHECK(shape.num_experts > 0 && shape.num_experts <= most_experts,
            "make_experts: ", shape.num_experts, " experts; want 1 to ", most_experts);
  detail::check_matrix_shape(gate_shape(shape));
  detail::check_matrix_shape(down_shape(shape));
}

inline void check_fill_expert(const ExpertsShape& want, int64_t index, const HostExpert& expert) {
  KDT_CHECK(index >= 0 && index < want.num_experts, "fill_expert: expert ", index, " of ",
            want.num_experts);
  detail::check_fill("fill_expert: gate", gate_shape(want), expert.gate);
  detail::check_fill("fill_expert: up", gate_shape(want), expert.up);
  detail::check_fill("fill_expert: down", down_shape(want), expert.down);
}

}  // namespace kdt
