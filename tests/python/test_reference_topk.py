import math

import numpy as np
import pytest

from kdtree_engine.reference.topk import argmax, merge_topk, topk_logprobs

INF = float("inf")


def test_log_probabilities_are_over_the_whole_vocabulary():
    logits = np.log([[1.0, 4.0, 2.0, 1.0]])
    logprobs, ids = topk_logprobs(logits, 2)
    assert ids.tolist() == [[1, 2]]
    assert np.allclose(np.exp(logprobs), [[0.5, 0.25]], rtol=1e-6)
    assert logprobs.dtype == np.float32 and ids.dtype == np.int32


@pytest.mark.parametrize("coarse", [False, True])  # many ties
def test_agrees_with_exact_sums(coarse):
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((20, 3000)).astype(np.float32) * 8
    if coarse:
        logits = np.round(logits / 4)
    logprobs, ids = topk_logprobs(logits, 50)
    for row, lp, tokens in zip(logits, logprobs, ids, strict=True):
        values = [float(x) for x in row]
        order = sorted(range(len(values)), key=lambda i, v=values: (-v[i], i))[:50]
        assert tokens.tolist() == order
        top = max(values)
        lse = np.float32(math.log(math.fsum(math.exp(x - top) for x in values)) + top)
        assert np.array_equal(lp, np.array([np.float32(values[i]) - lse for i in order]))


def test_equals_go_by_lower_id_whatever_the_sign_of_zero():
    logits = np.array([[2, 5, 5, 0, 5], [0.0, -0.0, 0.0, -0.0, 0.0]], np.float32)
    _, ids = topk_logprobs(logits, 4)
    assert ids.tolist() == [[1, 2, 4, 0], [0, 1, 2, 3]]


def test_masked_and_nan_logits_come_last():
    logprobs, ids = topk_logprobs([[-INF, 0.0, np.nan, 0.0, -INF]], 4)
    assert ids.tolist() == [[1, 3, 0, 2]]
    assert np.allclose(logprobs, [[math.log(0.5)] * 2 + [-INF] * 2])


@pytest.mark.parametrize("row", [[-INF] * 3, [np.nan] * 3, [np.nan, -INF, -INF], [0, INF, 1]])
def test_a_row_without_a_distribution_has_no_finite_log_probability(row):
    logprobs, ids = topk_logprobs([row], 2)
    assert logprobs.tolist() == [[-INF, -INF]]
    assert len(set(ids[0])) == 2


def test_temperature_divides_the_logits():
    logits = np.array([[3.0, 1.0, 2.0]], np.float32)
    assert np.array_equal(topk_logprobs(logits, 3, 0.25)[0], topk_logprobs(logits * 4, 3)[0])


def test_the_order_is_that_before_the_temperature():
    close = np.array([[1.75, np.nextafter(np.float32(1.75), np.float32(2))]], np.float32)
    assert close[0, 0] / np.float32(1.7) == close[0, 1] / np.float32(1.7)
    assert topk_logprobs(close, 2, 1.7)[1].tolist() == [[1, 0]]


def test_large_logits_do_not_overflow():
    logprobs, _ = topk_logprobs([[3e38, -3e38, 1e38], [-1e4, -1e4, -1e4]], 3)
    assert logprobs[0, 0] == 0 and np.isfinite(logprobs[0, 1])
    assert np.allclose(logprobs[1], -math.log(3), atol=1e-3)  # float32 of 1e4 is this coarse


@pytest.mark.parametrize("k, temperature", [(0, 1), (4, 1), (2, 0), (2, -1), (2, np.nan)])
def test_refuses_what_has_no_meaning(k, temperature):
    with pytest.raises(ValueError, match=r"k is|temperature is"):
        topk_logprobs(np.zeros((1, 3)), k, temperature)


@pytest.mark.parametrize("parts", [1, 2, 5])
def test_parts_give_the_whole(parts):
    rng = np.random.default_rng(parts)
    logits = np.round(rng.normal(0, 4, (6, 30))).astype(np.float32)  # many equals
    logits[1, rng.random(30) < 0.8] = -INF
    logits[2] = -INF
    logits[3, :15] = -INF
    logits[4, 7] = INF
    cut = logits.reshape(6, parts, -1).swapaxes(0, 1)
    order = np.argsort(-cut, axis=-1, kind="stable")
    with np.errstate(divide="ignore"):
        sums = np.log(np.exp(cut.astype(np.float64)).sum(axis=-1))
    ids = order + (np.arange(parts) * (30 // parts))[:, None, None]
    got = merge_topk(np.take_along_axis(cut, order, axis=-1), ids, sums, 9)
    want = topk_logprobs(logits, 9)
    assert np.array_equal(got[1], want[1]) and got[1].dtype == np.int32
    assert np.allclose(got[0], want[0], rtol=0, atol=1e-6) and got[0].dtype == np.float32
    with pytest.raises(ValueError, match="k is 10, want 1 to the 9"):
        merge_topk(np.zeros((3, 1, 3)), np.zeros((3, 1, 3)), np.zeros((3, 1)), 10)


def test_argmax_takes_the_first_greatest_number():
    rows = [[1, 3, 3], [np.nan, 2, 1], [np.nan, -INF, -INF], [np.nan] * 3, [1, INF, np.nan]]
    assert argmax(rows).tolist() == [1, 1, 1, -1, 1]
