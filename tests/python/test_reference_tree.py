import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kdtree_engine.reference.topk import topk_logprobs
from kdtree_engine.reference.tree import build_tree, links, visibility

INF = float("inf")


def rank_paths(tree):
    """The rank path of each slot, from the tree's arrays."""
    return [tuple(int(tree.rank[s]) for s in tree.path(slot)[1:]) for slot in range(len(tree.rank))]


def ids_like(logprobs):
    lp = np.asarray(logprobs)
    return np.arange(100, 100 + lp.size, dtype=np.int32).reshape(lp.shape)


def build(logprobs, budget):
    lp = np.asarray(logprobs, np.float32)
    return build_tree(lp, ids_like(lp), budget)


def test_golden_vector_without_ties():
    p = [[0.6, 0.2, 0.1, 0.05], [0.5, 0.3, 0.1, 0.05], [0.7, 0.1, 0.05, 0.05]]
    tree = build(np.log(p), 6)
    assert rank_paths(tree) == [(), (0,), (0, 0), (0, 0, 0), (1,), (0, 1), (0, 1, 0)]
    assert tree.parents.tolist() == [-1, 0, 1, 2, 0, 1, 5]
    assert tree.depths.tolist() == [0, 1, 2, 3, 1, 2, 3]
    assert tree.first_child.tolist() == [1, 2, 3, -1, -1, 6, -1]
    assert tree.next_sibling.tolist() == [-1, 4, 5, -1, -1, -1, -1]
    assert tree.tokens.tolist() == [-1, 100, 104, 108, 101, 105, 108]
    q = [1, 0.6, 0.3, 0.21, 0.2, 0.18, 0.126]
    assert np.allclose(np.exp(tree.logw), q, rtol=1e-6)
    assert np.exp(tree.logw).sum() == pytest.approx(2.616, abs=1e-6)
    seen = [{0}, {0, 1}, {0, 1, 2}, {0, 1, 2, 3}, {0, 4}, {0, 1, 5}, {0, 1, 5, 6}]
    assert [set(np.flatnonzero(row)) for row in tree.visibility] == seen


def test_golden_vector_of_ties_goes_by_rank_path():
    tree = build(np.log([[0.5, 0.25, 0.125, 0.125]] * 3), 8)
    want = [(0,), (0, 0), (1,), (0, 0, 0), (0, 1), (1, 0), (2,), (3,)]
    assert rank_paths(tree)[1:] == want
    assert np.allclose(tree.logw[1:] / np.log(0.5), [1, 2, 2, 3, 3, 3, 3, 3])


@pytest.mark.parametrize("shape, budget", [((0, 4), 8), ((4, 0), 8), ((4, 4), 0), ((0, 0), 0)])
def test_nothing_to_draft_leaves_the_root(shape, budget):
    tree = build(np.zeros(shape), budget)
    assert tree.num_nodes == 0
    assert (tree.tokens.tolist(), tree.parents.tolist(), tree.logw.tolist()) == ([-1], [-1], [0])
    assert (tree.first_child.tolist(), tree.next_sibling.tolist()) == ([-1], [-1])
    assert tree.visibility.tolist() == [[True]]


def test_top_1_is_a_chain_and_depth_1_a_star():
    chain = build(np.full((5, 1), -1.0), 64)
    assert chain.parents.tolist() == [-1, 0, 1, 2, 3, 4]
    star = build(-np.arange(1.0, 9.0)[None], 5)
    assert star.parents.tolist() == [-1, 0, 0, 0, 0, 0]
    assert star.next_sibling.tolist() == [-1, 2, 3, 4, 5, -1]


def test_a_log_probability_that_is_not_finite_ends_its_row():
    tree = build([[-1, -2, -INF, -INF], [-1, -INF, -INF, -INF], [-INF] * 4, [-1] * 4], 64)
    assert sorted(rank_paths(tree)) == [(), (0,), (0, 0), (1,), (1, 0)]
    for first in (-INF, INF, np.nan):
        assert build([[first, -1.0], [-1.0, -2.0]], 8).num_nodes == 0
    assert rank_paths(build([[-1.0, np.nan, -1.0]], 8)) == [(), (0,)]


def test_a_sibling_subtracts_first():
    # Numbers for which the three ways to reach the sibling differ in the last bits of float64.
    lp = np.full((3, 2), -INF, np.float32)
    lp[0, 0], lp[1, 0], lp[2] = -10.521369, -1.194726e-09, (-1.0237355e-08, -1.247709e-08)
    a, b, x, y = (float(v) for v in (lp[0, 0], lp[1, 0], lp[2, 0], lp[2, 1]))
    logw = (a + b) + x
    want = (logw - x) + y
    assert want != logw + (y - x) and want != (a + b) + y
    tree = build(lp, 8)
    assert rank_paths(tree)[4] == (0, 0, 1)
    assert tree.logw[4] == want


