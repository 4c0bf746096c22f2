"""Checkpoint folders in Hugging Face layout, read with numpy alone."""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kdtree_engine.kdtr import Array, BF16Array

_DTYPES = {
    "BOOL": "?", "U8": "u1", "I8": "i1", "I32": "<i4", "I64": "<i8", "U64": "<u8",
    "F16": "<f2", "BF16": "<u2", "F32": "<f4", "F64": "<f8",
}  # fmt: skip


def read_safetensors(path: str | os.PathLike[str]) -> dict[str, Array]:
    """The tensors of one file. Raises ValueError naming the tensor and the fault."""
    file = Path(path).read_bytes()
    header_bytes = int.from_bytes(file[:8], "little")
    if len(file) < 8 or header_bytes > len(file) - 8:
        raise ValueError(f"{path}: truncated: {len(file)} bytes, a header of {header_bytes}")
    try:
        header = json.loads(file[8 : 8 + header_bytes])
    except ValueError as error:
        raise ValueError(f"{path}: the header is not JSON: {error}") from error
    data = memoryview(file)[8 + header_bytes :]
    tensors: dict[str, Array] = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        if dtype not in _DTYPES:
            raise ValueError(f"{path}: tensor {name!r}: dtype {dtype} is not supported")
        want = math.prod(shape) * np.dtype(_DTYPES[dtype]).itemsize
        if not 0 <= begin <= end <= len(data) or end - begin != want:
            raise ValueError(
                f"{path}: tensor {name!r}: data_offsets [{begin}, {end}], "
                f"want {want} of the {len(data)} bytes"
            )
        values = np.frombuffer(data[begin:end], _DTYPES[dtype]).reshape(shape)
        tensors[name] = BF16Array(values) if dtype == "BF16" else values
    return tensors


def write_safetensors(path: str | os.PathLike[str], tensors: Mapping[str, Array]) -> None:
    """Writes the tensors in their order."""
    names = {np.dtype(code): name for name, code in _DTYPES.items() if name != "BF16"}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = bytearray()
    for name, tensor in tensors.items():
        values = tensor.bits if isinstance(tensor, BF16Array) else tensor
        dtype = "BF16" if isinstance(tensor, BF16Array) else names[values.dtype]
        begin = len(data)
        data += values.tobytes()
        offsets = [begin, len(data)]
        header[name] = {"dtype": dtype, "shape": list(values.shape), "data_offsets": offsets}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    Path(path).write_bytes(len(text).to_bytes(8, "little") + text + data)


def read_tensors(folder: str | os.PathLike[str]) -> dict[str, Array]:
    """Every tensor of a folder: of the shards its index names, or of model.safetensors."""
    index = Path(folder) / "model.safetensors.index.json"
    if not index.exists():
        return read_safetensors(Path(folder) / "model.safetensors")
    weight_map: dict[str, str] = json.loads(index.read_bytes())["weight_map"]
    tensors: dict[str, Array] = {}
    for shard in sorted(set(weight_map.values())):
        if Path(shard).name != shard:
            raise ValueError(f"{index}: shard {shard!r} is not the name of a file in the folder")
        tensors |= read_safetensors(Path(folder) / shard)
    missing = sorted(set(weight_map) - set(tensors))
    if missing:
        raise ValueError(f"{index}: tensor {missing[0]!r} is in no shard")
    return tensors


def read_config(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """The text model's keys of config.json; a nested `text_config` is lifted."""
    config: dict[str, Any] = json.loads((Path(folder) / "config.json").read_bytes())
    return {**config, **config["text_config"]} if "text_config" in config else config


def rope_keys(config: Mapping[str, Any]) -> tuple[float, dict[str, Any] | None]:
    """rope_theta and the yarn parameters, None for plain rope; from either spelling of the keys.

    Raises ValueError for another kind of rope.
    """
    keys = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = float(keys.get("rope_theta", config.get("rope_theta", 10000.0)))
    kind = keys.get("rope_type", keys.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "yarn":
        raise ValueError(f"rope_type {kind!r} is not supported, want default or yarn")
    return theta, dict(keys)


def to_numpy(tensor: Array, dtype: Any) -> np.ndarray[Any, Any]:
    """A tensor's values in `dtype`."""
    return (tensor.to_float32() if isinstance(tensor, BF16Array) else tensor).astype(dtype)
