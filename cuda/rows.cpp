// Ops that work on each row alone.
#include "kernels/rows.h"

#include <algorithm>
#include <initializer_list>

#include "backend/checks.h"
#include "cuda_backend.h"

namespace kdt::cuda {
namespace {

// Whether rows of n f32 values can be moved 16 bytes at a time.
bool in_quads(int64_t n, std::initializer_list<Tensor> tensors) {
  return n % 4 == 0 && std::ranges::all_of(tensors, [](const Tensor& t) {
           return reinterpret_cast<uintptr_t>(t.raw()) % 16 == 0;
         });
}

}  // namespace

void CudaBackend::embed(const EmbedArgs& args) {
  check_embed(args);
  launch_embed({.table = args.table.raw(),
                .token_ids = args.token_ids.data<int32_t>(),
                .out = args.out.data<float>(),
                .fault = device_fault_,
                .num_rows = args.token_ids.numel(),
                .table_rows = args.table.dim(0),
                .hidden_size = args.table.dim(1),
                .first_id = args.first_id,
                .vocab_size = args.vocab_size == 0 ? args.table.dim(0) : args.vocab_size,
                .is_bf16 = args.table.dtype() == DType::kBFloat16},
               stream_);
}

void CudaBackend::rms_norm(const RmsNormArgs& args) {
  check_rms_norm(args);
  launch_rms_norm({.x = args.x.data<float>() + args.column,
                   .residual = nullptr,
                   .delta = nullptr,
                   .weight = args.weight.data<float>(),
                   .out = args.out.data<float>(),
                   .num_rows = args.x.dim(0),
                   .n = args.weight.numel(),
                   .x_stride = args.x.dim(1),
                   .eps = args.eps,
                   .aligned = args.column % 4 == 0 && args.x.dim(1) % 4 == 0 &&
                              in_quads(args.weight.numel(), {args.x, args.weight, args.out})},
                  stream_);
}

void CudaBackend::add_rms_norm(const Tensor& residual, const Tensor& delta, const Tensor& weight,
                               float eps, const Tensor& out) {
  check_add_rms_norm(residual, delta, weight, out);
  launch_rms_norm({.x = nullptr,
                   .residual = residual.data<float>(),
                   .delta = delta.data<float>(),
                   .weight = weight.data<float>(),
                   .out = out.data<float>(),
                   .num_rows = out.dim(0),
                   .n = weight.numel(),
                   .x_stride = 0,
                   .eps = eps,
                   .aligned = in_quads(weight.numel(), {residual, delta, weight, out})},
                  stream_);
}

void CudaBackend::silu_mul(const Tensor& gate_up, const Tensor& out) {
  check_silu_mul(gate_up, out);
  launch_silu_mul({.gate_up = gate_up.data<float>(),
                   .out = out.data<float>(),
                   .num_rows = out.dim(0),
                   .n = out.dim(1)},
                  stream_);
}

void CudaBackend::fill_zero(const Tensor& x) {
  if (x.bytes() > 0) KDT_CUDA_CHECK(cudaMemsetAsync(x.raw(), 0, x.bytes(), stream_));
}

void CudaBackend::gather_rows(const Tensor& from, const Tensor& rows, const Tensor& to) {
  check_gather_rows(from, rows, to);
  launch_copy_rows({.from = from.data<float>(),
                    .rows = rows.data<int32_t>(),
                    .to = to.data<float>(),
                    .fault = device_fault_,
                    .num_rows = rows.numel(),
                    .num_from = from.dim(0),
                    .from_stride = from.dim(1),
                    .to_stride = from.dim(1),
                    .width = from.dim(1)},
                   stream_);
}

void CudaBackend::copy_columns(const Tensor& from, int64_t from_column, const Tensor& to,
                               int64_t to_column, int64_t width) {
  check_copy_columns(from, from_column, to, to_column, width);
  launch_copy_rows({.from = from.data<float>() + from_column,
                    .rows = nullptr,
                    .to = to.data<float>() + to_column,
                    .fault = device_fault_,
                    .num_rows = from.dim(0),
                    .num_from = from.dim(0),
                    .from_stride = from.dim(1),
                    .to_stride = to.dim(1),
                    .width = width},
                   stream_);
}

}  // namespace kdt::cuda
