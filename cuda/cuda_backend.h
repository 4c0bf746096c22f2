// The CUDA back end: one device, one stream. Weights stay packed (int4, bf16) in the order the
// kernels read them; activations are f32 at the seam and bf16 inside the matrix products; caches
// are bf16.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>
#include <string>
#include <vector>

#include "backend/backend.h"
#include "ceil_div.h"
#include "cuda_check.h"

namespace kdt::cuda {

struct Fault;
struct RopeParams;
struct Sequences;

// Of the current device. Giving it back waits for the device; see StreamMemory.
std::shared_ptr<void> device_memory(int64_t bytes);
// What the device says when `bytes` cannot be had.
Error no_room(int64_t bytes, cudaError_t status);

template <typename T>
T* typed(const std::shared_ptr<void>& memory) {
  return static_cast<T*>(memory.get());
}

// bf16 rows by block and position, so a row is one piece of memory. MLA: one row of kv_lora_rank +
// rope_dim values. GQA: kv_heads * head_dim keys, then as many values.
struct CudaKvCache final : KvCache {
  int64_t width = 0;        // values of a row
  int64_t row_stride = 0;   // width rounded up to 16 bytes
  int64_t value_begin = 0;  // of a row's values: 0 for MLA, whose value is the start of its key
  std::shared_ptr<void> memory;  // bf16 [num_layers, num_blocks, block_size, row_stride]

  uint16_t* layer(int64_t index) const {
    return typed<uint16_t>(memory) + index * num_blocks * block_size * row_stride;
  }
};

// Arguments of the seam as kernels take them (cache.cpp).
Sequences sequences_of(const SequenceRows& rows, const KvCache& cache, int64_t num_rows,
                       Fault* fault);
RopeParams rope_params(const RopeTable& rope, const Tensor& positions);

// Matrices of one shape, stacked (linear.cpp).
struct CudaLinear;
class CudaCommunicator;
class StreamMemory;
class WeightUpload;

// Memory of the back end that grows to what its ops need and is kept. Ops run in order on one
// stream, so each may use all of it.
class Workspace {
 public:
  Workspace() = default;
  explicit Workspace(std::shared_ptr<StreamMemory> source) : source_(std::move(source)) {}
  // Starts an op: what was taken before is free again.
  void begin() { used_ = 0; }
  // `count` elements, aligned to 256 bytes, valid until the next begin(). All pieces of an op are
  // reserved first, because growing moves them.
  void reserve(int64_t bytes);
  template <typename T>
  T* take(int64_t count) {
    return static_cast<T*>(take_bytes(count * static_cast<int64_t>(sizeof(T))));
  }
  static int64_t piece(int64_t bytes) { return (bytes + 255) / 256 * 256; }
  const std::shared_ptr<void>& memory() const { return memory_; }

 private:
  void* take_bytes(int64_t bytes);

  std::shared_ptr<StreamMemory> source_;
  std::shared_ptr<void> memory_;
  int64_t bytes_ = 0, used_ = 0;
};

class CudaBackend final : public Backend {
 public:
  explicit CudaBackend(int device);
  ~CudaBackend() override;

  BackendInfo info() const override;
  int device() const { return device_; }
  int num_multiprocessors() const { return num_multiprocessors_; }
  cudaStream_t stream() const { return stream_; }
  // Memory for this back end's ops alone.
  std::shared_ptr<void> stream_memory(int64_t bytes);
  // Whose kernels may wait for other ranks on the stream; null: nobody's. It tells when it ends.
  void set_communicator(CudaCommunicator* communicator);

  Buffer allocate(DType dtype, std::initializer_list<int64_t> shape) override;
  void upload(const Tensor& to, const void* from) override;
  void download(void* to, const Tensor& from) override;
  // Throws Error when a kernel met a value out of range.
  void synchronize() override;
  bool records() const override { return true; }
  std::unique_ptr<Recording> record(const std::function<void()>& body) override;
  // To be called with memory that an op works in and may replace by other later: a recording of the
  // op goes on with this one.
  void keep(const std::shared_ptr<void>& memory);
  // Throws Error once the group of a communicator has ended.
  void check_group() const;
  std::unique_ptr<LinearWeight> make_linear(const std::vector<MatrixShape>& stacked) override;
  void fill_linear(LinearWeight& weight, const std::vector<HostMatrix>& stacked) override;
  std::unique_ptr<ExpertsWeight> make_experts(const ExpertsShape& shape) override;
  void fill_expert(ExpertsWeight& weight, int64_t index, const HostExpert& expert) override;
  std::string weight_layout() const override { return "cuda-stripes-1"; }
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
  // out[t, h] = alpha * W_h x[t, h] for each of the weight's stacked matrices h: x element (t, h,
  // i) at x[t * x_row_stride + h * x_head_stride + i], out likewise. A row's bits do not depend on
  // num_rows.
  void multiply(const CudaLinear& weight, const float* x, int64_t x_row_stride,
                int64_t x_head_stride, int64_t num_rows, float* out, int64_t out_row_stride,
                int64_t out_head_stride, float alpha);

  WeightUpload& upload_of_weights();

  int device_ = 0, num_multiprocessors_ = 0;
  int64_t shared_bytes_ = 0;  // of a multiprocessor
  std::string chip_;
  std::shared_ptr<StreamMemory> stream_memory_;
  cudaStream_t stream_ = nullptr;  // its
  CudaCommunicator* communicator_ = nullptr;
  Workspace workspace_;
  std::vector<std::shared_ptr<void>>* recorded_memory_ = nullptr;  // of the recording being made
  std::unique_ptr<WeightUpload> weight_upload_;                    // once a weight was filled
  Fault* fault_ = nullptr;                                         // in the host's memory, mapped
  Fault* device_fault_ = nullptr;                                  // the same, for kernels
};

}  // namespace kdt::cuda
