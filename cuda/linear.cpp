// Packing of weights and the matrix products over them.
#include "linear.h"

#include "backend/checks.h"
#include "kernels/linear_plain.h"

namespace kdt::cuda {

void check_matrix(const HostMatrix& matrix) {
  KDT_CHECK(matrix.out_features > 0 && matrix.in_features > 0, "weight: shape [",
            matrix.out_features, ", ", matrix.in_features, "]");
  KDT_CHECK(matrix.dtype == DType::kFloat32 || matrix.dtype == DType::kBFloat16 ||
                matrix.dtype == DType::kInt32,
            "weight: dtype ", dtype_name(matrix.dtype), "; want f32, bf16 or int4 (i32)");
  if (matrix.dtype == DType::kInt32) {
    KDT_CHECK(matrix.in_features % 32 == 0, "int4 weight: in_features ", matrix.in_features,
              " is not a multiple of 32");
    KDT_CHECK(matrix.scale != nullptr, "int4 weight: no scale");
  }
}

int64_t matrix_bytes(const HostMatrix& matrix) {
  const int64_t values = matrix.out_features * matrix.in_features;
  if (matrix.dtype == DType::kInt32) return values / 2;
  return values * (matrix.dtype == DType::kFloat32 ? 4 : 2);
}

std::unique_ptr<LinearWeight> CudaBackend::prepare_linear(const std::vector<HostMatrix>& stacked) {
  KDT_CHECK(!stacked.empty(), "prepare_linear: no matrix");
  KDT_CUDA_CHECK(cudaSetDevice(device_));
  auto weight = std::make_unique<CudaLinear>();
  weight->in_features = stacked.front().in_features;
  weight->dtype = stacked.front().dtype;
  int64_t bytes = 0;
  for (const HostMatrix& matrix : stacked) {
    check_matrix(matrix);
    KDT_CHECK(matrix.in_features == weight->in_features, "prepare_linear: in_features ",
              matrix.in_features, " beside ", weight->in_features);
    KDT_CHECK(matrix.dtype == weight->dtype, "prepare_linear: ", dtype_name(matrix.dtype),
              " beside ", dtype_name(weight->dtype));
    weight->matrix_rows.push_back(matrix.out_features);
    weight->out_features += matrix.out_features;
    bytes += matrix_bytes(matrix);
  }
  weight->values = device_memory(bytes);
  weight->scales = device_memory(weight->dtype == DType::kInt32 ? bytes / 8 : 0);
  char* values = typed<char>(weight->values);
  char* scales = typed<char>(weight->scales);
  for (const HostMatrix& matrix : stacked) {
    const int64_t size = matrix_bytes(matrix);
    KDT_CUDA_CHECK(cudaMemcpyAsync(values, matrix.data, size, cudaMemcpyHostToDevice, stream_));
    values += size;
    if (matrix.dtype != DType::kInt32) continue;
    KDT_CUDA_CHECK(
        cudaMemcpyAsync(scales, matrix.scale, size / 8, cudaMemcpyHostToDevice, stream_));
    scales += size / 8;
  }
  return weight;
}

void CudaBackend::multiply(const CudaLinear& weight, const float* x, int64_t x_row_stride,
                           int64_t x_head_stride, int64_t num_rows, float* out,
                           int64_t out_row_stride, int64_t out_head_stride, float alpha) {
  for (int64_t rows : weight.matrix_rows)
    KDT_CHECK(rows == weight.matrix_rows.front(), "cuda: a matrix of ", rows,
              " rows beside one of ", weight.matrix_rows.front());
  launch_plain_linear({.weight = weight.values.get(),
                       .scale = typed<uint16_t>(weight.scales),
                       .dtype = weight.dtype,
                       .x = x,
                       .matrix_of_row = nullptr,
                       .out = out,
                       .num_rows = num_rows,
                       .num_matrices = weight.num_matrices(),
                       .out_features = weight.matrix_rows.front(),
                       .in_features = weight.in_features,
                       .x_row_stride = x_row_stride,
                       .x_head_stride = x_head_stride,
                       .out_row_stride = out_row_stride,
                       .out_head_stride = out_head_stride,
                       .rows_per_x = 1,
                       .alpha = alpha},
                      stream_);
}

void CudaBackend::linear(const Tensor& x, const LinearWeight& weight, const Tensor& out) {
  check_linear(x, weight, out);
  const auto& stacked = static_cast<const CudaLinear&>(weight);
  launch_plain_linear({.weight = stacked.values.get(),
                       .scale = typed<uint16_t>(stacked.scales),
                       .dtype = stacked.dtype,
                       .x = x.data<float>(),
                       .matrix_of_row = nullptr,
                       .out = out.data<float>(),
                       .num_rows = out.dim(0),
                       .num_matrices = 1,
                       .out_features = stacked.out_features,
                       .in_features = stacked.in_features,
                       .x_row_stride = stacked.in_features,
                       .x_head_stride = 0,
                       .out_row_stride = stacked.out_features,
                       .out_head_stride = 0,
                       .rows_per_x = 1,
                       .alpha = 1},
                      stream_);
}

void CudaBackend::head_linear(const Tensor& x, const LinearWeight& weight, const Tensor& out) {
  check_head_linear(x, weight, out);
  const auto& stacked = static_cast<const CudaLinear&>(weight);
  const int64_t heads = x.dim(1), in = x.dim(2), each = out.dim(2);
  KDT_CHECK(stacked.num_matrices() == heads, "head_linear: ", stacked.num_matrices(),
            " matrices for ", heads, " heads");
  multiply(stacked, x.data<float>(), heads * in, in, x.dim(0), out.data<float>(), heads * each,
           each, 1);
}

}  // namespace kdt::cuda
