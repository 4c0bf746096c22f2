import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kdtree_engine.reference.sampling import _mix, distribution, draw, uniform
from kdtree_engine.reference.topk import argmax

INF, NAN = float("inf"), float("nan")
LAST = math.nextafter(1, 0)

# Probabilities 0.4, 0.3, 0.2, 0.1, not in the order of their ids.
LOGITS = np.log([0.1, 0.4, 0.2, 0.3])


@pytest.mark.parametrize(
    ("options", "want"),
    [
        ({}, [0.1, 0.4, 0.2, 0.3]),
        ({"top_k": 2}, [0, 4 / 7, 0, 3 / 7]),
        ({"top_k": 9}, [0.1, 0.4, 0.2, 0.3]),
        ({"top_p": 0.69}, [0, 4 / 7, 0, 3 / 7]),
        ({"top_p": 0.71}, [0, 4 / 9, 2 / 9, 3 / 9]),
        ({"top_p": 1e-9}, [0, 1, 0, 0]),
        ({"min_p": 0.45}, [0, 4 / 9, 2 / 9, 3 / 9]),
        ({"min_p": 0.55}, [0, 4 / 7, 0, 3 / 7]),
        ({"min_p": 1.0}, [0, 1, 0, 0]),
        # top-p counts the mass that top-k and min-p left: 0.4 and 0.3 of 0.9.
        ({"top_k": 3, "top_p": 0.77}, [0, 4 / 7, 0, 3 / 7]),
        ({"min_p": 0.45, "top_p": 0.79}, [0, 4 / 9, 2 / 9, 3 / 9]),
        ({"top_k": 2, "min_p": 0.45}, [0, 4 / 7, 0, 3 / 7]),
        ({"top_k": 3, "min_p": 0.55}, [0, 4 / 7, 0, 3 / 7]),
    ],
)
def test_what_is_left_of_a_distribution(options, want):
    assert np.allclose(distribution(LOGITS, 1.0, **options), want, rtol=1e-12)


def test_temperature_comes_first():
    squared = np.array([1, 16, 4, 9]) / 30  # 16 and 9 of 30 are 0.83
    assert np.allclose(distribution(LOGITS, 0.5), squared)
    assert np.allclose(distribution(LOGITS, 0.5, top_p=0.83), [0, 16 / 25, 0, 9 / 25])
    assert np.allclose(distribution(LOGITS, 0.5, min_p=0.5), [0, 16 / 25, 0, 9 / 25])


def test_tokens_are_drawn_in_the_order_of_their_logits():
    for u, token in ((0.0, 1), (0.399, 1), (0.401, 3), (0.699, 3), (0.701, 2), (0.901, 0)):
        assert draw(LOGITS, 1.0, 0, 1.0, 0.0, u) == token
    assert draw(LOGITS, 1.0, 0, 1.0, 0.0, LAST) == 0
    assert draw(LOGITS, 1.0, 2, 1.0, 0.0, 0.571) == 1  # 4 / 7 is 0.5714
    assert draw(LOGITS, 1.0, 2, 1.0, 0.0, 0.572) == 3


def test_equals_go_by_lower_id_and_a_cumulative_mass_must_exceed():
    row = [0.0, 2.0, -0.0, 2.0, 2.0, 2.0]
    assert [draw(row, 1.0, 4, 1.0, 0.0, u) for u in (0, 0.2499, 0.25, 0.5, 0.75, LAST)] == [
        1, 1, 3, 4, 5, 5,
    ]  # fmt: skip
    assert np.array_equal(distribution(row, 1.0, top_k=3), [0, 1 / 3, 0, 1 / 3, 1 / 3, 0])
    assert np.array_equal(distribution(row, 1.0, top_k=4, top_p=0.5), [0, 0.5, 0, 0.5, 0, 0])
    assert np.array_equal(distribution(row, 1.0, top_k=5)[[0, 2]] > 0, [True, False])
    assert np.array_equal(distribution(row, 1.0, min_p=1.0), [0, 0.25, 0, 0.25, 0.25, 0.25])


