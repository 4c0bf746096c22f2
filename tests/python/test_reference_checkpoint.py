import json
import os
import subprocess
import sys

import numpy as np
import pytest

from kdtree_engine.kdtr import BF16Array, to_bf16
from kdtree_engine.reference import checkpoint
from make_tiny_model import PRESETS, make


def test_agrees_with_the_safetensors_package(tmp_path):
    safetensors = pytest.importorskip("safetensors.numpy")
    rng = np.random.default_rng(0)
    tensors = {
        "a": rng.standard_normal((3, 5)).astype(np.float32),
        "b": rng.integers(-9, 9, 7, dtype=np.int32),
        "scalar": np.array(2.5),
        "nothing": np.zeros((0, 4), np.float16),
    }
    safetensors.save_file(tensors, tmp_path / "theirs.safetensors", {"format": "pt"})
    checkpoint.write_safetensors(tmp_path / "ours.safetensors", tensors)
    for back in (
        checkpoint.read_safetensors(tmp_path / "theirs.safetensors"),
        safetensors.load_file(tmp_path / "ours.safetensors"),
    ):
        assert sorted(back) == sorted(tensors)
        for name, tensor in tensors.items():
            assert back[name].dtype == tensor.dtype and np.array_equal(back[name], tensor)


def test_bf16_comes_back_as_bits(tmp_path):
    w = to_bf16([[1.0, -2.5]])
    checkpoint.write_safetensors(tmp_path / "x.safetensors", {"w": w})
    back = checkpoint.read_safetensors(tmp_path / "x.safetensors")["w"]
    assert isinstance(back, BF16Array) and np.array_equal(back.bits, w.bits)


def test_json_is_utf8_whatever_the_locale(tmp_path):
    (tmp_path / "config.json").write_text('{"author": "\u00e9"}', "utf-8")
    checkpoint.write_safetensors(tmp_path / "w.safetensors", {"w": np.zeros(1)})
    index = '{"metadata": "\u00e9", "weight_map": {"w": "w.safetensors"}}'
    (tmp_path / "model.safetensors.index.json").write_text(index, "utf-8")
    script = """
import sys
from kdtree_engine.reference import checkpoint
print(ascii(checkpoint.read_config(sys.argv[1])["author"]), *checkpoint.read_tensors(sys.argv[1]))
"""
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        capture_output=True,
        text=True,
        env={**os.environ, **ascii_only},
    )
    assert done.stdout == "'\\xe9' w\n", done.stderr


def file_of(header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


@pytest.mark.parametrize(
    "file, fault",
    [
        (b"\1", "truncated"),
        (file_of({})[:-1], "truncated"),
        (file_of(b"{"), "not JSON"),
        (
            file_of({"t": {"dtype": "F9", "shape": [], "data_offsets": [0, 4]}}, b"0000"),
            "'t': dtype",
        ),
        (
            file_of({"t": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, b"0000"),
            "'t': data",
        ),
        (
            file_of({"t": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, b"0000"),
            "'t': data",
        ),
        (
            file_of({"t": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}}, b"0000"),
            "'t': data",
        ),
    ],
)
def test_a_malformed_file_is_refused(tmp_path, file, fault):
    (tmp_path / "x.safetensors").write_bytes(file)
    with pytest.raises(ValueError, match=fault):
        checkpoint.read_safetensors(tmp_path / "x.safetensors")


def test_the_index_names_the_shards(tmp_path):
    checkpoint.write_safetensors(tmp_path / "one.safetensors", {"a": np.zeros(1, np.float32)})
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "one.safetensors", "b": "one.safetensors"}}))
    with pytest.raises(ValueError, match="tensor 'b' is in no shard"):
        checkpoint.read_tensors(tmp_path)
    index.write_text(json.dumps({"weight_map": {"a": "../one.safetensors"}}))
    with pytest.raises(ValueError, match="is not the name of a file"):
        checkpoint.read_tensors(tmp_path)


@pytest.mark.parametrize(
    "config, want",
    [
        ({}, (10000.0, False)),
        ({"rope_theta": 5.0, "rope_scaling": None}, (5.0, False)),
        ({"rope_theta": 5.0, "rope_scaling": {}}, (5.0, False)),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}, (7.0, False)),
        ({"rope_theta": 5.0, "rope_scaling": {"type": "yarn", "factor": 2.0}}, (5.0, True)),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 7.0}}, (7.0, True)),
    ],
)
def test_both_spellings_of_rope_are_read(config, want):
    theta, yarn = checkpoint.rope_keys(config)
    assert (theta, yarn is not None) == want


def test_another_rope_is_refused():
    with pytest.raises(ValueError, match="rope_type 'longrope' is not supported"):
        checkpoint.rope_keys({"rope_scaling": {"rope_type": "longrope"}})


def test_the_tiny_checkpoint_is_whole(tmp_path):
    safetensors = pytest.importorskip("safetensors")
    make(tmp_path, PRESETS["nested"])
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) == 2
    size = 0
    for shard in set(index["weight_map"].values()):
        with safetensors.safe_open(tmp_path / shard, "numpy") as f:
            names = {n for n, s in index["weight_map"].items() if s == shard}
            assert set(f.keys()) == names
        size += sum(
            (t.bits if isinstance(t, BF16Array) else t).nbytes
            for t in checkpoint.read_safetensors(tmp_path / shard).values()
        )
    assert size == index["metadata"]["total_size"]
    expert = "language_model.model.layers.1.mlp.experts.7.down_proj"
    assert {f"{expert}.weight_{p}" for p in ("packed", "scale", "shape")} <= set(
        index["weight_map"]
    )
    assert checkpoint.read_config(tmp_path)["hidden_size"] == 64
