"""Accepting the path of a draft tree that the target agrees with, and committing it."""

import numpy as np
import numpy.typing as npt

from kdtree_engine.reference.tree import DraftTree

I64 = npt.NDArray[np.int64]


def accept(tree: DraftTree, target_tokens: npt.ArrayLike) -> tuple[list[int], int]:
    """Walks from the root to the child that carries the target's token, as long as there is one.

    `target_tokens` [n + 1] is the target's token after each slot. Gives the accepted slots, root
    first, and the bonus token: the target's token after the last of them. len(accepted) tokens are
    committed this round: those of accepted[1:] and the bonus token.
    """
    target = np.asarray(target_tokens)
    accepted = [0]
    while True:
        slot = accepted[-1]
        matches = [c for c in tree.children(slot) if tree.tokens[c] == target[slot]]
        if not matches:
            return accepted, int(target[slot])
        accepted.append(matches[0])


def compaction_rows(accepted: list[int], prefix_len: int) -> tuple[I64, I64]:
    """Cache rows to move, (from, to): the accepted slots' rows to just behind the prefix.

    Slot s lies at row prefix_len + s. Both lists ascend and to[i] <= from[i], so moving one row
    after another is safe.
    """
    from_rows = prefix_len + np.asarray(accepted, dtype=np.int64)
    to_rows = prefix_len + np.arange(len(accepted), dtype=np.int64)
    return from_rows, to_rows