def test_what_is_no_number_is_never_drawn():
    row = [NAN, 0.0, -INF, 0.0, NAN]
    assert np.array_equal(distribution(row, 1.0), [0, 0.5, 0, 0.5, 0])
    assert [draw(row, 1.0, k, 1.0, 0.0, u) for k in (0, 4) for u in (0.0, LAST)] == [1, 3, 1, 3]


@pytest.mark.parametrize("row", [[NAN] * 3, [-INF] * 3, [NAN, -INF, NAN], [0.0, INF, NAN]])
def test_a_row_without_a_distribution_has_no_token(row):
    for options in ((0, 1.0, 0.0), (2, 0.5, 0.1)):
        assert draw(row, 1.0, *options, 0.5) == -1
        assert not distribution(row, 1.0, *options).any()


def test_extreme_temperatures():
    row = np.array([3e38, 1.0, -3e38], np.float32)
    assert np.array_equal(distribution(row, 1e-3), [1, 0, 0])
    assert np.array_equal(distribution(row, 1e3), [1, 0, 0])
    assert np.allclose(distribution([0.0, 1.0, 2.0], 1e3), 1 / 3, atol=1e-3)
    close = [1.0, 1.0 + 1e-3]
    assert np.allclose(distribution(close, 1e-3), np.array([1, math.e]) / (1 + math.e))


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("temperature", [0, -1, 9e-4, 1001, NAN]),
        ("top_k", [-1]),
        ("top_p", [0, -0.1, 1.1, NAN]),
        ("min_p", [-0.1, 1.1, NAN]),
    ],
)
def test_options_out_of_range_are_named(name, values):
    for value in values:
        with pytest.raises(ValueError, match=f"^{name} is "):
            distribution(LOGITS, **{"temperature": 1.0, name: value})


# ---------------------------------------------------------------- against the definitions

ROWS = st.lists(st.integers(-40, 40).map(lambda n: n / 4), min_size=1, max_size=30)  # with equals
OPTIONS = st.tuples(st.floats(0.05, 20), st.integers(0, 32), st.floats(0.01, 1), st.floats(0, 1))


def by_definition(row, temperature, top_k, top_p, min_p):
    """{id: probability} by one filter after another, in the order of drawing."""
    total = math.fsum(math.exp(x / temperature) for x in row)
    p = {i: math.exp(x / temperature) / total for i, x in enumerate(row)}
    ranked = sorted(p, key=lambda i: (-row[i], i))
    bound = min_p * p[ranked[0]]
    assume(all(i == ranked[0] or abs(p[i] - bound) > 1e-9 * bound for i in p))
    kept = [i for i in (ranked[:top_k] if top_k else ranked) if i == ranked[0] or p[i] >= bound]
    whole = math.fsum(p[i] for i in kept)
    nucleus, mass = [], 0.0
    for i in kept:
        assume(not nucleus or top_p == 1 or abs(mass - top_p * whole) > 1e-9)
        if nucleus and mass >= top_p * whole and top_p < 1:
            break
        nucleus.append(i)
        mass += p[i]
    return {i: p[i] / mass for i in nucleus}


@settings(max_examples=500, deadline=None)
@given(ROWS, OPTIONS)
def test_agrees_with_the_definitions(row, options):
    want = by_definition(row, *options)
    got = distribution(row, *options)
    assert set(np.flatnonzero(got)) == set(want)
    assert all(got[i] == pytest.approx(q, rel=1e-9) for i, q in want.items())
    below = 0.0
    for i, q in want.items():
        if q > 1e-9:
            assert draw(row, *options, below + q / 2) == i
        below += q


@settings(max_examples=200, deadline=None)
@given(ROWS, OPTIONS, st.floats(0, LAST))
def test_properties(row, options, u):
    temperature, _, top_p, min_p = options
    token, best = draw(row, *options, u), int(argmax([row])[0])
    assert distribution(row, *options)[token] > 0
    assert draw(row, temperature, 1, top_p, min_p, u) == best  # top-k of 1
    assert draw(row, *options, 0.0) == best
    padded = [*row, -INF, NAN]
    assert draw(padded, *options, u) == token
    assert draw(np.add(row, 64.0), *options, u) == token  # exact: quarters


