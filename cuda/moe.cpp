// Routing of tokens to experts, and the experts' products.
#include "kernels/moe.h"

#include "backend/checks.h"
#include "kernels/linear_plain.h"
#include "kernels/rows.h"
#include "linear.h"

namespace kdt::cuda {

// Gate over up, of every expert; and down.
struct CudaExperts final : ExpertsWeight {
  std::unique_ptr<CudaLinear> gate_up, down;
};

std::unique_ptr<ExpertsWeight> CudaBackend::prepare_experts(
    const std::vector<HostExpert>& experts) {
  KDT_CHECK(!experts.empty(), "prepare_experts: no expert");
  auto weight = std::make_unique<CudaExperts>();
  weight->num_experts = static_cast<int64_t>(experts.size());
  weight->hidden_size = experts.front().gate.in_features;
  weight->intermediate_size = experts.front().gate.out_features;
  std::vector<HostMatrix> gate_up, down;
  for (const HostExpert& host : experts) {
    for (const HostMatrix* matrix : {&host.gate, &host.up}) {
      KDT_CHECK(matrix->in_features == weight->hidden_size &&
                    matrix->out_features == weight->intermediate_size,
                "prepare_experts: gate or up is [", matrix->out_features, ", ", matrix->in_features,
                "], want [", weight->intermediate_size, ", ", weight->hidden_size, "]");
      gate_up.push_back(*matrix);
    }
    KDT_CHECK(host.down.in_features == weight->intermediate_size &&
                  host.down.out_features == weight->hidden_size,
              "prepare_experts: down is [", host.down.out_features, ", ", host.down.in_features,
              "], want [", weight->hidden_size, ", ", weight->intermediate_size, "]");
    down.push_back(host.down);
  }
  weight->gate_up.reset(static_cast<CudaLinear*>(prepare_linear(gate_up).release()));
  weight->down.reset(static_cast<CudaLinear*>(prepare_linear(down).release()));
  return weight;
}

void CudaBackend::moe_route(const MoeRouteArgs& args) {
  check_moe_route(args);
  launch_moe_route({.logits = args.logits.data<float>(),
                    .bias = args.bias.data<float>(),
                    .ids = args.ids.data<int32_t>(),
                    .weights = args.weights.data<float>(),
                    .num_rows = args.logits.dim(0),
                    .num_experts = args.logits.dim(1),
                    .top_k = args.ids.dim(1),
                    .n_group = args.n_group,
                    .topk_group = args.topk_group,
                    .routed_scaling_factor = args.routed_scaling_factor,
                    .norm_topk_prob = args.norm_topk_prob},
                   stream_);
}

void CudaBackend::moe_experts(const MoeExpertsArgs& args) {
  check_moe_experts(args);
  const auto& weight = static_cast<const CudaExperts&>(*args.experts);
  const int64_t tokens = args.x.dim(0), top_k = args.ids.dim(1), slots = tokens * top_k;
  const int64_t hidden = weight.hidden_size, inter = weight.intermediate_size;
  if (slots == 0) return;
  workspace_.reserve(Workspace::piece(slots * 2 * inter * 4) + Workspace::piece(slots * inter * 4) +
                     Workspace::piece(slots * hidden * 4));
  auto* gate_up = workspace_.take<float>(slots * 2 * inter);
  auto* activated = workspace_.take<float>(slots * inter);
  auto* part = workspace_.take<float>(slots * hidden);
  const auto product = [&](const CudaLinear& linear, const float* x, int64_t rows_per_x, float* out,
                           int64_t out_features) {
    launch_plain_linear({.weight = linear.values.get(),
                         .scale = typed<uint16_t>(linear.scales),
                         .dtype = linear.dtype,
                         .x = x,
                         .matrix_of_row = args.ids.data<int32_t>(),
                         .out = out,
                         .num_rows = slots,
                         .num_matrices = weight.num_experts,
                         .out_features = out_features,
                         .in_features = linear.in_features,
                         .x_row_stride = linear.in_features,
                         .x_head_stride = 0,
                         .out_row_stride = out_features,
                         .out_head_stride = 0,
                         .rows_per_x = rows_per_x,
                         .alpha = 1},
                        stream_);
  };
  product(*weight.gate_up, args.x.data<float>(), top_k, gate_up, 2 * inter);
  launch_silu_mul({.gate_up = gate_up, .out = activated, .num_rows = slots, .n = inter}, stream_);
  product(*weight.down, activated, 1, part, hidden);
  launch_moe_sum({.part = part,
                  .ids = args.ids.data<int32_t>(),
                  .weights = args.weights.data<float>(),
                  .out = args.out.data<float>(),
                  .num_tokens = tokens,
                  .top_k = top_k,
                  .hidden_size = hidden,
                  .num_experts = weight.num_experts},
                 stream_);
}

}  // namespace kdt::cuda
