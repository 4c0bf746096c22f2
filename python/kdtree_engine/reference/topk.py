"""Top-k log-probabilities of rows of logits over the full vocabulary, also from its parts."""

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]


def topk_logprobs(logits: npt.ArrayLike, k: int, temperature: float = 1.0) -> tuple[F32, I32]:
    """The k greatest of each row, equals by lower id: log-probabilities [R, k] and ids [R, k].

    Logits [R, V] are divided by `temperature` in float32. A log-probability is logit - lse, both
    float32; lse over all V is summed in float64 and rounded once. NaN counts as -inf. A row
    whose greatest logit is not finite has no distribution: all its log-probabilities are -inf.
    Raises ValueError unless 1 <= k <= V and temperature > 0.
    """
    x = np.array(logits, dtype=np.float32)
    if not 1 <= k <= x.shape[-1]:
        raise ValueError(f"k is {k}, want 1 to the {x.shape[-1]} columns of logits")
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature}, want a number above 0")
    x[np.isnan(x)] = -np.inf
    ids = np.argsort(-x, axis=-1, kind="stable")[..., :k]
    x /= np.float32(temperature)  # after sorting: it may make equal what was not
    greatest = x.max(axis=-1, keepdims=True)
    has_distribution = np.isfinite(greatest)
    shift = np.where(has_distribution, greatest, 0).astype(np.float64)
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        total = np.exp(x - shift).sum(axis=-1, keepdims=True)
        lse = (np.log(total) + shift).astype(np.float32)
        logprobs = np.take_along_axis(x, ids, axis=-1) - lse
    logprobs[~np.broadcast_to(has_distribution, logprobs.shape)] = -np.inf
    return logprobs, ids.astype(np.int32)


def merge_topk(
    values: npt.ArrayLike, ids: npt.ArrayLike, log_sums: npt.ArrayLike, k: int
) -> tuple[F32, I32]:
    """The same from a vocabulary's N parts.

    Of each part: its k' greatest logits, divided by the temperature, as `values` [N, R, k'] with
    their `ids`, and the logarithm of the sum of all its exponentials, `log_sums` [N, R]. Equals
    stay in order, which with parts in the order of their ids is that of the ids.

    lse is summed in float64 in the order of the parts and rounded once. Raises ValueError unless
    1 <= k <= N * k'.
    """
    parts = np.moveaxis(np.asarray(values, np.float32), 0, 1)
    rows = parts.shape[0]
    flat = parts.reshape(rows, -1)
    flat_ids = np.moveaxis(np.asarray(ids, np.int32), 0, 1).reshape(rows, -1)
    if not 1 <= k <= flat.shape[1]:
        raise ValueError(f"k is {k}, want 1 to the {flat.shape[1]} candidates of a row")
    order = np.argsort(-flat, axis=-1, kind="stable")[:, :k]
    sums = np.asarray(log_sums, np.float32).astype(np.float64)
    greatest = sums.max(axis=0)
    has_distribution = np.isfinite(greatest)
    shift = np.where(has_distribution, greatest, 0)
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        lse = (shift + np.log(np.exp(sums - shift).sum(axis=0))).astype(np.float32)
        logprobs = np.take_along_axis(flat, order, axis=-1) - lse[:, None]
    logprobs[~has_distribution] = -np.inf
    return logprobs, np.take_along_axis(flat_ids, order, axis=-1)


def argmax(logits: npt.ArrayLike) -> I32:
    """[R] the first greatest of each row, NaN left out; -1 where a row holds no number."""
    x = np.array(logits, dtype=np.float32)
    nan = np.isnan(x)
    x[nan] = -np.inf
    best = x.argmax(axis=-1)
    # A row of NaN and -inf only: its first -inf is the greatest number in it.
    lowest = np.isneginf(x.max(axis=-1))
    best = np.where(lowest, (~nan).argmax(axis=-1), best)
    return np.where(nan.all(axis=-1), -1, best).astype(np.int32)
