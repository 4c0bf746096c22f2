"""Greedy decoding, plain and with a draft tree: both give the same tokens."""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kdtree_engine.reference.accept import accept
from kdtree_engine.reference.drafter import DraftModel
from kdtree_engine.reference.model import TargetModel, chain
from kdtree_engine.reference.topk import topk_logprobs
from kdtree_engine.reference.tree import build_tree

Floats = npt.NDArray[Any]


class Proposer(Protocol):
    """Proposes the tokens that follow; anything may: the output does not depend on it."""

    target_layer_ids: list[int]

    def extend(self, features: Floats, tokens: Sequence[int]) -> None:
        """Tells of committed tokens and the target's features [S, n * hidden_size] at them."""

    def logits(self, root_token: int) -> Floats:
        """[L, vocab_size] of the L tokens after `root_token`, which follows the tokens told of."""


class DFlash:
    """A DFlash drafter at work on one sequence."""

    def __init__(self, drafter: DraftModel, target: TargetModel) -> None:
        self.target_layer_ids = drafter.target_layer_ids
        self._drafter, self._target = drafter, target
        self._context = drafter.new_context()

    def extend(self, features: Floats, tokens: Sequence[int]) -> None:
        self._drafter.extend(self._context, features)

    def logits(self, root_token: int) -> Floats:
        return self._drafter.draft_logits(root_token, self._context, self._target)


def generate(target: TargetModel, prompt: Sequence[int], max_tokens: int) -> list[int]:
    """Plain greedy decoding: `max_tokens` tokens after the prompt."""
    cache = target.new_cache()
    logits = target.forward(prompt, chain(len(prompt)), cache).logits
    tokens = [int(logits[-1].argmax())]
    while len(tokens) < max_tokens:
        logits = target.forward(tokens[-1:], chain(1), cache).logits
        tokens.append(int(logits[-1].argmax()))
    return tokens[:max_tokens]


def generate_with_tree(
    target: TargetModel,
    proposer: Proposer,
    prompt: Sequence[int],
    max_tokens: int,
    budget: int,
    top_k: int | None = None,
    draft_temperature: float = 1.0,
) -> tuple[list[int], list[int]]:
    """Greedy decoding by rounds of draft, build, verify, accept, commit.

    `top_k` candidates a depth, by default as many as the budget. Gives `max_tokens` tokens and each
    round's accept length (tokens committed, bonus included).
    """
    width = min(top_k or budget, target.config["vocab_size"])
    cache = target.new_cache()
    verified = target.forward(prompt, chain(len(prompt)), cache)
    proposer.extend(verified.features(proposer.target_layer_ids), prompt)
    tokens = [int(verified.logits[-1].argmax())]
    accept_lengths = []
    while len(tokens) < max_tokens:
        root = tokens[-1]
        prefix_len = len(cache)
        tree = build_tree(*topk_logprobs(proposer.logits(root), width, draft_temperature), budget)
        slots = np.concatenate([[root], tree.tokens[1:]])
        verified = target.forward(slots, tree.parents, cache)
        accepted, bonus = accept(tree, verified.logits.argmax(axis=-1))
        cache.commit(accepted, prefix_len)
        features = verified.features(proposer.target_layer_ids)
        proposer.extend(features[accepted], slots[accepted].tolist())
        tokens += [*slots[accepted[1:]].tolist(), bonus]
        accept_lengths.append(len(accepted))
    return tokens[:max_tokens], accept_lengths
