// The CPU back end. Its weights stay packed (bf16, int4) and are widened in registers; activations
// are f32.
#pragma once

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "backend/backend.h"
#include "cpu/kernels.h"
#include "parallel/thread_pool.h"

namespace kdt::cpu {

// Zeroed memory of its own pages, which the system provides as they are touched.
std::shared_ptr<void> map_zeroed(int64_t bytes);

// Hands out zeroed pieces, aligned to cache lines, of large mappings: thousands of small weights
// then share large pages and few mappings. A mapping is released with its last piece.
class Arena {
 public:
  std::shared_ptr<void> allocate(int64_t bytes);

 private:
  std::shared_ptr<void> chunk_;
  int64_t chunk_bytes_ = 0;
  int64_t used_bytes_ = 0;
};

template <typename T>
T* typed(const std::shared_ptr<void>& memory) {
  return static_cast<T*>(memory.get());
}

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// One matrix of a stack, packed into panels of 32 outputs (see kernels.h).
struct PackedMatrix {
  DType dtype = DType::kBFloat16;
  int64_t out_features = 0;
  int64_t in_features = 0;
  uint32_t* panels = nullptr;
  uint32_t* scales = nullptr;  // int4 only
};

// Matrices one behind another in one piece of memory, each one's scales behind its panels. Every
// byte of a matrix is written when it is packed.
struct PackedMatrices {
  std::vector<PackedMatrix> matrices;
  std::shared_ptr<void> memory;
  int64_t bytes = 0;

  std::vector<Tensor> tensors() const { return {Tensor(memory.get(), DType::kUInt8, {bytes})}; }
};

PackedMatrices make_packed(const std::vector<MatrixShape>& shapes, Arena& arena);

struct CpuLinear final : LinearWeight {
  std::vector<MatrixShape> shapes;
  PackedMatrices packed;

  std::vector<Tensor> memory() const override { return packed.tensors(); }
};

struct CpuExperts final : ExpertsWeight {
  struct Expert {
    PackedMatrix gate, up, down;
  };
  ExpertsShape shape;
  PackedMatrices packed;
  std::vector<Expert> experts;  // in `packed`

  std::vector<Tensor> memory() const override { return packed.tensors(); }
};

// Kept as the two products of attention read them: keys transposed in panels of 32 positions,
// values as rows. MLA: one group, whose value is the start of its key. GQA: a group a key-value
// head.
struct CpuKvCache final : KvCache {
  int64_t num_groups = 0, key_dim = 0, value_dim = 0;
  int64_t value_stride = 0;  // value_dim rounded up to whole panels
  int64_t group_floats = 0, block_floats = 0, layer_floats = 0;
  std::shared_ptr<void> memory;

  float* keys(int64_t layer, int64_t block, int64_t group) const {
    return typed<float>(memory) + layer * layer_floats + block * block_floats +
           group * group_floats;
  }
  float* values(int64_t layer, int64_t block, int64_t group) const {
    return keys(layer, block, group) + block_size * key_dim;
  }
  // Element d of position p's key within a block: keys()[key_index(p, d)].
  int64_t key_index(int64_t position, int64_t d) const {
    return (position / kPanel * key_dim + d) * kPanel + position % kPanel;
  }
};

class CpuBackend final : public Backend {
 public:
  CpuBackend(int num_threads, const Kernels& kernels);

  BackendInfo info() const override { return {"cpu", kernels_.isa, num_threads()}; }
  int num_threads() const { return pool_.num_threads(); }

  Buffer allocate(DType dtype, std::initializer_list<int64_t> shape) override;
  void upload(const Tensor& to, const void* from) override;
  void download(void* to, const Tensor& from) override;
  void synchronize() override {}
  std::unique_ptr<LinearWeight> make_linear(const std::vector<MatrixShape>& stacked) override;
  void fill_linear(LinearWeight& weight, const std::vector<HostMatrix>& stacked) override;
  std::unique_ptr<ExpertsWeight> make_experts(const ExpertsShape& shape) override;
  void fill_expert(ExpertsWeight& weight, int64_t index, const HostExpert& expert) override;
  std::string weight_layout() const override { return "cpu-panels-1"; }
  std::unique_ptr<Communicator> make_communicator(RankGroup& group) override;
  std::unique_ptr<KvCache> make_mla_cache(int64_t num_layers, int64_t num_blocks,
                                          int64_t block_size, int64_t kv_lora_rank,
                                          int64_t rope_dim) override;
  std::unique_ptr<KvCache> make_gqa_cache(int64_t num_layers, int64_t num_blocks,
                                          int64_t block_size, int64_t kv_heads,
                                          int64_t head_dim) override;

