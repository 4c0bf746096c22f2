// Packing of weights and the matrix products over them.
#include "linear.h"

#include <algorithm>
#include <functional>
#include <system_error>
#include <thread>

#include "backend/checks.h"
#include "kernels/linear.h"
#include "kernels/linear_plain.h"

namespace kdt::cuda {
namespace {

// How many warps of a block share the k dimension: as many as have a few hundred k each. It decides
// the order of sums, so it depends on nothing but in_features.
int32_t k_warps_of(int64_t in_features) {
  return in_features >= 1024 ? 8 : in_features >= 512 ? 4 : in_features >= 256 ? 2 : 1;
}

// body(i) for each i below `count`, on a few threads: one alone is slower than a good disk. The
// body does not throw.
void in_parallel(int64_t count, const std::function<void(int64_t)>& body) {
  const int64_t cores = std::thread::hardware_concurrency();
  const int64_t threads = std::clamp<int64_t>(std::min(cores, count), 1, 8);
  std::vector<std::thread> others;
  const auto share = [&](int64_t first) {
    for (int64_t i = first; i < count; i += threads) body(i);
  };
  others.reserve(threads);
  for (int64_t t = 1; t < threads; ++t) {
    try {
      others.emplace_back(share, t);
    } catch (const std::system_error&) {  // no more threads here
      share(t);
    }
  }
  share(0);
  for (std::thread& thread : others) thread.join();
}

// Where element (row, h, i) of x or out lies: row * row + h * head + i.
struct Strides {
  int64_t row, head;
};

void multiply_packed(const CudaLinear& weight, const float* x, Strides x_strides, int64_t num_rows,
                     float* out, Strides out_strides, float alpha, Workspace& workspace,
                     int num_multiprocessors, cudaStream_t stream) {
  const StreamShape shape = stream_shape(weight.dtype, weight.in_features);
  LinearParams params{.weights = typed<unsigned char>(weight.memory),
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
  launch_plain_linear({.weight = typed<float>(weight.memory),
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

void check_matrix(const HostMatrix& matrix) {
  KDT_CHECK(matrix.out_features > 0 && matrix.in_features > 0, "weight: shape [",
            matrix.out_features, ", ", matrix.in_features, "]");
  // Kernels count stripes and chunks in 32 bits.
  constexpr int64_t kMost = 1 << 24;
  KDT_CHECK(matrix.out_features <= kMost && matrix.in_features <= kMost, "weight: shape [",
            matrix.out_features, ", ", matrix.in_features, "], at most ", kMost, " of each");
  KDT_CHECK(matrix.dtype == DType::kFloat32 || matrix.dtype == DType::kBFloat16 ||
                matrix.dtype == DType::kInt32,
            "weight: dtype ", dtype_name(matrix.dtype), "; want f32, bf16 or int4 (i32)");
  if (matrix.dtype == DType::kInt32) {
    KDT_CHECK(matrix.in_features % 32 == 0, "int4 weight: in_features ", matrix.in_features,
              " is not a multiple of 32");
    KDT_CHECK(matrix.scale != nullptr, "int4 weight: no scale");
  }
}

std::shared_ptr<void> upload_panels(const std::vector<PanelRow>& rows, DType dtype,
                                    int64_t in_features, cudaStream_t stream) {
  const int64_t panel_bytes = stream_shape(dtype, in_features).panel_bytes();
  const int64_t num_panels = static_cast<int64_t>(rows.size()) / kPanelRows;
  const std::shared_ptr<void> memory = device_memory(num_panels * panel_bytes);
  const int64_t step = std::max<int64_t>(1, (int64_t{64} << 20) / panel_bytes);
  std::vector<uint8_t> packed(std::min(step, num_panels) * panel_bytes);
  for (int64_t begin = 0; begin < num_panels; begin += step) {
    const int64_t count = std::min(step, num_panels - begin);
    in_parallel(count, [&](int64_t i) {
      pack_panel(&rows[(begin + i) * kPanelRows], dtype, in_features,
                 packed.data() + i * panel_bytes);
    });
    // Returns once the bytes are out of `packed`.
    KDT_CUDA_CHECK(cudaMemcpyAsync(typed<char>(memory) + begin * panel_bytes, packed.data(),
                                   count * panel_bytes, cudaMemcpyHostToDevice, stream));
  }
  return memory;
}

std::shared_ptr<void> upload_plain(const std::vector<HostMatrix>& matrices, cudaStream_t stream) {
  int64_t bytes = 0;
  for (const HostMatrix& matrix : matrices) bytes += matrix.out_features * matrix.in_features * 4;
  const std::shared_ptr<void> memory = device_memory(bytes);
  char* to = typed<char>(memory);
  for (const HostMatrix& matrix : matrices) {
    const int64_t size = matrix.out_features * matrix.in_features * 4;
    KDT_CUDA_CHECK(cudaMemcpyAsync(to, matrix.data, size, cudaMemcpyHostToDevice, stream));
    to += size;
  }
  return memory;
}

std::unique_ptr<LinearWeight> CudaBackend::prepare_linear(const std::vector<HostMatrix>& stacked) {
  KDT_CHECK(!stacked.empty(), "prepare_linear: no matrix");
  KDT_CUDA_CHECK(cudaSetDevice(device_));
  auto weight = std::make_unique<CudaLinear>();
  weight->in_features = stacked.front().in_features;
  weight->dtype = stacked.front().dtype;
  bool equal = true;
  for (const HostMatrix& matrix : stacked) {
    check_matrix(matrix);
    KDT_CHECK(matrix.in_features == weight->in_features, "prepare_linear: in_features ",
              matrix.in_features, " beside ", weight->in_features);
    KDT_CHECK(matrix.dtype == weight->dtype, "prepare_linear: ", dtype_name(matrix.dtype),
              " beside ", dtype_name(weight->dtype));
    weight->matrix_rows.push_back(matrix.out_features);
    weight->out_features += matrix.out_features;
    equal = equal && matrix.out_features == stacked.front().out_features;
  }
  if (!weight->is_packed()) {
    weight->memory = upload_plain(stacked, stream_);
    return weight;
  }
  std::vector<PanelRow> rows;
  const auto fill_panel = [&] { rows.resize(ceil_div(rows.size(), kPanelRows) * kPanelRows); };
  for (const HostMatrix& matrix : stacked) {
    for (int64_t row = 0; row < matrix.out_features; ++row) rows.push_back({&matrix, row});
    if (equal) fill_panel();
  }
  fill_panel();
  weight->packed_matrices = equal ? weight->num_matrices() : 1;
  weight->packed_rows = weight->out_features / weight->packed_matrices;
  weight->memory = upload_panels(rows, weight->dtype, weight->in_features, stream_);
  return weight;
}

void CudaBackend::multiply(const CudaLinear& weight, const float* x, int64_t x_row_stride,
                           int64_t x_head_stride, int64_t num_rows, float* out,
                           int64_t out_row_stride, int64_t out_head_stride, float alpha) {
  for (int64_t rows : weight.matrix_rows)
    KDT_CHECK(rows == weight.matrix_rows.front(), "cuda: a matrix of ", rows,
              " rows beside one of ", weight.matrix_rows.front());
  const Strides x_strides{x_row_stride, x_head_stride},
      out_strides{out_row_stride, out_head_stride};
  if (weight.is_packed()) {
    multiply_packed(weight, x, x_strides, num_rows, out, out_strides, alpha, workspace_,
                    num_multiprocessors_, stream_);
  } else {
    multiply_plain(weight, weight.num_matrices(), weight.matrix_rows.front(), x, x_strides,
                   num_rows, out, out_strides, alpha, stream_);
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
