// Times the ops at the sizes of Kimi K2.6 on one of eight ranks: 8 of 64 heads, 256 of 2048
// intermediate columns, 20480 of 163840 logits. Attention also with all heads, choice with all
// logits.
//
// Calls are recorded into a graph and replayed, so what the host does between them is not counted.
// Inputs rotate, and a write of 256 MB before each replay empties the L2 cache.
#include <algorithm>
#include <functional>
#include <random>

#include "backend/measure.h"
#include "cuda_backend.h"
#include "kernels/ceilings.h"

namespace kdt::cuda {
namespace {

constexpr int kReplays = 31;
constexpr int64_t kFlushBytes = 256 << 20;

class Bench {
 public:
  Bench(int device, std::string only)
      : backend_(device), only_(std::move(only)), flush_(device_memory(kFlushBytes)) {
    KDT_CUDA_CHECK(cudaEventCreate(&begin_));
    KDT_CUDA_CHECK(cudaEventCreate(&end_));
  }
  ~Bench() {
    static_cast<void>(cudaEventDestroy(begin_));
    static_cast<void>(cudaEventDestroy(end_));
  }

  std::vector<OpTime> run();

 private:
  // Microseconds of one of `calls` calls of body(i): the median of the replays.
  double time(int calls, const std::function<void(int)>& body) {
    const cudaStream_t stream = backend_.stream();
    for (int i = 0; i < calls; ++i) body(i);  // reserves the workspace, loads the kernels
    backend_.synchronize();
    const std::unique_ptr<Recording> recording = backend_.record([&] {
      for (int i = 0; i < calls; ++i) body(i);
    });
    std::vector<double> times;
    for (int i = 0; i < kReplays + 2; ++i) {
      KDT_CUDA_CHECK(cudaMemsetAsync(flush_.get(), i, kFlushBytes, stream));
      KDT_CUDA_CHECK(cudaEventRecord(begin_, stream));
      recording->run();
      KDT_CUDA_CHECK(cudaEventRecord(end_, stream));
      backend_.synchronize();
      float ms = 0;
      KDT_CUDA_CHECK(cudaEventElapsedTime(&ms, begin_, end_));
      if (i >= 2) times.push_back(ms * 1e3 / calls);
    }
    std::nth_element(times.begin(), times.begin() + times.size() / 2, times.end());
    return times[times.size() / 2];
  }

  void add(const std::string& op, const std::string& shape, double us, double bytes,
           double operations) {
    results_.push_back({op, shape, us, bytes, operations});
  }

  Buffer floats(std::initializer_list<int64_t> shape, float scale) {
    Buffer buffer = backend_.allocate(DType::kFloat32, shape);
    std::vector<float> values(buffer.tensor.numel());
    for (float& v : values) v = uniform_(random_) * scale;
    backend_.upload(buffer.tensor, values.data());
    backend_.synchronize();
    return buffer;
  }
  Buffer ints(std::initializer_list<int64_t> shape, const std::vector<int32_t>& values) {
    Buffer buffer = backend_.allocate(DType::kInt32, shape);
    backend_.upload(buffer.tensor, values.data());
    backend_.synchronize();
    return buffer;
  }
  std::vector<uint8_t> random_bf16(int64_t count, float scale) {
    std::vector<uint8_t> bytes(count * 2);
    for (int64_t i = 0; i < count; ++i) {
      const uint16_t bits = float_to_bf16(uniform_(random_) * scale);
      std::memcpy(bytes.data() + 2 * i, &bits, 2);
    }
    return bytes;
  }

  void ceilings();
  void experts();
  void linears();
  void attention();
  void choice();
  void rows();

