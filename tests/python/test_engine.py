"""The compiled engine: equal bits whatever runs beside a row, and no request that harms it."""

import ast
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kdtree_engine
from kdtree_engine import ddtree
from kdtree_engine.reference import accept as reference_accept

_core: Any = pytest.importorskip("kdtree_engine._core")
if not hasattr(_core, "op_linear"):
    pytest.skip("the compiled module is not built", allow_module_level=True)

METHODS = [("dflash", 0), ("dflash", 3)] + [("ddtree", n) for n in (1, 2, 8, 16, 32, 64, 256, 0)]


@pytest.fixture(scope="module", params=["tiny", "bundled"])
def folder(request: pytest.FixtureRequest) -> Path:
    if request.param == "tiny":
        path: Path = request.getfixturevalue("tiny_model")
        return path
    return Path(kdtree_engine.__file__).parent / "models" / "k2-nano"


@pytest.fixture(scope="module")
def engine(folder: Path) -> Any:
    return _core.Engine(str(folder), str(folder / "drafter"), num_threads=2)


def vocab(engine: Any) -> int:
    size: int = engine.config()["model"]["vocab_size"]
    return size


def random_ids(engine: Any, rng: np.random.Generator, n: int) -> list[int]:
    return [int(i) for i in rng.integers(0, vocab(engine), n)]


def tokens_of(outputs: list[Any]) -> list[int]:
    return [t for o in outputs for t in o.token_ids]


def generate(engine: Any, prompt: list[int], **options: Any) -> list[int]:
    return tokens_of(engine.generate(prompt, _core.RequestOptions(**options)))


def random_parents(rng: np.random.Generator, slots: int, max_depth: int) -> list[int]:
    parents, depths = [-1], [0]
    while len(parents) < slots:
        parent = int(rng.integers(0, len(parents)))
        if depths[parent] < max_depth:
            parents.append(parent)
            depths.append(depths[parent] + 1)
    return parents


def path_to(parents: list[int], slot: int) -> list[int]:
    path = [slot]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path


@pytest.mark.parametrize("seed", range(4))
def test_a_tree_node_has_the_bits_of_plain_decoding_along_its_path(engine: Any, seed: int) -> None:
    rng = np.random.default_rng(seed)
    prefix = random_ids(engine, rng, [0, 1, 63, 130][seed])
    slots = [9, 65, 33, 257][seed]
    parents = random_parents(rng, slots, max_depth=15)
    tokens = random_ids(engine, rng, slots)
    tree = engine.tree_logits(prefix, tokens, parents)
    for slot in rng.choice(slots, 12, replace=slots < 12):
        path = path_to(parents, int(slot))
        plain = engine.logits(prefix + [tokens[s] for s in path])
        assert tree[slot].tobytes() == plain[-1].tobytes()


def test_prefill_in_chunks_of_any_size_gives_equal_bits(folder: Path, engine: Any) -> None:
    ids = random_ids(engine, np.random.default_rng(5), 150)
    whole = engine.logits(ids)
    for chunk in (1, 7, 64, 1000):
        other = _core.Engine(str(folder), prefill_chunk_size=chunk, num_threads=1)
        assert other.logits(ids).tobytes() == whole.tobytes()


@pytest.mark.parametrize(("method", "budget"), METHODS)
def test_every_method_gives_the_tokens_of_plain_decoding(
    engine: Any, method: str, budget: int
) -> None:
    rng = np.random.default_rng(7)
    for length in (1, 2, 17, 65):
        prompt = random_ids(engine, rng, length)
        plain = generate(engine, prompt, max_tokens=70, method="none", ignore_eos=True)
        other = generate(
            engine, prompt, max_tokens=70, method=method, tree_budget=budget, ignore_eos=True
        )
        assert other == plain


def test_options_of_the_tree_do_not_change_the_tokens(engine: Any) -> None:
    prompt = random_ids(engine, np.random.default_rng(8), 40)
    plain = generate(engine, prompt, max_tokens=60, method="none")
    for topk, temperature in ((1, 1.0), (3, 0.5), (16, 2.0), (0, 0.001), (0, 1000.0)):
        got = generate(
            engine, prompt, max_tokens=60, tree_budget=16, tree_topk=topk,
            draft_temperature=temperature,
        )  # fmt: skip
        assert got == plain


