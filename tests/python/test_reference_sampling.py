import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kdtree_engine.reference import sampling
from kdtree_engine.reference.sampling import Noise, _mix, add_noise, distribution, draw
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


class Fixed:
    """Noise that a test chooses."""

    def __init__(self, uniform=0.0, gumbel=None):
        self._uniform, self._gumbel = uniform, gumbel or {}

    def uniform(self):
        return self._uniform

    def gumbel(self, tokens):
        return np.array([self._gumbel.get(int(t), 0.0) for t in tokens])


def test_the_greatest_sum_of_logit_and_noise_is_drawn():
    assert draw(LOGITS, 1.0, 0, 1.0, 0.0, Fixed(LAST)) == 1
    for gap, token in ((math.log(4) - 1e-9, 1), (math.log(4) + 1e-9, 0)):
        assert draw(LOGITS, 1.0, 0, 1.0, 0.0, Fixed(gumbel={0: gap})) == token
        assert draw(LOGITS, 0.5, 0, 1.0, 0.0, Fixed(gumbel={0: 2 * gap})) == token
    # What is cut off is not lifted by any noise.
    assert draw(LOGITS, 1.0, 3, 1.0, 0.0, Fixed(gumbel={0: 99.0})) == 1


def test_beyond_the_head_the_cumulative_mass_decides():
    """64 tokens of a quarter of the mass, of equal logits, and 192 that are as likely."""
    row, noise = np.zeros(256), {70: 9.0, 63: 1.0}
    assert draw(row, 1.0, 0, 1.0, 0.0, Fixed(math.nextafter(0.25, 0), noise)) == 63
    assert draw(row, 1.0, 0, 1.0, 0.0, Fixed(0.25, noise)) == 64
    assert draw(row, 1.0, 0, 1.0, 0.0, Fixed(0.5, noise)) == 128
    assert draw(row, 1.0, 0, 1.0, 0.0, Fixed(LAST, noise)) == 255
    assert draw(row, 1.0, 128, 1.0, 0.0, Fixed(LAST, noise)) == 127
    assert draw(row, 1.0, 64, 1.0, 0.0, Fixed(LAST, noise)) == 63


def test_equals_go_by_lower_id():
    row = [0.0, 2.0, -0.0, 2.0, 2.0, 2.0]
    assert draw(row, 1.0, 4, 1.0, 0.0, Fixed()) == 1
    assert np.array_equal(distribution(row, 1.0, top_k=3), [0, 1 / 3, 0, 1 / 3, 1 / 3, 0])
    assert np.array_equal(distribution(row, 1.0, top_k=4, top_p=0.5), [0, 0.5, 0, 0.5, 0, 0])
    assert np.array_equal(distribution(row, 1.0, top_k=5)[[0, 2]] > 0, [True, False])
    assert np.array_equal(distribution(row, 1.0, min_p=1.0), [0, 0.25, 0, 0.25, 0.25, 0.25])


def test_what_is_no_number_is_never_drawn():
    row = [NAN, 0.0, -INF, 0.0, NAN]
    assert np.array_equal(distribution(row, 1.0), [0, 0.5, 0, 0.5, 0])
    lifted = Fixed(LAST, {0: 99.0, 2: 99.0, 3: 1e-9})
    assert [draw(row, 1.0, k, 1.0, 0.0, noise) for k in (0, 4) for noise in (Fixed(), lifted)] == [
        1, 3, 1, 3,
    ]  # fmt: skip


@pytest.mark.parametrize("row", [[NAN] * 3, [-INF] * 3, [NAN, -INF, NAN], [0.0, INF, NAN]])
def test_a_row_without_a_distribution_has_no_token(row):
    for options in ((0, 1.0, 0.0), (2, 0.5, 0.1)):
        assert draw(row, 1.0, *options, Fixed(0.5)) == -1
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


@settings(max_examples=200, deadline=None)
@given(ROWS, OPTIONS, st.integers(0, 2**63 - 1))
def test_properties(row, options, seed):
    temperature, _, top_p, min_p = options
    noise = Noise(seed, 3)
    token, best = draw(row, *options, noise), int(argmax([row])[0])
    assert distribution(row, *options)[token] > 0
    assert draw(row, temperature, 1, top_p, min_p, noise) == best  # top-k of 1
    assert draw(row, *options, Fixed(0.5)) == best
    padded = [*row, -INF, NAN]
    assert draw(padded, *options, noise) == token
    assert draw(np.add(row, 64.0), *options, noise) == token  # exact: quarters


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


