// Routing of tokens to experts, and the experts' products.
#include "kernels/moe.h"

#include <algorithm>

#include "backend/checks.h"
#include "experts.h"
#include "kernels/linear_plain.h"
#include "kernels/rows.h"

namespace kdt::cuda {
namespace {

constexpr int64_t kFewSlots = 16;

// As k_warps_of in linear.cpp; experts have many stripes, so fewer warps share one.
int32_t k_warps_of(int64_t in_features) {
  return in_features >= 4096 ? 8 : in_features >= 2048 ? 4 : in_features >= 1024 ? 2 : 1;
}

// Rows of a launch with `num_slots` slots: as few as hold most experts' rows, so that weights are
// seldom read twice and not many rows of a tile are empty.
int32_t tile_rows_of(int64_t num_slots, int64_t num_experts) {
  const int64_t average = num_slots / num_experts;
  return average < 4 ? 8 : average < 10 ? 16 : 32;
}

// What the ops below work with.
struct Call {
  const MoeExpertsArgs& args;
  const CudaExperts& experts;
  int64_t first_token, num_tokens, top_k;
  Workspace& workspace;
  int num_multiprocessors;
  cudaStream_t stream;

  int64_t num_slots() const { return num_tokens * top_k; }
  const float* x() const { return args.x.data<float>() + first_token * experts.hidden_size; }
  const int32_t* ids() const { return args.ids.data<int32_t>() + first_token * top_k; }
  int32_t first_expert() const { return static_cast<int32_t>(args.first_expert); }
};

void add_up(const Call& call, const float* part) {
  launch_moe_sum({.part = part,
                  .ids = call.ids(),
                  .weights = call.args.weights.data<float>() + call.first_token * call.top_k,
                  .out = call.args.out.data<float>() + call.first_token * call.experts.hidden_size,
                  .num_tokens = call.num_tokens,
                  .top_k = call.top_k,
                  .hidden_size = call.experts.hidden_size,
                  .first_expert = call.first_expert(),
                  .num_experts = static_cast<int32_t>(call.experts.num_experts)},
                 call.stream);
}

void run_packed(const Call& call) {
  const CudaExperts& experts = call.experts;
  const int64_t tokens = call.num_tokens, slots = call.num_slots(), hidden = experts.hidden_size;
  const int64_t x_stride = ceil_div(hidden, kMostChunkK) * kMostChunkK;
  // A few slots are tiles of their own, unsorted: that saves a launch, and they seldom share an
  // expert.
  const bool as_they_are =
      slots <= kFewSlots &&
      hidden % stream_shape(experts.gate_up.dtype, experts.gate_up.in_features).chunk_k == 0;
  const int32_t tile_rows = as_they_are ? 8 : tile_rows_of(slots, experts.num_experts);
  const int64_t max_tiles =
      as_they_are ? slots : max_moe_tiles(slots, experts.num_experts, tile_rows);
  const int64_t activated_count = slots * experts.activated_stride;
  call.workspace.reserve(
      Workspace::piece(4) + Workspace::piece(max_tiles * 4) +
      Workspace::piece(max_tiles * tile_rows * 4) + Workspace::piece(tokens * x_stride * 2) +
      Workspace::piece(activated_count * 2) + Workspace::piece(slots * hidden * 4));
  MoeTilesOf<int32_t> sorted;
  sorted.num_tiles = call.workspace.take<int32_t>(1);
  sorted.expert_of_tile = call.workspace.take<int32_t>(max_tiles);
  sorted.slots_of_tile = call.workspace.take<int32_t>(max_tiles * tile_rows);
  MoeTiles tiles{sorted.num_tiles, sorted.expert_of_tile, sorted.slots_of_tile};
  auto* x = call.workspace.take<uint16_t>(tokens * x_stride);
  auto* activated = call.workspace.take<uint16_t>(activated_count);
  auto* part = call.workspace.take<float>(slots * hidden);

  if (as_they_are) {
    tiles = {nullptr, call.ids(), nullptr};
  } else {
    launch_moe_prepare({.x = call.x(),
                        .ids = call.ids(),
                        .x_bf16 = x,
                        .tiles = sorted,
                        .num_tokens = tokens,
                        .hidden_size = hidden,
                        .x_stride = x_stride,
                        .top_k = static_cast<int32_t>(call.top_k),
                        .first_expert = call.first_expert(),
                        .num_experts = static_cast<int32_t>(experts.num_experts),
                        .tile_rows = tile_rows},
                       call.stream);
  }
  const auto params = [&](const ExpertsProduct& product, const void* from, bool from_is_float,
                          int64_t from_stride, int64_t slots_per_x, void* out, int64_t out_stride) {
    return MoeProductParams{.weights = typed<unsigned char>(product.memory),
                            .dtype = product.dtype,
                            .num_chunks = static_cast<int32_t>(
                                stream_shape(product.dtype, product.in_features).num_chunks),
                            .k_warps = k_warps_of(product.in_features),
                            .num_stripes = static_cast<int32_t>(product.num_stripes),
                            .tiles = tiles,
                            .tile_rows = tile_rows,
                            .max_tiles = static_cast<int32_t>(max_tiles),
                            .first_expert = as_they_are ? call.first_expert() : 0,
                            .num_experts = static_cast<int32_t>(experts.num_experts),
                            .x = from,
                            .x_is_float = from_is_float,
                            .x_stride = from_stride,
                            .slots_per_x = static_cast<int32_t>(slots_per_x),
                            .out = out,
                            .out_stride = out_stride,
                            .num_multiprocessors = call.num_multiprocessors};
  };
  const void* from = as_they_are ? static_cast<const void*>(call.x()) : x;
  launch_moe_gate_up(params(experts.gate_up, from, as_they_are, as_they_are ? hidden : x_stride,
                            call.top_k, activated, experts.activated_stride),
                     call.stream);
  launch_moe_down(params(experts.down, activated, false, experts.activated_stride, 1, part, hidden),
                  call.stream);
  add_up(call, part);
}

void run_plain(const Call& call) {
  const CudaExperts& experts = call.experts;
  const int64_t slots = call.num_slots(), hidden = experts.hidden_size;
  const int64_t intermediate = experts.intermediate_size;
  call.workspace.reserve(Workspace::piece(slots * 2 * intermediate * 4) +
                         Workspace::piece(slots * intermediate * 4) +
                         Workspace::piece(slots * hidden * 4));
  auto* gate_up = call.workspace.take<float>(slots * 2 * intermediate);
  auto* activated = call.workspace.take<float>(slots * intermediate);
  auto* part = call.workspace.take<float>(slots * hidden);
  const auto product = [&](const ExpertsProduct& weight, const float* x, int64_t rows_per_x,
                           float* out, int64_t out_features) {
    launch_plain_linear({.weight = typed<float>(weight.memory),
                         .x = x,
                         .matrix_of_row = call.ids(),
                         .out = out,
                         .num_rows = slots,
                         .num_matrices = experts.num_experts,
                         .out_features = out_features,
                         .in_features = weight.in_features,
                         .x_row_stride = weight.in_features,
                         .x_head_stride = 0,
                         .out_row_stride = out_features,
                         .out_head_stride = 0,
                         .rows_per_x = rows_per_x,
                         .alpha = 1,
                         .first_matrix = call.first_expert()},
                        call.stream);
  };
  product(experts.gate_up, call.x(), call.top_k, gate_up, 2 * intermediate);
  for (int64_t begin = 0; begin < slots; begin += 65535)
    launch_silu_mul({.gate_up = gate_up + begin * 2 * intermediate,
                     .out = activated + begin * intermediate,
                     .num_rows = std::min<int64_t>(slots - begin, 65535),
                     .n = intermediate},
                    call.stream);
  product(experts.down, activated, 1, part, hidden);
  add_up(call, part);
}

}  // namespace

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

// Tokens of a launch: what their slots need stays below a quarter of a GiB.
void CudaBackend::moe_experts(const MoeExpertsArgs& args) {
  check_moe_experts(args);
  const auto& experts = static_cast<const CudaExperts&>(*args.experts);
  const int64_t tokens = args.x.dim(0), top_k = args.ids.dim(1);
  if (tokens * top_k == 0) return;
  const int64_t of_slot = 4 * (experts.hidden_size + 3 * experts.intermediate_size);
  const int64_t step = std::max<int64_t>(1, (int64_t{1} << 28) / (top_k * of_slot));
  for (int64_t begin = 0; begin < tokens; begin += step) {
    const Call call{args,
                    experts,
                    begin,
                    std::min(step, tokens - begin),
                    top_k,
                    workspace_,
                    num_multiprocessors_,
                    stream_};
    experts.gate_up.is_packed() ? run_packed(call) : run_plain(call);
  }
}

}  // namespace kdt::cuda
