"""Checkpoints that would load as another model than theirs: refused, and inspect says why."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kdtree_engine import LLM
from kdtree_engine.inspect_files import inspect_path
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
        "drafter/config.json: num_target_layers is 61, the target's num_hidden_layers is 3",
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
    drafter = None if name in TARGET else str(folder / "drafter")  # which may not fit the change
    with pytest.raises(RuntimeError) as error:
        _core.Engine(str(folder), drafter, num_threads=1)
    assert fault in str(error.value)


def link_to_itself(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to(path)


@pytest.mark.parametrize("name", ["generation_config.json", "drafter/config.json"])
def test_a_link_that_leads_nowhere_is_a_fault(
    folder: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    link_to_itself(folder / name)
    fault = f"{folder / name}: cannot open: Too many levels of symbolic links"
    assert _core.inspect_checkpoint(str(folder))["faults"] == [fault]
    assert not inspect_path(folder, as_json=True)
    assert f"model: {fault}" in json.loads(capsys.readouterr().out)["faults"]
    with pytest.raises(RuntimeError) as error:
        _core.Engine(str(folder), str(folder / "drafter"), num_threads=1)
    assert str(error.value) == fault


def test_too_little_memory_for_max_model_len_names_it(folder: Path) -> None:
    change(folder, set_key("max_position_embeddings", 4194304), None)
    script = """
import resource, sys
from kdtree_engine import _core
resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
_core.Engine(sys.argv[1], num_threads=1, max_model_len=100)
try:
    _core.Engine(sys.argv[1], num_threads=1)
except RuntimeError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(folder)], capture_output=True, text=True, timeout=120
    )
    assert ", 4194304 tokens each (max_model_len): allocate: no memory for " in done.stdout, done
    assert "set a smaller max_model_len or max_num_seqs" in done.stdout


@pytest.mark.parametrize(
    ("text", "token_id", "name"),
    [
        ("<|im_end|>", 511, "'<|reserved_token_511|>'"),
        ("<|mask|>", 501, "'<|im_user|>'"),
        ("<|im_end|>", 501, "'<|im_user|>'"),
        ("<|mask|>", 104, "'h'"),
        ("<|im_user|>", 501, None),
        ("<|mask|>", 511, None),  # a name for an id that has none
        ("<|reserved_token_511|>", 511, None),
    ],
)
def test_a_mask_token_is_what_mask_token_id_is(
    folder: Path, text: str, token_id: int, name: str | None
) -> None:
    names = {"mask_token": text, "mask_token_id": token_id}
    change(folder / "drafter", lambda c: c["dflash_config"].update(names), None)
    if name is None:
        assert LLM(folder, num_threads=1).config["drafter"]["mask_token"] == text
        return
    fault = f"config.json: dflash_config.mask_token is '{text}', but mask_token_id {token_id} is "
    with pytest.raises(RuntimeError, match=re.escape(fault + name)):
        LLM(folder, num_threads=1)
    change(folder / "drafter", lambda c: c["dflash_config"].update(mask_token=7), None)
    with pytest.raises(RuntimeError, match=r"dflash_config\.mask_token is 7, want a string"):
        LLM(folder, num_threads=1)
