"""KDTR files: each language reads what the other wrote, and both refuse the same files."""

import random
import struct
from pathlib import Path

import numpy as np
import pytest
import xxhash

import io_tool
from kdtree_engine import kdtr

ARRAYS = {
    "a bool": np.array([True, False, True]),
    "b u8": np.arange(10, dtype=np.uint8).reshape(2, 5),
    "c i8": np.array([-128, 127], np.int8),
    "d i32": np.array([[[-(2**31)]], [[2**31 - 1]]], np.int32),
    "e i64": np.array(-(2**63), np.int64),
    "f u64": np.array([2**64 - 1], np.uint64),
    "g f16": np.linspace(-1, 1, 7, dtype=np.float16),
    "h bf16": kdtr.to_bf16(np.linspace(-3, 3, 12, dtype=np.float32).reshape(3, 4)),
    "i f32": np.array([np.nan, np.inf, -0.0], np.float32),
    "j f64": np.random.default_rng(0).standard_normal((5, 31)),
    "k none": np.zeros((0, 4), np.float32),
    "l ü€": np.zeros((1,) * 8, np.int8),
}


def test_cpp_writes_back_the_bytes_that_python_wrote(tmp_path: Path) -> None:
    kdtr.write(tmp_path / "python.kdtr", ARRAYS)  # in the order of their names, as C++ writes them
    io_tool.copy_kdtr(tmp_path / "python.kdtr", tmp_path / "cpp.kdtr")
    assert (tmp_path / "cpp.kdtr").read_bytes() == (tmp_path / "python.kdtr").read_bytes()
    assert list(kdtr.read(tmp_path / "cpp.kdtr")) == list(ARRAYS)


@pytest.mark.parametrize("arrays", [{}, {"w": np.zeros((0,), np.float64)}])
def test_a_file_without_data_goes_there_and_back(
    tmp_path: Path, arrays: dict[str, np.ndarray]
) -> None:
    kdtr.write(tmp_path / "python.kdtr", arrays)
    io_tool.copy_kdtr(tmp_path / "python.kdtr", tmp_path / "cpp.kdtr")
    assert (tmp_path / "cpp.kdtr").read_bytes() == (tmp_path / "python.kdtr").read_bytes()


def sealed(file: bytes) -> bytes:
    """The file with the checksum of its table put right, to reach the checks behind it."""
    table_bytes = min(struct.unpack_from("<I", file, 20)[0], len(file) - 32)
    checksum = struct.pack("<Q", xxhash.xxh64_intdigest(file[32 : 32 + table_bytes]))
    return file[:24] + checksum + file[32:]


def test_changed_files_are_judged_alike(tmp_path: Path) -> None:
    rng = random.Random(1)
    kdtr.write(
        tmp_path / "good.kdtr", {"a": np.ones(2, np.float32), "bb": np.array([True, False, True])}
    )
    good = (tmp_path / "good.kdtr").read_bytes()
    contents = [good] + [good[:length] for length in range(0, len(good), 3)]
    for _ in range(3000):
        content = bytearray(good)
        at = rng.randrange(len(content))
        content[at] = rng.choice(
            [0, 1, 2, 8, 64, 127, 128, 255, content[at] ^ 1 << rng.randrange(8)]
        )
        contents.append(sealed(bytes(content)) if rng.random() < 0.8 else bytes(content))
    paths = [tmp_path / f"{i}.kdtr" for i in range(len(contents))]
    for path, content in zip(paths, contents, strict=True):
        path.write_bytes(content)
    lines = io_tool.verdicts("kdtr", paths)
    for path, content, line in zip(paths, contents, lines, strict=True):
        try:
            kdtr.parse(content)
            accepted = True
        except kdtr.KdtrError:
            accepted = False
        assert (line == "ok") == accepted, (path.name, line)
    assert 50 < lines.count("ok") < 2500
