#include "kernels/mla_rows.cuh"
#include "launch.cuh"

namespace kdt::cuda {
namespace {

// Threads share a row's partial results in four parts, so that its loads are in flight together.
constexpr int kParts = 4;
constexpr int kAtOnce = 8;

// A block a (row, head), rank threads: four columns each of every fourth partial result.
__global__ void mla_merge_kernel(const MlaAttentionParams p) {
  auto* parts = reinterpret_cast<float4*>(shared_memory());  // [kParts - 1, rank / 4]
  follow_previous_kernel();
  const int32_t row = p.first_row + static_cast<int32_t>(blockIdx.x / p.num_heads);
  const MlaSequence s = mla_sequence(p.sequences, sequence_of(p.sequences, row));
  if (row < s.begin || row >= s.end) {
    if (threadIdx.x == 0) report(p.sequences.fault, FaultKind::kSequence, row, s.index);
    return;
  }
  const int32_t segments =
      min(mla_segment_count(mla_prefix_keys(mla_position(p, s, row))), p.num_segments);
  // The row's partial results, the path's last.
  const int32_t count = segments + 1;
  const auto at = [&](int32_t i) { return i < segments ? i : p.num_segments; };
  const int64_t first = static_cast<int64_t>(blockIdx.x) * (p.num_segments + 1);
  const float2* sums = p.partial_sums + first;

  // Every warp for itself, lanes over the partial results.
  const int lane = threadIdx.x % 32;
  float top = -INFINITY;
  for (int32_t i = lane; i < count; i += 32) top = fmaxf(top, sums[at(i)].x);
  top = warp_max(top);
  const float shift = top == -INFINITY ? 0.0f : top;
  float sum = 0;
  for (int32_t i = lane; i < count; i += 32) {
    const float2 own = sums[at(i)];
    sum = fmaf(own.y, exp2_approx(own.x - shift), sum);
  }
  sum = warp_sum(sum);

  const int columns = p.rank / 4;
  const int column = threadIdx.x % columns, part = threadIdx.x / columns;
  const auto* from = reinterpret_cast<const float4*>(p.partial_out + first * p.rank) + column;
  float4 total = make_float4(0, 0, 0, 0);
  for (int32_t base = part; base < count; base += kParts * kAtOnce) {
    float4 value[kAtOnce];
    float weight[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int32_t index = base + i * kParts;
      weight[i] = 0;
      value[i] = make_float4(0, 0, 0, 0);
      if (index < count) {
        weight[i] = exp2_approx(sums[at(index)].x - shift);
        value[i] = from[static_cast<int64_t>(at(index)) * columns];
      }
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      total.x = fmaf(weight[i], value[i].x, total.x);
      total.y = fmaf(weight[i], value[i].y, total.y);
      total.z = fmaf(weight[i], value[i].z, total.z);
      total.w = fmaf(weight[i], value[i].w, total.w);
    }
  }
  if (part > 0) parts[(part - 1) * columns + column] = total;
  __syncthreads();
  if (part > 0) return;
#pragma unroll
  for (int i = 0; i < kParts - 1; ++i) {
    const float4 other = parts[i * columns + column];
    total.x += other.x;
    total.y += other.y;
    total.z += other.z;
    total.w += other.w;
  }
  const int64_t pair = static_cast<int64_t>(p.first_row) * p.num_heads + blockIdx.x;
  reinterpret_cast<float4*>(p.out + pair * p.rank)[column] =
      make_float4(total.x / sum, total.y / sum, total.z / sum, total.w / sum);
}

}  // namespace

void launch_mla_merge(const MlaAttentionParams& params, cudaStream_t stream) {
  const int64_t pairs = static_cast<int64_t>(params.end_row - params.first_row) * params.num_heads;
  launch<mla_merge_kernel>(dim3(static_cast<unsigned>(pairs)), params.rank,
                           (kParts - 1) * params.rank * sizeof(float), stream, params,
                           /*early=*/true);
}

}  // namespace kdt::cuda
