#include "backend/check_backend.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "backend/check_sides.h"
#include "parallel/communicator.h"

namespace kdt {
namespace {

// Scores that decide an order count as equal within this.
constexpr double kTie = 1e-6;

double or_lowest(float x) { return std::isnan(x) ? -std::numeric_limits<double>::infinity() : x; }

std::unique_ptr<KvCache> pair_caches(std::unique_ptr<KvCache> reference,
                                     std::unique_ptr<KvCache> other) {
  auto cache = std::make_unique<CheckCache>();
  cache->num_layers = reference->num_layers;
  cache->num_blocks = reference->num_blocks;
  cache->block_size = reference->block_size;
  cache->reference = std::move(reference);
  cache->other = std::move(other);
  return cache;
}

class CheckBackend final : public Backend {
  using Side = CheckSides::Side;

 public:
  CheckBackend(std::unique_ptr<Backend> reference, std::unique_ptr<Backend> other)
      : sides_(std::move(reference), std::move(other)) {}

  BackendInfo info() const override {
    const BackendInfo a = sides_.reference().info(), b = sides_.other().info();
    return {join("check:", a.device, ",", b.device), join(a.isa, ", ", b.isa),
            std::max(a.num_threads, b.num_threads)};
  }

  // Memory and weights.

  Buffer allocate(DType dtype, std::initializer_list<int64_t> shape) override {
    return sides_.allocate(dtype, shape);
  }

  void upload(const Tensor& to, const void* from) override {
    sides_.reference().upload(to, from);
    sides_.other().upload(sides_.twin(to), from);
  }

  void download(void* to, const Tensor& from) override { sides_.reference().download(to, from); }

  void synchronize() override {
    sides_.reference().synchronize();
    sides_.other().synchronize();
  }

  std::unique_ptr<LinearWeight> make_linear(const std::vector<MatrixShape>& stacked) override {
    auto weight = std::make_unique<CheckLinear>();
    weight->reference = sides_.reference().make_linear(stacked);
    weight->other = sides_.other().make_linear(stacked);
    weight->out_features = weight->reference->out_features;
    weight->in_features = weight->reference->in_features;
    weight->is_f32 = stacked.front().dtype == DType::kFloat32;
    return weight;
  }

  void fill_linear(LinearWeight& weight, const std::vector<HostMatrix>& stacked) override {
    auto& pair = static_cast<CheckLinear&>(weight);
    sides_.reference().fill_linear(*pair.reference, stacked);
    sides_.other().fill_linear(*pair.other, stacked);
  }

  std::unique_ptr<ExpertsWeight> make_experts(const ExpertsShape& shape) override {
    auto weight = std::make_unique<CheckExperts>();
    weight->reference = sides_.reference().make_experts(shape);
    weight->other = sides_.other().make_experts(shape);
    weight->num_experts = weight->reference->num_experts;
    weight->hidden_size = weight->reference->hidden_size;
    weight->intermediate_size = weight->reference->intermediate_size;
    return weight;
  }

  void fill_expert(ExpertsWeight& weight, int64_t index, const HostExpert& expert) override {
    auto& pair = static_cast<CheckExperts&>(weight);
    sides_.reference().fill_expert(*pair.reference, index, expert);
    sides_.other().fill_expert(*pair.other, index, expert);
  }

  // None: two sides' memory is no other back end's.
  std::string weight_layout() const override { return ""; }

  std::unique_ptr<Communicator> make_communicator(RankGroup&) override {
    throw Error("check: ranks are not compared; use one device");
  }
  std::unique_ptr<KvCache> make_mla_cache(int64_t num_layers, int64_t num_blocks,
                                          int64_t block_size, int64_t kv_lora_rank,
                                          int64_t rope_dim) override {
    return pair_caches(
        sides_.reference().make_mla_cache(num_layers, num_blocks, block_size, kv_lora_rank,
                                          rope_dim),
        sides_.other().make_mla_cache(num_layers, num_blocks, block_size, kv_lora_rank, rope_dim));
  }

  std::unique_ptr<KvCache> make_gqa_cache(int64_t num_layers, int64_t num_blocks,
                                          int64_t block_size, int64_t kv_heads,
                                          int64_t head_dim) override {
    return pair_caches(
        sides_.reference().make_gqa_cache(num_layers, num_blocks, block_size, kv_heads, head_dim),
        sides_.other().make_gqa_cache(num_layers, num_blocks, block_size, kv_heads, head_dim));
  }

  // Ops.

  void embed(const EmbedArgs& args) override {
    sides_.run("embed", [&](const Side& s) {
      auto a = args;
      s.place(a.table, a.token_ids, a.out);
      s.backend().embed(a);
    });
    sides_.expect_same<float>("embed", args.out);
  }

