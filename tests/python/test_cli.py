"""The command `kdtree`: what it prints, its exit status, one-line errors."""

import io
import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import pytest

import fake_core
from kdtree_engine import cli, cli_bench, cli_common
from kdtree_engine.cli import histogram_bars, main
from kdtree_engine.cli_arithmetic import of_plain, weights_per_token
from kdtree_engine.llm import LLM
from kdtree_engine.outputs import SpecStats

HELLO = [259, 264, ord("!"), ord("\n"), 259]
Fake = type[fake_core.Engine]
Run = Callable[..., tuple[int, str, str]]
KEYS = {
    "text",
    "token_ids",
    "method",
    "tree_budget",
    "target_forwards",
    "tokens_per_forward",
    "tokens_per_second",
    "accept_length_histogram",
    "finish_reason",
}


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs the command; gives exit status, standard output and standard error."""

    def call(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            main(list(arguments))
        out, err = capsys.readouterr()
        return int(end.value.code or 0), out, err

    return call


@pytest.fixture
def scripted(fake_engine: Fake) -> Fake:
    fake_engine.script = HELLO
    return fake_engine


# ---------------------------------------------------------------- generate


def test_generate_prints_text_and_statistics(scripted: Fake, run: Run) -> None:
    status, out, err = run("generate", "hello")
    assert status == 0 and out == "hello world!\nhello\n"
    last = err.splitlines()[-1]
    assert "5 tokens (length), ddtree auto" in last and "2 target forwards" in last
    assert "2.00 tokens per forward" in last and last.endswith("accept lengths 1|█ █|3]")


def test_generate_json_has_the_documented_keys(scripted: Fake, run: Run) -> None:
    status, out, err = run("generate", "--json", "--tree-budget", "8", "hello")
    assert status == 0 and err == ""
    record = json.loads(out)
    assert set(record) == KEYS
    assert record["text"] == "hello world!\nhello" and record["token_ids"] == HELLO
    assert record["method"] == "ddtree" and record["tree_budget"] == 8
    assert record["accept_length_histogram"] == {"1": 1, "3": 1}
    record = json.loads(run("generate", "--json", "--method", "none", "hello")[1])
    assert record["tree_budget"] is None and record["tokens_per_forward"] == 1.0


def test_generate_options_are_applied(scripted: Fake, run: Run) -> None:
    assert run("generate", "x", "--max-tokens", "2")[1] == "hello world\n"
    assert run("generate", "x", "--stop", "o w", "--stop", "zzz")[1] == "hell\n"
    scripted.eos = 33
    assert run("generate", "x")[1] == "hello world\n"
    assert run("generate", "x", "--ignore-eos")[1] == "hello world!\nhello\n"
    assert run("generate", "x", "-n", "0")[1] == "\n"


def test_generate_reads_standard_input(
    scripted: Fake, run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for raw, status in ((b"hello\n", 0), (b"\xff", 1)):
        (tmp_path / "in").write_bytes(raw)
        with open(tmp_path / "in") as file:
            monkeypatch.setattr(sys, "stdin", file)
            got, _, err = run("generate", "-")
        assert got == status
    assert "kdtree: error: standard input is not UTF-8 at byte 0" in err


def test_generate_chat(scripted: Fake, run: Run, tokenizer_folder: Path) -> None:
    assert run("generate", "--chat", "--system", "Be short.", "hello")[0] == 0
    (tokenizer_folder / "chat_template.jinja").unlink()
    assert "has no chat_template.jinja" in run("generate", "--chat", "hello")[2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "/no/such"], "--model is /no/such: there is no such folder"),
        (["--draft-model", "/no/such"], "--draft-model is /no/such: there is no such folder"),
        (["--model", "/"], "--model is /: not a checkpoint folder (no config.json)"),
        (["--method", "magic"], "--method is 'magic', want none, dflash, ddtree"),
        (["--method", "none", "--tree-budget", "8"], "--tree-budget needs trees, --method none"),
        (["--method", "dflash", "--tree-topk", "8"], "--tree-topk needs trees, --method dflash"),
        (["--tree-budget", "many"], "--tree-budget is 'many', want 1 to 256 or auto"),
        (["--tree-budget", "0"], "--tree-budget is '0', want 1 to 256 or auto"),
        (["--tree-topk", "-1"], "--tree-topk is -1"),
        (["--draft-temperature", "-1"], "--draft-temperature is -1.0"),
        (["--max-tokens", "-1"], "--max-tokens is -1"),
        (["--stop", ""], "--stop is empty"),
        (["--system", "x"], "--system needs --chat"),
    ],
)
def test_wrong_options_are_one_line(
    scripted: Fake,
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.setattr(scripted, "__init__", lambda *_, **__: pytest.fail("loaded the model"))
    status, out, err = run("generate", "hello", *arguments)
    assert status == 2 and out == ""
    assert message in err and err.startswith("kdtree: error: ") and err.count("\n") == 1


def test_options_that_the_engine_refuses_are_named(
    scripted: Fake, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise ValueError("num_threads is -1; want 0 to 256")

    monkeypatch.setattr(scripted, "__init__", refuse)
    status, _, err = run("generate", "hello", "-t", "-1")
    assert status == 2 and err == "kdtree: error: --num-threads is -1; want 0 to 256\n"


def test_an_empty_prompt_is_refused(
    scripted: Fake, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    for command in ("generate", "tree"):
        status, out, err = run(command, "")
        assert status == 2 and out == "" and "PROMPT is empty: give some text" in err
    with open(os.devnull) as empty:
        monkeypatch.setattr(sys, "stdin", empty)
        status, _, err = run("generate", "-")
    assert status == 2 and "standard input is empty" in err


def test_logits_that_are_no_numbers_are_a_failure(scripted: Fake, run: Run) -> None:
    scripted.no_numbers = 1
    status, out, err = run("generate", "hello")
    assert status == 1 and out == "hello"
    assert "kdtree: error: the model's logits are not all numbers" in err


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_any_encoding_of_the_terminal(
    scripted: Fake,
    prompts: Path,
    monkeypatch: pytest.MonkeyPatch,
    encoding: str,
) -> None:
    scripted.script = [0xE4, 0xB8, 0x96, 259, 10, 259]  # "世hello\nhello"
    for arguments in (["generate", "x"], ["tree", "x"], ["bench", "--budgets", "8"]):
        streams = [io.TextIOWrapper(io.BytesIO(), encoding) for _ in range(2)]
        monkeypatch.setattr(sys, "stdout", streams[0])
        monkeypatch.setattr(sys, "stderr", streams[1])
        with pytest.raises(SystemExit) as end:
            main(arguments)
        assert not end.value.code
        out, err = (s.buffer.getvalue() for s in streams if not s.flush())  # type: ignore
        if arguments[0] == "generate":
            want = "世hello" if encoding == "utf-8" else "?hello"
            assert out.decode(encoding).startswith(want)
            bars = "1|█ █|3" if encoding == "utf-8" else "1|4 8|3"
            assert f"accept lengths {bars[:2]}" in err.decode(encoding)
        if arguments[0] == "tree" and encoding == "ascii":
            assert b"accepted by the target" in out and b"  *" in out


@pytest.mark.parametrize("arguments", [["generate"], ["generate", "x", "--budget", "3"], ["fly"]])
def test_usage_errors_have_status_2(run: Run, arguments: list[str]) -> None:
    status, out, err = run(*arguments)
    assert status == 2 and out == "" and "kdtree" in err and "Traceback" not in err


@pytest.mark.parametrize("error", [RuntimeError("bad\nweights"), OSError("gone"), MemoryError()])
def test_engine_errors_are_one_line(
    scripted: Fake, run: Run, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(self: Any) -> None:
        raise error

    monkeypatch.setattr(scripted, "step", fail)
    status, _, err = run("generate", "hello")
    assert status == 1
    assert err.splitlines()[-1].startswith("kdtree: error: ")
    assert (str(error).replace("\n", " ") or "MemoryError") in err


def test_interrupt_is_clean(scripted: Fake, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(scripted, "step", interrupted)
    status, _, err = run("generate", "hello")
    assert status == 130 and err.endswith("kdtree: interrupted\n")


def test_text_for_a_terminal_cannot_steer_it() -> None:
    assert cli_common.printable("a\x1b[2J\tb\n\x9b\r") == "a\ufffd[2J\tb\n\ufffd\ufffd"


@pytest.mark.parametrize(
    ("histogram", "bars"),
    [({}, ""), ({1: 5}, "1|█|1"), ({1: 1, 2: 8, 4: 80}, "1|▁▁ █|4"), ({3: 4, 2: 2}, "1| ▄█|3")],
)
def test_histogram_bars(histogram: dict[int, int], bars: str) -> None:
    assert histogram_bars(histogram) == bars


@pytest.mark.parametrize("command", ["generate", "bench", "inspect", "tree"])
def test_help_has_examples(run: Run, command: str) -> None:
    status, out, _ = run(command, "--help")
    assert status == 0 and f"  kdtree {command}" in out.split("Examples:")[1]


def test_top_level(run: Run) -> None:
    assert "generate" in run("--help")[1]
    assert run("--version")[1].startswith("kdtree-engine ")


# ---------------------------------------------------------------- tree


def test_tree_draws_and_writes_svg(scripted: Fake, run: Run, tmp_path: Path) -> None:
    status, out, err = run("tree", "hello", "--svg", str(tmp_path / "t.svg"))
    assert status == 0 and "✓" in out and "·world" in out
    assert "6 draft nodes verified in one forward: 2 accepted" in out
    assert (tmp_path / "t.svg").read_text().startswith("<svg ") and "wrote" in err


def test_tree_after(scripted: Fake, run: Run) -> None:
    assert "0 accepted and the target's own hello, so 1 token" in " ".join(
        run("tree", "hello", "--after", "1")[1].split()
    )
    status, _, err = run("tree", "hello", "--after", "2")
    assert status == 1 and "the text ended before round 3: use a smaller --after" in err


def test_places_that_cannot_be_written_are_found_first(
    scripted: Fake, run: Run, prompts: Path, tmp_path: Path
) -> None:
    for place in (tmp_path, tmp_path / "no" / "file"):
        for arguments in (["tree", "x", "--svg"], ["bench", "--json"]):
            status, out, err = run(*arguments, str(place))
            assert status == 2 and out == "" and f"{arguments[-1]} is {place}: " in err


def test_tree_budget_is_checked(scripted: Fake, run: Run) -> None:
    for budget in ("300", "auto", "-1", "x"):
        status, _, err = run("tree", "hello", "--tree-budget", budget)
        assert status == 2 and f"--tree-budget is '{budget}', want 1 to 256\n" in err


# ---------------------------------------------------------------- bench


@pytest.fixture
def prompts(tokenizer_folder: Path) -> Path:
    path = tokenizer_folder / "heldout_prompts.json"
    listed = [{"name": f"p{i}", "text": "hello" * (i + 1), "kind": "code"} for i in range(3)]
    path.write_text(json.dumps(listed))
    return path


def test_bench(scripted: Fake, run: Run, prompts: Path, tmp_path: Path) -> None:
    status, out, _ = run("bench", "--budgets", "8,auto", "--json", str(tmp_path / "r.json"))
    assert status == 0
    for name in ("none", "dflash", "ddtree 8", "ddtree auto", "3 prompts"):
        assert name in out
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["machine"]["isa"] == "fake" and report["machine"]["cpu_count"]
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


def test_bench_prompt_files(scripted: Fake, run: Run, tmp_path: Path) -> None:
    status, _, err = run("bench")
    assert status == 2 and "heldout_prompts.json is not a file: name one" in err
    own = tmp_path / "own.json"
    for text, message in (
        ("[", "own.json is not JSON (Expecting value"),
        ("{}", "own.json holds no list of prompts: want a list of objects such as"),
        ('[{"name": "a", "kind": "b"}]', "own.json: prompt 0 has no text"),
        ('[{"text": "a"}, {"text": 3}]', "own.json: prompt 1 has no text"),
    ):
        own.write_text(text)
        status, _, err = run("bench", "--prompts", str(own))
        assert status == 2 and message in err
    own.write_text('[{"text": "a"}]')
    assert run("bench", "--prompts", str(own), "--methods", "none")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--methods", "none,eagle"], "--methods has 'eagle'"),
        (["--budgets", "8,300"], "--budgets is '300', want 1 to 256 or auto"),
        (["--budgets", "8,,9"], "--budgets is '', want 1 to 256 or auto"),
    ],
)
def test_bench_options_are_checked(
    scripted: Fake, run: Run, prompts: Path, arguments: list[str], message: str
) -> None:
    status, _, err = run("bench", *arguments)
    assert status == 2 and message in err


def test_bench_without_a_drafter(
    scripted: Fake, run: Run, prompts: Path, tokenizer_folder: Path
) -> None:
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
    assert "ddtree auto" in out and "ddtree 256" in out and max(map(len, out.splitlines())) <= 40


# ---------------------------------------------------------------- as a process


def test_module_is_the_command() -> None:
    source = Path(cli.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-m", "kdtree_engine", "inspect", "/no/such/file"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(source)},
    )
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr == "kdtree: error: No such file or directory: /no/such/file\n"


def test_cpu_name_is_text() -> None:
    assert cli_bench._cpu_name()
