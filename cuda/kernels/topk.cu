#include "kernels/topk.h"

#include <algorithm>

#include "kernels/logits.cuh"
#include "launch.cuh"

namespace kdt::cuda {
namespace {

constexpr int kScanThreads = 128;
constexpr int kScanWarps = kScanThreads / 32;
constexpr int kQuads = kLogitsChunk / (4 * kScanThreads);

// A block a chunk of a row.
__global__ void __launch_bounds__(kScanThreads) scan_kernel(const TopkParams p) {
  auto* tops = reinterpret_cast<float*>(shared_memory());
  auto* sums = tops + kScanWarps;
  const int64_t row = blockIdx.x / p.num_chunks, chunk = blockIdx.x % p.num_chunks;
  const float* logits = p.logits + row * p.vocab;
  // Those chosen in earlier rounds are left out.
  const uint64_t bound = p.first == 0 ? ~uint64_t{0} : p.bounds[row];
  const int64_t begin = chunk * kLogitsChunk + threadIdx.x * 4;

  float x[kQuads][4];
#pragma unroll
  for (int j = 0; j < kQuads; ++j)
    load_quad(logits, begin + j * 4 * kScanThreads, p.vocab, p.aligned, x[j]);

  float top = minus_infinity();
#pragma unroll
  for (int j = 0; j < kQuads; ++j) {
    const int64_t quad = begin + j * 4 * kScanThreads;
    uint32_t greatest = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (x[j][i] != x[j][i]) x[j][i] = minus_infinity();
      top = fmaxf(top, x[j][i]);
      const uint32_t order = ordered(x[j][i]);
      if (quad + i < p.vocab && key_of(order, quad + i) < bound) greatest = max(greatest, order);
    }
    // A group lies in 8 lanes.
#pragma unroll
    for (int offset = 1; offset < kTopkGroup / 4; offset *= 2)
      greatest = max(greatest, __shfl_xor_sync(0xFFFFFFFFu, greatest, offset));
    if (quad % kTopkGroup == 0 && quad < p.vocab)
      p.maxima[row * p.num_groups + quad / kTopkGroup] = greatest;
  }

  top = warp_max(top);
  if (threadIdx.x % 32 == 0) tops[threadIdx.x / 32] = top;
  __syncthreads();
  for (int w = 0; w < kScanWarps; ++w) top = fmaxf(top, tops[w]);
  float sum = 0;
  if (top != minus_infinity()) {
#pragma unroll
    for (int j = 0; j < kQuads; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sum += expf((x[j][i] - top) * p.scale);
    }
  }
  sum = warp_sum(sum);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x != 0) return;
  sum = 0;
  for (int w = 0; w < kScanWarps; ++w) sum += sums[w];
  p.tops[blockIdx.x] = top;
  p.sums[blockIdx.x] = sum;
}

constexpr int kThreads = 1024;
constexpr int kMaxCount = 256;                     // logits chosen in a round
constexpr int kMaxGroups = 320;                    // groups read again
constexpr int kMaxKeys = kMaxGroups * kTopkGroup;  // logits read again
constexpr int kMaxRanked = 384;                    // keys compared with each other
constexpr int kBins = 256;

struct Shared {
  uint64_t keys[kMaxKeys];
  uint64_t ranked[kMaxRanked];
  uint32_t groups[kMaxGroups];
  uint32_t bins[kBins];
  uint32_t digit, above, inside;  // the bin that was found
  uint32_t num_groups, num_keys, num_ranked;
  float log_sum_exp;
};
static_assert(sizeof(Shared) <= kMaxSharedBytes);

// Finds the bin in which the k-th greatest lies; by one warp.
__device__ void find_bin(int k, Shared& shared) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  constexpr int kOwn = kBins / 32;
  const int highest = kBins - 1 - lane * kOwn;
  uint32_t own = 0;
  for (int i = 0; i < kOwn; ++i) own += shared.bins[highest - i];
  uint32_t above = own;
  for (int offset = 1; offset < 32; offset *= 2) {
    const uint32_t before = __shfl_up_sync(0xFFFFFFFFu, above, offset);
    if (lane >= offset) above += before;
  }
  above -= own;
  const auto wanted = static_cast<uint32_t>(k);
  if (above >= wanted || above + own < wanted) return;
  int bin = highest;
  while (above + shared.bins[bin] < wanted) above += shared.bins[bin--];
  shared.digit = static_cast<uint32_t>(bin);
  shared.above = above;
  shared.inside = shared.bins[bin];
}

// A threshold that at least k and at most `most` of n distinct keys reach; k <= most, k <= n. Digit
// by digit from the highest, by the whole block.
template <typename KeyAt>
__device__ uint64_t threshold(int64_t n, int k, uint32_t most, Shared& shared,
                              const KeyAt& key_at) {
  uint64_t prefix = 0;
  uint32_t taken = 0;  // keys above the prefix
  for (int shift = 56;; shift -= 8) {
    if (threadIdx.x < kBins) shared.bins[threadIdx.x] = 0;
    __syncthreads();
    for (int64_t i = threadIdx.x; i < n; i += kThreads) {
      const uint64_t key = key_at(i);
      if ((key ^ prefix) >> shift >> 8 == 0) atomicAdd(&shared.bins[(key >> shift) & 255], 1u);
    }
    __syncthreads();
    if (threadIdx.x < 32) find_bin(k, shared);
    __syncthreads();
    prefix |= static_cast<uint64_t>(shared.digit) << shift;
    taken += shared.above;
    k -= static_cast<int>(shared.above);
    if (shift == 0 || taken + shared.inside <= most) return prefix;
  }
}

