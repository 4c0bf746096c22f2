import itertools

import numpy as np
import pytest

from kdtree_engine.reference.accept import accept, compaction_rows
from kdtree_engine.reference.tree import DraftTree, build_tree, links, visibility


def tree_of(parents, tokens):
    """A tree given by hand; what accepting does not look at is left at zero."""
    first_child, next_sibling = links(parents)
    zeros = np.zeros(len(parents), np.int32)
    return DraftTree(
        np.array(tokens, np.int32), np.array(parents, np.int32), zeros, first_child, next_sibling,
        visibility(parents), zeros.astype(np.float64), zeros,
    )  # fmt: skip


# root has children 1(11) and 2(12); node 1 has child 3(13).
TREE = tree_of([-1, 0, 0, 1], [-1, 11, 12, 13])


@pytest.mark.parametrize(
    "target, accepted, bonus",
    [
        ([11, 13, 0, 99], [0, 1, 3], 99),  # to a leaf
        ([12, 0, 77, 0], [0, 2], 77),  # a later sibling
        ([50, 0, 0, 0], [0], 50),  # refused at the root
        ([13, 0, 0, 0], [0], 13),  # in the tree, but not the root's child
        ([11, 12, 0, 0], [0, 1], 12),  # in the tree, but not this slot's child
        ([11, 11, 0, 0], [0, 1], 11),  # the slot's own token again
        ([-1, 0, 0, 0], [0], -1),  # the root's own placeholder
    ],
)
def test_walks_as_long_as_a_child_matches(target, accepted, bonus):
    assert accept(TREE, target) == (accepted, bonus)


def test_a_root_alone_gives_the_bonus_token():
    assert accept(tree_of([-1], [-1]), [7]) == ([0], 7)


@pytest.mark.parametrize("seed", range(50))
def test_agrees_with_a_walk_over_dictionaries(seed):
    rng = np.random.default_rng(seed)
    lp = -np.sort(rng.exponential(1, (6, 5)), axis=1)
    ids = np.stack([rng.permutation(8)[:5] for _ in range(6)])  # tokens recur at other depths
    tree = build_tree(lp, ids, 40)
    children = [{} for _ in tree.tokens]
    for slot in range(1, len(tree.tokens)):
        children[tree.parents[slot]][int(tree.tokens[slot])] = slot
    target = rng.integers(0, 8, len(tree.tokens))
    slot, walked = 0, [0]
    while int(target[slot]) in children[slot]:
        slot = children[slot][int(target[slot])]
        walked.append(slot)
    assert accept(tree, target) == (walked, int(target[slot]))


def shapes(max_nodes, vocab):
    """Every tree of at most `max_nodes` nodes that gives each slot at most `vocab` children."""
    for n in range(max_nodes + 1):
        for parents in itertools.product(*(range(slot) for slot in range(1, n + 1))):
            if all(parents.count(p) <= vocab for p in parents):
                yield [-1, *parents]


@pytest.mark.parametrize("parents", list(shapes(4, 3)), ids=str)
def test_committed_strings_have_the_targets_distribution(parents):
    vocab, draws = 3, 40_000
    rng = np.random.default_rng(len(parents))
    # Siblings carry distinct tokens, not in the order of their probabilities.
    tokens = [-1] + [
        (parents[: s + 1].count(parents[s]) + parents[s] + 1) % vocab
        for s in range(1, len(parents))
    ]
    tree = tree_of(parents, tokens)
    logits = rng.standard_normal((len(parents), vocab))
    temperature = 0.8
    p = np.exp(logits / temperature)
    p /= p.sum(axis=1, keepdims=True)

    # Closed form: a round's string is a path's tokens and a token that leaves the tree there.
    want = {}
    for slot in range(len(parents)):
        path = tree.path(slot)
        reach = np.prod([p[a, tokens[b]] for a, b in itertools.pairwise(path)])
        inside = {tokens[c] for c in tree.children(slot)}
        for token in set(range(vocab)) - inside:
            want[(*(tokens[s] for s in path[1:]), token)] = reach * p[slot, token]
    assert sum(want.values()) == pytest.approx(1)

    drawn = np.stack([rng.choice(vocab, draws, p=row) for row in p])
    counts = dict.fromkeys(want, 0)
    choices, times = np.unique(drawn, axis=1, return_counts=True)
    for targets, count in zip(choices.T, times, strict=True):
        accepted, bonus = accept(tree, targets)
        counts[(*(tokens[s] for s in accepted[1:]), bonus)] += count
    chi2 = sum((counts[s] - draws * q) ** 2 / (draws * q) for s, q in want.items())
    freedom = len(want) - 1
    assert chi2 < freedom + 5 * np.sqrt(2 * freedom)


def test_rows_are_compacted_to_behind_the_prefix():
    from_rows, to_rows = compaction_rows([0, 2, 5], 10)
    assert from_rows.tolist() == [10, 12, 15]
    assert to_rows.tolist() == [10, 11, 12]
