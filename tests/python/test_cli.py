"""The command `kdtree`: what it prints, its exit status, one-line errors."""

import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

import fake_core
from kdtree_engine import cli, cli_common
from kdtree_engine.cli import main
from kdtree_engine.cli_common import histogram_bars

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
    "seed",
}


# ---------------------------------------------------------------- generate


def test_generate_prints_text_and_statistics(scripted: Fake, run: Run) -> None:
    status, out, err = run("generate", "hello")
    assert status == 0 and out == "hello world!\nhello\n"
    last = err.splitlines()[-1]
    assert "5 tokens (length), ddtree auto" in last and "2 target forwards" in last
    assert "2.00 tokens per forward" in last and last.endswith("accept lengths 1|█ █|3]")


def test_a_load_that_takes_time_is_summed_up(
    scripted: Fake, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "loaded" in run("generate", "x")[2].splitlines()[0]
    counters = scripted.stats
    slow = {"load_seconds": 4.0, "load_bytes": 15_500_000_000}
    monkeypatch.setattr(scripted, "stats", lambda self: counters(self) | slow)
    line = run("generate", "x")[2].splitlines()[0]
    assert re.fullmatch(
        r"loaded \S+ on cpu: 15\.5 GB in 4\.0 s, 3\.88 GB/s, at most \d+\.\d GB of memory", line
    )


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
    assert record["seed"] is None
    record = json.loads(run("generate", "--json", "-T", "0.7", "--seed", "3", "hello")[1])
    assert record["seed"] == 3


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
    for raw, status in ((b"hello\n", 0), (b"a\nb\xff", 2)):
        (tmp_path / "in").write_bytes(raw)
        with open(tmp_path / "in") as file:
            monkeypatch.setattr(sys, "stdin", file)
            got, _, err = run("generate", "-")
        assert got == status
    assert "kdtree: error: standard input is not UTF-8 at byte 3, on line 2" in err


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
        (["-t", "99999999999"], "--num-threads is 99999999999, want 0 to 1024"),
        (["--rank-timeout", "5"], "ranks: give their number with --tp, under torchrun, mpirun and"),
        (["--tp", "2", "--rank-timeout", "0"], "--rank-timeout is 0.0, want 0.1 to"),
        (["-t", "-1"], "--num-threads is -1, want 0 to 1024"),
        (["--max-model-len", str(2**70)], f"--max-model-len is {2**70}, want 0 to "),
        (
            ["--tree-budget", "8", "--tree-topk", "9"],
            "--tree-topk is 9, more than --tree-budget, 8",
        ),
        (["--temperature", "-0.5"], "--temperature is -0.5, want 0 or 0.001 to 1000"),
        (["-T", "0.0001"], "--temperature is 0.0001, want 0 or 0.001 to 1000"),
        (["-T", "nan"], "--temperature is nan, want 0 or 0.001 to 1000"),
        (["-T", "1", "--top-p", "0"], "--top-p is 0.0, want above 0 and at most 1"),
        (["-T", "1", "--top-p", "1.5"], "--top-p is 1.5, want above 0 and at most 1"),
        (["-T", "1", "--top-k", "-2"], "--top-k is -2, want at least -1"),
        (["-T", "1", "--min-p", "2"], "--min-p is 2.0, want 0 to 1"),
        (["-T", "1", "--seed", str(2**63)], f"--seed is {2**63}, want 0 to {2**63 - 1}"),
        (["--seed", "3"], "--seed has no effect on greedy decoding: add a --temperature above 0"),
        (["--temperature", "0", "--top-p", "1"], "--top-p has no effect on greedy decoding"),
        (["--top-k", "0"], "--top-k has no effect on greedy decoding"),
        (["--method", "none", "--draft-temperature", "1"], "--draft-temperature needs trees"),
        (["--method", "dflash", "--tree-topk", "0"], "--tree-topk needs trees"),
        (["--tree-budget", "1" * 5000], "want 1 to 256 or auto"),
        (["--stop", "ab\udcff"], "--stop is not valid Unicode at character 2"),
        (["--chat", "--system", "\udcff"], "--system is not valid Unicode at character 0"),
        (["--model", "caf\udce9"], "--model is not valid Unicode at character 3"),
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


@pytest.mark.parametrize("command", ["generate", "tree", "bench", "chat"])
def test_every_command_has_the_engines_options(
    scripted: Fake, run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: str
) -> None:
    given: dict[str, Any] = {}

    def made(self: Any, model: str, drafter: str | None, device: str, **options: Any) -> None:
        given.update(device=device, **options)
        raise RuntimeError("enough")

    monkeypatch.setattr(scripted, "__init__", made)
    (tmp_path / "prompts.json").write_text('[{"text": "x"}]')
    own = {"bench": ["--prompts", str(tmp_path / "prompts.json")], "chat": []}.get(command, ["x"])
    options = ["--device", "cpu", "--tp", "4", "--expert-parallel", "-t", "3"]
    options += ["--max-model-len", "99", "--rank-timeout", "7"]
    assert run(command, *own, *options)[2].endswith("error: enough\n")
    assert (given["device"], given["tensor_parallel_size"], given["num_threads"]) == ("cpu", 4, 3)
    assert (given["max_model_len"], given["timeout_s"], given["expert_parallel"]) == (99, 7.0, True)


@pytest.mark.parametrize("command", ["generate", "tree", "bench", "chat"])
def test_every_command_samples(
    scripted: Fake,
    run: Run,
    prompts: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: str,
) -> None:
    seen: list[tuple[float, int, float, float, int]] = []
    add = scripted.add_request

    def spy(self: Any, ids: list[int], o: Any) -> int:
        seen.append((o.temperature, o.top_k, o.top_p, o.min_p, o.seed))
        return add(self, ids, o)

    monkeypatch.setattr(scripted, "add_request", spy)

    def call(*options: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"hello\n/stats\n")))
        return run(command, *(["x"] if command in ("generate", "tree") else []), *options)

    options = ["--top-k", "5", "--top-p", "0.9", "--min-p", "0.1", "--seed", "3"]
    status, _, err = call(*options)
    assert status == 2 and err.endswith(
        "error: --top-p has no effect on greedy decoding: add a --temperature above 0, such as "
        "--temperature 0.7\n"
    )
    assert not seen
    status, out, err = call("-T", "0.7", *options)
    assert status == 0 and set(seen) == {(0.7, 5, 0.9, 0.1, 3)}
    assert command == "tree" or "seed 3" in out + err
    seen.clear()
    assert call("--temperature", "0")[0] == 0 and set(seen) == {(0.0, 0, 1.0, 0.0, 0)}


