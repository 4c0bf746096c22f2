"""Ranks that share a model: the tokens of each method are those of plain decoding at every size."""

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kdtree_engine
import make_tiny_model
from kdtree_engine import LLM, SamplingParams, synth
from sampled import compare

_core: Any = pytest.importorskip("kdtree_engine._core")
if not hasattr(_core, "op_linear"):
    pytest.skip("the compiled module is not built", allow_module_level=True)

BUNDLED = Path(kdtree_engine.__file__).parent / "models" / "k2-nano"
# model, ranks, whole experts
GROUPS = [
    ("bundled", 2, False),
    ("bundled", 4, False),
    ("bundled", 4, True),
    ("wide", 2, False),
    ("wide", 4, True),
    ("wide", 8, False),
    ("wide", 8, True),
]
METHODS = [("dflash", 0), ("ddtree", 1), ("ddtree", 8), ("ddtree", 64), ("ddtree", 0)]


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random, of eight heads and experts that can be cut in eight."""
    folder = tmp_path_factory.mktemp("wide") / "model"
    synth.write(synth.plan("tiny", layers=3), folder)
    return folder


def make(folder: Path, ranks: int, expert_parallel: bool = False, **options: Any) -> Any:
    return make_named(str(folder), str(folder / "drafter"), ranks, expert_parallel, **options)


def make_named(
    model: str, drafter: str | None, ranks: int, expert_parallel: bool = False, **options: Any
) -> Any:
    return _core.Engine(
        model,
        drafter,
        tensor_parallel_size=ranks,
        expert_parallel=expert_parallel,
        **{"num_threads": 2, "max_model_len": 512, "timeout_s": 60.0, **options},
    )


@pytest.fixture(scope="module")
def alone(wide_model: Path) -> dict[str, Any]:
    return {"bundled": make(BUNDLED, 1), "wide": make(wide_model, 1)}


@pytest.fixture(scope="module", params=GROUPS, ids=lambda g: f"{g[0]}-{g[1]}{'-ep' * g[2]}")
def group(request: pytest.FixtureRequest, wide_model: Path) -> tuple[str, Any]:
    name, ranks, expert_parallel = request.param
    folder = BUNDLED if name == "bundled" else wide_model
    return name, make(folder, ranks, expert_parallel)


def prompts_of(engine: Any, lengths: tuple[int, ...], seed: int = 3) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    vocab = engine.config()["model"]["vocab_size"]
    return [[int(i) for i in rng.integers(0, vocab, n)] for n in lengths]


def tokens_of(engine: Any, prompt: list[int], **options: Any) -> list[int]:
    options = {"max_tokens": 48, "ignore_eos": True, **options}
    outputs = engine.generate(prompt, _core.RequestOptions(**options))
    return [t for o in outputs for t in o.token_ids]


def test_every_method_gives_the_tokens_of_plain_decoding(group: tuple[str, Any]) -> None:
    _, engine = group
    for prompt in prompts_of(engine, (1, 17, 70)):
        plain = tokens_of(engine, prompt, method="none")
        assert len(plain) == 48
        for method, budget in METHODS:
            assert tokens_of(engine, prompt, method=method, tree_budget=budget) == plain


@pytest.mark.parametrize(
    "setting",
    [
        {"temperature": 0.8, "top_p": 0.95},
        {"temperature": 4.0},  # many draws from whole rows
    ],
    ids=str,
)
def test_sampled_text_is_that_of_plain_decoding(
    group: tuple[str, Any], setting: dict[str, Any]
) -> None:
    _, engine = group
    (prompt,) = prompts_of(engine, (17,))
    plain = tokens_of(engine, prompt, method="none", seed=3, **setting)
    for method, budget in METHODS:
        sampled = tokens_of(engine, prompt, method=method, tree_budget=budget, seed=3, **setting)
        assert sampled == plain
    assert compare(engine, prompt, plain, seed=3, **setting) > 30


def test_a_tree_node_has_the_bits_of_plain_decoding_along_its_path(group: tuple[str, Any]) -> None:
    _, engine = group
    prefix, tokens = prompts_of(engine, (70, 33))
    parents = [-1] + [(slot - 1) // 2 for slot in range(1, 33)]
    tree = engine.tree_logits(prefix, tokens, parents)
    for slot in (0, 7, 20, 32):
        path = [slot]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        plain = engine.logits(prefix + [tokens[s] for s in path])
        assert tree[slot].tobytes() == plain[-1].tobytes()


def test_logits_are_those_of_one_rank_up_to_the_rounding_of_split_sums(
    group: tuple[str, Any], alone: dict[str, Any]
) -> None:
    name, engine = group
    (ids,) = prompts_of(engine, (90,), seed=5)
    one, several = alone[name].logits(ids), engine.logits(ids)
    errors = np.linalg.norm(several - one, axis=1) / np.linalg.norm(one, axis=1)
    # A router's choice may tip within the rounding, and such a row goes another way.
    assert np.median(errors) < 1e-5
    assert (one.argmax(axis=1) == several.argmax(axis=1)).mean() > 0.95


def test_batches_on_several_ranks(group: tuple[str, Any]) -> None:
    _, engine = group
    prompts = prompts_of(engine, (5, 33, 64, 12), seed=9)
    settings: list[dict[str, Any]] = [{}, {"temperature": 0.9, "seed": 1}] * 2
    expected = [
        tokens_of(engine, p, method="none", **s) for p, s in zip(prompts, settings, strict=True)
    ]
    methods = ["ddtree", "none", "dflash", "ddtree"]
    ids = [
        engine.add_request(p, _core.RequestOptions(max_tokens=48, ignore_eos=True, method=m, **s))
        for p, m, s in zip(prompts, methods, settings, strict=True)
    ]
    got: dict[int, list[int]] = {i: [] for i in ids}
    while engine.has_unfinished():
        for output in engine.step():
            got[output.request_id] += output.token_ids
    assert [got[i] for i in ids] == expected


def test_a_refused_request_leaves_the_ranks_in_step(group: tuple[str, Any]) -> None:
    _, engine = group
    (prompt,) = prompts_of(engine, (9,))
    before = tokens_of(engine, prompt, method="none")
    for bad in ([], [-1], [10**6], prompt * 100):
        with pytest.raises(ValueError, match="prompt_token_ids"):
            engine.add_request(bad, _core.RequestOptions())
    kept = engine.add_request(prompt, _core.RequestOptions())
    engine.step()
    assert engine.abort(kept)
    assert not engine.abort(kept)
    assert tokens_of(engine, prompt) == before


def test_what_cannot_be_cut_is_refused(wide_model: Path) -> None:
    cases = [
        (BUNDLED, 3, False, r"tensor_parallel_size is 3, .* num_attention_heads, 4"),
        (BUNDLED, 8, False, r"tensor_parallel_size is 8, .* num_attention_heads, 4"),
        (wide_model, 16, False, r"num_attention_heads, 8"),
        (BUNDLED, 0, False, "tensor_parallel_size is 0; want 1 to 64"),
        (BUNDLED, 65, False, "tensor_parallel_size is 65; want 1 to 64"),
        (BUNDLED, 1, True, "expert_parallel is true, but tensor_parallel_size is 1"),
    ]
    for folder, ranks, expert_parallel, message in cases:
        with pytest.raises(ValueError, match=message):
            make(folder, ranks, expert_parallel)
    with pytest.raises(ValueError, match="num_threads is -1; want 0 to 1024"):
        make(BUNDLED, 2, num_threads=-1)
    for timeout in (0.0, 1e300, float("nan")):
        with pytest.raises(ValueError, match="timeout_s is "):
            make(BUNDLED, 2, timeout_s=timeout)
    for device in (
        "cuda:0",
        "cuda:0,cuda:1,cuda:2",
        "cpu,cpu",
        "check:cpu,cpu",
        "cuda:0,",
        "x",
        "",
    ):
        with pytest.raises(ValueError, match=r"device is .* for 2 ranks; want"):
            make(BUNDLED, 2, device=device)


@pytest.mark.parametrize("name", sorted(make_tiny_model.PRESETS))
@pytest.mark.parametrize(("ranks", "experts"), [(2, "sliced"), (4, "sliced"), (4, "whole")])
def test_every_shape_of_model_on_several_ranks(
    name: str, ranks: int, experts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups of experts, no q_lora, half-split rope, windows; two kv heads for four ranks."""
    monkeypatch.setattr(make_tiny_model, "MOE_INTERMEDIATE", 128)  # int4 groups for four slices
    folder = make_tiny_model.make(tmp_path / "model", make_tiny_model.PRESETS[name])
    one, engine = make(folder, 1), make(folder, ranks, experts == "whole")
    (prompt,) = prompts_of(one, (70,))
    plain = tokens_of(engine, prompt, method="none")
    for method, budget in METHODS:
        assert tokens_of(engine, prompt, method=method, tree_budget=budget) == plain
    first, logits = one.logits(prompt), engine.logits(prompt)
    errors = np.linalg.norm(logits - first, axis=1) / np.linalg.norm(first, axis=1)
    assert np.median(errors) < 1e-5


