import numpy as np
import pytest

from kdtree_engine import ddtree, kdtr
from kdtree_engine.reference import topk
from kdtree_engine.reference import tree as reference
from make_test_data import DATA

LOGPROBS = np.log(np.array([[0.5, 0.25, 0.125], [0.75, 0.2, 0.01]], np.float32))
IDS = np.array([[7, 3, 9], [1, 2, 3]], np.int64)
ARRAYS = (
    "tokens",
    "parents",
    "depths",
    "first_child",
    "next_sibling",
    "visibility",
    "logw",
    "rank",
)


def compiled():
    """The compiled module; tests that need it are skipped, visibly, before it is built."""
    core = pytest.importorskip("kdtree_engine._core", exc_type=ImportError)
    if core.__name__ != "kdtree_engine._core":  # conftest's stand-in
        pytest.skip("kdtree_engine._core is not built")
    return core


def same_tree(a, b):
    for name in ARRAYS:
        x, y = getattr(a, name), getattr(b, name)
        assert x.dtype == y.dtype and np.array_equal(x, y), name


def test_builds_and_accepts():
    tree = ddtree.build_tree(LOGPROBS, IDS, 4)
    assert isinstance(tree, ddtree.DraftTree)
    assert tree.tokens.tolist() == [-1, 7, 1, 3, 1]
    assert tree.parents.tolist() == [-1, 0, 1, 0, 3]
    assert tree.num_nodes == 4
    assert tree.positions(10).tolist() == [10, 11, 12, 11, 12]
    assert ddtree.accept(tree, [3, 0, 0, 1, 42]) == ([0, 3, 4], 42)


def test_float64_and_lists_are_taken():
    tree = ddtree.build_tree(LOGPROBS.astype(np.float64).tolist(), IDS.tolist(), 4)
    same_tree(tree, ddtree.build_tree(LOGPROBS, IDS, 4))