  CudaBackend backend_;
  std::string only_;
  std::shared_ptr<void> flush_;
  cudaEvent_t begin_ = nullptr, end_ = nullptr;
  std::mt19937 random_{1};
  std::uniform_real_distribution<float> uniform_{-1.0f, 1.0f};
  std::vector<OpTime> results_;
};

void Bench::ceilings() {
  const int blocks = backend_.num_multiprocessors() * 4;
  const std::shared_ptr<void> out = device_memory(64);
  for (const int64_t mb : {64, 256, 4096}) {
    const int64_t bytes = mb << 20;
    const std::shared_ptr<void> memory = device_memory(bytes);
    KDT_CUDA_CHECK(cudaMemset(memory.get(), 1, bytes));
    const double us = time(1, [&](int) {
      launch_read({memory.get(), typed<uint32_t>(out), bytes / 16}, blocks, backend_.stream());
    });
    add("ceiling: read", join(mb, " MB"), us, static_cast<double>(bytes), 0);
  }
  constexpr int kSteps = 4096;
  const int matrix_blocks = backend_.num_multiprocessors() * 2;
  const double us = time(1, [&](int) {
    launch_matrix_rate({typed<float>(out), kSteps}, matrix_blocks, backend_.stream());
  });
  add("ceiling: mma.sync bf16", "registers", us, 0, kMatrixRateOperations * kSteps * matrix_blocks);
  const Buffer small = backend_.allocate(DType::kFloat32, {1, 32});
  const Buffer weight = backend_.allocate(DType::kFloat32, {32});
  const double launch_us = time(256, [&](int) {
    backend_.rms_norm({.x = small.tensor, .weight = weight.tensor, .out = small.tensor, .eps = 1});
  });
  add("ceiling: launch", "one tiny kernel", launch_us, 0, 0);
}

void Bench::experts() {
  constexpr int64_t kExperts = 384, kTopK = 8, kHidden = 7168, kInter = 256;
  // One expert's numbers stand for all: what is read is each expert's own copy.
  std::vector<uint8_t> nibbles(kHidden * kInter / 2);
  for (uint8_t& byte : nibbles) byte = static_cast<uint8_t>(random_());
  const std::vector<uint8_t> scales = random_bf16(kHidden * kInter / 32, 0.02f);
  const HostMatrix gate = {nibbles.data(), scales.data(), DType::kInt32, kInter, kHidden};
  const HostMatrix down = {nibbles.data(), scales.data(), DType::kInt32, kHidden, kInter};
  const std::unique_ptr<ExpertsWeight> weight =
      backend_.prepare_experts(std::vector<HostExpert>(kExperts, {gate, gate, down}));
  constexpr double kExpertBytes = 3.0 * kHidden * kInter * (0.5 + 2.0 / 32);
  for (const int64_t rows : {1, 2, 4, 8, 16, 32, 65}) {
    constexpr int kRoutings = 12;
    std::vector<Buffer> ids;
    double distinct = 0;
    for (int r = 0; r < kRoutings; ++r) {
      std::vector<int32_t> all(kExperts), chosen;
      std::vector<bool> used(kExperts);
      for (int64_t e = 0; e < kExperts; ++e) all[e] = static_cast<int32_t>(e);
      for (int64_t t = 0; t < rows; ++t) {
        std::shuffle(all.begin(), all.end(), random_);
        for (int64_t k = 0; k < kTopK; ++k) {
          chosen.push_back(all[k]);
          used[all[k]] = true;
        }
      }
      distinct += static_cast<double>(std::count(used.begin(), used.end(), true)) / kRoutings;
      ids.push_back(ints({rows, kTopK}, chosen));
    }
    const Buffer x = floats({rows, kHidden}, 1), weights = floats({rows, kTopK}, 1);
    const Buffer out = floats({rows, kHidden}, 1);
    const double us = time(kRoutings, [&](int i) {
      backend_.moe_experts({.x = x.tensor,
                            .ids = ids[i].tensor,
                            .weights = weights.tensor,
                            .experts = weight.get(),
                            .out = out.tensor});
    });
    add("moe_experts int4", join("T ", rows, ", ", static_cast<int>(distinct + 0.5), " experts"),
        us, distinct * kExpertBytes, 6.0 * rows * kTopK * kHidden * kInter);
  }
}

void Bench::linears() {
  struct Shape {
    const char* name;
    int64_t in, out;
  };
  for (const Shape& shape : {Shape{"qkv_a", 7168, 2112}, Shape{"q_b", 1536, 1536},
                             Shape{"o_proj", 1024, 7168}, Shape{"router", 7168, 384},
                             Shape{"shared gate_up", 7168, 512}, Shape{"lm_head", 7168, 20480}}) {
    const double bytes = 2.0 * shape.in * shape.out;
    const std::vector<uint8_t> data = random_bf16(shape.in * shape.out, 0.05f);
    const int copies = static_cast<int>(std::clamp(400e6 / bytes, 2.0, 24.0));
    std::vector<std::unique_ptr<LinearWeight>> weights;
    for (int i = 0; i < copies; ++i) {
      weights.push_back(
          backend_.prepare_linear({{data.data(), nullptr, DType::kBFloat16, shape.out, shape.in}}));
    }
    for (const int64_t rows : {1, 8, 16, 65}) {
      const Buffer x = floats({rows, shape.in}, 1), out = floats({rows, shape.out}, 1);
      const double us =
          time(copies, [&](int i) { backend_.linear(x.tensor, *weights[i], out.tensor); });
      add("linear bf16", join(shape.name, " ", shape.in, " to ", shape.out, ", T ", rows), us,
          bytes, 2.0 * rows * shape.in * shape.out);
    }
  }
}

void Bench::attention() {
  constexpr int64_t kRank = 512, kRope = 64, kBlock = 64;
  for (const int64_t heads : {8, 64}) {
    for (const int64_t length : {128, 2048, 16384, 65536, 131072}) {
      const int64_t layers = std::clamp<int64_t>((int64_t{400} << 20) / (length * 1152), 2, 16);
      const int64_t blocks = (length + 512) / kBlock;
      const std::unique_ptr<KvCache> cache =
          backend_.make_mla_cache(layers, blocks, kBlock, kRank, kRope);
      auto& memory = static_cast<CudaKvCache&>(*cache);
      // Small numbers of both signs in every row; their values do not change the time.
      std::vector<uint16_t> row(memory.row_stride * kBlock);
      for (uint16_t& bits : row) bits = float_to_bf16(uniform_(random_));
      for (int64_t block = 0; block < layers * blocks; ++block) {
        KDT_CUDA_CHECK(cudaMemcpy(memory.layer(0) + block * kBlock * memory.row_stride, row.data(),
                                  row.size() * 2, cudaMemcpyHostToDevice));
      }
      std::vector<int32_t> table(blocks);
      for (int64_t i = 0; i < blocks; ++i) table[i] = static_cast<int32_t>(i);
      std::shuffle(table.begin(), table.end(), random_);
      const Buffer block_table = ints({1, blocks}, table);
      const Buffer prefix = ints({1}, {static_cast<int32_t>(length)});
      for (const int64_t rows : {1, 17, 65}) {
        std::vector<int32_t> parents(rows), positions(rows);
        for (int64_t i = 0; i < rows; ++i) {
          parents[i] = static_cast<int32_t>(i == 0 ? -1 : (i - 1) / 3);
          positions[i] = static_cast<int32_t>(i == 0 ? length : positions[parents[i]] + 1);
        }
        const Buffer begins = ints({2}, {0, static_cast<int32_t>(rows)});
        const Buffer tree = ints({rows}, parents), at = ints({rows}, positions);
        const Buffer query = floats({rows, heads, kRank + kRope}, 0.05f);
        const Buffer out = floats({rows, heads, kRank}, 1);
        const SequenceRows sequence_rows = {begins.tensor, prefix.tensor, block_table.tensor,
                                            tree.tensor};
        const double us = time(static_cast<int>(layers), [&](int i) {
          backend_.mla_attention({.query = query.tensor,
                                  .cache = cache.get(),
                                  .layer = i,
                                  .rows = sequence_rows,
                                  .positions = at.tensor,
                                  .out = out.tensor});
        });
        add("mla_attention", join(heads, " heads, T ", rows, ", ", length, " keys"), us,
            2.0 * (kRank + kRope) * static_cast<double>(length),
            2.0 * rows * heads * (2 * kRank + kRope) * static_cast<double>(length));
      }
    }
  }
}

void Bench::choice() {
  constexpr int64_t kVocab = 163840, kDepth = 15, kCopies = 8;
  std::vector<Buffer> logits;
  for (int64_t i = 0; i < kCopies; ++i) logits.push_back(floats({kDepth, kVocab}, 10));
  const auto array = [&](DType dtype, int64_t n) { return backend_.allocate(dtype, {n}); };
  const Buffer tokens = array(DType::kInt32, 257), parents = array(DType::kInt32, 257),
               depths = array(DType::kInt32, 257), first = array(DType::kInt32, 257),
               next = array(DType::kInt32, 257), logw = array(DType::kFloat64, 257),
               count = array(DType::kInt32, 1), accepted = array(DType::kInt32, 257),
               length = array(DType::kInt32, 1), bonus = array(DType::kInt32, 1);
  for (const int64_t budget : {16, 64, 256}) {
    const Buffer logprobs = backend_.allocate(DType::kFloat32, {kDepth, budget});
    const Buffer ids = backend_.allocate(DType::kInt32, {kDepth, budget});
    const auto topk = [&](int i) {
      backend_.topk_logprobs(
          {.logits = logits[i].tensor, .logprobs = logprobs.tensor, .ids = ids.tensor});
    };
    const auto build = [&](int) {
      backend_.tree_build({.logprobs = logprobs.tensor,
                           .ids = ids.tensor,
                           .budget = budget,
                           .tokens = tokens.tensor,
                           .parents = parents.tensor,
                           .depths = depths.tensor,
                           .first_child = first.tensor,
                           .next_sibling = next.tensor,
                           .logw = logw.tensor,
                           .num_nodes = count.tensor});
    };
    const double bytes = 4.0 * kDepth * kVocab;
    const std::string shape = join(kDepth, " x ", kVocab, ", k ", budget);
    add("topk_logprobs", shape, time(kCopies, topk), bytes, 0);
    add("tree_build", join("budget ", budget), time(kCopies, build), 0, 0);
    add("topk_logprobs + tree_build", shape,
        time(kCopies,
             [&](int i) {
               topk(i);
               build(i);
             }),
        bytes, 0);
    // A walk along first children, as deep as the tree goes.
    const auto view = [&](const Buffer& b) { return b.tensor.rows(0, budget + 1); };
    const double us = time(kCopies, [&](int) {
      backend_.tree_accept({.tokens = view(tokens),
                            .first_child = view(first),
                            .next_sibling = view(next),
                            .target = view(tokens),
                            .accepted = view(accepted),
                            .accept_length = length.tensor,
                            .bonus_token = bonus.tensor});
    });
    add("tree_accept", join(budget + 1, " slots"), us, 0, 0);
  }
  logits.clear();
  const Buffer wide = floats({65, kVocab}, 10);
  const Buffer best = backend_.allocate(DType::kInt32, {65});
  add("argmax", join("65 x ", kVocab),
      time(1, [&](int) { backend_.argmax({.logits = wide.tensor, .ids = best.tensor}); }),
      4.0 * 65 * kVocab, 0);
}

// What stands between the large ops of a layer; a rank of eight's heads and widths.
void Bench::rows() {
  constexpr int64_t kHidden = 7168, kRank = 512, kRope = 64, kNope = 128, kHeads = 8,
                    kExperts = 384, kBlock = 64, kPositions = 4096, kCalls = 64;
  const Buffer weight = floats({kHidden}, 1), bias = floats({kExperts}, 1);
  const Buffer cos_sin = floats({kPositions, kRope}, 1);
  const std::vector<uint8_t> w_uk_values = random_bf16(kHeads * kRank * kNope, 0.05f);
  const HostMatrix one = {w_uk_values.data(), nullptr, DType::kBFloat16, kRank, kNope};
  const std::unique_ptr<LinearWeight> w_uk =
      backend_.prepare_linear(std::vector<HostMatrix>(kHeads, one));
  const std::unique_ptr<KvCache> cache =
      backend_.make_mla_cache(1, kPositions / kBlock, kBlock, kRank, kRope);
  std::vector<int32_t> table(kPositions / kBlock);
  for (size_t i = 0; i < table.size(); ++i) table[i] = static_cast<int32_t>(i);
  const Buffer block_table = ints({1, static_cast<int64_t>(table.size())}, table);
  const Buffer prefix = ints({1}, {1024});
  const RopeTable rope = {.cos_sin = cos_sin.tensor, .interleaved = true};
  for (const int64_t n : {1, 16, 65}) {
    const Buffer residual = floats({n, kHidden}, 1), delta = floats({n, kHidden}, 1),
                 out = floats({n, kHidden}, 1), logits = floats({n, kExperts}, 3),
                 kv = floats({n, 2112}, 1), q = floats({n, kHeads, kNope + kRope}, 1),
                 query = floats({n, kHeads, kRank + kRope}, 1), gate_up = floats({n, 512}, 1),
                 activated = floats({n, 256}, 1), weights = floats({n, 8}, 1);
    std::vector<int32_t> chain(n), at(n);
    for (int64_t i = 0; i < n; ++i) {
      chain[i] = static_cast<int32_t>(i - 1);
      at[i] = static_cast<int32_t>(1024 + i);
    }
    const Buffer ids = ints({n, 8}, std::vector<int32_t>(n * 8)), positions = ints({n}, at),
                 parents = ints({n}, chain), begins = ints({2}, {0, static_cast<int32_t>(n)});
    const auto timed = [&](const char* op, const auto& body) {
      add(op, join("T ", n), time(kCalls, [&](int) { body(); }), 0, 0);
    };
    timed("add_rms_norm", [&] {
      backend_.add_rms_norm(residual.tensor, delta.tensor, weight.tensor, 1e-5f, out.tensor);
    });
    timed("moe_route", [&] {
      backend_.moe_route({.logits = logits.tensor,
                          .bias = bias.tensor,
                          .routed_scaling_factor = 2.827f,
                          .ids = ids.tensor,
                          .weights = weights.tensor});
    });
    timed("mla_store", [&] {
      backend_.mla_store(
          {.kv = kv.tensor,
           .column = 1536,
           .norm_weight = weight.tensor.rows(0, kRank),
           .eps = 1e-6f,
           .rope = rope,
           .positions = positions.tensor,
           .cache = cache.get(),
           .rows = {begins.tensor, prefix.tensor, block_table.tensor, parents.tensor}});
    });
    timed("mla_query", [&] {
      backend_.mla_query({.q = q.tensor,
                          .w_uk = w_uk.get(),
                          .rope = rope,
                          .positions = positions.tensor,
                          .scale = 0.1f,
                          .out = query.tensor});
    });
    timed("silu_mul", [&] { backend_.silu_mul(gate_up.tensor, activated.tensor); });
  }
}

std::vector<OpTime> Bench::run() {
  const auto wanted = [&](const char* op) {
    return only_.empty() || std::string(op).find(only_) != std::string::npos;
  };
  ceilings();
  if (wanted("moe_experts")) experts();
  if (wanted("mla_attention")) attention();
  if (wanted("choice")) choice();
  if (wanted("rows")) rows();
  if (wanted("linear")) linears();
  ceilings();  // again: the spread of the run
  return std::move(results_);
}

}  // namespace

std::vector<OpTime> bench_ops(int device, const std::string& only) {
  return Bench(device, only).run();
}

}  // namespace kdt::cuda
