"""`kdtree bench`: settings, prompts files, the arithmetic of plain decoding."""

import io
import json
import struct
import sys
from collections.abc import Callable
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

import fake_core
from kdtree_engine import cli_bench
from kdtree_engine.cli_arithmetic import of_plain, weights_per_token
from kdtree_engine.cli_common import print_table
from kdtree_engine.llm import LLM
from kdtree_engine.outputs import SpecStats

Fake = type[fake_core.Engine]
Run = Callable[..., tuple[int, str, str]]


def test_bench(scripted: Fake, run: Run, prompts: Path, tmp_path: Path) -> None:
    status, out, _ = run("bench", "--budgets", "8,auto", "--json", str(tmp_path / "r.json"))
    assert status == 0
    for name in ("none", "dflash", "ddtree 8", "ddtree auto", "3 prompts"):
        assert name in out
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["machine"]["isa"] == "fake" and report["machine"]["cpu_count"]
    assert report["machine"]["device"] == "cpu" and "on cpu" in " ".join(out.split())
    records = report["settings"]
    assert [(r["method"], r["tree_budget"]) for r in records] == [
        ("none", None),
        ("dflash", None),
        ("ddtree", 8),
        ("ddtree", "auto"),
    ]
    for record in records:
        assert record["identical_to_plain"] is True and record["tokens_per_second"] > 0
        assert record["tokens"] == 15
    assert [r["tokens_per_forward"] for r in records] == [1.0, 2.0, 2.0, 2.0]
    assert records[0]["speedup_over_plain"] == 1.0
    status, out, _ = run("bench", "--device", "cuda:1", "--json", str(tmp_path / "r.json"))
    assert status == 0 and "on cuda:1" in " ".join(out.split())
    assert json.loads((tmp_path / "r.json").read_text())["machine"]["device"] == "cuda:1"
    status, _, err = run("bench", "--device", "cuda", "--arithmetic")
    assert status == 2 and "--arithmetic" in err and "add --device cpu" in err


def test_bench_fails_when_tokens_differ(scripted: Fake, run: Run, prompts: Path) -> None:
    scripted.break_method = "dflash"
    status, out, err = run("bench", "--budgets", "8")
    assert status == 1 and "NO" in out
    assert "dflash gave other tokens than plain decoding on 3 of 3 prompts, first 'p0'" in err
    assert "ddtree" not in err


