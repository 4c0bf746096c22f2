// Packing of experts.
#include "experts.h"

#include "backend/check_weights.h"
#include "kernels/moe.h"
#include "weight_upload.h"

namespace kdt::cuda {
namespace {

// `rows`: of an expert, padding included when they are packed.
ExpertsProduct make_product(DType dtype, int64_t num_experts, int64_t rows, int64_t in_features) {
  ExpertsProduct product{.dtype = dtype, .memory = nullptr, .in_features = in_features};
  if (product.is_packed()) {
    product.num_stripes = rows / kStripeRows;
    product.expert_bytes = rows / kPanelRows * stream_shape(dtype, in_features).panel_bytes();
  } else {
    product.expert_bytes = rows * in_features * 4;
  }
  int64_t bytes = 0;
  KDT_CHECK(!__builtin_mul_overflow(num_experts, product.expert_bytes, &bytes),
            "make_experts: ", num_experts, " experts of ", product.expert_bytes,
            " bytes are more than memory can hold");
  product.memory = device_memory(bytes);
  return product;
}

}  // namespace

std::vector<Tensor> CudaExperts::memory() const {
  std::vector<Tensor> memory;
  for (const ExpertsProduct* product : {&gate_up, &down})
    memory.emplace_back(product->memory.get(), DType::kUInt8,
                        std::initializer_list<int64_t>{num_experts * product->expert_bytes});
  return memory;
}

std::unique_ptr<ExpertsWeight> CudaBackend::make_experts(const ExpertsShape& shape) {
  check_make_experts(shape, kMaxExperts);
  const DType gate_up = shape.gate_up_dtype, down = shape.down_dtype;
  KDT_CHECK((gate_up == DType::kFloat32) == (down == DType::kFloat32),
            "make_experts: gate and up of ", dtype_name(gate_up), " beside a down of ",
            dtype_name(down));
  KDT_CUDA_CHECK(cudaSetDevice(device_));
  auto weight = std::make_unique<CudaExperts>();
  weight->shape = shape;
  const int64_t experts = weight->num_experts = shape.num_experts;
  const int64_t hidden = weight->hidden_size = shape.hidden_size;
  const int64_t intermediate = weight->intermediate_size = shape.intermediate_size;
  if (gate_up == DType::kFloat32) {
    weight->gate_up = make_product(gate_up, experts, 2 * intermediate, hidden);
    weight->down = make_product(down, experts, hidden, intermediate);
    return weight;
  }
  weight->activated_stride = ceil_div(intermediate, kMostChunkK) * kMostChunkK;
  weight->gate_up = make_product(gate_up, experts, 2 * weight->activated_stride, hidden);
  weight->down =
      make_product(down, experts, ceil_div(hidden, kPanelRows) * kPanelRows, intermediate);
  return weight;
}

void CudaBackend::fill_expert(ExpertsWeight& weight, int64_t index, const HostExpert& expert) {
  const auto& experts = static_cast<const CudaExperts&>(weight);
  check_fill_expert(experts.shape, index, expert);
  KDT_CUDA_CHECK(cudaSetDevice(device_));
  const auto place = [&](const ExpertsProduct& product) {
    return typed<char>(product.memory) + index * product.expert_bytes;
  };
  WeightUpload& to = upload_of_weights();
  if (!experts.gate_up.is_packed()) {
    to.plain(expert.gate, place(experts.gate_up), stream_);
    to.plain(expert.up, place(experts.gate_up) + experts.gate_up.expert_bytes / 2, stream_);
    to.plain(expert.down, place(experts.down), stream_);
    return;
  }
  // Stripes of eight rows of gate over the same of up, as far as an activated row goes.
  std::vector<PanelRow> rows;
  for (int64_t begin = 0; begin < experts.activated_stride; begin += 8) {
    for (const HostMatrix* matrix : {&expert.gate, &expert.up}) {
      for (int64_t row = begin; row < begin + 8; ++row)
        rows.push_back(row < experts.intermediate_size ? PanelRow{matrix, row} : PanelRow{});
    }
  }
  to.panels(rows, experts.gate_up.dtype, experts.hidden_size, place(experts.gate_up), stream_);
  rows.clear();
  for (int64_t row = 0; row < experts.hidden_size; ++row) rows.push_back({&expert.down, row});
  rows.resize(ceil_div(experts.hidden_size, kPanelRows) * kPanelRows);
  to.panels(rows, experts.down.dtype, experts.intermediate_size, place(experts.down), stream_);
}

}  // namespace kdt::cuda