def test_requests_beside_each_other_get_the_tokens_they_get_alone(engine: Any) -> None:
    rng = np.random.default_rng(9)
    prompts = [random_ids(engine, rng, n) for n in (3, 300, 1, 64, 65, 20, 129, 5, 7, 11, 2)]
    options = [("none", 0), ("ddtree", 8), ("dflash", 0), ("ddtree", 0), ("ddtree", 256)]
    alone = [generate(engine, p, max_tokens=30, method="none") for p in prompts]
    ids = {}
    for i, prompt in enumerate(prompts):
        method, budget = options[i % len(options)]
        request = _core.RequestOptions(max_tokens=30, method=method, tree_budget=budget)
        ids[engine.add_request(prompt, request)] = i
    got: dict[int, list[int]] = {i: [] for i in ids.values()}
    while engine.has_unfinished():
        for output in engine.step():
            got[ids[output.request_id]] += output.token_ids
    assert [got[i] for i in range(len(prompts))] == alone


def test_a_round_reports_a_tree_that_agrees_with_the_reference(engine: Any) -> None:
    prompt = random_ids(engine, np.random.default_rng(10), 30)
    outputs = engine.generate(prompt, _core.RequestOptions(max_tokens=40, tree_budget=20))
    trees = [o for o in outputs if o.tree is not None]
    assert trees
    for output in trees:
        tree = output.tree
        assert tree.tokens[0] == tree.parents[0] == -1
        # The committed tokens walk the tree, but for the last, which is the bonus.
        path = [int(tree.tokens[s]) for s in tree.accepted[1:]]
        assert output.token_ids[: len(path)] == path
        assert output.accept_length == len(output.token_ids) == len(tree.accepted)
        for slot in range(1, len(tree.tokens)):
            assert tree.visibility[slot].sum() == tree.depths[slot] + 1
            assert tree.logw[slot] <= tree.logw[slot - 1]


def test_stop_tokens_inside_an_accepted_chunk_end_the_request_there(engine: Any) -> None:
    prompt = random_ids(engine, np.random.default_rng(11), 30)
    plain = generate(engine, prompt, max_tokens=60, method="none", ignore_eos=True)
    for position in (0, 1, 5, 13, 40):
        stop = plain[position]
        expected = plain[: plain.index(stop) + 1]
        for method, budget in [("none", 0), *METHODS]:
            outputs = engine.generate(
                prompt,
                _core.RequestOptions(
                    max_tokens=60, stop_token_ids=[stop], ignore_eos=True, method=method,
                    tree_budget=budget,
                ),
            )  # fmt: skip
            assert tokens_of(outputs) == expected
            assert outputs[-1].finish_reason == "stop" and outputs[-1].stop_token_id == stop


def test_the_first_of_stop_token_and_max_tokens_ends_a_request(engine: Any) -> None:
    prompt = random_ids(engine, np.random.default_rng(11), 30)
    plain = generate(engine, prompt, max_tokens=40, method="none", ignore_eos=True)
    for position in (2, 9):
        stop = plain[position]
        first = plain.index(stop)
        for max_tokens in (first, first + 1, first + 2):
            for method, budget in [("none", 0), *METHODS]:
                options = _core.RequestOptions(
                    max_tokens=max_tokens, stop_token_ids=[stop], ignore_eos=True, method=method,
                    tree_budget=budget,
                )  # fmt: skip
                outputs = engine.generate(prompt, options)
                assert tokens_of(outputs) == plain[: min(first + 1, max_tokens)]
                reason = "stop" if max_tokens > first else "length"
                assert outputs[-1].finish_reason == reason


@pytest.mark.parametrize("max_tokens", [0, 1, 2, 15, 16, 17])
def test_max_tokens_is_met_exactly(engine: Any, max_tokens: int) -> None:
    prompt = random_ids(engine, np.random.default_rng(12), 12)
    for method, budget in [("none", 0), *METHODS]:
        options = _core.RequestOptions(
            max_tokens=max_tokens, method=method, tree_budget=budget, ignore_eos=True
        )
        outputs = engine.generate(prompt, options)
        assert len(tokens_of(outputs)) == max_tokens
        assert outputs[-1].finished and outputs[-1].finish_reason == "length"


