"""Sampled decoding: the law of the target, draws that numpy makes too, and trees as plain."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kdtree_engine
import make_tiny_model
from kdtree_engine.reference.sampling import distribution
from sampled import compare

_core: Any = pytest.importorskip("kdtree_engine._core")
if not hasattr(_core, "op_linear"):
    pytest.skip("the compiled module is not built", allow_module_level=True)

METHODS = [("dflash", 0), ("ddtree", 1), ("ddtree", 8), ("ddtree", 64), ("ddtree", 256)]
METHODS += [("ddtree", 0)]
SETTINGS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.6, "top_p": 0.95},
    {"temperature": 1.5, "top_k": 5},
    {"temperature": 1.0, "top_k": 200, "top_p": 0.9},
    {"temperature": 1.0, "min_p": 0.02},
    {"temperature": 4.0, "top_p": 0.999, "min_p": 1e-6},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.05},
]


@pytest.fixture(scope="module", params=["tiny", "bundled"])
def engine(request: pytest.FixtureRequest) -> Any:
    folder: Path = Path(kdtree_engine.__file__).parent / "models" / "k2-nano"
    if request.param == "tiny":
        folder = request.getfixturevalue("tiny_model")
    return _core.Engine(str(folder), str(folder / "drafter"), num_threads=2)


def random_ids(engine: Any, seed: int, n: int) -> list[int]:
    vocab = engine.config()["model"]["vocab_size"]
    return [int(i) for i in np.random.default_rng(seed).integers(0, vocab, n)]


def generate(engine: Any, prompt: list[int], **options: Any) -> list[int]:
    options = {"max_tokens": 40, "ignore_eos": True, "method": "none", **options}
    outputs = engine.generate(prompt, _core.RequestOptions(**options))
    return [t for o in outputs for t in o.token_ids]


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_draws_are_those_of_numpy(engine: Any, setting: dict[str, Any]) -> None:
    told = 0  # of 120
    for seed in (0, 1, 2**63 - 1):
        prompt = random_ids(engine, 1, 9)
        tokens = generate(engine, prompt, seed=seed, **setting)
        told += compare(engine, prompt, tokens, seed=seed, **setting)
    assert told > 80


def test_draws_from_whole_rows(engine: Any) -> None:
    """Beyond the likeliest tokens, which are looked at first, a whole row is needed."""
    prompt = random_ids(engine, 2, 5)
    tokens = generate(engine, prompt, temperature=8.0, seed=3)
    rows = engine.logits(prompt + tokens)[len(prompt) - 1 : -1]
    ranks = [int((row > row[token]).sum()) for row, token in zip(rows, tokens, strict=True)]
    assert sum(rank >= 64 for rank in ranks) > 8
    assert compare(engine, prompt, tokens, temperature=8.0, seed=3) > 20
    for budget in (0, 16):
        drafted = generate(
            engine, prompt, temperature=8.0, seed=3, method="ddtree", tree_budget=budget
        )
        assert drafted == tokens


@pytest.mark.parametrize("setting", [SETTINGS[1], SETTINGS[4]], ids=str)
def test_every_method_gives_the_tokens_of_plain_decoding(
    engine: Any, setting: dict[str, Any]
) -> None:
    for seed, length in ((5, 1), (6, 70)):
        prompt = random_ids(engine, seed, length)
        plain = generate(engine, prompt, seed=seed, **setting)
        for method, budget in METHODS:
            got = generate(engine, prompt, seed=seed, method=method, tree_budget=budget, **setting)
            assert got == plain, (method, budget)


def test_first_tokens_follow_the_law(tiny_model: Path) -> None:
    engine = _core.Engine(str(tiny_model), num_threads=2)
    prompt = random_ids(engine, 4, 12)
    setting = {"temperature": 1.3, "top_k": 12, "top_p": 0.9}
    p = distribution(engine.logits(prompt)[-1], **setting)
    draws = 2000
    counts = np.zeros(len(p))
    for seed in range(draws):
        counts[generate(engine, prompt, seed=seed, max_tokens=1, **setting)[0]] += 1
    assert counts[p == 0].sum() == 0
    kept = p > 0
    chi_square = ((counts[kept] - draws * p[kept]) ** 2 / (draws * p[kept])).sum()
    degrees = kept.sum() - 1
    assert degrees > 1 and chi_square < degrees + 5 * np.sqrt(2 * degrees)


def test_a_seed_repeats_a_text_and_others_do_not(engine: Any) -> None:
    prompt = random_ids(engine, 6, 8)
    texts = [generate(engine, prompt, temperature=1.0, seed=seed) for seed in (1, 2, 3, 1)]
    assert texts[0] == texts[3]
    assert len({tuple(text) for text in texts}) == 3


def test_at_temperature_zero_nothing_else_matters(engine: Any) -> None:
    prompt = random_ids(engine, 7, 8)
    greedy = generate(engine, prompt)
    assert generate(engine, prompt, top_k=3, top_p=0.5, min_p=0.5, seed=9) == greedy
    # The first of the kept tokens is the likeliest, and the only one here.
    assert generate(engine, prompt, temperature=1.0, top_k=1, seed=9) == greedy
    assert generate(engine, prompt, temperature=5.0, min_p=1.0, seed=9) == greedy


def test_requests_beside_each_other_get_the_tokens_they_get_alone(engine: Any) -> None:
    settings: list[dict[str, Any]] = [
        {},
        # More rows of a pass than logits are held at once, 128.
        {"temperature": 1.0, "seed": 4, "method": "ddtree", "tree_budget": 100},
        {"temperature": 1.0, "seed": 5, "method": "ddtree", "tree_budget": 90},
        {"temperature": 0.7, "seed": 4},
        {"method": "ddtree", "tree_budget": 8},
    ]
    prompts = [random_ids(engine, 10 + i, 3 + 20 * i) for i in range(len(settings))]
    alone = [generate(engine, p, **s) for p, s in zip(prompts, settings, strict=True)]
    ids = {}
    for i, (prompt, setting) in enumerate(zip(prompts, settings, strict=True)):
        options = {"max_tokens": 40, "ignore_eos": True, "method": "none", **setting}
        ids[engine.add_request(prompt, _core.RequestOptions(**options))] = i
    got: list[list[int]] = [[] for _ in prompts]
    while engine.has_unfinished():
        for output in engine.step():
            got[ids[output.request_id]] += output.token_ids
    assert got == alone


def test_drafts_are_made_with_the_noise_of_the_draws() -> None:
    """Without it, this makes 2.32 tokens a forward; with it, 2.61."""
    llm = kdtree_engine.LLM()
    prompts = [p["text"] for p in json.loads((llm.model / "heldout_prompts.json").read_text())]
    params = [
        kdtree_engine.SamplingParams(max_tokens=96, temperature=1.0, seed=i, ignore_eos=True)
        for i in range(12)
    ]
    outputs = llm.generate(prompts[:12], params, speculative_config={"tree_budget": 16})
    assert np.mean([o.spec.tokens_per_forward for o in outputs]) > 2.45


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_vocabulary_smaller_than_the_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    monkeypatch.setattr(make_tiny_model, "VOCAB", 48)
    folder = make_tiny_model.make(tmp_path)
    for config in (folder / "config.json", folder / "drafter" / "config.json"):
        text = config.read_text()
        for token in ("508", "509", "510", "511", "500"):
            text = text.replace(token, "47")
        config.write_text(text)
    (folder / "generation_config.json").unlink()
    engine = _core.Engine(
        str(folder), str(folder / "drafter"), tensor_parallel_size=ranks, expert_parallel=ranks > 1
    )
    prompt = random_ids(engine, 1, 6)
    for setting in ({"temperature": 3.0}, {"temperature": 2.0, "top_k": 30, "top_p": 0.9}):
        tokens = generate(engine, prompt, seed=2, **setting)
        assert compare(engine, prompt, tokens, seed=2, **setting) > 30
        for budget in (0, 64):
            options = {"method": "ddtree", "tree_budget": budget, **setting}
            assert generate(engine, prompt, seed=2, **options) == tokens