def test_noise_is_finite(monkeypatch):
    for word in (0, 2**64 - 1):
        monkeypatch.setattr(sampling, "_mix", lambda x, word=word: word)
        assert np.isfinite(Noise(0, 0).gumbel([0])).all() and 0 <= Noise(0, 0).uniform() < 1


def test_numbers_depend_on_seed_and_position():
    key = _mix((_mix(3) + 5 * 0x9E3779B97F4A7C15) % 2**64)
    assert uniform(3, 5) == (key >> 11) / 2**53
    u = ((_mix((key + 8 * 0x9E3779B97F4A7C15) % 2**64) >> 12) + 0.5) / 2**52
    assert Noise(3, 5).gumbel([7]) == pytest.approx(-math.log(-math.log(u)), rel=1e-12)
    many = [uniform(s, p) for s in (0, 1, 2**63 - 1) for p in (0, 1, 2, 10**7)]
    assert len(set(many)) == len(many) and all(0 <= u < 1 for u in many)
    assert all((u * 2**53).is_integer() for u in many)


def uniform(seed, position):
    return Noise(seed, position).uniform()


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


def test_gumbel_noise_is_that_and_independent_of_the_uniform():
    noises = [Noise(1, p) for p in range(4000)]
    u = np.array([n.uniform() for n in noises])
    g = np.array([n.gumbel([0, 1, 2, 163_839]) for n in noises])
    back = np.exp(-np.exp(-g))
    for column in back.T:
        assert abs(chi_square(column, 64)) < 5
        assert abs(np.corrcoef(u, column)[0, 1]) < 5 / math.sqrt(len(u))
    assert np.abs(np.corrcoef(back.T)[np.triu_indices(4, 1)]).max() < 5 / math.sqrt(len(u))


def test_draws_have_the_distribution():
    for row, options in (
        (LOGITS, (0.8, 0, 0.95, 0.0)),
        (-0.02 * np.arange(200.0), (1.0, 0, 1.0, 0.0)),  # a third of it lies beyond the head
        (-0.02 * np.arange(200.0), (1.0, 100, 0.9, 0.1)),
    ):
        want = distribution(row, *options)
        draws = [draw(row, *options, Noise(11, p)) for p in range(20_000)]
        counts, possible = np.bincount(draws, minlength=len(row)), want > 0
        assert not counts[~possible].any()
        expected = 20_000 * want[possible]
        chi2 = ((counts[possible] - expected) ** 2 / expected).sum()
        freedom = possible.sum() - 1
        assert chi2 < freedom + 5 * math.sqrt(2 * freedom)


def test_drafts_with_noise():
    logprobs, ids = np.log([0.4, 0.3, 0.2]), [7, 3, 5]  # and 0.1 of others
    same, tokens = add_noise(logprobs, ids, 0.0, Noise(1, 2))
    assert np.allclose(same, logprobs) and list(tokens) == ids
    got, tokens = add_noise(logprobs, ids, 0.5, Fixed(gumbel={5: 2 * math.log(4.0)}))
    assert list(tokens) == [5, 7, 3]  # 0.8, 0.4, 0.3 and 0.1
    assert np.allclose(np.exp(got), [0.5, 0.25, 0.1875])
    equal, tokens = add_noise(np.log([0.5, 0.25]), [1, 0], 1.0, Fixed(gumbel={0: math.log(2)}))
    assert list(tokens) == [0, 1] and np.allclose(np.exp(equal), 0.4)


def test_noise_makes_drafts_likelier_to_be_drawn():
    """A drafter whose logits are off by noise of its own: its first token is the target's."""
    rng = np.random.default_rng(5)
    hits = {0.0: 0, 0.7: 0}
    for position in range(2000):
        row = rng.normal(0, 2, 40)
        token = draw(row, 1.0, 0, 1.0, 0.0, Noise(9, position))
        drafted = row + rng.normal(0, 0.7, 40)
        order = np.argsort(-drafted)
        logprobs = (drafted - np.logaddexp.reduce(drafted))[order]
        for scale in hits:
            hits[scale] += add_noise(logprobs, order, scale, Noise(9, position))[1][0] == token
    assert hits[0.7] > 1.3 * hits[0.0], hits
