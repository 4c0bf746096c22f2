import math

import numpy as np
import pytest

from kdtree_engine.reference.attention import gqa_attention, mla_attention


def attend(query, keys, values, scale):
    """One query over a list of keys, in plain Python."""
    scores = [scale * math.fsum(a * b for a, b in zip(query, k, strict=True)) for k in keys]
    weights = [math.exp(s - max(scores)) for s in scores]
    total = math.fsum(weights)
    return [
        math.fsum(w * v[c] for w, v in zip(weights, values, strict=True)) / total
        for c in range(len(values[0]))
    ]


@pytest.mark.parametrize("prefix", [0, 1, 11])
def test_a_slot_attends_to_the_prefix_and_its_path(prefix):
    rng = np.random.default_rng(prefix)
    parents = [-1, 0, 0, 1, 1, 2, 5, 0]
    paths = [[0], [0, 1], [0, 2], [0, 1, 3], [0, 1, 4], [0, 2, 5], [0, 2, 5, 6], [0, 7]]
    heads, rank, rotary, scale = 3, 6, 4, 0.3
    q_latent = rng.standard_normal((8, heads, rank))
    q_rope = rng.standard_normal((8, heads, rotary))
    latent = rng.standard_normal((prefix + 8, rank + rotary))
    out = mla_attention(q_latent, q_rope, latent, parents, scale)
    assert out.shape == (8, heads, rank)
    for slot, head in np.ndindex(8, heads):
        seen = latent[[*range(prefix), *(prefix + s for s in paths[slot])]]
        query = [*q_latent[slot, head], *q_rope[slot, head]]
        want = attend(query, seen, seen[:, :rank], scale)
        assert np.allclose(out[slot, head], want, rtol=1e-12, atol=1e-12)


def test_float32_is_kept_when_asked_for():
    rng = np.random.default_rng(0)
    q, r, latent = (
        rng.standard_normal(s).astype(np.float32) for s in ((2, 2, 4), (2, 2, 2), (5, 6))
    )
    exact = mla_attention(q, r, latent, [-1, 0], 0.5)
    single = mla_attention(q, r, latent, [-1, 0], 0.5, np.float32)
    assert (exact.dtype, single.dtype) == (np.float64, np.float32)
    assert np.allclose(exact, single, atol=1e-6)


@pytest.mark.parametrize("context", [0, 9])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [0, 1, 4, 100])
def test_a_block_sees_what_window_and_causality_allow(context, causal, window):
    rng = np.random.default_rng(1)
    q = rng.standard_normal((5, 4, 8))
    k, v = rng.standard_normal((2, context + 5, 2, 8))
    out = gqa_attention(q, k, v, context, causal, window, 0.35)
    for row, head in np.ndindex(5, 4):
        at = context + row
        seen = [
            j
            for j in range(context + 5)
            if not (causal and j > at) and not (window and at - j >= window)
        ]
        want = attend(q[row, head], k[seen, head // 2], v[seen, head // 2], 0.35)
        assert np.allclose(out[row, head], want, rtol=1e-12, atol=1e-12)
