"""Choosing a token from logits: temperature, top-k, min-p, top-p, and noise for each position.

The noise is a function of seed, position and token id, so the text depends on (seed, prompt,
options) alone, and every draft tree gives the tokens of plain decoding.
"""

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]

HEAD = 64
_STEP, _WORD = 0x9E3779B97F4A7C15, (1 << 64) - 1


def _mix(x: int) -> int:
    """A step of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014, with Stafford's mixer 13)."""
    z = (x + _STEP) & _WORD
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _WORD
    return z ^ (z >> 31)


class Noise:
    """The random numbers that choose the token at `position` of prompt and output, from 0.

    0 <= seed < 2**63. All of them come from one word of 64 bits: element `position` of a SplitMix64
    stream that the seed begins at a place of its own.
    """

    def __init__(self, seed: int, position: int) -> None:
        self._key = _mix((_mix(seed) + position * _STEP) & _WORD)

    def uniform(self) -> float:
        """In [0, 1), of 53 bits."""
        return (self._key >> 11) * 2.0**-53

    def gumbel(self, tokens: npt.ArrayLike) -> F64:
        """One for each token, of the standard Gumbel distribution."""
        words = [_mix((self._key + (int(t) + 1) * _STEP) & _WORD) for t in np.ravel(tokens)]
        u = (np.array([w >> 12 for w in words], dtype=np.float64) + 0.5) * 2.0**-52
        return np.asarray(-np.log(-np.log(u)))


def _nucleus(
    logits: npt.ArrayLike, temperature: float, top_k: int, top_p: float, min_p: float
) -> tuple[I64, F64]:
    """The ids that can be drawn, likeliest first, and exp((logit - greatest) / temperature) of
    each; none for a row without a distribution."""
    for name, value, fits, want in (
        ("temperature", temperature, 0.001 <= temperature <= 1000, "0.001 to 1000"),
        ("top_k", top_k, top_k >= 0, "at least 0"),
        ("top_p", top_p, 0 < top_p <= 1, "above 0 and at most 1"),
        ("min_p", min_p, 0 <= min_p <= 1, "0 to 1"),
    ):
        if not fits:
            raise ValueError(f"{name} is {value}, want {want}")
    x = np.array(logits, dtype=np.float64)
    x[np.isnan(x)] = -np.inf
    if not np.isfinite(x.max()):
        return np.empty(0, np.int64), np.empty(0)
    ids = np.argsort(-x, kind="stable")
    weights = np.exp((x[ids] - x[ids[0]]) / temperature)
    kept = int((weights >= min_p).sum())  # the greatest weight is 1
    if top_k:
        kept = min(kept, top_k)
    if top_p < 1:
        mass = weights[:kept].cumsum()
        kept = int((mass < top_p * mass[-1]).sum()) + 1
    return ids[:kept], weights[:kept]


def distribution(
    logits: npt.ArrayLike,
    temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> F64:
    """[V] the probability of each token under logits [V]; zeros where there is no distribution.

    Of the tokens by logit, equals by lower id, the first `top_k` (0: all) stay whose probability
    in softmax(logits / temperature) is at least `min_p` times the greatest; of those the shortest
    prefix that holds at least `top_p` of their mass (1: all). NaN counts as -inf; a row whose
    greatest logit is not finite has no distribution. Raises ValueError for an option out of range.
    """
    ids, weights = _nucleus(logits, temperature, top_k, top_p, min_p)
    probabilities = np.zeros(np.shape(logits))
    probabilities[ids] = weights / weights.sum()
    return probabilities


def draw(
    logits: npt.ArrayLike,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    noise: Noise,
) -> int:
    """The token that `noise` chooses from `distribution`, -1 where there is none.

    The first, by logit and then by lower id, whose cumulative mass exceeds the uniform's share of
    the whole, if it is not among the first HEAD tokens. Else the one of these with the greatest
    log-probability plus Gumbel noise (Gumbel-max: Maddison et al., A* Sampling, 2014).
    """
    ids, weights = _nucleus(logits, temperature, top_k, top_p, min_p)
    if not ids.size:
        return -1
    mass = weights.cumsum()
    place = int((mass <= noise.uniform() * mass[-1]).sum())
    if place >= HEAD:
        return int(ids[place])
    with np.errstate(divide="ignore"):
        scores = np.log(weights[:HEAD]) + noise.gumbel(ids[:HEAD])
    return int(ids[scores.argmax()])


def add_noise(
    logprobs: npt.ArrayLike, ids: npt.ArrayLike, scale: float, noise: Noise
) -> tuple[F64, I64]:
    """Drafted log-probabilities [K] given the noise of the target's draw, sorted, and their ids.

    In proportion to exp(logprob + scale * noise); tokens that are not among them keep their mass.
    """
    tokens = np.asarray(ids, dtype=np.int64)
    values = np.asarray(logprobs, dtype=np.float64)
    others = max(0.0, 1 - np.exp(values).sum())
    values = values + scale * noise.gumbel(tokens)
    total = np.logaddexp.reduce(values)
    if others > 0:
        total = np.logaddexp(total, np.log(others))
    order = np.lexsort((tokens, -values))
    return values[order] - total, tokens[order]
