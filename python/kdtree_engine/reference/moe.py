"""Mixture of experts with the sigmoid router of DeepSeek-V3 (arXiv 2412.19437, section 2.1.2)."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[Any]


def silu(x: Floats) -> Floats:
    """x * sigmoid(x)"""
    with np.errstate(over="ignore"):
        return x / (1 + np.exp(-x))


def _top(scores: Floats, k: int) -> npt.NDArray[np.int64]:
    """Indices of the k greatest of each row, greatest first, equals by lower index."""
    return np.argsort(-scores, axis=-1, kind="stable")[:, :k]


def route(
    logits: npt.ArrayLike,
    bias: npt.ArrayLike,
    top_k: int,
    n_group: int = 1,
    topk_group: int = 1,
    norm_topk_prob: bool = True,
    scale: float = 1.0,
    dtype: npt.DTypeLike = np.float32,
) -> tuple[npt.NDArray[np.int32], Floats]:
    """The experts of each row: ids [T, top_k], greatest biased score first, and weights [T, top_k].

    `logits` [T, E]; `bias` [E] takes part in the choice only. Scores are sigmoids. With n_group >
    1, only experts of the topk_group best groups are eligible; a group's score is the sum of its
    two greatest biased scores. Weights are the unbiased scores, divided by their sum + 1e-20 when
    `norm_topk_prob`, times `scale`. Equals go by lower id. An expert whose logit is NaN is never
    chosen; where too few others are left the id is -1 and the weight 0. Raises ValueError when E is
    no multiple of n_group or the groups hold fewer than top_k.
    """
    x = np.asarray(logits, dtype)
    num_experts = x.shape[1]
    if num_experts % n_group != 0:
        raise ValueError(f"{num_experts} experts in n_group {n_group} groups of unequal size")
    group_size = num_experts // n_group
    if topk_group > n_group or top_k > topk_group * group_size:
        raise ValueError(
            f"top_k is {top_k}, topk_group {topk_group}: "
            f"there are {n_group} groups of {group_size} experts"
        )
    with np.errstate(over="ignore"):
        scores = 1 / (1 + np.exp(-x))
    choice = np.where(np.isnan(x), -np.inf, scores + np.asarray(bias, dtype))
    if n_group > 1:
        grouped = choice.reshape(len(x), n_group, group_size)
        group_score = np.sort(grouped, axis=-1)[:, :, -2:].sum(axis=-1)
        eligible = np.zeros((len(x), n_group), dtype=bool)
        np.put_along_axis(eligible, _top(group_score, topk_group), True, axis=1)
        choice = np.where(np.repeat(eligible, group_size, axis=1), choice, -np.inf)
    ids = _top(choice, top_k)
    chosen = np.isfinite(np.take_along_axis(choice, ids, axis=1))
    ids = np.where(chosen, ids, -1)
    weights = np.where(chosen, np.take_along_axis(scores, ids, axis=1), 0).astype(dtype)
    if norm_topk_prob:
        weights = weights / (weights.sum(axis=1, keepdims=True) + 1e-20)
    return ids.astype(np.int32), weights * float(scale)


def mlp(x: Floats, gate: Floats, up: Floats, down: Floats) -> Floats:
    """down (silu(gate x) * (up x)): x [T, H]; gate, up [I, H]; down [H, I]."""
    return (silu(x @ gate.T) * (x @ up.T)) @ down.T


def experts(
    x: Floats,
    ids: npt.NDArray[np.int32],
    weights: Floats,
    matrices: Sequence[tuple[Floats, Floats, Floats]],
) -> Floats:
    """[T, H] the weighted sum of each row's experts, added in the order of its ids.

    `matrices`: gate, up [I, H] and down [H, I] of each expert. An id that is no expert adds
    nothing.
    """
    parts = np.zeros((*ids.shape, x.shape[1]), x.dtype)
    for expert in range(len(matrices)):
        rows, choices = np.nonzero(ids == expert)
        weighted = weights[rows, choices, None] * mlp(x[rows], *matrices[expert])
        parts[rows, choices] = weighted
    out = np.zeros_like(x)
    for choice in range(ids.shape[1]):
        out += parts[:, choice]
    return out
