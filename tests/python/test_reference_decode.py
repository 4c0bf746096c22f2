import numpy as np
import pytest

from kdtree_engine.reference.decode import DFlash, generate, generate_with_tree
from kdtree_engine.reference.drafter import DraftModel
from kdtree_engine.reference.model import TargetModel, chain
from make_tiny_model import PRESETS, VOCAB, make

PROMPT = [7, 301, 44, 44, 120, 9]
LENGTH = 40


class Foreknowing:
    """Proposes the plain continuation at one of the first three ranks of each depth."""

    target_layer_ids = (0,)

    def __init__(self, future, depth=7):
        self.future, self.depth, self.committed = future, depth, 0
        self.rng = np.random.default_rng(5)
        self.features = []

    def extend(self, features, tokens):
        assert len(features) == len(tokens)
        self.committed += len(tokens)
        self.features.append(features)

    def logits(self, root_token):
        at = self.committed - len(PROMPT)
        assert root_token == self.future[at]
        logits = np.empty((self.depth, VOCAB))
        for depth in range(self.depth):
            order = self.rng.permutation(VOCAB).tolist()
            for token in self.future[at + 1 + depth : at + 2 + depth]:
                order.remove(token)
                order.insert(self.rng.integers(0, 3), token)
            logits[depth, order] = -3 * np.log1p(np.arange(VOCAB))
        return logits


@pytest.fixture(scope="module", params=["tiny", "kimi_groups", "plain"])
def models(request, tmp_path_factory):
    folder = make(tmp_path_factory.mktemp("model"), PRESETS[request.param])
    target = TargetModel(folder)
    return target, DraftModel(folder / "drafter"), generate(target, PROMPT, LENGTH + 8)


@pytest.mark.parametrize("budget", [1, 8, 64, 256])
def test_a_drafted_tree_changes_no_token(models, budget):
    target, drafter, plain = models
    proposer = DFlash(drafter, target)
    tokens, accepted = generate_with_tree(target, proposer, PROMPT, LENGTH, budget)
    assert tokens == plain[:LENGTH]
    assert sum(accepted) >= LENGTH - 1


@pytest.mark.parametrize("budget, top_k", [(1, None), (16, None), (64, None), (256, 8), (7, 1)])
def test_long_accepted_paths_change_no_token(models, budget, top_k):
    target, _, plain = models
    proposer = Foreknowing(plain)
    tokens, accepted = generate_with_tree(target, proposer, PROMPT, LENGTH, budget, top_k)
    assert tokens == plain[:LENGTH]
    if budget >= 64:
        assert max(accepted) > 2
    # What the drafter was told of is what one pass over the text gives.
    told = np.concatenate(proposer.features)
    text = (PROMPT + plain)[: len(told)]
    once = target.forward(text, chain(len(text)), target.new_cache()).features([0])
    assert np.allclose(told, once, rtol=0, atol=1e-10)


def test_the_drafts_temperature_changes_no_token(models):
    target, drafter, plain = models
    proposer = DFlash(drafter, target)
    tokens, _ = generate_with_tree(target, proposer, PROMPT, LENGTH, 16, draft_temperature=0.5)
    assert tokens == plain[:LENGTH]