  void embed(const EmbedArgs& args) override;
  void rms_norm(const RmsNormArgs& args) override;
  void add_rms_norm(const Tensor& residual, const Tensor& delta, const Tensor& weight, float eps,
                    const Tensor& out) override;
  void silu_mul(const Tensor& gate_up, const Tensor& out) override;
  void fill_zero(const Tensor& x) override;
  void gather_rows(const Tensor& from, const Tensor& rows, const Tensor& to) override;
  void copy_columns(const Tensor& from, int64_t from_column, const Tensor& to, int64_t to_column,
                    int64_t width) override;
  void linear(const Tensor& x, const LinearWeight& weight, const Tensor& out) override;
  void head_linear(const Tensor& x, const LinearWeight& weight, const Tensor& out) override;
  void mla_query(const MlaQueryArgs& args) override;
  void mla_store(const MlaStoreArgs& args) override;
  void mla_attention(const MlaAttentionArgs& args) override;
  void gqa_store(const GqaStoreArgs& args) override;
  void gqa_attention(const GqaAttentionArgs& args) override;
  void kv_compact(KvCache& cache, const Tensor& block_table, const Tensor& from,
                  const Tensor& to) override;
  void moe_route(const MoeRouteArgs& args) override;
  void moe_experts(const MoeExpertsArgs& args) override;
  void topk_logprobs(const TopkLogprobsArgs& args) override;
  void merge_topk(const MergeTopkArgs& args) override;
  void argmax(const ArgmaxArgs& args) override;
  void tree_build(const TreeBuildArgs& args) override;
  void tree_accept(const TreeAcceptArgs& args) override;

 private:
  // Memory that grows to what an op needs and is kept: an op of a size seen before allocates
  // nothing.
  struct Scratch {
    std::vector<float> floats;
    std::vector<float> more_floats;
    std::vector<int32_t> ints;
    std::vector<int32_t> more_ints;
  };

  void pack(const HostMatrix& from, const PackedMatrix& to);
  // `count` panels of one matrix's product, from `panel` on.
  void multiply(const float* x, int64_t ldx, int64_t rows, const PackedMatrix& matrix,
                int64_t panel, int64_t count, float* out, int64_t ldo) const;
  // Tasks of at least this many multiply-adds pay for being handed to another thread.
  bool worth_sharing(int64_t multiply_adds) const {
    return num_threads() > 1 && multiply_adds >= 49152;
  }
  // Splits `rows` independent rows over the threads.
  template <typename Body>
  void for_rows(int64_t rows, int64_t work_per_row, const Body& body);
  // Calls body(task, thread) for each task: on all threads when `multiply_adds` in all pay for it.
  template <typename Body>
  void run(int64_t multiply_adds, int64_t num_tasks, const Body& body) {
    if (worth_sharing(multiply_adds)) {
      pool_.run(num_tasks, body);
    } else {
      for (int64_t task = 0; task < num_tasks; ++task) body(task, 0);
    }
  }
  void product(const Tensor& x, const CpuLinear& weight, const Tensor& out, bool per_head);

  const Kernels& kernels_;
  Arena arena_;
  ThreadPool pool_;
  std::vector<Scratch> scratch_;  // one a thread
  Scratch shared_;                // of the op that runs
};

template <typename Body>
void CpuBackend::for_rows(int64_t rows, int64_t work_per_row, const Body& body) {
  if (!worth_sharing(rows * work_per_row)) {
    for (int64_t row = 0; row < rows; ++row) body(row);
    return;
  }
  const int64_t tasks = std::min<int64_t>(rows, num_threads() * 2);
  pool_.run(tasks, [&](int64_t task, int) {
    for (int64_t row = rows * task / tasks; row < rows * (task + 1) / tasks; ++row) body(row);
  });
}

}  // namespace kdt::cpu
