#include "kernels/mla_rows.cuh"
#include "launch.cuh"

namespace kdt::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kKeys = kThreads;  // of a tile

struct Scratch {
  int64_t path[kMlaPathKeys];
  int64_t rows[kKeys];
  float scores[kKeys];  // then weights
  MlaPathScratch lookup;
};

// A block a (row, head); keys in position order.
__global__ void mla_plain_kernel(const MlaAttentionParams p) {
  auto& shared = *reinterpret_cast<Scratch*>(shared_memory());
  const int width = p.rank + p.rope;
  float* query = reinterpret_cast<float*>(shared_memory() + sizeof(Scratch));  // [width]
  float* out = query + width;                                                  // [rank]
  const auto row = static_cast<int32_t>(blockIdx.x);
  const int lane = threadIdx.x % 32;
  const MlaSequence s = mla_sequence(p.sequences, sequence_of(p.sequences, row));
  if (row < s.begin || row >= s.end) {
    if (threadIdx.x == 0) report(p.sequences.fault, FaultKind::kSequence, row, s.index);
    return;
  }
  const int32_t position = mla_position(p, s, row);
  const int32_t prefix_keys = mla_prefix_keys(position);
  mla_path<kThreads>(p, s, row, position, shared.lookup, shared.path);
  const int64_t pair = static_cast<int64_t>(row) * p.num_heads + blockIdx.y;
  constexpr float kLog2E = 1.44269504f;
  for (int d = threadIdx.x; d < width; d += kThreads) query[d] = p.query[pair * width + d] * kLog2E;
  for (int d = threadIdx.x; d < p.rank; d += kThreads) out[d] = 0;

  float top = -INFINITY, sum = 0;  // the same in every thread
  const int own = threadIdx.x;     // the key of a tile
  for (int32_t first = 0; first <= position; first += kKeys) {
    const int count = min(kKeys, position + 1 - first);
    __syncthreads();
    int64_t at = -1;
    if (own < count) {
      at = first + own < prefix_keys ? cache_row(p.sequences, s.index, first + own)
                                     : shared.path[first + own - prefix_keys];
    }
    float score = own < count ? 0 : -INFINITY;
    if (at >= 0) {
      const uint16_t* key = p.layer + at * p.row_stride;
      for (int d = 0; d < width; ++d) score = fmaf(query[d], bf16_value(key[d]), score);
    }
    shared.rows[own] = at;
    shared.scores[own] = score;
    __syncthreads();
    float new_top = top;
    for (int i = lane; i < kKeys; i += 32) new_top = fmaxf(new_top, shared.scores[i]);
    new_top = warp_max(new_top);
    const float shift = new_top == -INFINITY ? 0.0f : new_top;
    const float scale = exp2_approx(top - shift);
    top = new_top;
    __syncthreads();
    shared.scores[own] = exp2_approx(score - shift);
    __syncthreads();
    float weights = 0;
    for (int i = lane; i < kKeys; i += 32) weights += shared.scores[i];
    sum = fmaf(sum, scale, warp_sum(weights));
    for (int d = threadIdx.x; d < p.rank; d += kThreads) {
      float value = out[d] * scale;
      for (int i = 0; i < count; ++i) {
        const int64_t row = shared.rows[i];
        if (row >= 0)
          value = fmaf(shared.scores[i], bf16_value(p.layer[row * p.row_stride + d]), value);
      }
      out[d] = value;
    }
  }
  for (int d = threadIdx.x; d < p.rank; d += kThreads) p.out[pair * p.rank + d] = out[d] / sum;
}

}  // namespace

void launch_mla_attention_plain(const MlaAttentionParams& params, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(params.sequences.num_rows),
                  static_cast<unsigned>(params.num_heads));
  const int64_t floats = 2 * static_cast<int64_t>(params.rank) + params.rope;
  launch<mla_plain_kernel>(grid, kThreads,
                           static_cast<int64_t>(sizeof(Scratch) + floats * sizeof(float)), stream,
                           params);
}

}  // namespace kdt::cuda
