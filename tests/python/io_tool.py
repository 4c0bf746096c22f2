"""Runs the C++ file readers (tests/cpp/io/io_tool.cpp) from the build folder of the C++ tests."""

import os
import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def program() -> Path:
    """KDT_BUILD_DIR/io_tool, by default build/io_tool. Skips the test when it is not built."""
    folder = os.environ.get("KDT_BUILD_DIR")
    path = (Path(folder) if folder else ROOT / "build") / "io_tool"
    if not path.exists():
        if folder:  # whoever names a build wants it tested
            pytest.fail(f"{path} is missing")
        pytest.skip("the C++ tests are not built: run scripts/build_and_test.sh")
    return path


def verdicts(kind: str, files: Iterable[Path]) -> list[str]:
    """ "ok" or "refused MESSAGE" for each file, read as `kind` (safetensors or kdtr)."""
    names = [str(file) for file in files]
    result = subprocess.run([program(), kind, *names], capture_output=True, text=True, check=True)
    lines = result.stdout.splitlines()
    assert len(lines) == len(names)
    return lines


def copy_kdtr(source: Path, target: Path) -> None:
    """Reads a KDTR file in C++ and writes its arrays to another."""
    subprocess.run([program(), "kdtr-copy", source, target], check=True)