  void rms_norm(const RmsNormArgs& args) override {
    sides_.run("rms_norm", [&](const Side& s) {
      auto a = args;
      s.place(a.x, a.weight, a.out);
      s.backend().rms_norm(a);
    });
    sides_.expect_close("rms_norm", args.out);
  }

  void add_rms_norm(const Tensor& residual, const Tensor& delta, const Tensor& weight, float eps,
                    const Tensor& out) override {
    sides_.run("add_rms_norm", [&](const Side& s) {
      s.backend().add_rms_norm(s(residual), s(delta), s(weight), eps, s(out));
    });
    sides_.expect_same<float>("add_rms_norm", residual);
    sides_.expect_close("add_rms_norm", out);
  }

  void silu_mul(const Tensor& gate_up, const Tensor& out) override {
    sides_.run("silu_mul", [&](const Side& s) { s.backend().silu_mul(s(gate_up), s(out)); });
    sides_.expect_close("silu_mul", out);
  }

  void fill_zero(const Tensor& x) override {
    sides_.run("fill_zero", [&](const Side& s) { s.backend().fill_zero(s(x)); });
    sides_.expect_same<float>("fill_zero", x);
  }

  void gather_rows(const Tensor& from, const Tensor& rows, const Tensor& to) override {
    sides_.run("gather_rows",
               [&](const Side& s) { s.backend().gather_rows(s(from), s(rows), s(to)); });
    sides_.expect_same<float>("gather_rows", to);
  }

  void copy_columns(const Tensor& from, int64_t from_column, const Tensor& to, int64_t to_column,
                    int64_t width) override {
    sides_.run("copy_columns", [&](const Side& s) {
      s.backend().copy_columns(s(from), from_column, s(to), to_column, width);
    });
    sides_.expect_same<float>("copy_columns", to);
  }

  void linear(const Tensor& x, const LinearWeight& weight, const Tensor& out) override {
    sides_.run("linear", [&](const Side& s) { s.backend().linear(s(x), s(weight), s(out)); });
    if (out.numel() == 0) return;
    sides_.expect_close(static_cast<const CheckLinear&>(weight).is_f32 ? "linear (f32)" : "linear",
                        out.view({out.dim(0), weight.out_features}));
  }

  void head_linear(const Tensor& x, const LinearWeight& weight, const Tensor& out) override {
    sides_.run("head_linear",
               [&](const Side& s) { s.backend().head_linear(s(x), s(weight), s(out)); });
    sides_.expect_close("head_linear", out);
  }

  void mla_query(const MlaQueryArgs& args) override {
    sides_.run("mla_query", [&](const Side& s) {
      auto a = args;
      s.place(a.q, a.w_uk, a.rope, a.positions, a.out);
      s.backend().mla_query(a);
    });
    sides_.expect_close("mla_query", args.out);
  }

  void mla_store(const MlaStoreArgs& args) override {
    sides_.run("mla_store", [&](const Side& s) {
      auto a = args;
      s.place(a.kv, a.norm_weight, a.rope, a.positions, a.cache, a.rows);
      s.backend().mla_store(a);
    });
  }

  void mla_attention(const MlaAttentionArgs& args) override {
    sides_.run("mla_attention", [&](const Side& s) {
      auto a = args;
      s.place(a.query, a.cache, a.rows, a.positions, a.out);
      s.backend().mla_attention(a);
    });
    sides_.expect_close("mla_attention", args.out);
  }

  void gqa_store(const GqaStoreArgs& args) override {
    sides_.run("gqa_store", [&](const Side& s) {
      auto a = args;
      s.place(a.kv, a.k_norm, a.rope, a.positions, a.cache, a.rows);
      s.backend().gqa_store(a);
    });
  }

  void gqa_attention(const GqaAttentionArgs& args) override {
    sides_.run("gqa_attention", [&](const Side& s) {
      auto a = args;
      s.place(a.q, a.q_norm, a.rope, a.positions, a.cache, a.rows, a.out);
      s.backend().gqa_attention(a);
    });
    sides_.expect_close("gqa_attention", args.out);
  }

  void kv_compact(KvCache& cache, const Tensor& block_table, const Tensor& from,
                  const Tensor& to) override {
    sides_.run("kv_compact", [&](const Side& s) {
      s.backend().kv_compact(s(cache), s(block_table), s(from), s(to));
    });
  }

