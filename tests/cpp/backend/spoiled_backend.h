// A back end with one wrong op.
#pragma once

#include <functional>

#include "op_test.h"
#include "parallel/communicator.h"

namespace kdt::test {

// A back end that may give other results: after (or for stores, before) the op named `op`, `spoil`
// gets the tensor it wrote (or stores).
class Spoiled : public Backend {
 public:
  using Spoil = std::function<void(Backend&, const Tensor&)>;
  Spoiled(std::unique_ptr<Backend> inner, std::string op, Spoil spoil)
      : inner_(std::move(inner)), op_(std::move(op)), spoil_(std::move(spoil)) {}

  BackendInfo info() const override { return {"spoiled", "", 1}; }
  Buffer allocate(DType dtype, std::initializer_list<int64_t> shape) override {
    return inner_->allocate(dtype, shape);
  }
  void upload(const Tensor& to, const void* from) override { inner_->upload(to, from); }
  void download(void* to, const Tensor& from) override { inner_->download(to, from); }
  void synchronize() override { inner_->synchronize(); }
  std::unique_ptr<LinearWeight> make_linear(const std::vector<MatrixShape>& m) override {
    return inner_->make_linear(m);
  }
  void fill_linear(LinearWeight& weight, const std::vector<HostMatrix>& m) override {
    inner_->fill_linear(weight, m);
  }
  std::unique_ptr<ExpertsWeight> make_experts(const ExpertsShape& shape) override {
    return inner_->make_experts(shape);
  }
  void fill_expert(ExpertsWeight& weight, int64_t index, const HostExpert& e) override {
    inner_->fill_expert(weight, index, e);
  }
  std::string weight_layout() const override { return inner_->weight_layout(); }
  std::unique_ptr<Communicator> make_communicator(RankGroup& group) override {
    return inner_->make_communicator(group);
  }
  std::unique_ptr<KvCache> make_mla_cache(int64_t l, int64_t n, int64_t b, int64_t rank,
                                          int64_t rope) override {
    return inner_->make_mla_cache(l, n, b, rank, rope);
  }
  std::unique_ptr<KvCache> make_gqa_cache(int64_t l, int64_t n, int64_t b, int64_t heads,
                                          int64_t dim) override {
    return inner_->make_gqa_cache(l, n, b, heads, dim);
  }
  void embed(const EmbedArgs& a) override {
    inner_->embed(a);
    spoil("embed", a.out);
  }
  void rms_norm(const RmsNormArgs& a) override {
    inner_->rms_norm(a);
    spoil("rms_norm", a.out);
  }
  void add_rms_norm(const Tensor& residual, const Tensor& delta, const Tensor& weight, float eps,
                    const Tensor& out) override {
    inner_->add_rms_norm(residual, delta, weight, eps, out);
    spoil("add_rms_norm", out);
    spoil("add_rms_norm residual", residual);
  }
  void silu_mul(const Tensor& gate_up, const Tensor& out) override {
    inner_->silu_mul(gate_up, out);
    spoil("silu_mul", out);
  }
  void fill_zero(const Tensor& x) override {
    inner_->fill_zero(x);
    spoil("fill_zero", x);
  }
  void gather_rows(const Tensor& from, const Tensor& rows, const Tensor& to) override {
    inner_->gather_rows(from, rows, to);
    spoil("gather_rows", to);
  }
  void copy_columns(const Tensor& from, int64_t a, const Tensor& to, int64_t b,
                    int64_t width) override {
    inner_->copy_columns(from, a, to, b, width);
    spoil("copy_columns", to);
  }
  void linear(const Tensor& x, const LinearWeight& weight, const Tensor& out) override {
    inner_->linear(x, weight, out);
    spoil("linear", out);
  }
  void head_linear(const Tensor& x, const LinearWeight& weight, const Tensor& out) override {
    inner_->head_linear(x, weight, out);
    spoil("head_linear", out);
  }
  void mla_query(const MlaQueryArgs& a) override {
    inner_->mla_query(a);
    spoil("mla_query", a.out);
  }
  void mla_store(const MlaStoreArgs& a) override {
    spoil("mla_store", a.kv);
    inner_->mla_store(a);
  }
  void mla_attention(const MlaAttentionArgs& a) override {
    inner_->mla_attention(a);
    spoil("mla_attention", a.out);
  }
  void gqa_store(const GqaStoreArgs& a) override {
    spoil("gqa_store", a.kv);
    inner_->gqa_store(a);
  }
  void gqa_attention(const GqaAttentionArgs& a) override {
    inner_->gqa_attention(a);
    spoil("gqa_attention", a.out);
  }
  void kv_compact(KvCache& cache, const Tensor& blocks, const Tensor& from,
                  const Tensor& to) override {
    spoil("kv_compact", from);
    inner_->kv_compact(cache, blocks, from, to);
  }
  void moe_route(const MoeRouteArgs& a) override {
    inner_->moe_route(a);
    spoil("moe_route", a.ids);
    spoil("moe_route weights", a.weights);
  }
  void moe_experts(const MoeExpertsArgs& a) override {
    inner_->moe_experts(a);
    spoil("moe_experts", a.out);
  }
  void topk_logprobs(const TopkLogprobsArgs& a) override {
    inner_->topk_logprobs(a);
    spoil("topk_logprobs", a.ids);
    spoil("topk_logprobs logprobs", a.logprobs);
    if (a.log_sums.defined()) spoil("topk_logprobs log_sums", a.log_sums);
  }
  void merge_topk(const MergeTopkArgs& a) override {
    inner_->merge_topk(a);
    spoil("merge_topk", a.ids);
    spoil("merge_topk logprobs", a.logprobs);
  }
  void argmax(const ArgmaxArgs& a) override {
    inner_->argmax(a);
    spoil("argmax", a.ids);
    if (a.values.defined()) spoil("argmax values", a.values);
  }
  void tree_build(const TreeBuildArgs& a) override {
    inner_->tree_build(a);
    for (const Tensor* array : {&a.tokens, &a.parents, &a.depths, &a.first_child, &a.next_sibling})
      spoil("tree_build", *array);
    spoil("tree_build num_nodes", a.num_nodes);
  }
  void tree_accept(const TreeAcceptArgs& a) override {
    inner_->tree_accept(a);
    spoil("tree_accept", a.accepted);
    spoil("tree_accept bonus_token", a.bonus_token);
  }

 private:
  void spoil(const char* op, const Tensor& tensor) {
    if (op_ == op) spoil_(*inner_, tensor);
  }

  std::unique_ptr<Backend> inner_;
  std::string op_;
  Spoil spoil_;
};

// Adds to one value; int32 values get `by` rounded.
inline Spoiled::Spoil add(int64_t index, double by) {
  return [=](Backend& on, const Tensor& tensor) {
    if (tensor.dtype() == DType::kInt32) {
      Ints x = download<int32_t>(on, tensor);
      x.at(index) += static_cast<int32_t>(by);
      on.upload(tensor, x.data());
    } else {
      Floats x = download(on, tensor);
      x.at(index) += static_cast<float>(by);
      on.upload(tensor, x.data());
    }
  };
}

}  // namespace kdt::test
