// Packing of weights and the matrix products over them.
#include "linear.h"

#include "backend/check_weights.h"
#include "backend/checks.h"
#include "kernels/linear.h"
#include "kernels/linear_plain.h"
#include "weight_upload.h"

namespace kdt::cuda {
namespace {

// How many warps of a block share the k dimension: as many as have a few hundred k each. It decides
// the order of sums, so it depends on nothing but in_features.
int32_t k_warps_of(int64_t in_features) {
  return in_features >= 1024 ? 8 : in_features >= 512 ? 4 : in_features >= 256 ? 2 : 1;
}

// Where element (row, h, i) of x or out lies: row * row + h * head + i.
struct Strides {
  int64_t row, head;
};

void multiply_packed(const CudaLinear& weight, const float* x, Strides x_strides, int64_t num_rows,
                     float* out, Strides out_strides, float alpha, Workspace& workspace,
                     int num_multiprocessors, cudaStream_t stream) {
  const StreamShape shape = stream_shape(weight.dtype, weight.in_features);
  LinearParams params{.weights = typed<unsigned char>(weight.data),
                      .dtype = weight.dtype,
                      .num_chunks = static_cast<int32_t>(shape.num_chunks),
                      .k_warps = k_warps_of(weight.in_features),
                      .num_matrices = static_cast<int32_t>(weight.packed_matrices),
                      .matrix_rows = static_cast<int32_t>(weight.packed_rows),
                      .x = x,
                      .x_is_float = true,
                      .x_row_stride = x_strides.row,
                      .x_head_stride = x_strides.head,
                      .out = out,
                      .out_row_stride = out_strides.row,
                      .out_head_stride = out_strides.head,
                      .num_rows = num_rows,
                      .alpha = alpha,
                      .num_multiprocessors = num_multiprocessors};
  const bool direct = num_rows <= 8 && weight.in_features % shape.chunk_k == 0 &&
                      x_strides.row % 4 == 0 && x_strides.head % 4 == 0 &&
                      reinterpret_cast<uintptr_t>(x) % 16 == 0;
  if (!direct) {
    const int64_t heads = x_strides.head == 0 ? 1 : weight.packed_matrices;
    const int64_t stride = shape.num_chunks * shape.chunk_k;
    workspace.reserve(Workspace::piece(num_rows * heads * stride * 2));
    auto* rounded = workspace.take<uint16_t>(num_rows * heads * stride);
    launch_round_rows({.from = x,
                       .to = rounded,
                       .num_rows = num_rows,
                       .num_heads = heads,
                       .row_stride = x_strides.row,
                       .head_stride = x_strides.head,
                       .n = weight.in_features,
                       .to_stride = stride},
                      stream);
    params.x = rounded;
    params.x_is_float = false;
    params.x_row_stride = heads * stride;
    params.x_head_stride = x_strides.head == 0 ? 0 : stride;
  }
  launch_linear(params, stream);
}

void multiply_plain(const CudaLinear& weight, int64_t num_matrices, int64_t matrix_rows,
                    const float* x, Strides x_strides, int64_t num_rows, float* out,
                    Strides out_strides, float alpha, cudaStream_t stream) {
  launch_plain_linear({.weight = typed<float>(weight.data),
                       .x = x,
                       .matrix_of_row = nullptr,
                       .out = out,
                       .num_rows = num_rows,
                       .num_matrices = num_matrices,
                       .out_features = matrix_rows,
                       .in_features = weight.in_features,
                       .x_row_stride = x_strides.row,
                       .x_head_stride = x_strides.head,
                       .out_row_stride = out_strides.row,
                       .out_head_stride = out_strides.head,
                       .rows_per_x = 1,
                       .alpha = alpha},
                      stream);
}

}  // namespace

std::unique_ptr<LinearWeight> CudaBackend::make_linear(const std::vector<MatrixShape>& stacked) {
  check_make_linear(stacked);
  KDT_CUDA_CHECK(cudaSetDevice(device_));
  auto weight = std::make_unique<CudaLinear>();
  weight->shapes = stacked;
  weight->in_features = stacked.front().in_features;
  weight->dtype = stacked.front().dtype;
  bool equal = true;
  for (const MatrixShape& matrix : stacked) {
    weight->out_features += matrix.out_features;
    equal = equal && matrix.out_features == stacked.front().out_features;
  }
  if (weight->is_packed()) {
    weight->packed_matrices = equal ? weight->num_matrices() : 1;
    weight->packed_rows = weight->out_features / weight->packed_matrices;
    weight->bytes = weight->packed_matrices * ceil_div(weight->packed_rows, kPanelRows) *
                    stream_shape(weight->dtype, weight->in_features).panel_bytes();
  } else {
    weight->bytes = weight->out_features * weight->in_features * 4;
  }
  weight->data = device_memory(weight->bytes);
  return weight;
}

void CudaBackend::fill_linear(LinearWeight& weight, const std::vector<HostMatrix>& stacked) {
  const auto& linear = static_cast<const CudaLinear&>(weight);
  check_fill_linear(linear.shapes, stacked);
  KDT_CUDA_CHECK(cudaSetDevice(device_));
  WeightUpload& to = upload_of_weights();
  if (!linear.is_packed()) {
    char* at = typed<char>(linear.data);
    for (const HostMatrix& matrix : stacked) {
      to.plain(matrix, at, stream_);
      at += matrix.out_features * matrix.row_bytes();
    }
    return;
  }
  std::vector<PanelRow> rows;
  const auto fill_panel = [&] { rows.resize(ceil_div(rows.size(), kPanelRows) * kPanelRows); };
  for (const HostMatrix& matrix : stacked) {
    for (int64_t row = 0; row < matrix.out_features; ++row) rows.push_back({&matrix, row});
    if (linear.packed_matrices > 1) fill_panel();
  }
  fill_panel();
  to.panels(rows, linear.dtype, linear.in_features, linear.data.get(), stream_);
}

void CudaBackend::multiply(const CudaLinear& weight, const float* x, int64_t x_row_stride,
                           int64_t x_head_stride, int64_t num_rows, float* out,
                           int64_t out_row_stride, int64_t out_head_stride, float alpha) {
  const int64_t matrix_rows = weight.shapes.front().out_features;
  for (const MatrixShape& shape : weight.shapes)
    KDT_CHECK(shape.out_features == matrix_rows, "cuda: a matrix of ", shape.out_features,
              " rows beside one of ", matrix_rows);
  const Strides x_strides{x_row_stride, x_head_stride},
      out_strides{out_row_stride, out_head_stride};
  if (weight.is_packed()) {
    multiply_packed(weight, x, x_strides, num_rows, out, out_strides, alpha, workspace_,
                    num_multiprocessors_, stream_);
  } else {
    multiply_plain(weight, weight.num_matrices(), matrix_rows, x, x_strides, num_rows, out,
                   out_strides, alpha, stream_);
  }
}

void CudaBackend::linear(const Tensor& x, const LinearWeight& weight, const Tensor& out) {
  check_linear(x, weight, out);
  const auto& stacked = static_cast<const CudaLinear&>(weight);
  const Strides x_strides{stacked.in_features, 0};
  if (stacked.is_packed()) {
    multiply_packed(stacked, x.data<float>(), x_strides, out.dim(0), out.data<float>(),
                    {stacked.out_features, stacked.packed_rows}, 1, workspace_,
                    num_multiprocessors_, stream_);
  } else {
    multiply_plain(stacked, 1, stacked.out_features, x.data<float>(), x_strides, out.dim(0),
                   out.data<float>(), {stacked.out_features, 0}, 1, stream_);
  }
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
