"""Tokens that an engine drew, against numpy's draws from the same logits."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from kdtree_engine.reference.sampling import Noise, draw

ROUNDING = 3e-6  # of a log-probability, and of a sum of probabilities


class _Nudged(Noise):
    def __init__(self, seed: int, position: int, by: float) -> None:
        super().__init__(seed, position)
        self._by = by

    def uniform(self) -> float:
        return min(max(super().uniform() + self._by, 0.0), 1 - 2.0**-53)


def compare(engine: Any, prompt: Sequence[int], tokens: Sequence[int], **setting: Any) -> int:
    """Asserts that `tokens` are numpy's; gives how many could be told.

    What lies within rounding of a boundary may be drawn either way.
    """
    law = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, **setting}
    seed = law.pop("seed")
    rows = engine.logits([*prompt, *tokens])[len(prompt) - 1 : -1]
    rng = np.random.default_rng(0)
    told = 0
    for position, (row, token) in enumerate(zip(rows, tokens, strict=True), len(prompt)):
        near = set()
        for by in (-ROUNDING, 0.0, ROUNDING):
            nudge = law["temperature"] * rng.uniform(-ROUNDING, ROUNDING, row.shape)
            logits = row + nudge if by else row
            near.add(draw(logits, **law, noise=_Nudged(seed, position, by)))
        assert token in near, (position, token, near)
        told += len(near) == 1
    return told