def test_the_seed_of_a_text_is_told(scripted: Fake, run: Run) -> None:
    assert "seed" not in run("generate", "hello")[2].splitlines()[-1]
    lines = [run("generate", "--temperature", "0.7", "hello")[2].splitlines()[-1] for _ in "ab"]
    seeds = [re.search(r"2\.00 tokens per forward, seed (\d+), accept lengths", s) for s in lines]
    assert seeds[0] and seeds[1] and seeds[0][1] != seeds[1][1]


def test_options_that_the_engine_refuses_are_named(
    scripted: Fake, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise ValueError("device is 'tpu'; this build knows 'cpu'")

    monkeypatch.setattr(scripted, "__init__", refuse)
    status, _, err = run("generate", "hello", "--device", "tpu")
    assert status == 2 and err == "kdtree: error: --device is 'tpu'; this build knows 'cpu'\n"


def test_messages_name_options_but_leave_what_was_given() -> None:
    text = "tensor_parallel_size 3: use expert_parallel, or /a/expert_parallel.d/gpu_memory"
    text += ", 'max_model_len' or tree_budget.json"
    assert cli_common.with_option_names(text) == (
        "--tp 3: use --expert-parallel, or /a/expert_parallel.d/gpu_memory"
        ", 'max_model_len' or tree_budget.json"
    )


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


@pytest.mark.parametrize(
    "arguments", [["generate"], ["tree"], ["inspect"], ["generate", "--method"]]
)
def test_arguments_that_are_not_utf8_are_named(
    scripted: Fake, run: Run, arguments: list[str]
) -> None:
    status, out, err = run(*arguments, "x\udcff", *(["y"] if len(arguments) > 1 else []))
    name = {"generate": "PROMPT", "tree": "PROMPT", "inspect": "PATH"}.get(
        arguments[-1], "--method"
    )
    assert status == 2 and out == ""
    assert err.startswith(
        f"kdtree: error: {name} is not valid Unicode at character 1, in 'x\\udcff'"
    )


def test_chat_with_the_template_of_another_model(
    scripted: Fake, run: Run, tokenizer_folder: Path
) -> None:
    (tokenizer_folder / "tokenizer_config.json").write_text("{}")
    status, _, err = run("generate", "--chat", "hello")
    assert status == 1 and "uses '<|im_user|>', which is none of the tokenizer's control" in err


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate"], "'PROMPT' (see kdtree generate --help)"),
        (["generate", "x", "y"], "(y): text of several words needs quotes"),
        (["tree", "x", "--svg", "x.png"], "--svg is x.png: the picture is SVG"),
        (["inspect", "nowhere"], "PATH is nowhere: there is no such folder or file"),
        (["chat", "hello"], "(hello) (see kdtree chat --help)"),
        (["generate", "x", "--budget", "3"], "--budget"),
        (["generate", "x", "-n"], "'-n'"),
        (["fly"], "'fly'"),
        (["bench", "fly\n"], "'fly\\n'"),
        (["tree", "x", "--top-p", "\udcff"], "--top-p"),
        (["generate", "x", "-n", "1" * 5000], "--max-tokens"),
        (["inspect", "x", "--tp", "x"], "--tensor-parallel-size"),
        (["bench", "--limit", "0"], "--limit"),
    ],
)
def test_usage_errors_are_one_line(run: Run, arguments: list[str], message: str) -> None:
    status, out, err = run(*arguments)
    assert status == 2 and out == ""
    assert err.startswith("kdtree: error: ") and err.count("\n") == 1 and message in err