def test_a_rank_that_fails_ends_all() -> None:
    def fails(done: int, total: int) -> None:
        raise KeyError("planted")

    before = threading.active_count()
    with pytest.raises(KeyError, match="planted"):
        make(BUNDLED, 4, progress=fails)
    assert threading.active_count() == before


def test_a_rank_that_stalls_ends_all_within_the_timeout() -> None:
    calls: list[int] = []

    def stalls(done: int, total: int) -> None:
        calls.append(done)
        time.sleep(5 if len(calls) == 1 else 0)

    start = time.monotonic()
    with pytest.raises(RuntimeError, match="rank 0 "):
        make(BUNDLED, 2, progress=stalls, timeout_s=1.0)
    assert time.monotonic() - start < 4.5
    time.sleep(5)  # until the thread that was left behind has gone


def test_an_interrupt_ends_loading() -> None:
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT))
    try:
        timer.start()
        start = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            make(BUNDLED, 2, progress=lambda done, total: time.sleep(1))
        assert time.monotonic() - start < 10
    finally:
        timer.cancel()
        signal.signal(signal.SIGINT, handler)


def test_ranks_come_and_go(wide_model: Path) -> None:
    """Nothing hangs, and nothing is left behind."""
    prompt = [3, 1, 4, 1]
    threads = threading.active_count()
    tasks = len(list(Path("/proc/self/task").iterdir()))  # numpy has one a core
    for repeat in range(200):
        # A drafter's costs would be measured each time.
        engine = _core.Engine(
            str(wide_model),
            tensor_parallel_size=(2, 4, 8)[repeat % 3],
            num_threads=2,
            max_model_len=64,
            max_num_seqs=1,
            timeout_s=60.0,
        )
        if repeat % 4 == 0:
            assert len(tokens_of(engine, prompt, max_tokens=3)) == 3
        elif repeat % 4 == 1:
            engine.add_request(prompt, _core.RequestOptions())
            engine.step()
        del engine
    assert threading.active_count() == threads
    assert len(list(Path("/proc/self/task").iterdir())) < tasks + 20


