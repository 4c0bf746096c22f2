// Draft trees: built and walked.
#include "op_test.h"

namespace kdt::test {
namespace {

struct Tree {
  Ints tokens, parents, depths, first_child, next_sibling;
  std::vector<double> logw;
};

Tree build(Backend& b, const Floats& logprobs, const Ints& ids, int64_t depth, int64_t width,
           int64_t budget) {
  const int64_t slots = budget + 1;
  const Buffer lp = upload(b, logprobs, {depth, width}), id = upload(b, ids, {depth, width});
  const Buffer outputs[] = {int_output(b, {slots}), int_output(b, {slots}), int_output(b, {slots}),
                            int_output(b, {slots}), int_output(b, {slots}), int_output(b, {1})};
  const Buffer logw = upload(b, std::vector<double>(slots, -777));
  b.tree_build({.logprobs = lp.tensor,
                .ids = id.tensor,
                .budget = budget,
                .tokens = outputs[0].tensor,
                .parents = outputs[1].tensor,
                .depths = outputs[2].tensor,
                .first_child = outputs[3].tensor,
                .next_sibling = outputs[4].tensor,
                .logw = logw.tensor,
                .num_nodes = outputs[5].tensor});
  const int32_t n = download<int32_t>(b, outputs[5].tensor)[0];
  KDT_CHECK(n >= 1 && n <= slots, "tree of ", n, " slots");
  const auto list = [&](int i) { return download<int32_t>(b, outputs[i].tensor.rows(0, n)); };
  Tree tree{list(0), list(1), list(2),
            list(3), list(4), download<double>(b, logw.tensor.rows(0, n))};
  // What lies behind the last slot stays as it was.
  for (int i = 0; i < 5; ++i) {
    EXPECT(download<int32_t>(b, outputs[i].tensor.rows(n, slots - n)) == Ints(slots - n, -777));
  }
  return tree;
}

KDT_TEST(bundles) {
  for (const char* name : {"typical", "wide", "deep", "underfull", "chain", "star", "all_ties",
                           "bf16_ties", "inf_tails", "budget_0", "budget_1", "budget_64",
                           "budget_128", "budget_256", "golden_a", "golden_b"}) {
    const KdtrFile file = bundle(std::string("tree_") + name);
    const Shape& shape = file.at("logprobs").shape;
    const Tree tree =
        build(backend(), values<float>(file.at("logprobs")), values<int32_t>(file.at("ids")),
              shape[0], shape[1], scalar<int32_t>(file, "budget"));
    const auto expect = [&](const char* array, const Ints& got) {
      if (got != values<int32_t>(file.at(array)))
        report(__FILE__, __LINE__, join(name, ": ", array));
    };
    expect("tokens", tree.tokens);
    expect("parents", tree.parents);
    expect("depths", tree.depths);
    expect("first_child", tree.first_child);
    expect("next_sibling", tree.next_sibling);
    if (!same_bits(tree.logw, values<double>(file.at("logw"))))
      report(__FILE__, __LINE__, join(name, ": logw"));
  }
}

// The definition, without a heap: at each step every node's next child competes, paths written out.
Tree slow_build(const Floats& logprobs, const Ints& ids, int64_t depth, int64_t width,
                int64_t budget) {
  struct Node {
    Ints path;
    int32_t parent;
    double logw;
    int32_t children = 0;
    double last_child = 0;
  };
  std::vector<Node> nodes = {{{}, -1, 0.0}};
  while (static_cast<int64_t>(nodes.size()) <= budget) {
    int64_t best_parent = -1;
    double best = 0;
    Ints best_path;
    for (size_t n = 0; n < nodes.size(); ++n) {
      const auto d = static_cast<int64_t>(nodes[n].path.size());
      const int32_t rank = nodes[n].children;
      if (d == depth || rank == width) continue;
      const float* row = logprobs.data() + d * width;
      bool ended = false;
      for (int32_t r = 0; r <= rank; ++r) ended = ended || !std::isfinite(row[r]);
      if (ended) continue;
      const double logw =
          rank == 0 ? nodes[n].logw + row[0]
                    : (nodes[n].last_child - static_cast<double>(row[rank - 1])) + row[rank];
      Ints path = nodes[n].path;
      path.push_back(rank);
      if (best_parent < 0 || logw > best || (logw == best && path < best_path)) {
        best_parent = static_cast<int64_t>(n);
        best = logw;
        best_path = path;
      }
    }
    if (best_parent < 0) break;
    ++nodes[best_parent].children;
    nodes[best_parent].last_child = best;
    nodes.push_back({best_path, static_cast<int32_t>(best_parent), best});
  }
  Tree tree;
  for (const Node& node : nodes) {
    const auto d = static_cast<int64_t>(node.path.size());
    tree.tokens.push_back(d == 0 ? -1 : ids[(d - 1) * width + node.path.back()]);
    tree.parents.push_back(node.parent);
    tree.depths.push_back(static_cast<int32_t>(d));
    tree.logw.push_back(node.logw);
  }
  tree.first_child.assign(nodes.size(), -1);
  tree.next_sibling.assign(nodes.size(), -1);
  for (size_t n = nodes.size(); n-- > 1;) {
    tree.next_sibling[n] = tree.first_child[tree.parents[n]];
    tree.first_child[tree.parents[n]] = static_cast<int32_t>(n);
  }
  return tree;
}

// Random candidates, each row descending: rounded to bf16, or to eighths for many equal sums, and
// some with a tail that is no number.
void random_candidates(Random& random, int64_t depth, int64_t width, bool eighths, Floats& logprobs,
                       Ints& ids) {
  for (int64_t d = 0; d < depth; ++d) {
    Floats row;
    for (int64_t r = 0; r < width; ++r) {
      const float x = bf16_to_float(float_to_bf16(-4 + random.uniform(3.99f)));
      row.push_back(eighths ? std::round(x * 2) / 8 : x);
    }
    std::sort(row.begin(), row.end(), std::greater<float>());
    if (random.below(6) == 0) {
      for (int64_t r = random.below(width); r < width; ++r)
        row[r] = random.below(4) == 0 ? kNan : -kInfinity;
    }
    append(logprobs, row);
    for (int64_t r = 0; r < width; ++r) ids.push_back(static_cast<int32_t>(random.below(1000)));
  }
}

void expect_slow_build(const Floats& logprobs, const Ints& ids, int64_t depth, int64_t width,
                       int64_t budget) {
  const Tree tree = build(backend(), logprobs, ids, depth, width, budget);
  const Tree slow = slow_build(logprobs, ids, depth, width, budget);
  if (tree.tokens != slow.tokens || tree.parents != slow.parents || tree.depths != slow.depths ||
      tree.first_child != slow.first_child || tree.next_sibling != slow.next_sibling ||
      tree.logw != slow.logw) {
    report(__FILE__, __LINE__, join("depth ", depth, ", width ", width, ", budget ", budget));
  }
}

KDT_TEST(random_inputs_against_a_slow_build) {
  Random random(2026);
  for (int i = 0; i < (large_cases() ? 10000 : 500); ++i) {
    const int64_t depth = 1 + random.below(8), width = 1 + random.below(12),
                  budget = random.below(41);
    Floats logprobs;
    Ints ids;
    random_candidates(random, depth, width, i % 2 == 1, logprobs, ids);
    expect_slow_build(logprobs, ids, depth, width, budget);
  }
}

KDT_TEST(every_size_against_a_slow_build) {
  Random random(4);
  for (int64_t depth : {1, 2, 15, 64}) {
    for (int64_t width : {1, 2, 31, 64, 65, 256}) {
      for (int64_t budget : {0, 1, 63, 64, 65, 255, 256}) {
        Floats logprobs;
        Ints ids;
        random_candidates(random, depth, width, budget % 2 == 0, logprobs, ids);
        expect_slow_build(logprobs, ids, depth, width, budget);
      }
    }
  }
  expect_slow_build({}, {}, 0, 5, 3);
  expect_slow_build({}, {}, 3, 0, 3);
}

KDT_TEST(sums_that_are_no_log_probabilities) {
  // Any float is summed and ordered: positive ones, both zeros, what overflows f32 only.
  const Floats logprobs = {3e38f, 2.0f,  -0.0f, 0.0f,  3e38f, 1.0f,
                           0.0f,  -0.0f, -0.0f, -0.0f, 0.0f,  -3e38f};
  const Ints ids = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12};
  for (int64_t depth : {1, 2, 3, 4, 6}) {
    for (int64_t budget : {1, 5, 100}) expect_slow_build(logprobs, ids, depth, 12 / depth, budget);
  }
  expect_slow_build({kInfinity, 0}, {1, 2}, 1, 2, 3);
  expect_slow_build({kNan, 0}, {1, 2}, 1, 2, 3);
  expect_slow_build({0, kNan, 0}, {1, 2, 3}, 1, 3, 3);
  // The bits of zeros are those of the sums.
  EXPECT(same_bits(build(backend(), {-0.0f, -0.0f}, {1, 2}, 2, 1, 2).logw, {0.0, -0.0, -0.0}));
}

KDT_TEST(the_largest_tree) {
  // A heap of the greatest size: every node brings a sibling and a child.
  const Floats logprobs(64 * 256, -1.0f);
  const Ints ids(64 * 256, 5);
  EXPECT_EQ(build(backend(), logprobs, ids, 64, 256, 256).tokens.size(), 257u);
  const Floats sure(64 * 256, 0.0f);  // all sums equal: the order is the paths'
  const Tree tree = build(backend(), sure, ids, 64, 256, 256),
             slow = slow_build(sure, ids, 64, 256, 256);
  EXPECT(tree.parents == slow.parents);
  EXPECT(tree.depths == slow.depths);
}

KDT_TEST(trees_too_large_are_refused) {
  Backend& b = backend();
  const auto try_build = [&](int64_t depth, int64_t width, int64_t budget) {
    build(b, Floats(depth * width, -1.0f), Ints(depth * width, 0), depth, width, budget);
  };
  EXPECT_THROWS("tree_build: budget 257, at most 256", try_build(2, 2, 257));
  EXPECT_THROWS("tree_build: depth 65, at most 64", try_build(65, 2, 4));
}

// Walking.

struct Accepted {
  Ints slots;
  int32_t length, bonus;
};

Accepted accept(Backend& b, const Ints& tokens, const Ints& first_child, const Ints& next_sibling,
                const Ints& target) {
  const auto n = static_cast<int64_t>(tokens.size());
  const Buffer inputs[] = {upload(b, tokens), upload(b, first_child), upload(b, next_sibling),
                           upload(b, target)};
  const Buffer accepted = int_output(b, {n}), length = int_output(b, {1}),
               bonus = int_output(b, {1});
  b.tree_accept({.tokens = inputs[0].tensor,
                 .first_child = inputs[1].tensor,
                 .next_sibling = inputs[2].tensor,
                 .target = inputs[3].tensor,
                 .accepted = accepted.tensor,
                 .accept_length = length.tensor,
                 .bonus_token = bonus.tensor});
  Accepted result{download<int32_t>(b, accepted.tensor), download<int32_t>(b, length.tensor)[0],
                  download<int32_t>(b, bonus.tensor)[0]};
  KDT_CHECK(result.length >= 1 && result.length <= n, "accept_length ", result.length, " of ", n);
  result.slots.resize(result.length);
  return result;
}

KDT_TEST(accept_bundles) {
  for (const char* name : {"accept", "accept_wide"}) {
    const KdtrFile file = bundle(name);
    const Ints tokens = values<int32_t>(file.at("tokens")),
               targets = values<int32_t>(file.at("target_tokens"));
    const Ints slots = values<int32_t>(file.at("accepted")),
               lengths = values<int32_t>(file.at("accept_length"));
    const Ints bonus = values<int32_t>(file.at("bonus"));
    const auto n = static_cast<int64_t>(tokens.size());
    for (int64_t c = 0; c < static_cast<int64_t>(lengths.size()); ++c) {
      const Accepted result =
          accept(backend(), tokens, values<int32_t>(file.at("first_child")),
                 values<int32_t>(file.at("next_sibling")), slice(targets, c * n, n));
      EXPECT_EQ(result.length, lengths[c]);
      EXPECT_EQ(result.bonus, bonus[c]);
      EXPECT(result.slots == slice(slots, c * n, lengths[c]));
    }
  }
}

KDT_TEST(accept_of_the_root_alone) {
  const Accepted result = accept(backend(), {-1}, {-1}, {-1}, {42});
  EXPECT(result.slots == Ints({0}));
  EXPECT_EQ(result.bonus, 42);
  // A target of -1 (no number in its logits) matches no slot, the root's own -1 included.
  EXPECT_EQ(accept(backend(), {-1, 7}, {1, -1}, {-1, -1}, {-1, 3}).length, 1);
}

KDT_TEST(accept_of_random_trees) {
  Random random(11);
  for (int i = 0; i < (large_cases() ? 10000 : 500); ++i) {
    const int64_t slots = 1 + random.below(i % 50 == 0 ? 257 : 20);
    Ints tokens = {-1}, parents = {-1}, target;
    Ints first_child(slots, -1), next_sibling(slots, -1);
    for (int64_t slot = 1; slot < slots; ++slot) {
      tokens.push_back(static_cast<int32_t>(random.below(6)));  // siblings may carry the same
      // Chains, stars and what lies between.
      parents.push_back(static_cast<int32_t>(i % 4 == 0 ? slot - 1 : random.below(slot)));
    }
    for (int64_t slot = slots; slot-- > 1;) {
      next_sibling[slot] = first_child[parents[slot]];
      first_child[parents[slot]] = static_cast<int32_t>(slot);
    }
    for (int64_t slot = 0; slot < slots; ++slot) {
      const bool follows = slot + 1 < slots && random.below(4) != 0;
      target.push_back(follows ? tokens[slot + 1] : static_cast<int32_t>(random.below(6)));
    }
    Ints walked = {0};
    for (int64_t slot = 1; slot < slots; ++slot) {
      if (parents[slot] == walked.back() && tokens[slot] == target[walked.back()])
        walked.push_back(static_cast<int32_t>(slot));
    }
    const Accepted result = accept(backend(), tokens, first_child, next_sibling, target);
    if (result.slots != walked || result.bonus != target[walked.back()])
      report(__FILE__, __LINE__, join("case ", i, " of ", slots, " slots"));
  }
}

KDT_TEST(accept_refuses_links_that_lead_astray) {
  Backend& b = backend();
  // On a GPU the fault is reported at the next synchronization.
  const auto message = [](int from, int to) {
    return on_cpu() ? join("tree_accept: link from slot ", from, " to ", to)
                    : join("link to slot ", to, " at row ", from);
  };
  EXPECT_THROWS(message(0, 3), accept(b, {-1, 7, 8}, {3, -1, -1}, {-1, -1, -1}, {7, 0, 0}));
  EXPECT_THROWS(message(0, 0), accept(b, {-1, 7, 8}, {0, -1, -1}, {-1, -1, -1}, {7, 0, 0}));
  EXPECT_THROWS(message(1, 1), accept(b, {-1, 7, 8}, {1, -1, -1}, {-1, 1, -1}, {8, 0, 0}));
  EXPECT_THROWS(message(0, -2), accept(b, {-1, 7, 8}, {-2, -1, -1}, {-1, -1, -1}, {8, 0, 0}));
  EXPECT_THROWS(message(2, 1), accept(b, {-1, 7, 8}, {2, -1, -1}, {-1, -1, 1}, {9, 0, 0}));
  // What the walk does not reach is not looked at, and no fault is left over.
  EXPECT_EQ(accept(b, {-1, 7, 8}, {1, 99, -1}, {-1, 2, 99}, {8, 0, 0}).length, 2);
}

}  // namespace
}  // namespace kdt::test

KDT_OP_TEST_MAIN
