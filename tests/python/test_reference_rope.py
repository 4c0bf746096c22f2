import numpy as np
import pytest

from kdtree_engine.reference import rope

KIMI = {"factor": 64.0, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}
KIMI["original_max_position_embeddings"] = 4096


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation_is_multiplication_by_a_complex_number(interleaved):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((4, 2, 8))
    frequencies = rope.inverse_frequencies(8, 10000.0)
    positions = [0, 1, 7, 4000]
    out = rope.rotate(x, *rope.cos_sin(positions, frequencies), interleaved)

    def as_complex(y):
        return y[..., ::2] + 1j * y[..., 1::2] if interleaved else y[..., :4] + 1j * y[..., 4:]

    turn = np.exp(1j * np.outer(positions, 10000.0 ** (-np.arange(4) / 4)))
    assert np.allclose(as_complex(out), as_complex(x) * turn[:, None, :])
    assert np.array_equal(out[0], x[0])


def test_scores_depend_on_the_distance_alone():
    rng = np.random.default_rng(1)
    q, k = rng.standard_normal((2, 1, 1, 16))
    frequencies = rope.inverse_frequencies(16, 50000.0, KIMI)

    def score(at_q, at_k):
        a = rope.rotate(q, *rope.cos_sin([at_q], frequencies), True)
        b = rope.rotate(k, *rope.cos_sin([at_k], frequencies), True)
        return float((a * b).sum())

    assert score(9, 4) == pytest.approx(score(1009, 1004))


@pytest.mark.parametrize("beta_fast, low", [(32.0, 8), (1.0, 19)])
def test_yarn_keeps_fast_and_divides_slow_frequencies(beta_fast, low):
    plain = rope.inverse_frequencies(64, 50000.0)
    ratio = rope.inverse_frequencies(64, 50000.0, KIMI | {"beta_fast": beta_fast}) / plain
    high = 20
    assert np.allclose(ratio[: low + 1], 1)
    assert np.allclose(ratio[high:], 1 / 64)
    between = (np.arange(low, high + 1) - low) / (high - low)
    assert np.allclose(ratio[low : high + 1], 1 - between + between / 64)


def test_ends_of_the_ramp_that_are_not_whole():
    """Frequencies of transformers 5.24."""
    got = rope.inverse_frequencies(64, 50000.0, KIMI | {"truncate": False})[[8, 9, 14, 19, 20]]
    want = [0.0668740347, 0.0472970344, 0.00449924031, 5.09722158e-05, 1.80702336e-05]
    assert np.allclose(got / want, 1, atol=1e-5)


@pytest.mark.parametrize("factor, scale", [(64.0, 0.14467962580), (32.0, 0.13086079996)])
def test_softmax_scale_of_kimi(factor, scale):
    assert rope.softmax_scale(192, KIMI | {"factor": factor}) == pytest.approx(scale, abs=1e-11)
    assert rope.softmax_scale(192, None) == pytest.approx(192**-0.5)


def test_cosines_are_scaled_by_what_the_checkpoint_says():
    assert rope.rotation_scale(None) == 1
    assert rope.rotation_scale(KIMI) == 1
    assert rope.rotation_scale(KIMI | {"mscale": 0.5}) == pytest.approx(
        (0.05 * np.log(64) + 1) / (0.1 * np.log(64) + 1)
    )
    qwen = {"factor": 64.0, "original_max_position_embeddings": 4096}
    assert rope.rotation_scale(qwen) == pytest.approx(0.1 * np.log(64) + 1)
    assert rope.rotation_scale(qwen | {"attention_factor": 1.25}) == 1.25