# An older typer, as Python 3.10 has it, tells the value in words of its own.
@pytest.mark.skipif(
    tuple(map(int, version("typer").split(".")[:2])) < (0, 29), reason="typer is older than 0.29"
)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "x", "-T", "abc"], "--temperature is 'abc', want a number"),
        (["chat", "--top-p", ""], "--top-p is '', want a number"),
        (["tree", "x", "--top-p", "\udcff"], "--top-p is '\\udcff', want valid Unicode"),
        (["generate", "x", "--top-k", "1.5"], "--top-k is '1.5', want an integer"),
        (["bench", "--seed", "0x10"], "--seed is '0x10', want an integer"),
        (["generate", "x", "-n", "1" * 5000], "1..., want an integer of fewer digits"),
        (["bench", "--limit", "0"], "--limit is '0', want at least 1"),
    ],
)
def test_values_of_a_wrong_kind_are_told(run: Run, arguments: list[str], message: str) -> None:
    assert run(*arguments)[2].endswith(f"{message}\n")


def test_without_arguments_the_help_is_shown(run: Run) -> None:
    status, out, err = run()
    assert status == 2 and out == "" and err == run("--help")[1]


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


def test_text_for_a_terminal_cannot_steer_it(run: Run) -> None:
    assert "PATH is no\ufffd[2Jfile: there is" in run("inspect", "no\x1b[2Jfile")[2]
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
    assert (tmp_path / "t.svg").read_text("utf-8").startswith("<svg ") and "wrote" in err