// log(sum(exp(scale * x))) of a row from its chunks, by one warp; not finite when the row's
// greatest is not.
__device__ float log_sum_exp(const float* tops, const float* sums, int64_t num_chunks,
                             float scale) {
  float top = minus_infinity(), sum = 0;
  for (int64_t c = threadIdx.x % 32; c < num_chunks; c += 32) top = fmaxf(top, tops[c]);
  top = warp_max(top);
  for (int64_t c = threadIdx.x % 32; c < num_chunks; c += 32) {
    if (tops[c] != minus_infinity()) sum += sums[c] * expf((tops[c] - top) * scale);
  }
  return __fadd_rn(logf(warp_sum(sum)), __fmul_rn(top, scale));
}

// A block a row.
__global__ void __launch_bounds__(kThreads) choose_kernel(const TopkParams p) {
  Shared& shared = *reinterpret_cast<Shared*>(shared_memory());
  const int64_t row = blockIdx.x;
  const float* logits = p.logits + row * p.vocab;
  const int64_t num_groups = p.num_groups, num_chunks = p.num_chunks;
  const uint32_t* maxima = p.maxima + row * num_groups;
  const uint64_t bound = p.first == 0 ? ~uint64_t{0} : p.bounds[row];

  if (threadIdx.x < 32) {
    const float sum =
        log_sum_exp(p.tops + row * num_chunks, p.sums + row * num_chunks, num_chunks, p.scale);
    if (threadIdx.x == 0) {
      shared.log_sum_exp = sum;
      // It is no number where the greatest logit is infinite.
      if (p.log_sums != nullptr) p.log_sums[row] = isnan(sum) ? -minus_infinity() : sum;
      shared.num_groups = shared.num_keys = shared.num_ranked = 0;
    }
  }
  __syncthreads();

  const auto group_key = [&](int64_t i) { return key_of(maxima[i], i); };
  const uint64_t least_group =
      num_groups <= kMaxGroups ? 0 : threshold(num_groups, p.count, kMaxGroups, shared, group_key);
  for (int64_t i = threadIdx.x; i < num_groups; i += kThreads) {
    if (group_key(i) >= least_group)
      shared.groups[atomicAdd(&shared.num_groups, 1u)] = static_cast<uint32_t>(i);
  }
  __syncthreads();

  // Of these groups only what is not below the last of them can be chosen.
  const auto least = static_cast<uint32_t>(least_group >> 32);
  const int num_quads = static_cast<int>(shared.num_groups * (kTopkGroup / 4));
  for (int q = static_cast<int>(threadIdx.x); q < num_quads; q += kThreads) {
    const int64_t quad =
        shared.groups[q / (kTopkGroup / 4)] * kTopkGroup + q % (kTopkGroup / 4) * 4;
    float x[4];
    load_quad(logits, quad, p.vocab, p.aligned, x);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t order = ordered(x[i] == x[i] ? x[i] : minus_infinity());
      const uint64_t key = key_of(order, quad + i);
      if (quad + i < p.vocab && order >= least && key < bound)
        shared.keys[atomicAdd(&shared.num_keys, 1u)] = key;
    }
  }
  __syncthreads();

  int num_ranked = static_cast<int>(shared.num_keys);
  const uint64_t* ranked = shared.keys;
  if (num_ranked > kMaxRanked) {
    const uint64_t least_key = threshold(num_ranked, p.count, kMaxRanked, shared,
                                         [&](int64_t i) { return shared.keys[i]; });
    for (int i = static_cast<int>(threadIdx.x); i < num_ranked; i += kThreads) {
      if (shared.keys[i] >= least_key)
        shared.ranked[atomicAdd(&shared.num_ranked, 1u)] = shared.keys[i];
    }
    __syncthreads();
    num_ranked = static_cast<int>(shared.num_ranked);
    ranked = shared.ranked;
  }
  const float lse = shared.log_sum_exp;
  const bool is_part = p.log_sums != nullptr;
  const bool has_logprobs = is_part || isfinite(lse);
  const float subtracted = is_part ? 0.0f : lse;
  for (int i = static_cast<int>(threadIdx.x); i < num_ranked; i += kThreads) {
    const uint64_t key = ranked[i];
    int rank = 0;
    for (int j = 0; j < num_ranked; ++j) rank += ranked[j] > key;
    if (rank >= p.count) continue;
    const float logit = number_of(static_cast<uint32_t>(key >> 32));
    const int64_t to = row * p.k + p.first + rank;
    p.ids[to] = p.first_id + position_of(key);
    p.logprobs[to] = has_logprobs && logit != minus_infinity()
                         ? __fsub_rn(__fmul_rn(logit, p.scale), subtracted)
                         : minus_infinity();
    if (rank == p.count - 1) p.bounds[row] = key;
  }
}

}  // namespace

void launch_topk(TopkParams params, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(params.num_rows * params.num_chunks);
  for (params.first = 0; params.first < params.k; params.first += kMaxCount) {
    params.count = static_cast<int>(std::min<int64_t>(kMaxCount, params.k - params.first));
    launch<scan_kernel>(dim3(blocks), kScanThreads, 2 * kScanWarps * sizeof(float), stream, params);
    launch<choose_kernel>(dim3(static_cast<unsigned>(params.num_rows)), kThreads, sizeof(Shared),
                          stream, params);
  }
}

}  // namespace kdt::cuda
