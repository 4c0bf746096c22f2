"""Pre-sharded caches and memory plans: the same tokens, clear refusals, nothing left behind."""

import json
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kdtree_engine
from kdtree_engine import LLM, SamplingParams
from kdtree_engine.inspect_files import inspect_path
from kdtree_engine.inspect_plan import parse_size, size_text

_core: Any = pytest.importorskip("kdtree_engine._core")
if not hasattr(_core, "shard_checkpoint"):
    pytest.skip("the compiled module is not built", allow_module_level=True)
from kdtree_engine import synth  # noqa: E402

BUNDLED = Path(kdtree_engine.__file__).parent / "models" / "k2-nano"
PROMPT = list(range(40, 60))
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the bundled model, for two ranks."""
    out = tmp_path_factory.mktemp("cache") / "k2-nano-tp2"
    _core.shard_checkpoint(str(BUNDLED), str(out), str(BUNDLED / "drafter"), tensor_parallel_size=2)
    return out


def tokens(model: Path, drafter: Path | None, ranks: int, whole: bool = False) -> list[int]:
    engine = _core.Engine(
        str(model),
        str(drafter) if drafter else None,
        tensor_parallel_size=ranks,
        expert_parallel=whole,
        num_threads=2,
        max_model_len=128,
    )
    options = _core.RequestOptions(max_tokens=24, ignore_eos=True)
    return [t for output in engine.generate(PROMPT, options) for t in output.token_ids]


@pytest.mark.parametrize(
    ("like", "ranks", "whole"),
    [("bundled", 1, False), ("bundled", 2, False), ("bundled", 4, True), ("kimi-k2.6", 2, False),
     ("kimi-k2-instruct", 2, True)],
)  # fmt: skip
def test_a_cache_gives_the_checkpoints_tokens(
    like: str, ranks: int, whole: bool, tmp_path: Path
) -> None:
    model = BUNDLED
    if like != "bundled":
        model = tmp_path / "model"
        synth.write(synth.plan(like, layers=2, experts=8, hidden=256, vocab=640), model)
    out = tmp_path / "out"
    told: list[tuple[int, int]] = []
    made = _core.shard_checkpoint(
        str(model), str(out), str(model / "drafter"), tensor_parallel_size=ranks,
        expert_parallel=whole, progress=lambda done, total: told.append((done, total)),
    )  # fmt: skip
    assert made["layout"] == "cpu-panels-1"
    assert told[-1] == (made["written_bytes"], made["written_bytes"])
    expected = tokens(model, model / "drafter", ranks, whole)
    assert len(expected) == 24
    assert tokens(out, out / "drafter", ranks, whole) == expected
    assert _core.inspect_checkpoint(str(out), verify=True)["faults"] == []


def test_drafters_of_all_kinds(cache: Path) -> None:
    expected = tokens(BUNDLED, None, 2)
    assert tokens(cache, None, 2) == expected
    assert tokens(cache, BUNDLED / "drafter", 2) == expected  # a checkpoint
    assert tokens(BUNDLED, cache / "drafter", 2) == expected


def test_llm_takes_a_cache(cache: Path) -> None:
    params = SamplingParams(max_tokens=12)
    texts = []
    for model in (BUNDLED, cache):
        with LLM(model, tensor_parallel_size=2, device="cpu") as llm:
            texts.append(llm.generate("def fibonacci(n):", params)[0].outputs[0].text)
            assert llm.stats()["draft_forwards"] > 0
    assert texts[0] == texts[1] != ""
    with pytest.raises(
        ValueError, match=r"tensor_parallel_size is 1, but .* is a pre-sharded cache"
    ):
        LLM(cache, device="cpu")
    with pytest.raises(ValueError, match=r"expert_parallel is true, but .* cache made without it"):
        LLM(cache, device="cpu", tensor_parallel_size=2, expert_parallel=True)


def test_a_back_end_without_a_layout_takes_no_cache(tmp_path: Path) -> None:
    out = tmp_path / "out"
    _core.shard_checkpoint(str(BUNDLED), str(out))
    with pytest.raises(RuntimeError, match=r"layout 'cpu-panels-1', device 'check:.*' has none: "):
        _core.Engine(str(out), None, "check:cpu,cpu")


# ---------------------------------------------------------------- the command


def test_shard_command(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "out"
    status, text, error = run("shard", str(BUNDLED), "--tp", "2", "--out", str(out))
    assert status == 0 and text == "", error
    assert error.startswith(f"wrote {out}: 2 ranks, layout cpu-panels-1, ")
    names = {path.name for path in out.iterdir()}
    assert {"config.json", "generation_config.json", "tiktoken.model", "drafter"} <= names
    assert {"chat_template.jinja", "tokenizer_config.json", "kdtree_shards.json"} <= names
    assert not any(name.endswith((".safetensors", ".index.json")) for name in names)
    status, text, error = run(
        "generate", "--model", str(out), "--tp", "2", "--device", "cpu", "-n", "4", "--json", "x ="
    )
    assert status == 0 and len(json.loads(text)["token_ids"]) == 4, error


def test_options_are_refused_by_name(run: Run, cache: Path, tmp_path: Path) -> None:
    out, model = str(tmp_path / "out"), str(BUNDLED)
    cases = [
        ([model], "--out is missing"),
        ([str(tmp_path / "none"), "--out", out], "MODEL is "),
        ([str(tmp_path), "--out", out], "not a checkpoint folder"),
        ([model, "--out", str(cache)], "--out is "),
        ([model, "--out", str(tmp_path / "a" / "b")], "--out is "),
        ([model, "--out", out, "--tp", "0"], "--tensor-parallel-size is 0; want 1 to 64"),
        ([model, "--out", out, "--tp", "3"], "--tensor-parallel-size is 3, which does not divide"),
        ([model, "--out", out, "--expert-parallel"], "--expert-parallel is true, but --tp is 1"),
        ([model, "--out", out, "--device", "abacus"], "--device is 'abacus'"),
        ([model, "--out", out, "--device", "check:cpu,cpu"], "which has no weight layout"),
        ([model, "--out", out, "--device", "cuda", "-t", "2"], "--num-threads is 2"),
        ([model, "--out", out, "--draft-model", str(tmp_path)], "--draft-model is "),
        ([str(cache), "--out", out], "which is a pre-sharded cache already"),
    ]  # fmt: skip
    for arguments, message in cases:
        status, _, error = run("shard", *arguments)
        assert status == 2 and message in error and len(error.splitlines()) == 1, (arguments, error)
        assert list(tmp_path.iterdir()) == [], arguments


def command(*arguments: str, **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "kdtree_engine", *arguments],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        **options,
    )


def test_an_interrupt_leaves_nothing(tmp_path: Path) -> None:
    out = tmp_path / "out"
    for _ in range(10):
        # A shell that starts us in the background has SIGINT ignored.
        process = command(
            "shard",
            str(BUNDLED),
            "--out",
            str(out),
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        deadline = time.monotonic() + 60
        while not (tmp_path / "out.partial").exists() and time.monotonic() < deadline:
            time.sleep(0.001)
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=60)
        if process.returncode != 0:
            break
        shutil.rmtree(out)  # it was done before the signal came
    assert process.returncode == 130 and "interrupted" in error
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (5_000_000, 5_000_000))

    process = command(
        "shard", str(BUNDLED), "--tp", "2", "--out", str(tmp_path / "out"), preexec_fn=limit
    )
    _, error = process.communicate(timeout=60)
    assert process.returncode == 1 and "bytes: File too large" in error, error
    assert "rank-0-of-2.kdts: cannot write at " in error
    assert len(error.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def sparse_kimi(folder: Path) -> dict[str, Any]:
    """Kimi K2.6's headers, in files whose data are holes."""
    made: dict[str, Any] = _core.synth_checkpoint("kimi-k2.6")
    folder.mkdir()
    (folder / "config.json").write_text(made["config"])
    (folder / "generation_config.json").write_text(made["generation_config"])
    index: dict[str, str] = {}
    for shard in made["shards"]:
        with open(folder / shard["file"], "wb") as file:
            file.write(shard["header"])
            file.truncate(len(shard["header"]) + shard["bytes"])
        names = json.loads(shard["header"][8:])
        index |= {name: shard["file"] for name in names if name != "__metadata__"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return made


def test_too_little_room_is_known_before_anything_is_read(run: Run, tmp_path: Path) -> None:
    if shutil.disk_usage(tmp_path).free > 500e9:
        pytest.skip("this disk has room for Kimi K2.6")
    model = tmp_path / "model"
    sparse_kimi(model)
    out = tmp_path / "out"
    status, _, error = run("shard", str(model), "--tp", "2", "--device", "cpu", "--out", str(out))
    assert status == 1 and f"{out}: needs " in error and " are free on its disk" in error, error
    needed = float(error.split("needs ")[1].split(" GB")[0])
    assert 590 < needed < 620
    assert list(tmp_path.iterdir()) == [model]
    # And the plan of the same headers, which the command line prints.
    plan = _core.plan_memory(str(model), tensor_parallel_size=8, gpu_memory=96 << 30)
    assert round(plan["weights"] / 2**30, 2) == pytest.approx(70.95, abs=0.01)
    assert plan["kv_bytes_per_token"] == 70272


# ---------------------------------------------------------------- inspect


def test_inspect_a_cache(run: Run, cache: Path, tmp_path: Path) -> None:
    status, text, _ = run("inspect", str(cache), "--verify", "--json")
    report = json.loads(text)
    assert status == 0 and report["faults"] == []
    assert report["model"]["cache"]["tensor_parallel_size"] == 2
    assert report["model"]["cache"]["source"] == str(BUNDLED)
    copy = tmp_path / "copy"
    shutil.copytree(cache, copy)
    path = copy / "drafter" / "rank-1-of-2.kdts"
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    (copy / "rank-0-of-2.kdts").unlink()
    assert run("inspect", str(copy / "drafter"))[0] == 0  # not all is read
    status, text, _ = run("inspect", str(copy), "--verify", "--tp", "4", "--json")
    faults = json.loads(text)["faults"]
    assert status == 1 and len(faults) == 4, faults
    assert "rank-0-of-2.kdts: missing" in faults[0]
    assert faults[1].startswith("drafter: ") and "bad checksum of the data of '" in faults[1]
    assert "plan: --tp is 4, but " in faults[2]
    text = run("inspect", str(cache), "--tp", "2", "--expert-parallel", "--json")[1]
    faults = json.loads(text)["faults"]
    assert faults and all(f.startswith("plan: --expert-parallel is true, but ") for f in faults)
    text = run("inspect", str(cache), "--tp", "4", "--gpu-memory", "96GiB")[1]
    assert "fits, but for the faults below: needs " in text
    status, _, error = run("generate", "--expert-parallel", "x")
    assert status == 2 and ": --expert-parallel is true, but --tp is 1: there are no ranks" in error
    status, _, error = run("inspect", str(BUNDLED), "--verify")
    assert status == 2 and error.startswith("kdtree: error: --verify is true, but ")


def test_verifying_shows_progress_and_can_be_interrupted(cache: Path) -> None:
    told: list[tuple[int, int]] = []
    _core.inspect_checkpoint(str(cache), verify=True, progress=lambda *bytes: told.append(bytes))
    total = sum(path.stat().st_size for path in cache.glob("*.kdts"))
    assert told[-1] == (total, total) and told == sorted(told)

    def interrupt(done: int, total: int) -> None:
        told.append((done, total))
        raise KeyboardInterrupt

    told.clear()
    with pytest.raises(KeyboardInterrupt):
        _core.inspect_checkpoint(str(cache), verify=True, progress=interrupt)
    assert len(told) == 1 and told[0][0] < total
    with pytest.raises(ValueError, match="progress is 3; want a function or None"):
        _core.inspect_checkpoint(str(cache), verify=True, progress=3)


def test_the_drafter_goes_on_where_the_targets_progress_ended(cache: Path) -> None:
    told: list[tuple[int, int]] = []
    assert inspect_path(
        cache, as_json=True, verify=True, progress=lambda *bytes: told.append(bytes)
    )
    total = sum(path.stat().st_size for path in cache.rglob("*.kdts"))
    assert told == sorted(told) and {of for _, of in told} == {total}
    assert told[-1] == (total, total)


def test_a_drafter_that_may_not_be_entered_is_a_fault(cache: Path, tmp_path: Path) -> None:
    script = """
import ctypes, sys
from pathlib import Path
from kdtree_engine.inspect_files import inspect_path
# A root whom modes stop: without CAP_DAC_OVERRIDE (1) and CAP_DAC_READ_SEARCH (2).
libc, header, sets = ctypes.CDLL(None), (ctypes.c_uint32 * 2)(0x20080522), (ctypes.c_uint32 * 6)()
assert libc.capget(header, sets) == 0
for i in range(3):
    sets[i] &= ~0b110
assert libc.capset(header, sets) == 0
for verify in (False, True):
    inspect_path(Path(sys.argv[1]), as_json=True, verify=verify)
"""
    copy = tmp_path / "copy"
    shutil.copytree(cache, copy)
    (copy / "drafter").chmod(0)
    done = subprocess.run([sys.executable, "-c", script, str(copy)], capture_output=True, text=True)
    (copy / "drafter").chmod(0o755)
    fault = f"{copy}/drafter/config.json: cannot open: Permission denied"
    reports = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(reports) == 2, done.stderr
    for report in reports:
        assert report["drafter"] == {"faults": [fault]}
        assert report["model"]["kind"] == "target" and f"drafter: {fault}" in report["faults"]


def test_inspect_prints_a_plan(run: Run) -> None:
    status, text, error = run("inspect", str(BUNDLED), "--tp", "2", "--gpu-memory", "3GiB")
    assert status == 0, error
    for part in ("plan: each of 2 ranks", "experts", "drafter", "workspace", "tokens that fit"):
        assert part in text
    assert "kv_lora_rank" not in text and f"model: {BUNDLED}: " in text
    # The verdict is the last word, but for faults.
    verdict = " ".join(text.split("sequences of")[-2].split())
    assert (
        "fits: needs " in verdict and " a rank, " in verdict and " cache tokens fit, 8" in verdict
    )
    assert " 8 sequences of 2,048 tokens and a spare one take " in text
    assert "cache, 8 sequences of 2,048 and a spare one " in text
    assert " 0." not in text and re.search(r" norms +│ +[0-9,]+ │ +[0-9.]+ KiB ", text), text
    text = run("inspect", str(BUNDLED), "--tp", "2", "--max-num-seqs", "1")[1]
    assert " for the cache of 1 sequence of 2,048 tokens and a spare one; --gpu-memory SIZE" in text
    status, text, _ = run(
        "inspect", str(BUNDLED), "--tp", "2", "--gpu-memory", "3GiB", "--overhead", "1GiB",
        "--max-model-len", "1024", "--max-num-seqs", "4", "--json",
    )  # fmt: skip
    plan = json.loads(text)["plan"]
    assert status == 0 and plan["overhead"] == 1 << 30 and plan["max_model_len"] == 1024
    # 128 + 64 values of two bytes in each of ten layers; 1024 + 256 + 64 positions a sequence.
    assert plan["kv_bytes_per_token"] == 192 * 2 * 10 and plan["cache_tokens"] == 5 * 1344
    free = (3 << 30) - (1 << 30) - plan["weights"] - plan["workspace"]
    per_token = plan["kv_bytes_per_token"] + plan["draft_kv_bytes_per_token"]
    assert plan["kv_tokens_fit"] == free // per_token


def test_plans_are_whole_on_narrow_terminals(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    words = run("inspect", str(BUNDLED), "--tp", "2", "--gpu-memory", "3GiB")[1].split()
    assert {"2,147,483,648", "3,221,225,472", "drafter's"} <= set(words)
    words = run("inspect", str(BUNDLED))[1].split()
    assert {"max_position_embeddings", "bytes_by_part.embedding", "deepseek_v3"} <= set(words)


def test_what_a_plan_finds_wrong(run: Run, tmp_path: Path) -> None:
    status, text, _ = run("inspect", str(BUNDLED), "--tp", "3", "--json")
    faults = json.loads(text)["faults"]
    assert status == 1
    assert faults == ["plan: --tp is 3, which does not divide num_attention_heads, 4"]
    status, text, _ = run("inspect", str(BUNDLED), "--gpu-memory", "2GiB", "--json")
    assert status == 1
    assert "raise --gpu-memory or lower --overhead" in json.loads(text)["faults"][0]
    small = ["--gpu-memory", "2.3GiB", "--max-num-seqs", "1000"]
    status, text, _ = run("inspect", str(BUNDLED), *small)
    text = " ".join(text.split())
    assert status == 1 and "does not fit: needs " in text and ", has 2.30 GiB; " in text
    assert "lower --max-model-len or --max-num-seqs" in text
    copy = tmp_path / "model"
    shutil.copytree(BUNDLED, copy)
    (copy / "model-00002-of-00003.safetensors").unlink()
    status, text, _ = run("inspect", str(copy), "--tp", "2", "--json")
    report = json.loads(text)
    assert status == 1 and report["plan"] is None
    assert len(report["faults"]) == 1 and "model-00002-of-00003" in report["faults"][0]


def test_plan_options_are_refused_by_name(run: Run, tmp_path: Path) -> None:
    file = str(Path(__file__).parents[1] / "data" / "tree_wide.kdtr")
    cases = [
        (["--gpu-memory", "3x"], "--gpu-memory is '3x', want a size such as 96GiB"),
        (["--overhead", "-1"], "--overhead is '-1', want a size"),
        (["--gpu-memory", "0"], "--gpu-memory is '0', want a size"),
        (["--gpu-memory", "9000TiB"], "--gpu-memory is '9000TiB', want a size"),
        (["--tp", "65"], "--tensor-parallel-size is 65; want 1 to 64"),
        (["--expert-parallel"], "--expert-parallel is true, but --tp is 1"),
        (["--max-model-len", "4096"], "--max-model-len is 4096; want 0 (the checkpoint's) to 2048"),
        (["--max-num-seqs", "0"], "--max-num-seqs is 0; want 1 to 1024"),
        (["--draft-model", str(tmp_path)], "--draft-model is "),
    ]  # fmt: skip
    for arguments, message in cases:
        status, _, error = run("inspect", str(BUNDLED), *arguments)
        assert status == 2 and message in error and len(error.splitlines()) == 1, (arguments, error)
    for arguments in (["--tp", "2"], ["--verify"]):
        status, _, error = run("inspect", file, *arguments)
        assert status == 1 and "is no folder" in error
    status, _, error = run("inspect", str(BUNDLED / "drafter"), "--tp", "2")
    assert status == 1 and "is a drafter's folder" in error


def test_a_size_is_told_in_a_unit_that_shows_it(run: Run, tiny_model: Path) -> None:
    text = run("inspect", str(tiny_model), "--max-num-seqs", "2")[1]
    assert " 0." not in text and re.search(r"^model: .*tensors, [0-9.]+ KiB$", text, re.M), text
    sizes = {0: "0 B", 1023: "1023 B", 1 << 10: "1.00 KiB", 3 << 19: "1.50 MiB"}
    sizes |= {(1 << 30) - 1: "1024.00 MiB", 1 << 30: "1.00 GiB", 1 << 50: "1048576.00 GiB"}
    assert {size: size_text(size) for size in sizes} == sizes


def test_sizes() -> None:
    sizes = {"96GiB": 96 << 30, "96": 96 << 30, "80GB": 80 * 10**9, "80 gb": 80 * 10**9}
    sizes |= {"1.5g": 3 << 29, "512 MiB": 512 << 20, "100000000B": 10**8, " 1TiB ": 1 << 40}
    sizes |= {"94.5Gi": 189 << 29, "0.5PB": 5 * 10**14, "1125899906842623B": (1 << 50) - 1}
    sizes |= dict.fromkeys(
        ("1PiB", "1 p", "1024TiB", "1048576", "1125899906842624B", "1.125899906842624PB"), 1 << 50
    )
    sizes |= {"1PB": 10**15, "1125899.906842624 GB": 1 << 50}
    for text, size in sizes.items():
        assert parse_size("--x", text) == size, text
    for text in (
        "",
        "GiB",
        "-1",
        "1e9",
        "96GBps",
        "0",
        "0.0GiB",
        "1 2",
        "nan",
        "inf",
        "9" * 30,
        "1125899906842625B",
        "1.0000000000000001PiB",
        "1.2PB",
        "9" * 5000,
        "0.4B",
    ):
        with pytest.raises(ValueError, match=r"^--x is .*, want a size such as 96GiB"):
            parse_size("--x", text)