def test_generation_ends_exactly_at_the_context(folder: Path) -> None:
    engine = _core.Engine(str(folder), str(folder / "drafter"), max_model_len=70)
    rng = np.random.default_rng(13)
    for length in (40, 68, 69, 70):
        prompt = random_ids(engine, rng, length)
        plain = generate(engine, prompt, max_tokens=100, method="none", ignore_eos=True)
        assert len(plain) == 70 - length
        for method, budget in METHODS:
            options = {"method": method, "tree_budget": budget, "ignore_eos": True}
            assert generate(engine, prompt, max_tokens=100, **options) == plain
    with pytest.raises(ValueError, match=r"prompt_token_ids has 71 tokens; max_model_len is 70"):
        engine.add_request(random_ids(engine, rng, 71), _core.RequestOptions())


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([], {}, "prompt_token_ids is empty"),
        ([-1], {}, r"prompt_token_ids\[0\] is -1"),
        ([1, 1 << 40], {}, r"prompt_token_ids\[1\] is 1099511627776"),
        ([1], {"max_tokens": -1}, "max_tokens is -1"),
        ([1], {"tree_budget": 257}, "tree_budget is 257"),
        ([1], {"tree_budget": -1}, "tree_budget is -1"),
        ([1], {"tree_topk": 257}, "tree_topk is 257"),
        ([1], {"method": "eagle"}, "method is 'eagle'"),
        ([1], {"method": "none", "tree_budget": 4}, "tree_budget is 4"),
        ([1], {"method": "none", "tree_topk": 4}, "tree_topk is 4"),
        ([1], {"method": "none", "draft_temperature": 0.5}, "draft_temperature is 0.5"),
        ([1], {"method": "dflash", "tree_topk": 2}, "tree_topk is 2"),
        ([1], {"method": "dflash", "draft_temperature": 2.0}, "draft_temperature is 2"),
        ([1], {"tree_budget": 8, "tree_topk": 9}, "tree_topk is 9; want at most tree_budget, 8"),
        ([1], {"tree_topk": 65}, "tree_topk is 65; want at most .*, 64"),
        ([1], {"draft_temperature": 0.0}, "draft_temperature is 0"),
        ([1], {"draft_temperature": float("nan")}, "draft_temperature is nan"),
        ([1], {"stop_token_ids": [-5]}, r"stop_token_ids\[0\] is -5"),
    ],
)
def test_a_bad_request_is_a_value_error_and_leaves_the_engine_as_it_was(
    engine: Any, prompt: list[int], options: dict[str, Any], message: str
) -> None:
    before = generate(engine, [1, 2, 3], max_tokens=5)
    with pytest.raises(ValueError, match=message):
        engine.add_request(prompt, _core.RequestOptions(**options))
    assert not engine.has_unfinished()
    assert generate(engine, [1, 2, 3], max_tokens=5) == before


def test_an_aborted_request_frees_its_place(engine: Any) -> None:
    for _ in range(30):
        ids = [
            engine.add_request([1, 2, 3], _core.RequestOptions(max_tokens=50)) for _ in range(10)
        ]
        engine.step()
        assert all(engine.abort(i) for i in ids)
        assert not engine.abort(ids[0])
    assert not engine.has_unfinished()
    assert len(generate(engine, [1, 2, 3], max_tokens=5, ignore_eos=True)) == 5


def test_a_drafter_that_does_not_fit_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"config\.json"):
        _core.Engine(str(folder), str(tmp_path))
    with pytest.raises(ValueError, match="without a drafter"):
        _core.Engine(str(folder)).add_request([1], _core.RequestOptions(method="ddtree"))
    with pytest.raises(ValueError, match="device is 'tpu'"):
        _core.Engine(str(folder), device="tpu")
    with pytest.raises(ValueError, match="max_model_len is 1000000"):
        _core.Engine(str(folder), max_model_len=1000000)