@pytest.mark.torch
@pytest.mark.parametrize("seed", range(20))
def test_agrees_with_the_filters_of_transformers(seed):
    torch = pytest.importorskip("torch")
    filters = pytest.importorskip("transformers.generation.logits_process")
    rng = np.random.default_rng(seed)
    row = rng.normal(0, 3, 500)
    temperature, top_p, min_p = rng.uniform((0.3, 0.3, 0), (2, 1, 0.05))
    top_k = int(rng.integers(1, 500))
    scores = torch.tensor(row)[None]
    for one in (
        filters.TemperatureLogitsWarper(float(temperature)),
        filters.MinPLogitsWarper(float(min_p)),
        filters.TopKLogitsWarper(top_k),
        filters.TopPLogitsWarper(float(top_p)),
    ):
        scores = one(None, scores)
    want = scores.softmax(-1)[0].numpy()
    assert np.allclose(distribution(row, temperature, top_k, top_p, min_p), want, rtol=1e-9)


# ---------------------------------------------------------------- the numbers


def test_the_generator_is_splitmix64():
    """Its published outputs for the seed 1234567."""
    stream = [(1234567 + i * 0x9E3779B97F4A7C15) % 2**64 for i in range(5)]
    assert [_mix(x) for x in stream] == [
        6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431,
        16408922859458223821,
    ]  # fmt: skip


def test_numbers_have_53_bits_and_depend_on_seed_and_position():
    assert uniform(3, 5) == (_mix((_mix(3) + 5 * 0x9E3779B97F4A7C15) % 2**64) >> 11) / 2**53
    many = [uniform(s, p) for s in (0, 1, 2**63 - 1) for p in (0, 1, 2, 10**7)]
    assert len(set(many)) == len(many) and all(0 <= u < 1 for u in many)
    assert all((u * 2**53).is_integer() for u in many)


def chi_square(values, bins):
    """Of values in [0, 1), by its distance from the mean in standard deviations."""
    counts = np.bincount((np.asarray(values) * bins).astype(int), minlength=bins)
    expected = len(values) / bins
    chi2 = ((counts - expected) ** 2 / expected).sum()
    return (chi2 - (bins - 1)) / math.sqrt(2 * (bins - 1))


STREAMS = {
    **{f"positions of seed {s}": [(s, p) for p in range(40_000)] for s in (0, 1, 2**63 - 1)},
    "seeds at position 0": [(s, 0) for s in range(40_000)],
    "seeds at position 9": [(s, 9) for s in range(40_000)],
    "seeds and positions together": [(p, p) for p in range(40_000)],
    "seeds far apart": [(s << 40, 100) for s in range(40_000)],
}


@pytest.mark.parametrize("name", STREAMS)
def test_numbers_are_uniform_and_their_neighbours_independent(name):
    u = np.array([uniform(*pair) for pair in STREAMS[name]])
    assert abs(chi_square(u, 256)) < 5
    bits = (u * 2**53).astype(np.int64)
    assert abs(chi_square((bits & 255) / 256, 256)) < 5  # the lowest bits too
    for lag in (1, 2, 16):
        a, b = u[:-lag], u[lag:]
        assert abs(np.corrcoef(a, b)[0, 1]) < 5 / math.sqrt(len(a))
        pairs = ((a * 16).astype(int) * 16 + (b * 16).astype(int)) / 256
        assert abs(chi_square(pairs, 256)) < 5


def test_neighbouring_seeds_are_independent_at_every_position():
    u = np.array([[uniform(s, p) for p in range(10_000)] for s in range(4)])
    correlations = np.corrcoef(u)[np.triu_indices(4, 1)]
    assert np.abs(correlations).max() < 5 / math.sqrt(10_000)


def test_draws_have_the_distribution():
    want = distribution(LOGITS, 0.8, top_p=0.95)
    draws = [draw(LOGITS, 0.8, 0, 0.95, 0.0, uniform(11, p)) for p in range(20_000)]
    counts, possible = np.bincount(draws, minlength=4), want > 0
    assert not counts[~possible].any()
    expected = 20_000 * want[possible]
    chi2 = ((counts[possible] - expected) ** 2 / expected).sum()
    freedom = possible.sum() - 1
    assert chi2 < freedom + 5 * math.sqrt(2 * freedom)
