"""The target's attention over prefix and tree (MLA), the drafter's over context and block (GQA)."""

from typing import Any

import numpy as np
import numpy.typing as npt

from kdtree_engine.reference.tree import visibility

F64 = npt.NDArray[np.float64]


def softmax(scores: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Softmax over the last axis; a row has at least one score above -inf."""
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def mla_attention(
    q_latent: npt.NDArray[Any],
    q_rope: npt.NDArray[Any],
    latent: npt.NDArray[Any],
    parents: npt.ArrayLike,
    scale: float,
    dtype: npt.DTypeLike = np.float64,
) -> npt.NDArray[Any]:
    """Multi-head latent attention, absorbed (DeepSeek-V2, arXiv 2405.04434, section 2.1).

    `q_latent` [T, H, C] queries through W_UK, `q_rope` [T, H, R] rotated queries; `latent` [P + T,
    C + R] the cache: P rows of the prefix, which every slot sees, then the slots' own. `parents`
    [T], -1 for slot 0: a slot sees its ancestors and itself. Gives [T, H, C]: for each head the
    softmax-weighted sum of the latents' first C values.
    """
    num_slots, _, rank = q_latent.shape
    keys = np.asarray(latent, dtype)
    prefix_len = len(keys) - num_slots
    query = np.concatenate([q_latent, q_rope], axis=-1).astype(dtype)
    scores = np.einsum("thd,jd->thj", query, keys) * float(scale)
    seen = np.hstack([np.ones((num_slots, prefix_len), bool), visibility(parents)])
    weights = softmax(np.where(seen[:, None, :], scores, -np.inf))
    return np.einsum("thj,jc->thc", weights, keys[:, :rank])


def gqa_attention(
    q: npt.NDArray[Any],
    k: npt.NDArray[Any],
    v: npt.NDArray[Any],
    context_len: int,
    causal: bool,
    window: int,
    scale: float,
    dtype: npt.DTypeLike = np.float64,
) -> npt.NDArray[Any]:
    """Grouped-query attention of a block behind its context.

    `q` [b, Hq, d] at positions context_len ... context_len + b - 1; `k`, `v` [context_len + b, Hkv,
    d] at positions 0 and up. Query head h reads key head h // (Hq / Hkv). A position sees all of
    the context and the block, but with `causal` no later position, and with `window` > 0 none that
    is `window` or more positions back. Gives [b, Hq, d].
    """
    group = q.shape[1] // k.shape[1]
    keys = np.repeat(np.asarray(k, dtype), group, axis=1)
    values = np.repeat(np.asarray(v, dtype), group, axis=1)
    scores = np.einsum("ihd,jhd->ihj", q.astype(dtype), keys) * float(scale)
    back = (context_len + np.arange(len(q)))[:, None] - np.arange(len(k))[None, :]
    seen = np.ones_like(back, dtype=bool)
    if causal:
        seen &= back >= 0
    if window > 0:
        seen &= back < window
    weights = softmax(np.where(seen[:, None, :], scores, -np.inf))
    return np.einsum("ihj,jhd->ihd", weights, values)