def test_build_equals_the_reference_on_10000_rounded_inputs() -> None:
    rng = np.random.default_rng(14)
    for _ in range(10000):
        depth, width = int(rng.integers(1, 8)), int(rng.integers(1, 17))
        logits = np.sort(rng.normal(8, 2.5, (depth, width)).astype(np.float32), axis=1)[:, ::-1]
        rounded = (logits.copy().view(np.uint32) & 0xFFFF0000).view(np.float32)
        logprobs = rounded - np.float32(np.log(np.exp(rounded.astype(np.float64)).sum()))
        ids = rng.permuted(np.tile(np.arange(64, dtype=np.int32), (depth, 1)), axis=1)[:, :width]
        budget = int(rng.integers(0, 65))
        want = ddtree.build_tree(logprobs, ids, budget)
        got = ddtree.build_tree(logprobs, ids, budget, backend="cpu")
        for name in ("tokens", "parents", "depths", "first_child", "next_sibling", "logw"):
            np.testing.assert_array_equal(getattr(got, name), getattr(want, name))
        target = rng.integers(0, 64, len(want.tokens)).astype(np.int32)
        slots, bonus = _core.accept_tree(got.tokens, got.first_child, got.next_sibling, target)
        assert (list(slots), bonus) == reference_accept.accept(want, target)


def test_prompts_of_every_length(tiny_model: Path) -> None:
    engine = _core.Engine(str(tiny_model), str(tiny_model / "drafter"), num_threads=1)
    tokens = random_ids(engine, np.random.default_rng(15), 300)
    for length in range(1, 301):
        options: dict[str, Any] = {"max_tokens": 4, "ignore_eos": True}
        plain = generate(engine, tokens[:length], method="none", **options)
        tree = generate(engine, tokens[:length], method="ddtree", tree_budget=16, **options)
        assert tree == plain and len(plain) == 4, length


def test_drafting_stops_where_the_drafters_positions_end(tiny_model: Path, tmp_path: Path) -> None:
    drafter = tmp_path / "drafter"
    shutil.copytree(tiny_model / "drafter", drafter)
    config = json.loads((drafter / "config.json").read_text())
    (drafter / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 64}))
    engine = _core.Engine(str(tiny_model), str(drafter), num_threads=1)
    for length in (1, 40, 63, 64, 65, 100):
        prompt = random_ids(engine, np.random.default_rng(length), length)
        plain = generate(engine, prompt, max_tokens=80, method="none", ignore_eos=True)
        for method, budget in METHODS:
            options = _core.RequestOptions(
                max_tokens=80, method=method, tree_budget=budget, ignore_eos=True
            )
            outputs = engine.generate(prompt, options)
            assert tokens_of(outputs) == plain
            known, drafted = length, 0
            for output in outputs:
                if output.tree is not None:  # a block begins at the last known token
                    assert known - 1 + config["block_size"] <= 64
                    drafted += 1
                known += len(output.token_ids)
            assert drafted > 0 if length == 1 else drafted == 0 or length == 40


def test_requests_do_not_grow_the_process(tiny_model: Path) -> None:
    engine = _core.Engine(str(tiny_model), str(tiny_model / "drafter"), num_threads=1)
    prompt = random_ids(engine, np.random.default_rng(16), 40)

    def kilobytes_after(requests: int) -> int:
        for _ in range(requests):
            generate(engine, prompt, max_tokens=12, method="ddtree", tree_budget=16)
        status = Path("/proc/self/status").read_text().split()
        return sum(int(status[status.index(name) + 1]) for name in ("RssAnon:", "VmSwap:"))

    before = kilobytes_after(100)
    assert kilobytes_after(500) - before < 1024  # 2 KiB a request would show


def test_the_stub_names_what_the_module_has() -> None:
    stub = ast.parse((Path(kdtree_engine.__file__).parent / "_core.pyi").read_text())
    names = {n.name for n in stub.body if isinstance(n, ast.FunctionDef | ast.ClassDef)}
    assert names == {n for n in dir(_core) if not n.startswith("_")}
    for node in stub.body:
        if isinstance(node, ast.ClassDef):
            members = {
                n.name if isinstance(n, ast.FunctionDef) else n.target.id  # type: ignore[union-attr]
                for n in node.body
                if isinstance(n, ast.FunctionDef | ast.AnnAssign)
            } - {"__init__"}
            have = {n for n in dir(getattr(_core, node.name)) if not n.startswith("_")}
            assert members == have, node.name


def test_a_tree_deeper_than_any_drafter_makes_must_be_a_chain(tiny_model: Path) -> None:
    engine = _core.Engine(str(tiny_model))
    chain = [*range(-1, 69)]
    assert engine.tree_logits([1, 2], [3] * 70, chain).shape[0] == 70
    with pytest.raises(ValueError, match="slot 69 is at depth 65; a tree that is no chain"):
        engine.tree_logits([1, 2], [3] * 70, [*range(-1, 64), 0, 1, 2, 3, 64])