def test_bench_settings_take_turns(
    scripted: Fake, run: Run, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    add = scripted.add_request

    def spy(self: Any, ids: list[int], options: Any) -> int:
        seen.append(options.method)
        return add(self, ids, options)

    monkeypatch.setattr(scripted, "add_request", spy)
    run("bench", "--budgets", "8", "--limit", "2")
    assert seen[:3] == ["none", "dflash", "ddtree"]  # warm-up
    assert seen[3:] == ["none", "dflash", "ddtree", "dflash", "ddtree", "none"]


def test_bench_draws_with_one_seed(
    scripted: Fake, run: Run, prompts: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen = set()
    add = scripted.add_request

    def spy(self: Any, ids: list[int], options: Any) -> int:
        seen.add((options.temperature, options.top_p, options.seed))
        return add(self, ids, options)

    monkeypatch.setattr(scripted, "add_request", spy)
    arguments = ["bench", "--budgets", "8", "--json", str(tmp_path / "r.json")]
    for given, seed in (([], 0), (["--seed", str(2**63 - 1)], 2**63 - 1)):
        out = run(*arguments, "--temperature", "0.7", "--top-p", "0.95", *given)[1]
        title = f"on cpu, temperature 0.7, top-p 0.95, seed {seed}"
        assert title in " ".join(out.split())
        assert seen == {(0.7, 0.95, seed)}
        sampling = json.loads((tmp_path / "r.json").read_text())["sampling"]
        want = {"temperature": 0.7, "top_p": 0.95, "top_k": 0, "min_p": 0.0, "seed": seed}
        assert sampling == want
        seen.clear()
    assert "greedy" in run(*arguments)[1] and seen == {(0.0, 1.0, 0)}
    sampling = json.loads((tmp_path / "r.json").read_text())["sampling"]
    assert sampling["temperature"] == 0 and sampling["seed"] is None


def test_bench_prompt_files(
    scripted: Fake, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise ValueError("prompt_token_ids has 9 tokens; max_model_len is 8")

    status, _, err = run("bench")
    assert status == 2 and "heldout_prompts.json is not a file: name one" in err
    own = tmp_path / "own.json"
    for text, message in (
        ("[", "own.json is not JSON (Expecting value"),
        ("{}", "own.json holds no list of prompts: want a list of objects such as"),
        ('[{"name": "a", "kind": "b"}]', "own.json: prompt 0 has no text"),
        ('[{"text": "a"}, {"text": 3}]', "own.json: prompt 1 has no text"),
        ('[{"text": "a"},\n{"text": "\udcff"}]', "own.json is not UTF-8 at byte 26, on line 2"),
        (r'[{"text": "a\ud800"}]', "own.json: prompt 0: text is not valid Unicode at character 1"),
        ("[" * 100_000, "own.json is not JSON (it is nested too deeply)"),
        (f"[{'1' * 5000}]", "own.json is not JSON (Exceeds the limit"),
    ):
        own.write_text(text, "utf-8", "surrogateescape")
        status, _, err = run("bench", "--prompts", str(own))
        assert status == 2 and message in err
    own.write_text('[{"text": "a"}]')
    with monkeypatch.context() as patched:
        patched.setattr(scripted, "add_request", refuse)
        status, _, err = run("bench", "--prompts", str(own))
    assert status == 1 and "kdtree: error: prompt '0': prompt_token_ids has 9 tokens" in err
    assert run("bench", "--prompts", str(own), "--methods", "none")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--methods", "none,eagle"], "--methods has 'eagle'"),
        (["--methods", ""], "--methods has ''"),
        (["--methods", "none", "--budgets", "8"], "--budgets needs trees"),
        (["--budgets", "8,300"], "--budgets is '300', want 1 to 256 or auto"),
        (["--budgets", "8,,9"], "--budgets is '', want 1 to 256 or auto"),
        (["--seed", "0"], "--seed has no effect on greedy decoding"),
        (["--temperature", "2000"], "--temperature is 2000.0, want 0 or 0.001 to 1000"),
    ],
)
def test_bench_options_are_checked(
    scripted: Fake, run: Run, prompts: Path, arguments: list[str], message: str
) -> None:
    status, _, err = run("bench", *arguments)
    assert status == 2 and message in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tp", "4", "-m", "/no", "rank"], "--tensor-parallel-size stands before rank"),
        (["--tp", "4", "rank"], "would be ignored: give it after rank"),
        (["-m", "/no", "--tp", "4", "rank", "--rows", "1"], "--model stands before rank"),
        (["--temperature", "5000", "rank"], "would be ignored: rank has no such option"),
        (["--max-tokens", "128", "ops"], "--max-tokens stands before ops"),  # the default too
        (["--arithmetic", "ops"], "would be ignored: ops has no such option"),
        (["--json", "x.json", "ops"], "--json stands before ops and would be ignored: give it af"),
    ],
)
def test_options_before_a_subcommand_are_refused(
    run: Run, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    called = SimpleNamespace(bench_rank=pytest.fail, bench_ops=pytest.fail)
    monkeypatch.setitem(sys.modules, "kdtree_engine._core", called)
    monkeypatch.setattr("kdtree_engine._core", called, raising=False)
    status, out, err = run("bench", *arguments)
    assert status == 2 and out == "" and message in err and err.count("\n") == 1


def test_bench_without_a_drafter(
    scripted: Fake, run: Run, prompts: Path, tokenizer_folder: Path
) -> None:
    status, _, err = run("bench", "--model", str(tokenizer_folder.parent))
    assert status == 2 and "not a checkpoint folder (no config.json)" in err
    (tokenizer_folder / "drafter").rmdir()
    status, _, err = run("bench")
    assert status == 2 and "has no drafter: name one with --draft-model" in err
    for arguments in (["tree", "x"], ["generate", "x", "--tree-budget", "8"]):
        status, _, err = run(*arguments)
        assert status == 2 and "has no folder 'drafter': name one with --draft-model" in err
    assert run("bench", "--methods", "none")[0] == 0


def test_weights_per_token(tiny_model: Path) -> None:
    """Against a count by hand of the tiny model's matrices."""
    config = json.loads((tiny_model / "config.json").read_text())
    hidden, vocab, heads = 64, 512, 4
    attention = hidden * 32 + 32 * heads * 32 + hidden * 48 + 32 * heads * 32 + heads * 16 * hidden
    experts, shared, dense = 2 * 3 * 32 * hidden, 3 * 32 * hidden, 3 * 128 * hidden
    layers = config["num_hidden_layers"]
    moe = layers - config["first_k_dense_replace"]
    router = config["n_routed_experts"] * hidden
    macs = layers * attention + (layers - moe) * dense + vocab * hidden
    macs += moe * (experts + shared * config["n_shared_experts"] + router)
    num_bytes, counted = weights_per_token(tiny_model, config)
    assert counted == macs
    int4 = moe * experts
    norms = layers * (2 * hidden + 32 + 32) + hidden
    extra = moe * (4 * config["n_routed_experts"] + 3 * 2 * 8)  # router bias, weight_shape
    assert num_bytes == 2 * (macs - int4) + int4 * (0.5 + 2 / 32) + 2 * (norms + hidden) + extra


def test_bench_arithmetic(
    scripted: Fake, run: Run, prompts: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = dict.fromkeys(
        ("kv_lora_rank", "qk_rope_head_dim", "num_hidden_layers", "num_attention_heads"), 2
    ) | {"vocab_size": 512}
    monkeypatch.setattr(
        scripted, "config", lambda self: {"model": config, "drafter": None, "max_model_len": 512}
    )
    monkeypatch.setattr(
        "kdtree_engine.cli_arithmetic.weights_per_token", lambda folder, config: (1e6, 2e6)
    )
    status, out, _ = run(
        "bench", "--methods", "none", "--arithmetic", "--json", str(tmp_path / "r.json")
    )
    assert status == 0 and "multiply-adds" in out and "10.0 GB/s" in out
    monkeypatch.setenv("COLUMNS", "20")
    words = run("bench", "--methods", "none", "--arithmetic")[1].split()
    assert {"multiply-adds", "MFLOP", "GFLOP/s"} <= set(words)
    result = json.loads((tmp_path / "r.json").read_text())["arithmetic"]
    # prompts of 2, 3 and 4 ids with [BOS], 5 tokens each, so 3 + 2.5 in the cache on average
    assert result["mean_context"] == 5.5
    # keys of 2 + 2 and values of 2 a position and layer, float32
    assert result["kv_bytes"] == 5.5 * 2 * 6 * 4
    assert result["operations"] == 2 * (2e6 + 5.5 * 2 * 2 * (4 + 2))
    assert result["memory_ms"] == pytest.approx((1e6 + 264) / 10e6)
    assert result["fraction_of_cache"] == pytest.approx(
        result["cache_ms"] * result["tokens_per_second"] / 1000
    )


def test_weights_of_a_dense_model_with_a_tied_head(tiny_model: Path, tmp_path: Path) -> None:
    tensors = {"model.embed_tokens.weight": [8, 4], "model.norm.weight": [4]}
    header = {n: {"shape": s, "data_offsets": [0, 2 * prod(s)]} for n, s in tensors.items()}
    raw = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(raw)) + raw)
    for config in ({}, {"n_routed_experts": 0, "num_experts_per_tok": 0}):
        # one row to embed a token, all rows as the head, the norm
        assert weights_per_token(tmp_path, config) == (2 * (4 + 32 + 4), 32)