  void moe_route(const MoeRouteArgs& args) override {
    sides_.run("moe_route", [&](const Side& s) {
      auto a = args;
      s.place(a.logits, a.bias, a.ids, a.weights);
      s.backend().moe_route(a);
    });
    const std::vector<float> logits = sides_.read<float>(args.logits);
    const std::vector<float> bias = sides_.read<float>(args.bias);
    const int64_t experts = args.logits.dim(1);
    const auto score = [&](int64_t row, int32_t id) {
      return 1 / (1 + std::exp(-static_cast<double>(logits[row * experts + id]))) + bias[id];
    };
    const std::vector<bool> differ =
        sides_.expect_ids("moe_route", args.ids, [&](int64_t row, int32_t a, int32_t b) {
          return std::min(a, b) >= 0 && std::max(a, b) < experts &&
                 std::fabs(score(row, a) - score(row, b)) <= kTie;
        });
    sides_.expect_close("moe_route", args.weights, differ);
  }

  void moe_experts(const MoeExpertsArgs& args) override {
    sides_.run("moe_experts", [&](const Side& s) {
      auto a = args;
      s.place(a.x, a.ids, a.weights, a.experts, a.out);
      s.backend().moe_experts(a);
    });
    sides_.expect_close("moe_experts", args.out);
  }

  void topk_logprobs(const TopkLogprobsArgs& args) override {
    sides_.run("topk_logprobs", [&](const Side& s) {
      auto a = args;
      s.place(a.logits, a.logprobs, a.ids, a.log_sums);
      s.backend().topk_logprobs(a);
    });
    const std::vector<float> logits = sides_.read<float>(args.logits);
    const int64_t vocab = args.logits.dim(1);
    sides_.expect_ids("topk_logprobs", args.ids, [&](int64_t row, int32_t a, int32_t b) {
      a -= static_cast<int32_t>(args.first_id);
      b -= static_cast<int32_t>(args.first_id);
      if (std::min(a, b) < 0 || std::max(a, b) >= vocab) return false;
      const double difference =
          std::fabs(or_lowest(logits[row * vocab + a]) - or_lowest(logits[row * vocab + b]));
      return difference > 0 && difference <= kTie;  // equals have an order: that of their ids
    });
    sides_.expect_close("topk_logprobs", args.logprobs);
    if (args.log_sums.defined())
      sides_.expect_close("topk_logprobs", args.log_sums.view({args.log_sums.numel(), 1}));
  }

  void merge_topk(const MergeTopkArgs& args) override {
    sides_.run("merge_topk", [&](const Side& s) {
      auto a = args;
      s.place(a.parts, a.logprobs, a.ids);
      s.backend().merge_topk(a);
    });
    sides_.expect_same<int32_t>("merge_topk", args.ids);
    sides_.expect_close("merge_topk", args.logprobs);
  }

  void argmax(const ArgmaxArgs& args) override {
    sides_.run("argmax", [&](const Side& s) {
      auto a = args;
      s.place(a.logits, a.ids, a.values);
      s.backend().argmax(a);
    });
    sides_.expect_same<int32_t>("argmax", args.ids);
    if (args.values.defined()) sides_.expect_same<float>("argmax", args.values);
  }

  void tree_build(const TreeBuildArgs& args) override {
    sides_.run("tree_build", [&](const Side& s) {
      auto a = args;
      s.place(a.logprobs, a.ids, a.tokens, a.parents, a.depths, a.first_child, a.next_sibling,
              a.logw, a.num_nodes);
      s.backend().tree_build(a);
    });
    sides_.expect_same<int32_t>("tree_build", args.num_nodes);
    const int64_t nodes = sides_.read<int32_t>(args.num_nodes)[0];
    for (const Tensor* array :
         {&args.tokens, &args.parents, &args.depths, &args.first_child, &args.next_sibling})
      sides_.expect_same<int32_t>("tree_build", *array, nodes);
    sides_.expect_same<double>("tree_build", args.logw, nodes);
  }

  void tree_accept(const TreeAcceptArgs& args) override {
    sides_.run("tree_accept", [&](const Side& s) {
      auto a = args;
      s.place(a.tokens, a.first_child, a.next_sibling, a.target, a.accepted, a.accept_length,
              a.bonus_token);
      s.backend().tree_accept(a);
    });
    sides_.expect_same<int32_t>("tree_accept", args.accept_length);
    sides_.expect_same<int32_t>("tree_accept", args.accepted,
                                sides_.read<int32_t>(args.accept_length)[0]);
    sides_.expect_same<int32_t>("tree_accept", args.bonus_token);
  }

 private:
  CheckSides sides_;
};

}  // namespace

std::unique_ptr<Backend> make_check_backend(std::unique_ptr<Backend> reference,
                                            std::unique_ptr<Backend> other) {
  return std::make_unique<CheckBackend>(std::move(reference), std::move(other));
}

}  // namespace kdt