def test_a_sampled_tree_says_what_its_probabilities_are(
    scripted: Fake, run: Run, tmp_path: Path
) -> None:
    svg = tmp_path / "t.svg"
    for sampling, told in (([], 0), (["-T", "0"], 0), (["-T", "0.7"], 1)):
        out = run("tree", "hello", "--svg", str(svg), *sampling)[1]
        note = "; probabilities given part of the noise of the draws"
        assert out.count(f"accepted by the target{note}\n") == told
        assert svg.read_text("utf-8").count(f"tokens{note}</text>") == told
        assert ("noise" in out) == ("noise" in svg.read_text("utf-8")) == bool(told)
    assert "given part of the noise" in " ".join(run("tree", "--help")[1].split())


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


# ---------------------------------------------------------------- as a process


def command(*arguments: str, shell: str = "") -> subprocess.CompletedProcess[str]:
    """The command as a process; `shell` is what the shell is told about its streams."""
    source = Path(cli.__file__).parents[1]
    line = shlex.join([sys.executable, "-m", "kdtree_engine", *arguments])
    return subprocess.run(
        ["sh", "-c", f"{line} {shell}"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(source)},
    )


def test_module_is_the_command() -> None:
    done = command("inspect", "/no/such/file")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == "kdtree: error: PATH is /no/such/file: there is no such folder or file\n"


IMPORTING = """
import os, signal
try:
    os.kill(os.getpid(), signal.SIGINT)
except KeyboardInterrupt as error:  # as a class does to what ends its making
    raise RuntimeError from error
"""
READING_OPTIONS = """
import typer.core
def interrupted(*_, **__):
    raise KeyboardInterrupt
typer.core.TyperGroup.make_context = interrupted
"""


@pytest.mark.parametrize(("name", "text"), [("typer", IMPORTING), ("first", READING_OPTIONS)])
def test_an_interrupt_before_the_command_begins_is_clean(
    tmp_path: Path, name: str, text: str
) -> None:
    (tmp_path / "first.py").touch()
    (tmp_path / f"{name}.py").write_text(text)
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    entry = re.search(r'^kdtree = "([\w.]+):(\w+)"$', project, re.M)
    assert entry is not None
    for script in (
        f"import first; from {entry[1]} import {entry[2]}; {entry[2]}()",
        "import first, runpy; runpy.run_module('kdtree_engine', run_name='__main__')",
    ):
        done = subprocess.run(
            [sys.executable, "-c", script, "--help"],
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": f"{tmp_path}:{Path(cli.__file__).parents[1]}"},
            # A shell that starts us in the background has SIGINT ignored.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        assert done.returncode == 130 and done.stderr == "\nkdtree: interrupted\n", done.stderr


def test_the_package_alone_imports_little() -> None:
    """Until it is imported, nothing says "interrupted" in place of Python's traceback."""
    script = "import sys; a = set(sys.modules); import kdtree_engine; print(set(sys.modules) - a)"
    done = subprocess.run(
        [sys.executable, "-S", "-c", script],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(cli.__file__).parents[1])},
    )
    assert "'kdtree_engine'" in done.stdout and "importlib.metadata" not in done.stdout


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["inspect", "FILE"]])
def test_streams_that_are_closed_or_full(arguments: list[str]) -> None:
    file = Path(__file__).parents[1] / "data" / "tree_wide.kdtr"
    arguments = [str(file) if a == "FILE" else a for a in arguments]
    done = command(*arguments, shell=">&-")
    assert done.returncode == 1 and done.stderr == "kdtree: error: standard output is closed\n"
    done = command(*arguments, shell=">/dev/full")
    assert done.returncode == 1 and done.stderr == "kdtree: error: No space left on device\n"
    done = command(*arguments, shell="<&- 2>&-")
    assert done.returncode == 0 and done.stdout
    done = command(*arguments, shell="| true")
    assert done.stderr == ""


def test_a_closed_standard_error_does_not_go_to_standard_output() -> None:
    done = command("inspect", "/no/such/file", shell="2>&-")
    assert done.returncode == 2 and done.stdout == ""


def test_a_closed_standard_input() -> None:
    done = command("generate", "-", shell="<&-")
    assert done.returncode == 2
    assert done.stderr == "kdtree: error: standard input is closed: give some text to continue\n"