def changed(array, at, value):
    array = array.copy()
    array[at] = value
    return array


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((LOGPROBS[0], IDS, 4), r"logprobs has shape \(3,\), want \[L, K\]"),
        ((IDS, IDS, 4), "logprobs has dtype int64"),
        ((LOGPROBS, IDS[:1], 4), r"token_ids has shape \(1, 3\)"),
        ((LOGPROBS, LOGPROBS, 4), "token_ids has dtype float32"),
        ((LOGPROBS, changed(IDS, (0, 1), -1), 4), "token_ids holds -1"),
        ((LOGPROBS, changed(IDS, (0, 1), 2**31), 4), "token_ids holds 2147483648"),
        ((LOGPROBS, changed(IDS, (1, 1), 1), 4), r"token_ids\[1\] holds 1 twice"),
        ((changed(LOGPROBS, (1, 2), np.nan), IDS, 4), r"logprobs\[1, 2\] is nan"),
        ((LOGPROBS[:, ::-1], IDS, 4), r"logprobs\[0\] is not descending at rank 0"),
        ((LOGPROBS, IDS, -1), "budget is -1"),
        ((LOGPROBS, IDS, 1.5), "budget is 1.5"),
        ((LOGPROBS, IDS, True), "budget is True"),
        ((LOGPROBS, IDS, 257, "cpu"), "budget is 257, backend 'cpu' takes at most 256"),
        ((np.zeros((65, 1)), np.zeros((65, 1), int), 4, "cpu"), "logprobs has 65 rows"),
        ((LOGPROBS, IDS, 4, "gpu"), "backend is 'gpu'"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        ddtree.build_tree(*arguments)


def test_the_reference_takes_any_budget():
    logprobs = -np.arange(300, dtype=np.float32)[None]
    assert ddtree.build_tree(logprobs, np.arange(300)[None], 300).num_nodes == 300


@pytest.mark.parametrize("target", [[1, 2], [[1, 2, 3, 4, 5]], [0.5] * 5])
def test_a_target_for_each_slot_is_needed(target):
    with pytest.raises(ValueError, match="target_tokens has shape"):
        ddtree.accept(ddtree.build_tree(LOGPROBS, IDS, 4), target)


@pytest.mark.parametrize("path", sorted(DATA.glob("tree_*.kdtr")), ids=lambda p: p.stem)
def test_the_compiled_builder_gives_the_bundles(path):
    compiled()
    case = kdtr.read(path)
    budget = int(case["budget"][0])
    tree = ddtree.build_tree(case["logprobs"], case["ids"], budget, backend="cpu")
    for name in set(ARRAYS) - {"rank"}:
        assert np.array_equal(getattr(tree, name), case[name]), name
    same_tree(tree, ddtree.build_tree(case["logprobs"], case["ids"], budget))


def test_the_compiled_builder_equals_the_reference_on_10000_rounded_inputs():
    core = compiled()
    rng = np.random.default_rng(11)
    for _ in range(10_000):
        depths, k = int(rng.integers(0, 9)), int(rng.integers(1, 33))
        budget = int(rng.integers(0, 49))
        logits = rng.standard_normal((depths, 64)) * rng.choice([1.0, 3.0, 8.0])
        rounded = kdtr.to_bf16(logits).to_float32()
        if rng.random() < 0.1:
            rounded[rng.random(rounded.shape) < 0.7] = -np.inf
        logprobs, ids = topk.topk_logprobs(rounded, k) if depths else (rounded[:, :k],) * 2
        want = reference.build_tree(logprobs, ids, budget)
        got = core.build_tree(logprobs, ids.astype(np.int32), budget)
        for name in set(ARRAYS) - {"rank"}:
            assert np.array_equal(got[name], getattr(want, name)), (name, logprobs, budget)


@pytest.mark.parametrize("name", ["accept", "accept_wide"])
def test_the_walk_gives_the_bundles(name):
    case = kdtr.read(DATA / f"{name}.kdtr")
    links = [case[n] for n in ("tokens", "first_child", "next_sibling")]
    zeros = np.zeros(len(case["tokens"]), np.int32)
    tree = ddtree.DraftTree(
        tokens=links[0], parents=case["parents"], depths=zeros, first_child=links[1],
        next_sibling=links[2], visibility=zeros > 0, logw=zeros * 1.0, rank=zeros,
    )  # fmt: skip
    for row, target in enumerate(case["target_tokens"]):
        slots = case["accepted"][row, : case["accept_length"][row]].tolist()
        bonus = int(case["bonus"][row])
        assert ddtree.accept(tree, target) == (slots, bonus)


@pytest.mark.parametrize("name", ["accept", "accept_wide"])
def test_the_compiled_walk_gives_the_bundles(name):
    core = compiled()
    case = kdtr.read(DATA / f"{name}.kdtr")
    links = [case[n] for n in ("tokens", "first_child", "next_sibling")]
    for row, target in enumerate(case["target_tokens"]):
        accepted, bonus = core.accept_tree(*links, target)
        assert accepted.tolist() == case["accepted"][row, : case["accept_length"][row]].tolist()
        assert bonus == case["bonus"][row]


@pytest.mark.parametrize("parts", [1, 2, 4, 8])
@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_the_compiled_choices_over_parts_of_a_vocabulary(parts, temperature):
    core = compiled()
    rng = np.random.default_rng(parts)
    logits = kdtr.to_bf16(rng.normal(0, 3, (9, 800))).to_float32()
    logits[rng.random(logits.shape) < 0.1] = np.nan
    logits[1, 300:] = -np.inf
    logits[2] = np.nan
    width, k = 800 // parts, 150
    cut = [
        core.op_topk_part(
            logits[:, first : first + width], min(k, width), temperature, first_id=first
        )
        for first in range(0, 800, width)
    ]
    values, ids, log_sums = (np.stack(arrays) for arrays in zip(*cut, strict=True))
    want = topk.topk_logprobs(logits, k, temperature)
    for got in (
        core.op_merge_topk(values, ids, log_sums, k=k),
        topk.merge_topk(values, ids, log_sums, k),
    ):
        assert np.array_equal(got[1], want[1])
        assert np.allclose(got[0], want[0], rtol=1e-6, atol=1e-6)

    best, value = core.op_argmax_part(logits[:, width * (parts - 1) :], 800 - width)
    last = topk.argmax(logits[:, 800 - width :])
    assert np.array_equal(best, np.where(last < 0, -1, last + 800 - width))
    assert np.array_equal(value[0], logits[0, best[0]]) and value[2] == -np.inf


def test_the_compiled_embedding_and_experts_of_a_part():
    core = compiled()
    rng = np.random.default_rng(6)
    table = rng.standard_normal((12, 5)).astype(np.float32)
    ids = np.array([0, 11, 5, 6, 5], np.int32)
    halves = [core.op_embed(table[f : f + 6], ids, first_id=f, vocab_size=12) for f in (0, 6)]
    assert np.array_equal(halves[0] + halves[1], table[ids])
    assert np.array_equal(core.op_embed(table, ids), table[ids])
    with pytest.raises(ValueError, match=r"token_ids\[1\] is 11; want 0 or more and less than 6"):
        core.op_embed(table[:6], ids)
    with pytest.raises(ValueError, match="first_id is 13; want 0 to 12"):
        core.op_embed(table, ids, 13, 12)

    x, weights = rng.standard_normal((3, 8)), rng.random((3, 2))
    chosen = np.array([[0, 3], [2, 1], [3, 3]], np.int32)
    gate, up, down = (rng.standard_normal((4, 8, 8)) for _ in range(3))
    whole = core.op_moe_experts(x, chosen, weights, gate, up, down)
    parts = [
        core.op_moe_experts(
            x, chosen, weights, gate[f : f + 2], up[f : f + 2], down[f : f + 2], first_expert=f
        )
        for f in (0, 2)
    ]
    assert np.allclose(parts[0] + parts[1], whole, rtol=0, atol=1e-4 * np.abs(whole).max())
    assert not core.op_moe_experts(x, chosen, weights, gate, up, down, first_expert=4).any()
