// The check back end: two right back ends pass, and a wrong value of any op is found and named.
//
// The other back end is a CPU's, or the GPU of KDT_TEST_DEVICE.
#include <functional>
#include <map>

#include "backend/check_backend.h"
#include "backend/check_sides.h"
#include "cache_test.h"
#include "spoiled_backend.h"

namespace kdt::test {
namespace {

std::unique_ptr<Backend> spoiled(const std::string& op, Spoiled::Spoil spoil) {
  return make_check_backend(
      make_backend("cpu", 1),
      std::make_unique<Spoiled>(make_backend(device(), 1), op, std::move(spoil)));
}

// One call of each op on 3 rows.
using Op = std::function<void(Backend&)>;
constexpr int64_t kRows = 3;

Buffer floats(Backend& b, const Shape& shape, uint64_t seed, float scale = 1) {
  int64_t n = 1;
  for (const int64_t size : shape) n *= size;
  return upload(b, Random(seed).floats(n, scale), shape);
}

void run_attention(Backend& b, bool compacts) {
  MlaCache cache(b, 32, 16, 2, 32);
  Random random(11);
  cache.store(random.floats(5 * cache.width()), 0, {1, 0});
  if (compacts) {
    b.kv_compact(cache.cache(), upload(b, Ints{1, 0}).tensor, upload(b, Ints{2, 4}).tensor,
                 upload(b, Ints{1, 2}).tensor);
  }
  cache.attend(random.floats(kRows * 2 * cache.width()), 2, Rows(b, 0, {1, 0}, {-1, 0, 0}));
}

void run_gqa(Backend& b) {
  GqaCache cache(b, 1, 32, 2, 32);
  Random random(12);
  cache.store(random.floats(4 * 32), random.floats(4 * 32), 0, {1, 0});
  cache.attend(random.floats(kRows * 2 * 32), 2, Rows(b, 0, {1, 0}, {-1, 0, 1}), 0.2f, true, 0);
}

void run_linear(Backend& b, DType dtype) {
  const auto weight = b.prepare_linear({random_matrix(dtype, 40, 64, 1).host()});
  const Buffer out = output(b, {kRows, 40});
  b.linear(floats(b, {kRows, 64}, 2).tensor, *weight, out.tensor);
}

const std::map<std::string, Op>& ops() {
  static const std::map<std::string, Op> table = {
      {"embed",
       [](Backend& b) {
         b.embed({.table = floats(b, {9, 8}, 1).tensor,
                  .token_ids = upload(b, Ints{8, 0, 3}).tensor,
                  .out = output(b, {kRows, 8}).tensor});
       }},
      {"rms_norm",
       [](Backend& b) {
         b.rms_norm({.x = floats(b, {kRows, 12}, 1).tensor,
                     .weight = floats(b, {8}, 2).tensor,
                     .out = output(b, {kRows, 8}).tensor,
                     .eps = 1e-5f,
                     .column = 3});
       }},
      {"add_rms_norm",
       [](Backend& b) {
         b.add_rms_norm(floats(b, {kRows, 8}, 1).tensor, floats(b, {kRows, 8}, 2).tensor,
                        floats(b, {8}, 3).tensor, 1e-5f, output(b, {kRows, 8}).tensor);
       }},
      {"silu_mul",
       [](Backend& b) {
         b.silu_mul(floats(b, {kRows, 16}, 1).tensor, output(b, {kRows, 8}).tensor);
       }},
      {"fill_zero", [](Backend& b) { b.fill_zero(floats(b, {kRows, 8}, 1).tensor); }},
      {"gather_rows",
       [](Backend& b) {
         b.gather_rows(floats(b, {9, 8}, 1).tensor, upload(b, Ints{8, 0, 3}).tensor,
                       output(b, {kRows, 8}).tensor);
       }},
      {"copy_columns",
       [](Backend& b) {
         b.copy_columns(floats(b, {kRows, 8}, 1).tensor, 2, floats(b, {kRows, 8}, 2).tensor, 1, 5);
       }},
      {"linear", [](Backend& b) { run_linear(b, DType::kBFloat16); }},
      {"head_linear",
       [](Backend& b) {
         const Matrix m[] = {random_matrix(DType::kBFloat16, 4, 32, 1),
                             random_matrix(DType::kBFloat16, 4, 32, 2)};
         b.head_linear(floats(b, {kRows, 2, 32}, 3).tensor,
                       *b.prepare_linear({m[0].host(), m[1].host()}),
                       output(b, {kRows, 2, 4}).tensor);
       }},
      {"mla_query",
       [](Backend& b) {
         const Matrix m[] = {random_matrix(DType::kBFloat16, 8, 32, 1),
                             random_matrix(DType::kBFloat16, 8, 32, 2)};
         const auto w_uk = b.prepare_linear({m[0].host(), m[1].host()});
         b.mla_query({.q = floats(b, {kRows, 2, 40}, 3).tensor,
                      .w_uk = w_uk.get(),
                      .rope = {floats(b, {7, 8}, 4).tensor, true},
                      .positions = upload(b, Ints{6, 0, 3}).tensor,
                      .scale = 0.5f,
                      .out = output(b, {kRows, 2, 16}).tensor});
       }},
      {"mla_attention", [](Backend& b) { run_attention(b, false); }},
      {"kv_compact", [](Backend& b) { run_attention(b, true); }},
      {"gqa_attention", run_gqa},
      {"moe_route",
       [](Backend& b) {
         b.moe_route({.logits = floats(b, {kRows, 16}, 1, 4).tensor,
                      .bias = floats(b, {16}, 2).tensor,
                      .ids = int_output(b, {kRows, 4}).tensor,
                      .weights = output(b, {kRows, 4}).tensor});
       }},
      {"moe_experts",
       [](Backend& b) {
         const auto matrix = [](uint64_t seed) {
           return random_matrix(DType::kBFloat16, 32, 32, seed);
         };
         const Matrix m[] = {matrix(1), matrix(2), matrix(3), matrix(4), matrix(5), matrix(6)};
         const auto experts = b.prepare_experts(
             {{m[0].host(), m[1].host(), m[2].host()}, {m[3].host(), m[4].host(), m[5].host()}});
         b.moe_experts({.x = floats(b, {kRows, 32}, 7).tensor,
                        .ids = upload(b, Ints{0, 1, 1, -1, 1, 0}, {kRows, 2}).tensor,
                        .weights = floats(b, {kRows, 2}, 8).tensor,
                        .experts = experts.get(),
                        .out = floats(b, {kRows, 32}, 9).tensor});
       }},
      {"topk_logprobs",
       [](Backend& b) {
         b.topk_logprobs({.logits = floats(b, {kRows, 50}, 1, 6).tensor,
                          .logprobs = output(b, {kRows, 4}).tensor,
                          .ids = int_output(b, {kRows, 4}).tensor,
                          .log_sums = output(b, {kRows}).tensor,
                          .first_id = 100});
       }},
      {"merge_topk",
       [](Backend& b) {
         const Ints logits = bits({3, 2, 1, 0, 3, 2, 1, 0, 3, 2, 1, 0});
         Ints parts;
         for (int32_t first : {0, 12}) {
           append(parts, logits);
           for (int32_t i = 0; i < 12; ++i) parts.push_back(first + i);
           append(parts, bits(Floats(kRows, 4.0f)));
         }
         b.merge_topk({.parts = upload(b, parts, {2, kRows * 9}).tensor,
                       .logprobs = output(b, {kRows, 4}).tensor,
                       .ids = int_output(b, {kRows, 4}).tensor});
       }},
      {"argmax",
       [](Backend& b) {
         b.argmax({.logits = floats(b, {kRows, 50}, 1).tensor,
                   .ids = int_output(b, {kRows}).tensor,
                   .values = output(b, {kRows}).tensor,
                   .first_id = 7});
       }},
      {"tree_build",
       [](Backend& b) {
         const Floats logprobs = {-0.1f, -2, -3, -0.5f, -1, -4, -0.2f, -2, -5};
         const auto ints = [&] { return int_output(b, {9}); };
         b.tree_build({.logprobs = upload(b, logprobs, {3, 3}).tensor,
                       .ids = upload(b, Ints{1, 2, 3, 4, 5, 6, 7, 8, 9}, {3, 3}).tensor,
                       .budget = 8,
                       .tokens = ints().tensor,
                       .parents = ints().tensor,
                       .depths = ints().tensor,
                       .first_child = ints().tensor,
                       .next_sibling = ints().tensor,
                       .logw = upload(b, std::vector<double>(9)).tensor,
                       .num_nodes = int_output(b, {1}).tensor});
       }},
      {"tree_accept",
       [](Backend& b) {
         b.tree_accept({.tokens = upload(b, Ints{-1, 5, 6, 7}).tensor,
                        .first_child = upload(b, Ints{1, 3, -1, -1}).tensor,
                        .next_sibling = upload(b, Ints{-1, 2, -1, -1}).tensor,
                        .target = upload(b, Ints{5, 7, 1, 2}).tensor,
                        .accepted = int_output(b, {4}).tensor,
                        .accept_length = int_output(b, {1}).tensor,
                        .bonus_token = int_output(b, {1}).tensor});
       }},
  };
  return table;
}

KDT_TEST(two_right_back_ends_agree_on_every_op) {
  const auto check = make_backend("check:cpu," + device(), 1);
  for (const auto& [name, op] : ops()) {
    try {
      op(*check);
    } catch (const std::exception& error) {
      report(name.c_str(), 0, error.what());
    }
  }
  for (const DType dtype : {DType::kFloat32, DType::kInt32}) run_linear(*check, dtype);
}

// Value 1 of row 1 is wrong after the op, by more than its tolerance.
KDT_TEST(a_wrong_value_is_named) {
  // The op, the width of its rows, and the place named.
  const std::map<std::string, std::pair<int64_t, std::string>> places = {
      {"embed", {8, "row 1, column 1 of f32[3, 8]"}},
      {"rms_norm", {8, "row 1, column 1 of f32[3, 8]"}},
      {"add_rms_norm", {8, "row 1, column 1 of f32[3, 8]"}},
      {"silu_mul", {8, "row 1, column 1 of f32[3, 8]"}},
      {"fill_zero", {8, "row 1, column 1 of f32[3, 8]"}},
      {"gather_rows", {8, "row 1, column 1 of f32[3, 8]"}},
      {"copy_columns", {8, "row 1, column 1 of f32[3, 8]"}},
      {"linear", {40, "row 1, column 1 of f32[3, 40]"}},
      {"head_linear", {8, "row 1, column 1 of f32[3, 2, 4]"}},
      {"mla_query", {32, "row 1, column 1 of f32[3, 2, 16]"}},
      {"mla_attention", {64, "row 1, column 1 of f32[3, 2, 32]"}},
      {"gqa_attention", {64, "row 1, column 1 of f32[3, 2, 32]"}},
      {"moe_route", {4, "row 1, column 1 of i32[3, 4]"}},
      {"moe_experts", {32, "row 1, column 1 of f32[3, 32]"}},
      {"topk_logprobs", {4, "row 1, column 1 of i32[3, 4]"}},
      {"merge_topk", {4, "row 1, column 1 of i32[3, 4]"}},
      {"argmax", {0, "row 1 of i32[3]"}},
      {"tree_build", {0, "row 1 of i32[9]"}},
      {"tree_accept", {0, "row 1 of i32[4]"}},
  };
  for (const auto& [name, op] : ops()) {
    if (name == "kv_compact") continue;  // it has no result
    const auto& [width, place] = places.at(name);
    const auto check = spoiled(name, add(width + 1, 5));
    expect_throws(name.c_str(), 0, "check: " + name + ": " + place + ": cpu has ",
                  [&, &run = op] { run(*check); });
  }
}

KDT_TEST(results_beside_the_first_are_compared_too) {
  const auto message = [](const std::string& spoil, const std::string& op, int64_t index) {
    try {
      ops().at(op)(*spoiled(spoil, add(index, 1)));
    } catch (const std::exception& error) {
      return std::string(error.what());
    }
    return std::string("nothing was thrown");
  };
  const auto starts = [](const std::string& text, const std::string& with) {
    return text.rfind(with, 0) == 0;
  };
  EXPECT(starts(message("add_rms_norm residual", "add_rms_norm", 9),
                "check: add_rms_norm: row 1, column 1 of f32[3, 8]: cpu has "));
  EXPECT(starts(message("moe_route weights", "moe_route", 7),
                "check: moe_route: row 1, column 3 of f32[3, 4]: cpu has "));
  EXPECT(starts(message("topk_logprobs logprobs", "topk_logprobs", 7),
                "check: topk_logprobs: row 1, column 3 of f32[3, 4]: cpu has "));
  EXPECT(starts(message("topk_logprobs log_sums", "topk_logprobs", 1),
                "check: topk_logprobs: row 1 of f32[3, 1]: cpu has "));
  EXPECT(starts(message("merge_topk logprobs", "merge_topk", 7),
                "check: merge_topk: row 1, column 3 of f32[3, 4]: cpu has "));
  EXPECT(starts(message("argmax values", "argmax", 2), "check: argmax: row 2 of f32[3]: cpu has "));
  EXPECT_EQ(message("tree_build num_nodes", "tree_build", 0),
            "check: tree_build: row 0 of i32[1]: cpu has 9, spoiled has 10; want the same bits");
  EXPECT_EQ(message("tree_accept bonus_token", "tree_accept", 0),
            "check: tree_accept: row 0 of i32[1]: cpu has 2, spoiled has 3; want the same bits");
}

KDT_TEST(weights_are_filled_on_both_sides) {
  const auto check = make_check_backend(make_backend("cpu", 1), make_backend(device(), 2));
  EXPECT_EQ(check->weight_layout(), "");
  std::vector<Matrix> m;
  for (uint64_t seed = 0; seed < 3; ++seed) m.push_back(random_matrix(DType::kInt32, 32, 32, seed));
  const auto experts =
      check->make_experts({.num_experts = 2, .hidden_size = 32, .intermediate_size = 32});
  for (int64_t e : {1, 0}) check->fill_expert(*experts, e, {m[e].host(), m[2].host(), m[1].host()});
  const Buffer x = upload(*check, Random(1).floats(64), {2, 32});
  const Buffer ids = upload(*check, Ints{0, 1}, {2, 1}),
               weights = upload(*check, Floats{1, 1}, {2, 1});
  const Buffer out = upload(*check, Floats(64, 0.0f), {2, 32});
  check->moe_experts({.x = x.tensor,
                      .ids = ids.tensor,
                      .weights = weights.tensor,
                      .experts = experts.get(),
                      .out = out.tensor});
  // One side alone has other weights.
  auto& pair = static_cast<CheckExperts&>(*experts);
  make_backend("cpu", 1)->fill_expert(*pair.reference, 0, {m[2].host(), m[2].host(), m[1].host()});
  EXPECT_THROWS("check: moe_experts: row 0", check->moe_experts({.x = x.tensor,
                                                                 .ids = ids.tensor,
                                                                 .weights = weights.tensor,
                                                                 .experts = experts.get(),
                                                                 .out = out.tensor}));
}

KDT_TEST(a_wrong_cache_shows_in_the_attention) {
  for (const auto& [store, op] : {std::pair{"mla_store", "mla_attention"},
                                  {"gqa_store", "gqa_attention"},
                                  {"kv_compact", "kv_compact"}}) {
    const auto check = spoiled(store, add(store == std::string("kv_compact") ? 0 : 60, 1));
    const std::string found = op == std::string("kv_compact") ? "mla_attention" : op;
    expect_throws(store, 0, "check: " + found + ": row ",
                  [&, name = op] { ops().at(name)(*check); });
  }
}

KDT_TEST(a_difference_within_the_tolerance_passes_and_does_not_add_up) {
  const auto check = spoiled("linear", add(40, 1e-4));
  const auto weight = check->prepare_linear({random_matrix(DType::kBFloat16, 40, 40, 1).host()});
  Buffer x = floats(*check, {kRows, 40}, 2), out = output(*check, {kRows, 40});
  for (int i = 0; i < 5; ++i) {
    check->linear(x.tensor, *weight, out.tensor);
    // The twin of `out` has the reference's bits, or this would find them.
    check->copy_columns(out.tensor, 0, x.tensor, 0, 40);
  }
  // A product with f32 weights has no rounding to excuse it.
  EXPECT_THROWS("check: linear (f32): row 1, column 0",
                run_linear(*spoiled("linear", add(40, 1e-2)), DType::kFloat32));
  run_linear(*spoiled("linear", add(40, 1e-2)), DType::kBFloat16);
}

KDT_TEST(many_small_differences_in_a_row_are_one) {
  const auto scaled = [](float by) {
    return spoiled("linear", [by](Backend& on, const Tensor& tensor) {
      Floats x = download(on, tensor);
      for (int i = 40; i < 80; ++i) x[i] *= by;
      on.upload(tensor, x.data());
    });
  };
  run_linear(*scaled(1.005f), DType::kBFloat16);
  EXPECT_THROWS("check: linear: row 1, column ", run_linear(*scaled(1.015f), DType::kBFloat16));
  EXPECT_THROWS("root mean square of the row's differences ",
                run_linear(*scaled(1.015f), DType::kBFloat16));
}

KDT_TEST(a_number_against_nan_is_a_difference_and_nan_against_nan_is_none) {
  const auto nan = [](Backend& on, const Tensor& tensor) {
    Floats x = download(on, tensor);
    x.at(9) = kNan;
    on.upload(tensor, x.data());
  };
  EXPECT_THROWS("row 1, column 1 of f32[3, 8]: cpu has",
                ops().at("rms_norm")(*spoiled("rms_norm", nan)));
  const auto check = make_backend("check:cpu,cpu", 1);
  Floats x(16, 1.0f);
  x[3] = kNan;
  const Buffer out = output(*check, {2, 8});
  check->rms_norm({.x = upload(*check, x, {2, 8}).tensor,
                   .weight = upload(*check, Floats(8, 1.0f)).tensor,
                   .out = out.tensor});
  EXPECT(std::isnan(download(*check, out.tensor)[0]));
}

// Swaps the first two ids of a row.
Spoiled::Spoil swap_ids() {
  return [](Backend& on, const Tensor& tensor) {
    Ints ids = download<int32_t>(on, tensor);
    std::swap(ids.at(0), ids.at(1));
    on.upload(tensor, ids.data());
  };
}

KDT_TEST(ids_may_differ_where_scores_tie) {
  const auto topk = [](const Floats& logits) {
    const auto check = spoiled("topk_logprobs", swap_ids());
    check->topk_logprobs({.logits = upload(*check, logits, {1, 4}).tensor,
                          .logprobs = output(*check, {1, 2}).tensor,
                          .ids = int_output(*check, {1, 2}).tensor});
  };
  topk({0, 0.5f, 0.50000006f, 0.1f});
  const std::string no_tie = "their scores are no tie";
  EXPECT_THROWS(no_tie, topk({0, 0.5f, 0.5001f, 0.1f}));
  EXPECT_THROWS(no_tie, topk({0, 0.5f, 0.5f, 0.1f}));  // equals go by id

  const auto route = [](const Floats& logits) {
    const auto check = spoiled("moe_route", swap_ids());
    check->moe_route({.logits = upload(*check, logits, {1, 4}).tensor,
                      .bias = upload(*check, Floats(4, 0.25f)).tensor,
                      .ids = int_output(*check, {1, 2}).tensor,
                      .weights = output(*check, {1, 2}).tensor});
  };
  route({0, 0.5f, 0.50000006f, 0.1f});
  route({0, 0.5f, 0.5f, 0.1f});
  EXPECT_THROWS(no_tie, route({0, 0.5f, 0.5001f, 0.1f}));
}

KDT_TEST(faults_of_one_side_and_memory_of_others) {
  const auto fails = [](Backend&, const Tensor&) { throw Error("out of order"); };
  EXPECT_THROWS("check: argmax: spoiled alone fails: out of order",
                ops().at("argmax")(*spoiled("argmax", fails)));
  const auto check = make_backend("check:cpu,cpu", 1);
  float outside[8] = {};
  EXPECT_THROWS("check: f32[8] is in no memory of this back end",
                check->fill_zero(Tensor(outside, DType::kFloat32, {8})));
  // A view is found in its allocation; one that reaches past its end is not.
  const Buffer memory = check->allocate(DType::kFloat32, {4, 8});
  check->fill_zero(memory.tensor.rows(1, 3).view({24}));
  const Tensor past(memory.tensor.data<float>() + 8, DType::kFloat32, {4, 8});
  EXPECT_THROWS("is in no memory", check->upload(past, Floats(32).data()));
  check->fill_zero(memory.tensor.rows(4, 0));
}

KDT_TEST(names_of_check_devices) {
  EXPECT_EQ(make_backend("check:cpu,cpu", 1)->info().device, "check:cpu,cpu");
  for (const char* name : {"check:", "check:cpu", "check:cpu,", "check:,cpu", "check:cpu,tpu",
                           "check:auto,cpu", "check:cpu,cpu,cpu", "check:check:cpu,cpu,cpu"}) {
    expect_throws(name, 0, std::string("device is '") + name + "'; want 'check:A,B'",
                  [&] { make_backend(name, 1); });
  }
  EXPECT_THROWS("device is 'check'; want 'auto', 'cpu', 'cuda', 'cuda:N' or 'check:A,B'",
                make_backend("check", 1));
}

}  // namespace
}  // namespace kdt::test

KDT_OP_TEST_MAIN
