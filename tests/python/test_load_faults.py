"""Checkpoints that would load as another model than theirs: refused, and inspect says why."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kdtree_engine.reference.checkpoint import read_tensors, write_safetensors

_core: Any = pytest.importorskip("kdtree_engine._core")
if not hasattr(_core, "op_linear"):
    pytest.skip("the compiled module is not built", allow_module_level=True)

Edit = Callable[[dict[str, Any]], object]
UP = "model.layers.1.mlp.experts.0.up_proj"


def set_key(key: str, value: Any) -> Edit:
    return lambda config: config.__setitem__(key, value)


def drop(name: str) -> Edit:
    return lambda entries: entries.pop(name)


def set_shape(values: list[int]) -> Edit:
    return set_key(f"{UP}.weight_shape", np.array(values, np.int32))


EXTRA = np.zeros(4, np.float32)
NO_SUCH = "the model of config.json has no such tensor"
# name: (change of config.json, change of the tensors, the fault)
TARGET: dict[str, tuple[Edit | None, Edit | None, str]] = {
    "too few layers": (
        set_key("num_hidden_layers", 2),
        None,
        f"model.layers.2.input_layernorm.weight: {NO_SUCH}",
    ),
    "no shared experts": (
        set_key("n_shared_experts", 0),
        None,
        f"model.layers.1.mlp.shared_experts.down_proj.weight: {NO_SUCH}",
    ),
    "experts without end": (
        lambda c: c.update(num_hidden_layers=1024, n_routed_experts=65536),
        None,
        "config.json asks for 1023 layers of n_routed_experts 65536, the files hold ",
    ),
    "a bias": (
        None,
        set_key("model.layers.0.self_attn.o_proj.bias", EXTRA),
        f"model.layers.0.self_attn.o_proj.bias: {NO_SUCH}",
    ),
    "zero points": (
        None,
        set_key(f"{UP}.weight_zero_point", EXTRA),
        f"{UP}.weight_zero_point: {NO_SUCH}",
    ),
    "not quantized": (
        drop("quantization_config"),
        None,
        "down_proj.weight_packed: int4, but config.json has no quantization_config",
    ),
    "another weight_shape": (
        None,
        set_shape([32, 60]),
        f"{UP}.weight_shape: holds [32, 60], want [32, 64]",
    ),
    "nothing packed": (
        None,
        drop(f"{UP}.weight_packed"),
        f"{UP}: missing, neither .weight_packed (int4) nor .weight is there",
    ),
}
DRAFTER: dict[str, tuple[Edit | None, Edit | None, str]] = {
    "a head of its own": (None, set_key("lm_head.weight", EXTRA), f"lm_head.weight: {NO_SUCH}"),
    "a vocabulary of its own": (None, set_key("d2t", EXTRA), f"d2t: {NO_SUCH}"),
    "another target's": (
        set_key("num_target_layers", 61),
        None,
        "num_target_layers is 61, the target's num_hidden_layers is 3",
    ),
}


def change(folder: Path, config: Edit | None, tensors: Edit | None) -> None:
    if config is not None:
        path = folder / "config.json"
        read = json.loads(path.read_text())
        config(read)
        path.write_text(json.dumps(read))
    if tensors is not None:
        entries = read_tensors(folder)
        tensors(entries)
        for old in folder.glob("model*.safetensors*"):
            old.unlink()
        write_safetensors(folder / "model.safetensors", entries)


@pytest.fixture
def folder(tiny_model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


def faults(folder: Path) -> list[str]:
    reports = [_core.inspect_checkpoint(str(f)) for f in (folder, folder / "drafter")]
    return [fault for report in reports for fault in report["faults"]]


def test_the_checkpoint_itself_loads(folder: Path) -> None:
    # A change of nothing, so that the other tests' files are refused for their change alone.
    change(folder, lambda c: None, lambda t: None)
    change(folder / "drafter", lambda c: None, lambda t: None)
    assert faults(folder) == []
    _core.Engine(str(folder), str(folder / "drafter"), num_threads=1)


@pytest.mark.parametrize("name", [*TARGET, *DRAFTER])
def test_a_checkpoint_that_is_not_what_it_says(folder: Path, name: str) -> None:
    config, tensors, fault = TARGET[name] if name in TARGET else DRAFTER[name]
    change(folder if name in TARGET else folder / "drafter", config, tensors)
    found = faults(folder)
    assert any(fault in one for one in found), found
    with pytest.raises(RuntimeError) as error:
        _core.Engine(str(folder), str(folder / "drafter"), num_threads=1)
    assert fault in str(error.value)
