import math

import numpy as np
import pytest

from kdtree_engine.reference import moe


def route_by_hand(logits, bias, top_k, n_group, topk_group, norm, scale):
    """The rules in plain Python, for one row."""
    score = [1 / (1 + math.exp(-x)) for x in logits]
    choice = [s + b for s, b in zip(score, bias, strict=True)]
    size = len(logits) // n_group
    groups = [range(g * size, (g + 1) * size) for g in range(n_group)]
    worth = [sum(sorted((choice[e] for e in g), reverse=True)[:2]) for g in groups]
    kept = sorted(range(n_group), key=lambda g: (-worth[g], g))[:topk_group]
    eligible = [e for g in kept for e in groups[g]] if n_group > 1 else range(len(logits))
    ids = sorted(eligible, key=lambda e: (-choice[e], e))[:top_k]
    total = sum(score[e] for e in ids) + 1e-20 if norm else 1
    return ids, [score[e] / total * scale for e in ids]


@pytest.mark.parametrize("coarse", [False, True])
@pytest.mark.parametrize("n_group, topk_group", [(1, 1), (4, 2), (8, 1)])
@pytest.mark.parametrize("norm", [False, True])
def test_agrees_with_the_rules_by_hand(coarse, n_group, topk_group, norm):
    rng = np.random.default_rng(n_group)
    logits = rng.standard_normal((40, 32)) * 2
    bias = rng.standard_normal(32) * 0.2
    if coarse:  # many exact ties, decided by the lower id
        logits, bias = logits.round(), np.zeros(32)
    ids, weights = moe.route(logits, bias, 4, n_group, topk_group, norm, 2.5, np.float64)
    for row in range(40):
        want = route_by_hand(logits[row], bias, 4, n_group, topk_group, norm, 2.5)
        assert ids[row].tolist() == want[0]
        assert np.allclose(weights[row], want[1], rtol=1e-12)


def test_the_bias_chooses_and_does_not_weigh():
    ids, weights = moe.route([[0.0, 0.0, 0.0]], [0.0, 0.0, 1.0], 2, scale=3.0)
    assert ids.tolist() == [[2, 0]]
    assert np.allclose(weights, 1.5)


def test_an_expert_whose_logit_is_nan_is_never_chosen():
    nan = np.nan
    logits = [[nan] * 4, [nan, nan, nan, -1.0], [nan, -1.0, nan, -np.inf]]
    ids, weights = moe.route(logits, [9.0, 0, 0, 0], 2)
    assert ids.tolist() == [[-1, -1], [3, -1], [1, 3]]
    assert weights.tolist() == [[0, 0], [1, 0], [1, 0]]
    out = moe.experts(np.ones((1, 2)), ids[:1], weights[:1], [(np.ones((2, 2)),) * 3] * 4)
    assert not out.any()


def test_groups_of_nan_come_last():
    logits = [[np.nan, np.nan, -5.0, -6.0, 1.0, np.nan]]
    assert moe.route(logits, np.zeros(6), 2, 3, 1)[0].tolist() == [[2, 3]]


@pytest.mark.parametrize("top_k, n_group, topk_group", [(2, 3, 1), (9, 1, 1), (5, 2, 1), (1, 2, 3)])
def test_refuses_impossible_groups(top_k, n_group, topk_group):
    with pytest.raises(ValueError, match="group"):
        moe.route(np.zeros((1, 8)), np.zeros(8), top_k, n_group, topk_group)


def test_experts_are_weighted_and_added():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 3))
    matrices = [tuple(rng.standard_normal(s) for s in ((4, 3), (4, 3), (3, 4))) for _ in range(3)]

    def expert(e, v):
        gate, up, down = matrices[e]
        z = gate @ v
        return down @ (z / (1 + np.exp(-z)) * (up @ v))

    out = moe.experts(x, np.array([[2, 0], [1, 1]]), np.array([[0.5, 2.0], [1.0, 3.0]]), matrices)
    assert np.allclose(out[0], 0.5 * expert(2, x[0]) + 2 * expert(0, x[0]))
    assert np.allclose(out[1], 4 * expert(1, x[1]))
