"""Draft trees: build one from a drafter's log-probabilities, and walk it along the target's tokens.

Build and walk follow DDTree (arXiv 2604.12989); `kdtree_engine.reference.tree` states the order and
the ties.
"""

from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from kdtree_engine.checks import integer, shown
from kdtree_engine.reference import accept as _reference_accept
from kdtree_engine.reference import tree as _reference_tree
from kdtree_engine.reference.tree import DraftTree

__all__ = ["MAX_BUDGET", "MAX_DEPTH", "DraftTree", "accept", "build_tree"]

MAX_BUDGET = 256  # most nodes and depths that the compiled builders take; the reference takes any
MAX_DEPTH = 64


def build_tree(
    logprobs: npt.ArrayLike,
    token_ids: npt.ArrayLike,
    budget: int,
    backend: Literal["reference", "cpu"] = "reference",
) -> DraftTree:
    """The tree of the `budget` most probable continuations under a drafter.

    `logprobs` [L, K] (converted to float32): row d holds the natural log-probabilities of the best
    K tokens at depth d + 1, descending; `token_ids` [L, K] are their ids, distinct within a row. A
    log-probability that is not finite ends its row. The tree has fewer nodes than `budget` when
    there are not as many continuations, only its root when the budget, L or K is 0.

    `backend`: "reference" (numpy) or "cpu" (compiled, up to 256 nodes and 64 depths); both give the
    same bits. Raises ValueError naming the argument and the value.
    """
    lp, ids = _checked(logprobs, token_ids)
    budget = integer("budget", budget, 0)
    if not isinstance(backend, str) or backend not in ("reference", "cpu"):
        raise ValueError(f"backend is {shown(backend)}, want 'reference' or 'cpu'")
    if backend == "reference":
        return _reference_tree.build_tree(lp, ids, budget)
    if budget > MAX_BUDGET:
        raise ValueError(f"budget is {shown(budget)}, backend 'cpu' takes at most {MAX_BUDGET}")
    if len(lp) > MAX_DEPTH:
        raise ValueError(f"logprobs has {len(lp)} rows, backend 'cpu' takes at most {MAX_DEPTH}")
    from kdtree_engine import _core

    arrays = _core.build_tree(lp, ids, budget)
    names = ("tokens", "parents", "depths", "first_child", "next_sibling", "visibility", "logw")
    return DraftTree(**{n: arrays[n] for n in names}, rank=_ranks(arrays["parents"]))


def accept(tree: DraftTree, target_tokens: npt.ArrayLike) -> tuple[list[int], int]:
    """The path the target agrees with: accepted slots, root first, and the bonus token.

    `target_tokens` [n + 1]: the target's token after each slot. Committed are the tokens of the
    accepted slots after the root, then the bonus token, so len(accepted) tokens. Raises ValueError
    for another number of tokens.
    """
    if not all(hasattr(tree, name) for name in ("tokens", "first_child", "next_sibling")):
        raise ValueError(f"tree is {shown(tree)}, want a DraftTree")
    target = _array("target_tokens", target_tokens)
    if target.shape != tree.tokens.shape or not np.issubdtype(target.dtype, np.integer):
        raise ValueError(
            f"target_tokens has shape {target.shape} and dtype {target.dtype}, "
            f"want {len(tree.tokens)} integers, one for each slot"
        )
    return _reference_accept.accept(tree, target)


def _array(name: str, value: npt.ArrayLike) -> npt.NDArray[Any]:
    try:
        return np.asarray(value)
    except Exception:  # ragged or endless lists, or what refuses to be an array
        raise ValueError(f"{name} is {shown(value)}, want an array") from None


def _checked(
    logprobs: npt.ArrayLike, token_ids: npt.ArrayLike
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int32]]:
    """Both arrays in the types of the builders, when they are what `build_tree` asks for."""
    lp, ids = _array("logprobs", logprobs), _array("token_ids", token_ids)
    if lp.ndim != 2:
        raise ValueError(f"logprobs has shape {lp.shape}, want [L, K]")
    if lp.dtype.kind != "f":
        raise ValueError(f"logprobs has dtype {lp.dtype}, want a floating-point type")
    if ids.shape != lp.shape:
        raise ValueError(f"token_ids has shape {ids.shape}, want that of logprobs, {lp.shape}")
    if ids.dtype.kind not in "iu":
        raise ValueError(f"token_ids has dtype {ids.dtype}, want an integer type")
    if ids.size and not 0 <= ids.min() <= ids.max() < 2**31:
        bad = ids.min() if ids.min() < 0 else ids.max()
        raise ValueError(f"token_ids holds {bad}, want 0 to 2^31 - 1")
    with np.errstate(over="ignore"):
        lp = np.ascontiguousarray(lp, dtype=np.float32)
    if np.isnan(lp).any():
        depth, rank = np.argwhere(np.isnan(lp))[0]
        raise ValueError(f"logprobs[{depth}, {rank}] is nan")
    rising = lp[:, 1:] > lp[:, :-1]
    if rising.any():
        depth, rank = np.argwhere(rising)[0]
        pair = f"{lp[depth, rank]}, then {lp[depth, rank + 1]}"
        raise ValueError(f"logprobs[{depth}] is not descending at rank {rank}: {pair}")
    for depth, row in enumerate(ids):
        tokens, counts = np.unique(row[np.isfinite(lp[depth])], return_counts=True)
        if (counts > 1).any():
            raise ValueError(f"token_ids[{depth}] holds {tokens[counts > 1][0]} twice")
    return lp, np.ascontiguousarray(ids, dtype=np.int32)


def _ranks(parents: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """The rank of each slot: how many siblings come before it; ranks enter a tree in order."""
    children = np.zeros(len(parents), np.int32)
    ranks = np.full(len(parents), -1, np.int32)
    for slot in range(1, len(parents)):
        ranks[slot] = children[parents[slot]]
        children[parents[slot]] += 1
    return ranks
