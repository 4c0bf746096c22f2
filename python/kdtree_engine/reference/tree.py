"""The DDTree build (arXiv 2604.12989, algorithm 1): the drafter's most probable prefixes."""

import heapq
import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

I32 = npt.NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class DraftTree:
    """A draft tree by slot: slot 0 is the root, slot i the i-th node in best-first order."""

    tokens: I32  # [n + 1] the root's is -1
    parents: I32  # [n + 1] smaller than the slot; the root's is -1
    depths: I32  # [n + 1] the root's is 0
    first_child: I32  # [n + 1] -1: none
    next_sibling: I32  # [n + 1] -1: none; siblings are linked in ascending slot order
    visibility: npt.NDArray[np.bool_]  # [n + 1, n + 1] row i: the ancestors of i and i itself
    logw: npt.NDArray[np.float64]  # [n + 1] log-probability of the path; the root's is 0
    rank: I32  # [n + 1] which candidate of its depth, 0 the best; the root's is -1

    @property
    def num_nodes(self) -> int:
        """Nodes below the root."""
        return len(self.tokens) - 1

    def positions(self, prefix_len: int) -> I32:
        """[n + 1] position of each slot when the root follows `prefix_len` cached tokens."""
        return (self.depths + prefix_len).astype(np.int32)

    def children(self, slot: int) -> list[int]:
        """The children of a slot, most probable first."""
        found = []
        child = int(self.first_child[slot])
        while child >= 0:
            found.append(child)
            child = int(self.next_sibling[child])
        return found

    def path(self, slot: int) -> list[int]:
        """The slots from the root to `slot`, both included."""
        return [int(s) for s in np.flatnonzero(self.visibility[slot])]


def links(parents: npt.ArrayLike) -> tuple[I32, I32]:
    """First child and next sibling of each slot, -1 for none; siblings in ascending slot order."""
    above = np.asarray(parents, dtype=np.int32)
    first_child = np.full(len(above), -1, np.int32)
    next_sibling = np.full(len(above), -1, np.int32)
    for slot in range(len(above) - 1, 0, -1):
        next_sibling[slot] = first_child[above[slot]]
        first_child[above[slot]] = slot
    return first_child, next_sibling


def visibility(parents: npt.ArrayLike) -> npt.NDArray[np.bool_]:
    """[n + 1, n + 1] which slots each slot sees: its ancestors and itself."""
    above = np.asarray(parents, dtype=np.int32)
    visible = np.eye(len(above), dtype=bool)
    for slot in range(1, len(above)):
        visible[slot] |= visible[above[slot]]
    return visible


def build_tree(logprobs: npt.ArrayLike, token_ids: npt.ArrayLike, budget: int) -> DraftTree:
    """The `budget` most probable prefixes, as a tree.

    `logprobs` [L, K] float32: row d the log-probabilities of the best K tokens d + 1 positions
    after the root, descending; `token_ids` [L, K] their tokens. Fewer nodes come out when there are
    not as many prefixes.

    Order: log-weight (float64) descending, then rank path ascending, a prefix before its
    extensions. A sibling's log-weight is (logw - logprob[rank]) + logprob[rank + 1], in this order.
    A log-probability that is not finite ends its row: it and those behind it are no candidates.
    """
    lp = np.asarray(logprobs, dtype=np.float32).astype(np.float64)
    ids = np.asarray(token_ids)
    num_depths, width = lp.shape

    def candidate(depth: int, rank: int) -> bool:
        return depth < num_depths and rank < width and math.isfinite(lp[depth, rank])

    tokens, parents, depths, logws, ranks = [-1], [-1], [0], [0.0], [-1]
    # Entries: (-logw, rank path, parent's slot). Paths are distinct, so the slot is never compared.
    heap: list[tuple[float, tuple[int, ...], int]] = []
    if candidate(0, 0):
        heap.append((-float(lp[0, 0]), (0,), 0))
    while heap and len(tokens) <= budget:
        negative, path, parent = heapq.heappop(heap)
        logw, depth, rank = -negative, len(path) - 1, path[-1]
        slot = len(tokens)
        tokens.append(int(ids[depth, rank]))
        parents.append(parent)
        depths.append(depth + 1)
        logws.append(logw)
        ranks.append(rank)
        if candidate(depth, rank + 1):
            sibling = (logw - float(lp[depth, rank])) + float(lp[depth, rank + 1])
            heapq.heappush(heap, (-sibling, (*path[:-1], rank + 1), parent))
        if candidate(depth + 1, 0):
            heapq.heappush(heap, (-(logw + float(lp[depth + 1, 0])), (*path, 0), slot))

    first_child, next_sibling = links(parents)
    return DraftTree(
        tokens=np.array(tokens, np.int32),
        parents=np.array(parents, np.int32),
        depths=np.array(depths, np.int32),
        first_child=first_child,
        next_sibling=next_sibling,
        visibility=visibility(parents),
        logw=np.array(logws, np.float64),
        rank=np.array(ranks, np.int32),
    )
