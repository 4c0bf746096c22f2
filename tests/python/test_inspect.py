"""`kdtree inspect` on KDTR files and checkpoint folders."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fake_core
from kdtree_engine import kdtr
from kdtree_engine.inspect_files import inspect_path

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    path = tmp_path / "a.kdtr"
    kdtr.write(path, {"weights": kdtr.to_bf16(np.ones((2, 3))), "[red]": np.arange(4)})
    return path


def test_kdtr_table(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert inspect_path(bundle, as_json=False)
    out = capsys.readouterr().out
    for text in ("weights", "bf16", "[2, 3]", "[red]", "i64", "no faults found"):
        assert text in out


def test_what_is_piped_keeps_its_lines(bundle: Path, run: Run) -> None:
    folder = bundle.parent / ("long" * 50)
    folder.mkdir()
    path = bundle.rename(folder / bundle.name)
    out = run("inspect", str(path))[1]
    assert out.startswith(f"{path}, {path.stat().st_size:,} bytes")


def test_kdtr_table_is_whole_on_narrow_terminals(
    bundle: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    sums = [
        array["xxh64"] for array in json.loads(run("inspect", str(bundle), "--json")[1])["arrays"]
    ]
    monkeypatch.setenv("COLUMNS", "20")
    assert {"weights", "[red]", "bf16", *sums} <= set(run("inspect", str(bundle))[1].split())


def test_kdtr_json(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert inspect_path(bundle, as_json=True)
    report = json.loads(capsys.readouterr().out)
    assert [(a["name"], a["dtype"], a["shape"], a["bytes"]) for a in report["arrays"]] == [
        ("weights", "bf16", [2, 3], 12),
        ("[red]", "i64", [4], 32),
    ]
    assert report["faults"] == [] and report["bytes"] == bundle.stat().st_size


def test_kdtr_with_changed_data(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    raw = bytearray(bundle.read_bytes())
    raw[-1] ^= 1
    bundle.write_bytes(raw)
    assert not inspect_path(bundle, as_json=False)
    assert "bad checksum" in capsys.readouterr().out
    assert not inspect_path(bundle, as_json=True)
    assert "'[red]': bad checksum" in json.loads(capsys.readouterr().out)["faults"][0]


def test_files_that_are_something_else(bundle: Path, tmp_path: Path) -> None:
    bundle.write_bytes(bundle.read_bytes()[:-8])
    with pytest.raises(ValueError, match="truncated"):
        inspect_path(bundle, as_json=False)
    for raw in (b"", b"GGUF1234"):
        (tmp_path / "x").write_bytes(raw)
        with pytest.raises(ValueError, match="is not a KDTR file"):
            inspect_path(tmp_path / "x", as_json=False)
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match=f"part of a checkpoint: give its folder, {tmp_path}"):
        inspect_path(tmp_path / "model.safetensors", as_json=False)
    with pytest.raises(ValueError, match=r"not a checkpoint folder: it has no config\.json"):
        inspect_path(tmp_path, as_json=False)
    with pytest.raises(FileNotFoundError):
        inspect_path(tmp_path / "none", as_json=False)


def test_a_pipe_is_refused_before_it_is_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="pipe is neither a folder nor a file"):
        inspect_path(tmp_path / "pipe", as_json=False)


def test_folder_with_faults(
    fake_engine: Any,
    tokenizer_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert inspect_path(tokenizer_folder, as_json=False)
    out = capsys.readouterr().out
    assert "kimi_k2" in out and "sizes.hidden_size" in out and "drafter: " in out
    monkeypatch.setattr(
        fake_core, "inspect_checkpoint", lambda folder: {"faults": ["lm_head.weight is missing"]}
    )
    assert not inspect_path(tokenizer_folder, as_json=True)
    faults = json.loads(capsys.readouterr().out)["faults"]
    assert faults[0] == "model: lm_head.weight is missing"