def test_a_model_made_in_memory_is_the_one_from_files(wide_model: Path) -> None:
    name = "synth:tiny,layers=3"
    files, memory = make(wide_model, 2), make_named(name, name, 2)
    for prompt in prompts_of(files, (5, 40)):
        for method in ("none", "ddtree"):
            assert tokens_of(memory, prompt, method=method) == tokens_of(
                files, prompt, method=method
            )
    bad = ["synth:", "synth:none", "synth:tiny,layers", "synth:tiny,layers=x", "synth:tiny,x=1"]
    bad += ["synth:tiny,layers=-1", "synth:tiny,layers=99999999999999999999", "synth:tiny,,"]
    for wrong in bad:
        with pytest.raises(ValueError, match="is '"):
            make_named(wrong, None, 1)


def test_llm_and_its_arguments() -> None:
    params = SamplingParams(max_tokens=12)
    one = LLM(num_threads=2).generate("def f(x):", params)
    two = LLM(num_threads=2, tensor_parallel_size=2, expert_parallel=True)
    assert two.generate("def f(x):", params)[0].outputs[0].token_ids == one[0].outputs[0].token_ids
    bad: list[tuple[str, Any]] = [
        ("tensor_parallel_size", 0),
        ("tensor_parallel_size", 2.0),
        ("expert_parallel", 1),
        ("rank_timeout", -1),
        ("rank_timeout", "soon"),
    ]
    for name, value in bad:
        with pytest.raises(ValueError, match=f"{name} is"):
            LLM(**{name: value})