@pytest.mark.parametrize(("weights", "cache"), [(1.0, 1 << 16), (1e12, 4 << 30)])
def test_the_cache_to_measure_has_limits(
    fake_engine: Fake,
    monkeypatch: pytest.MonkeyPatch,
    weights: float,
    cache: int,
) -> None:
    asked = []
    measure = fake_core.measure_cpu
    monkeypatch.setattr(
        fake_core, "measure_cpu", lambda n, size: asked.append(size) or measure(n, size)
    )
    monkeypatch.setattr(
        "kdtree_engine.cli_arithmetic.weights_per_token", lambda *_: (weights, weights)
    )
    llm = LLM()
    sizes = ("kv_lora_rank", "qk_rope_head_dim", "num_hidden_layers", "num_attention_heads")
    llm.config["model"] |= dict.fromkeys(sizes, 1)
    of_plain(llm, cli_bench.Setting(SpecStats("none", None)), 1.0)
    assert asked == [cache]


def test_bench_keeps_the_settings_on_narrow_terminals(
    scripted: Fake, run: Run, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    out = run("bench", "--budgets", "256,auto")[1]
    assert "ddtree auto" in out and "ddtree 256" in out and "…" not in out
    assert max(map(len, out.splitlines())) <= 44  # the longest words of its headers
    assert "2.00" in out and "1.00" in out
    for columns in ("1", "20"):
        monkeypatch.setenv("COLUMNS", columns)
        out = run("bench", "--budgets", "256,auto")[1]
        words = out.split()
        assert words.count("2.00") == 3 and words.count("yes") == 4 and "…" not in out


@pytest.mark.parametrize("columns", ["0", "-40", "many", "²", "9" * 5000, "0" * 5000 + "80"])
def test_a_width_that_is_none_is_as_if_unset(
    scripted: Fake, run: Run, prompts: Path, monkeypatch: pytest.MonkeyPatch, columns: str
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    tree = run("tree", "hello")[1]
    assert "hello" in tree
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setenv("LINES", columns)
    assert run("tree", "hello")[1] == tree
    monkeypatch.setenv("COLUMNS", columns)
    assert "same tokens" in run("bench")[1]


@pytest.mark.parametrize("width", [1, 7, 20, 33, 40, 60, 79, 200])
def test_no_cell_of_a_table_is_cut(width: int) -> None:
    table = Table(title="a title")
    table.add_column("an op", no_wrap=True)
    for head in ("bytes", "tokens per second"):
        table.add_column(head, justify="right")
    table.add_column("name")
    table.add_column("nothing")
    table.add_row("two words", "2,147,483,648", "17.9 GB/s", "q" * 50, "")
    table.add_row("[b]x[/b]", "0", Text("[1]"), "some more words than there are above", "")
    console = Console(width=width, file=io.StringIO())
    with console.capture() as capture:
        print_table(table, console)
    out = capture.get()
    words = out.replace("│", " ").split()
    assert {"two", "words", "2,147,483,648", "17.9", "GB/s", "x", "0", "[1]", "above"} <= {*words}
    assert "two words" in out and out.count("q") == 50 and "q" * 24 in out
    least = len("two words 2,147,483,648 tokens nothing") + 1 + 24
    assert max(map(cell_len, out.splitlines())) <= max(width, least)
    assert console.width == width


def test_a_table_without_rows() -> None:
    table = Table()
    for head in ("name", "bytes of the data"):
        table.add_column(head)
    console = Console(width=12, file=io.StringIO())
    with console.capture() as capture:
        print_table(table, console)
    assert {"name", "bytes", "data"} <= {*capture.get().split()}


def test_cpu_name_is_text() -> None:
    assert cli_bench._cpu_name()


def test_ops_are_compared_with_the_ceiling_that_bounds_them() -> None:
    from kdtree_engine.cli_bench_ops import with_shares

    def record(op: str, us: float, number: float, operations: float) -> dict[str, object]:
        return {"op": op, "shape": "", "us": us, "bytes": number, "operations": operations}

    records = with_shares(
        [
            record("ceiling: read", 1.0, 4e6, 0.0),  # 4000 GB/s
            record("ceiling: mma", 1.0, 0.0, 5e8),  # 500 TFLOP/s
            record("experts", 2.0, 4e6, 1e8),  # 2000 GB/s, 50 TFLOP/s
            record("attention", 1.0, 4e5, 2e8),
        ]
    )
    assert [(r["bound"], round(r["share"], 6)) for r in records[2:]] == [
        ("memory", 0.5),
        ("mma.sync", 0.4),
    ]


def test_ops_are_whole_on_narrow_terminals(
    scripted: Fake, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = {"op": "moe_experts", "shape": "8 x 7168", "bytes": 4e9, "operations": 1e9, "us": 2e3}
    ceiling = {**record, "op": "ceiling: read"}
    monkeypatch.setattr(
        fake_core, "bench_ops", lambda device, only: [ceiling, record], raising=False
    )
    monkeypatch.setenv("COLUMNS", "20")
    out = run("bench", "ops")[1]
    assert {"moe_experts", "7168", "2000.0", "2000", "100%", "memory"} <= set(out.split())
    assert "ceiling: read" in out and "…" not in out


def test_ops_without_a_cuda_build_say_so(run: Callable[..., tuple[int, str, str]]) -> None:
    status, _, err = run("bench", "ops", "--device", "tpu")
    assert status == 2 or status == 1
    assert "'tpu'" in err


def test_ops_that_are_not_there_are_refused_by_the_option(run: Run) -> None:
    pytest.importorskip("kdtree_engine._core")
    status, _, err = run("bench", "ops", "--only", "x")
    assert status == 2 and err.startswith("kdtree: error: --only is 'x'; want moe_experts, ")
