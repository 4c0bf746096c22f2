// Routing and experts.
#include "op_test.h"

namespace kdt::test {
namespace {

struct Routed {
  Ints ids;
  Floats weights;
};

Routed route(Backend& b, const Floats& logits, const Floats& bias, int64_t top_k,
             int64_t n_group = 1, int64_t topk_group = 1, bool norm = true, float factor = 1) {
  const auto experts = static_cast<int64_t>(bias.size()),
             rows = static_cast<int64_t>(logits.size()) / experts;
  const Buffer memory = upload(b, logits, {rows, experts}), bias_memory = upload(b, bias);
  const Buffer ids = int_output(b, {rows, top_k}), weights = output(b, {rows, top_k});
  b.moe_route({.logits = memory.tensor,
               .bias = bias_memory.tensor,
               .n_group = n_group,
               .topk_group = topk_group,
               .norm_topk_prob = norm,
               .routed_scaling_factor = factor,
               .ids = ids.tensor,
               .weights = weights.tensor});
  return {download<int32_t>(b, ids.tensor), download(b, weights.tensor)};
}

KDT_TEST(route_bundles) {
  for (const char* name :
       {"plain", "ties", "groups", "group_ties", "nan", "nan_groups", "unnormalised"}) {
    const KdtrFile file = bundle(std::string("route_") + name);
    const Routed routed =
        route(backend(), values<float>(file.at("logits")), values<float>(file.at("bias")),
              scalar<int32_t>(file, "top_k"), scalar<int32_t>(file, "n_group"),
              scalar<int32_t>(file, "topk_group"), scalar<bool>(file, "norm_topk_prob"),
              scalar<float>(file, "routed_scaling_factor"));
    if (routed.ids != values<int32_t>(file.at("ids")))
      report(__FILE__, __LINE__, join(name, ": ids"));
    const double error = max_error(routed.weights, values<float>(file.at("weights")));
    if (!(error < 1e-6)) report(__FILE__, __LINE__, join(name, ": weights differ by ", error));
  }
}

KDT_TEST(equal_scores_go_by_lower_id) {
  const Routed routed = route(backend(), Floats(16, 0.25f), Floats(16, 0.0f), 4);
  EXPECT(routed.ids == Ints({0, 1, 2, 3}));
  for (float weight : routed.weights) EXPECT_EQ(weight, 0.25f);
}

KDT_TEST(the_bias_chooses_and_does_not_weigh) {
  Floats bias(8, 0.0f);
  bias[5] = 10;
  const Routed routed = route(backend(), {3, 2, 1, 0, -1, -2, -3, -4}, bias, 2, 1, 1, false);
  EXPECT(routed.ids == Ints({5, 0}));
  EXPECT_NEAR(routed.weights[0], 1 / (1 + std::exp(2.0)), 1e-7);
  EXPECT_NEAR(routed.weights[1], 1 / (1 + std::exp(-3.0)), 1e-7);
}

KDT_TEST(a_row_of_nan_chooses_nobody) {
  const Routed routed = route(backend(), Floats(8, kNan), Floats(8, 0.0f), 2, 4, 2);
  EXPECT(routed.ids == Ints({-1, -1}));
  EXPECT(routed.weights == Floats({0, 0}));
}

KDT_TEST(impossible_routes_are_refused) {
  const auto try_route = [](int64_t top_k, int64_t n_group, int64_t topk_group) {
    route(backend(), Floats(8, 0.0f), Floats(8, 0.0f), top_k, n_group, topk_group);
  };
  EXPECT_THROWS("moe_route: top 9 of 8", try_route(9, 1, 1));
  EXPECT_THROWS("moe_route: top 2 of 8 experts in 1 of 3", try_route(2, 3, 1));
  EXPECT_THROWS("moe_route: top 5", try_route(5, 4, 2));
  EXPECT_THROWS("moe_route:", try_route(2, 4, 5));
}

// Experts.

std::unique_ptr<ExpertsWeight> bundle_experts(Backend& b, const KdtrFile& file) {
  const Shape& shape = file.at("gate_packed").shape;
  const int64_t inter = shape[1], hidden = shape[2] * 8;
  std::vector<HostExpert> experts;
  for (int64_t e = 0; e < shape[0]; ++e) {
    const auto matrix = [&](const std::string& part, int64_t out, int64_t in) {
      return HostMatrix{file.at(part + "_packed").data + e * out * in / 2,
                        file.at(part + "_scale").data + e * out * in / 32 * 2, DType::kInt32, out,
                        in};
    };
    experts.push_back({matrix("gate", inter, hidden), matrix("up", inter, hidden),
                       matrix("down", hidden, inter)});
  }
  return b.prepare_experts(experts);
}

// The experts' sum is added to `start`.
Floats run_experts(Backend& b, const Floats& x, const Ints& ids, const Floats& weights,
                   const ExpertsWeight& experts, const Floats& start, int64_t first_expert = 0) {
  const int64_t rows = static_cast<int64_t>(x.size()) / experts.hidden_size;
  const int64_t top_k = static_cast<int64_t>(ids.size()) / rows;
  const Buffer out = upload(b, start, {rows, experts.hidden_size});
  const Buffer x_memory = upload(b, x, {rows, experts.hidden_size});
  const Buffer id_memory = upload(b, ids, {rows, top_k}),
               weight_memory = upload(b, weights, {rows, top_k});
  b.moe_experts({.x = x_memory.tensor,
                 .ids = id_memory.tensor,
                 .weights = weight_memory.tensor,
                 .experts = &experts,
                 .out = out.tensor,
                 .first_expert = first_expert});
  return download(b, out.tensor);
}

// On a CPU the sums are those of f32 arithmetic; elsewhere activations are rounded to bf16.
void expect_close(const Floats& out, const std::vector<double>& reference, double cpu_tolerance) {
  if (on_cpu()) EXPECT(max_error(out, reference) < cpu_tolerance);
  const RelativeError error = relative_error(out, reference);
  EXPECT(error.worst < 2e-2);
  EXPECT(error.norm < 5e-3);
}

KDT_TEST(experts_bundles) {
  Backend& b = backend();
  for (const char* name : {"experts_spread", "experts_all_on_one"}) {
    const KdtrFile file = bundle(name);
    const auto experts = bundle_experts(b, file);
    EXPECT_EQ(experts->num_experts, 6);
    const Floats x = values<float>(file.at("x"));
    const Floats out =
        run_experts(b, x, values<int32_t>(file.at("ids")), values<float>(file.at("weights")),
                    *experts, Floats(x.size(), 0.0f));
    expect_close(out, values<double>(file.at("out")), 1e-5);
  }
}

KDT_TEST(ids_that_are_no_expert_add_nothing) {
  Backend& b = backend();
  const KdtrFile file = bundle("experts_spread");
  const auto experts = bundle_experts(b, file);
  const Floats x = slice(values<float>(file.at("x")), 0, 128), start = Random(1).floats(128);
  EXPECT(same_bits(run_experts(b, x, {-1, 6, 100, -7}, {1, 2, 3, 4}, *experts, start), start));
  const Floats one = run_experts(b, x, {3, 1}, {0.5f, 2}, *experts, start);
  EXPECT(same_bits(run_experts(b, x, {-1, 3, 1, 6}, {9, 0.5f, 2, 9}, *experts, start), one));
}

struct RandomExperts {
  RandomExperts(DType dtype, int64_t count, int64_t hidden, int64_t inter) {
    for (int64_t e = 0; e < count; ++e) {
      gate.push_back(random_matrix(dtype, inter, hidden, 3 * e));
      up.push_back(random_matrix(dtype, inter, hidden, 3 * e + 1));
      down.push_back(random_matrix(dtype, hidden, inter, 3 * e + 2));
    }
  }
  std::unique_ptr<ExpertsWeight> prepare(Backend& b) const {
    std::vector<HostExpert> hosts;
    for (size_t e = 0; e < gate.size(); ++e)
      hosts.push_back({gate[e].host(), up[e].host(), down[e].host()});
    return b.prepare_experts(hosts);
  }
  std::vector<double> run(const Floats& x, const Ints& ids, const Floats& weights,
                          int64_t top_k) const {
    const int64_t hidden = gate[0].in;
    std::vector<double> out(x.size(), 0.0);
    for (size_t s = 0; s < ids.size(); ++s) {
      if (ids[s] < 0 || ids[s] >= static_cast<int32_t>(gate.size())) continue;
      const int64_t row = static_cast<int64_t>(s) / top_k;
      const Floats xr = slice(x, row * hidden, hidden);
      const auto g = product(xr, gate[ids[s]]), u = product(xr, up[ids[s]]);
      Floats activated;
      for (size_t i = 0; i < g.size(); ++i)
        activated.push_back(static_cast<float>(g[i] / (1 + std::exp(-g[i])) * u[i]));
      if (rounds()) activated = to_bf16_values(activated);
      const auto result = product(activated, down[ids[s]]);
      for (int64_t i = 0; i < hidden; ++i) out[row * hidden + i] += weights[s] * result[i];
    }
    return out;
  }
  // Whether the back end works with bf16 activations.
  bool rounds() const { return !on_cpu() && gate[0].dtype != DType::kFloat32; }
  Floats inputs(int64_t rows, float scale, uint64_t seed) const {
    const Floats x = Random(seed).floats(rows * gate[0].in, scale);
    return rounds() ? to_bf16_values(x) : x;
  }
  // With the activations rounded as the back end does, only a rounding to the other side remains.
  void expect(const Floats& out, const Floats& x, const Ints& ids, const Floats& weights,
              int64_t top_k) const {
    const RelativeError error = relative_error(out, run(x, ids, weights, top_k));
    EXPECT(error.worst < (rounds() ? 2e-2 : 1e-5));
    EXPECT(error.norm < (rounds() ? 2e-3 : 1e-5));
  }
  std::vector<Matrix> gate, up, down;
};

Floats zeros(int64_t count) { return Floats(count, 0.0f); }

KDT_TEST(experts_of_each_type_and_row_independence) {
  constexpr int64_t kExperts = 9, kTopK = 3, kMaxRows = 70;
  for (const auto& [dtype, hidden, inter] : {std::tuple{DType::kInt32, 96, 64},
                                             {DType::kBFloat16, 70, 45},
                                             {DType::kFloat32, 64, 33},
                                             {DType::kInt32, 32, 160}}) {
    const RandomExperts host(dtype, kExperts, hidden, inter);
    const Floats x = host.inputs(kMaxRows, 0.5f, 5);
    Random random(6);
    const Floats weights = random.floats(kMaxRows * kTopK);
    Ints ids;
    for (int64_t s = 0; s < kMaxRows * kTopK; ++s)
      ids.push_back(static_cast<int32_t>(random.below(kExperts)));
    Floats expected;
    for (int threads : on_cpu() ? std::vector{1, 2, 3} : std::vector{1}) {
      const auto b = make_backend(device(), threads);
      const auto experts = host.prepare(*b);
      if (expected.empty()) {
        for (int64_t r = 0; r < kMaxRows; ++r) {
          append(expected,
                 run_experts(*b, slice(x, r * hidden, hidden), slice(ids, r * kTopK, kTopK),
                             slice(weights, r * kTopK, kTopK), *experts, zeros(hidden)));
        }
        host.expect(expected, x, ids, weights, kTopK);
      }
      for (int64_t rows : {1, 2, 3, 7, 8, 9, 13, 31, 32, 33, 64, 65, 69, 70}) {
        const Floats out =
            run_experts(*b, slice(x, 0, rows * hidden), slice(ids, 0, rows * kTopK),
                        slice(weights, 0, rows * kTopK), *experts, zeros(rows * hidden));
        EXPECT(same_bits(out, slice(expected, 0, rows * hidden)));
      }
    }
  }
}

// Each of several back ends may hold some of the experts.
KDT_TEST(parts_of_the_experts_add_up) {
  Backend& b = backend();
  constexpr int64_t kExperts = 12, kHidden = 64, kTopK = 4;
  for (DType dtype : {DType::kInt32, DType::kBFloat16, DType::kFloat32}) {
    const RandomExperts host(dtype, kExperts, kHidden, 32);
    const auto whole = host.prepare(b);
    for (int64_t rows :
         {1, 4, 5, 70}) {  // with 16 slots the ids are tiles, with more they are sorted
      const Floats x = host.inputs(rows, 0.5f, rows), weights = Random(9).floats(rows * kTopK);
      Random random(rows);
      Ints ids;
      for (int64_t s = 0; s < rows * kTopK; ++s)
        ids.push_back(static_cast<int32_t>(random.below(kExperts + 2)) - 1);  // two are none
      const Floats all = run_experts(b, x, ids, weights, *whole, zeros(rows * kHidden));
      for (int64_t parts : {2, 3}) {
        const int64_t count = kExperts / parts;
        Floats sum = zeros(rows * kHidden);
        for (int64_t p = 0; p < parts; ++p) {
          RandomExperts part = host;
          for (std::vector<Matrix>* m : {&part.gate, &part.up, &part.down})
            *m = {m->begin() + p * count, m->begin() + (p + 1) * count};
          const auto experts = part.prepare(b);
          sum = run_experts(b, x, ids, weights, *experts, sum, p * count);
          if (p != 0) continue;
          // Nothing where all ids are another's.
          const Floats start = Random(1).floats(rows * kHidden);
          for (int64_t first : {kExperts + 1, int64_t{2147483647} - count})
            EXPECT(same_bits(run_experts(b, x, ids, weights, *experts, start, first), start));
        }
        EXPECT(max_error(sum, all) < 2e-5);
      }
    }
  }
  const RandomExperts host(DType::kBFloat16, 2, 32, 32);
  EXPECT_THROWS("moe_experts: first_expert -1",
                run_experts(b, zeros(32), {0}, {1}, *host.prepare(b), zeros(32), -1));
}

// Sums over a long k are cut between warps, and each expert's rows into tiles of several sizes.
KDT_TEST(experts_of_long_rows) {
  Backend& b = backend();
  for (const auto& [dtype, hidden, inter] : {std::tuple{DType::kInt32, 1056, 32},
                                             {DType::kInt32, 2080, 32},
                                             {DType::kInt32, 4128, 32},
                                             {DType::kBFloat16, 32, 1040},
                                             {DType::kInt32, 64, 1024}}) {
    const RandomExperts host(dtype, 2, hidden, inter);
    const auto experts = host.prepare(b);
    constexpr int64_t kRows = 33;
    const Floats x = host.inputs(kRows, 0.1f, 7), weights = Random(8).floats(kRows);
    Ints ids;
    for (int64_t t = 0; t < kRows; ++t) ids.push_back(t % 5 == 0 ? 0 : 1);
    const Floats all = run_experts(b, x, ids, weights, *experts, zeros(kRows * hidden));
    host.expect(all, x, ids, weights, 1);
    for (int64_t rows : {1, 9, 20}) {
      const Floats some = run_experts(b, slice(x, 0, rows * hidden), slice(ids, 0, rows),
                                      slice(weights, 0, rows), *experts, zeros(rows * hidden));
      EXPECT(same_bits(some, slice(all, 0, rows * hidden)));
    }
  }
}

KDT_TEST(every_way_to_choose_experts) {
  Backend& b = backend();
  constexpr int64_t kExperts = 40, kHidden = 64, kTopK = 4;
  const RandomExperts host(DType::kInt32, kExperts, kHidden, 32);
  const auto experts = host.prepare(b);
  const auto check = [&](int64_t rows, const auto& choose) {
    const Floats x = host.inputs(rows, 0.5f, rows), weights = Random(9).floats(rows * kTopK);
    Ints ids;
    for (int64_t t = 0; t < rows; ++t) {
      for (int64_t k = 0; k < kTopK; ++k) ids.push_back(static_cast<int32_t>(choose(t, k)));
    }
    host.expect(run_experts(b, x, ids, weights, *experts, zeros(rows * kHidden)), x, ids, weights,
                kTopK);
  };
  for (int64_t rows : {1, 8, 65}) {
    check(rows, [](int64_t, int64_t) { return kExperts - 1; });  // the last one, four times
    check(rows, [](int64_t, int64_t k) { return k; });           // all tokens on four
    check(rows, [](int64_t t, int64_t k) { return t % 3 == 0 ? 5 : k * 9; });  // duplicates
    check(rows, [](int64_t t, int64_t k) { return (t * kTopK + k) % kExperts; });
    // Ids that are none beside ids that are.
    check(rows, [](int64_t t, int64_t k) { return k == 2 ? (t % 2 == 0 ? -1 : kExperts) : t % 7; });
    check(rows, [](int64_t t, int64_t k) { return t == 0 && k == 3 ? 0 : -1 - t; });
  }
  // A slot's weight counts, not its place among the duplicates.
  const Floats x = host.inputs(1, 0.5f, 1);
  const auto of = [&](const Ints& ids, const Floats& weights) {
    return run_experts(b, x, ids, weights, *experts, zeros(kHidden));
  };
  EXPECT(
      same_bits(of({7, 7, -1, -1}, {0.25f, 0.5f, 1, 1}), of({-1, 7, 50, 7}, {9, 0.25f, 9, 0.5f})));
}

KDT_TEST(intermediate_sizes_of_sharded_experts) {
  Backend& b = backend();
  for (int64_t inter : {160, 256, 320}) {
    const RandomExperts host(DType::kInt32, 2, 32, inter);
    const auto experts = host.prepare(b);
    const Floats x = host.inputs(3, 0.5f, 1), weights = Random(2).floats(3);
    host.expect(run_experts(b, x, {1, 0, 1}, weights, *experts, zeros(96)), x, {1, 0, 1}, weights,
                1);
  }
  for (int64_t inter : {80, 232}) {
    const Matrix wide = random_matrix(DType::kInt32, inter, 32, 1);
    Matrix down = random_matrix(DType::kInt32, 32, 256, 2);
    down.in = inter;
    EXPECT_THROWS(join("int4 weight: in_features ", inter, " is not a multiple of 32"),
                  b.prepare_experts({{wide.host(), wide.host(), down.host()}}));
  }
}

KDT_TEST(large_activations_and_extreme_scales) {
  Backend& b = backend();
  for (const double magnitude : {1e-6, 1e3}) {
    RandomExperts host(DType::kInt32, 2, 64, 32);
    for (std::vector<Matrix>* matrices : {&host.up, &host.down}) {
      for (Matrix& m : *matrices) {
        const uint16_t bits = float_to_bf16(static_cast<float>(magnitude));
        for (size_t i = 0; i < m.scale.size(); i += 2) std::memcpy(m.scale.data() + i, &bits, 2);
        for (size_t i = 0; i < m.values.size(); ++i) {
          uint32_t word;
          std::memcpy(&word, m.data.data() + i / 8 * 4, 4);
          m.values[i] = (static_cast<int>(word >> 4 * (i % 8) & 15) - 8) *
                        static_cast<double>(bf16_to_float(bits));
        }
      }
    }
    const auto experts = host.prepare(b);
    const Floats x = host.inputs(2, 1e4f, 3);
    host.expect(run_experts(b, x, {0, 1}, {1, 0.5f}, *experts, zeros(128)), x, {0, 1}, {1, 0.5f},
                1);
  }
}

// K2.6 on one of eight ranks. Only a few experts hold numbers of their own: a reference of 384
// would take minutes.
KDT_TEST(large_experts_repeat_to_the_bit) {
  if (!large_cases()) return;
  Backend& b = backend();
  constexpr int64_t kExperts = 384, kOwn = 5, kHidden = 7168, kInter = 256, kTopK = 8;
  const RandomExperts own(DType::kInt32, kOwn, kHidden, kInter);
  std::vector<HostExpert> hosts;
  for (int64_t e = 0; e < kExperts; ++e)
    hosts.push_back(
        {own.gate[e % kOwn].host(), own.up[e % kOwn].host(), own.down[e % kOwn].host()});
  const auto experts = b.prepare_experts(hosts);
  constexpr int64_t kRows = 4096;
  const Floats x = own.inputs(kRows, 0.02f, 1), weights = Random(2).floats(kRows * kTopK);
  Random random(3);
  Ints ids, own_ids;
  for (int64_t s = 0; s < kRows * kTopK; ++s) {
    ids.push_back(static_cast<int32_t>(random.below(kExperts)));
    own_ids.push_back(ids.back() % static_cast<int32_t>(kOwn));
  }
  ids[5] = kExperts - 1;
  own_ids[5] = (kExperts - 1) % kOwn;
  const Floats all = run_experts(b, x, ids, weights, *experts, zeros(kRows * kHidden));
  own.expect(slice(all, 0, 2 * kHidden), slice(x, 0, 2 * kHidden), slice(own_ids, 0, 2 * kTopK),
             slice(weights, 0, 2 * kTopK), kTopK);
  for (int64_t rows : {1, 4, 8, 16, 65, 256, 1100}) {
    const auto some = [&] {
      return run_experts(b, slice(x, 0, rows * kHidden), slice(ids, 0, rows * kTopK),
                         slice(weights, 0, rows * kTopK), *experts, zeros(rows * kHidden));
    };
    const Floats first = some();
    EXPECT(same_bits(first, slice(all, 0, rows * kHidden)));
    for (int i = 0; i < (rows <= 65 ? 100 : 3); ++i) EXPECT(same_bits(some(), first));
  }
}

KDT_TEST(experts_of_unequal_shapes_are_refused) {
  Backend& b = backend();
  const Matrix wide = random_matrix(DType::kFloat32, 8, 16, 1),
               tall = random_matrix(DType::kFloat32, 16, 8, 1);
  EXPECT_THROWS("prepare_experts: no expert", b.prepare_experts({}));
  EXPECT_THROWS("fill_expert: up is f32 [16, 8], want f32 [8, 16]",
                b.prepare_experts({{wide.host(), tall.host(), tall.host()}}));
  EXPECT_THROWS("fill_expert: down is f32 [8, 16], want f32 [16, 8]",
                b.prepare_experts({{wide.host(), wide.host(), wide.host()}}));
}

}  // namespace
}  // namespace kdt::test

KDT_OP_TEST_MAIN