def test_links_are_in_ascending_slot_order():
    first_child, next_sibling = links([-1, 0, 0, 1, 0, 1])
    assert first_child.tolist() == [1, 3, -1, -1, -1, -1]
    assert next_sibling.tolist() == [-1, 2, 4, 5, -1, -1]


def brute_force(logprobs, budget):
    """The best prefixes by sorting all of them; exact when sums of the log-probabilities are."""
    lp = np.asarray(logprobs, np.float64)
    depths, width = lp.shape
    every = [
        (-sum(lp[d, r] for d, r in enumerate(path)), path)
        for length in range(1, depths + 1)
        for path in itertools.product(range(width), repeat=length)
    ]
    return [path for _, path in sorted(every)[:budget]]


@pytest.mark.parametrize("seed", range(40))
def test_the_tree_is_the_best_set_of_prefixes(seed):
    rng = np.random.default_rng(seed)
    depths, width = rng.integers(1, 5), rng.integers(1, 5)
    levels = 8 if seed % 2 else 1024  # few levels: many ties
    lp = -np.sort(rng.integers(0, levels, (depths, width)), axis=1) / 256  # exact sums
    for budget in (1, 2, 5, 17, 60, 1000):
        assert rank_paths(build(lp, budget))[1:] == brute_force(lp, budget)


def check_invariants(tree, lp, budget):
    n = tree.num_nodes
    depths = len(lp)
    assert n <= budget
    assert (tree.tokens[0], tree.parents[0], tree.depths[0], tree.logw[0]) == (-1, -1, 0, 0)
    assert (np.diff(tree.logw[1:]) <= 0).all()
    assert (tree.parents[1:] < np.arange(1, n + 1)).all()
    assert (tree.depths[1:] == tree.depths[tree.parents[1:]] + 1).all()
    assert tree.depths.max() <= depths
    ids = ids_like(lp)
    assert all(tree.tokens[s] == ids[tree.depths[s] - 1, tree.rank[s]] for s in range(1, n + 1))
    for slot in range(n + 1):
        children = tree.children(slot)
        assert children == sorted(children)
        assert [int(tree.rank[c]) for c in children] == list(range(len(children)))
        assert children == np.flatnonzero(tree.parents == slot).tolist()
        ancestors, above = {slot}, int(tree.parents[slot])
        while above >= 0:
            ancestors.add(above)
            above = int(tree.parents[above])
        assert set(np.flatnonzero(tree.visibility[slot])) == ancestors
        assert tree.visibility[slot].sum() == tree.depths[slot] + 1
    assert np.array_equal(tree.visibility, visibility(tree.parents))
    # As many nodes as there are prefixes, or the budget.
    finite = np.cumprod(np.isfinite(lp), axis=1).sum(axis=1).astype(object)
    assert n == min(budget, sum(np.cumprod(finite))) if depths else n == 0


log_probabilities = st.sampled_from([0.0, -0.5, -0.5, -0.75, -1.0, -3.25, -INF])


@settings(max_examples=300, deadline=None, derandomize=True)
@given(data=st.data(), depths=st.integers(0, 5), width=st.integers(1, 6), budget=st.integers(0, 70))
def test_invariants_on_any_input(data, depths, width, budget):
    row = st.lists(log_probabilities, min_size=width, max_size=width)
    rows = data.draw(st.lists(row, min_size=depths, max_size=depths))
    lp = -np.sort(-np.array(rows, np.float32).reshape(depths, width), axis=1)
    check_invariants(build(lp, budget), lp, budget)


def test_invariants_on_rounded_logits_at_full_size():
    rng = np.random.default_rng(3)
    logits = (rng.standard_normal((7, 4096)) * 16).round() / 8  # coarse, as bf16 makes them
    lp, _ = topk_logprobs(logits, 64)
    tree = build(lp, 64)
    assert len(np.unique(tree.logw)) < len(tree.logw)  # there are ties
    check_invariants(tree, lp, 64)


def test_a_smaller_budget_is_a_prefix_of_a_larger_one():
    lp = -np.sort(np.random.default_rng(4).exponential(2, (6, 20)), axis=1)
    whole = build(lp, 200)
    for budget in (1, 7, 64, 199):
        part = build(lp, budget)
        assert np.array_equal(part.tokens, whole.tokens[: budget + 1])
        assert np.array_equal(part.parents, whole.parents[: budget + 1])
        assert np.array_equal(part.logw, whole.logw[: budget + 1])
