"""Loading: FP8 against its bf16 twin, what one reading costs, and files that are not whole."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kdtree_engine.kdtr import to_bf16
from kdtree_engine.reference.checkpoint import read_tensors

_core: Any = pytest.importorskip("kdtree_engine._core")
if not hasattr(_core, "op_linear"):
    pytest.skip("the compiled module is not built", allow_module_level=True)

FP8 = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "weight_block_size": [128, 128],
    "activation_scheme": "dynamic",
}
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


def engine(folder: Path, ranks: int = 1, **options: Any) -> Any:
    options = {"num_threads": 1, "max_model_len": 256, "timeout_s": 60.0} | options
    options = {"expert_parallel": ranks > 1} | options
    return _core.Engine(str(folder), tensor_parallel_size=ranks, **options)


# ---------------------------------------------------------------- FP8


def e4m3() -> npt.NDArray[np.float64]:
    """The value of each code, NaN for 0x7f and 0xff."""
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 15, code & 7
    value = np.where(
        exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    )
    value[(code & 127) == 127] = np.nan
    return np.where(code >= 128, -value, value)


def write(folder: Path, tensors: dict[str, tuple[str, list[int], bytes]]) -> None:
    """Of (dtype, shape, bytes) each, whatever the dtype."""
    for old in folder.glob("model*.safetensors*"):
        old.unlink()
    header, data = {}, bytearray()
    for name, (dtype, shape, raw) in tensors.items():
        offsets = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        data += raw
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)


def make_twins(tiny: Path, fp8: Path, bf16: Path) -> None:
    """The tiny model with all matrices that may be FP8 as FP8, and as the bf16 they stand for."""
    rng = np.random.default_rng(1)
    values = e4m3()
    coded: dict[str, tuple[str, list[int], bytes]] = {}
    plain: dict[str, tuple[str, list[int], bytes]] = {}
    for name, tensor in read_tensors(tiny).items():
        module, _, kind = name.rpartition(".")
        if kind in ("weight_scale", "weight_shape"):
            continue
        bits = tensor.bits if hasattr(tensor, "bits") else tensor
        shape = list(bits.shape)
        if kind == "weight_packed":
            shape[1] *= 8
        dtype = "F32" if bits.dtype == np.float32 else "BF16"
        if len(shape) < 2 or "embed_tokens" in name or name.endswith("mlp.gate.weight"):
            coded[name] = plain[name] = (dtype, shape, bits.tobytes())
            continue
        codes = rng.integers(0, 0x50, shape).astype(np.uint8) | (rng.integers(0, 2, shape) << 7)
        codes = codes.astype(np.uint8)
        blocks = [-(-n // 128) for n in shape]
        scale = (rng.uniform(0.01, 0.04, blocks)).astype(np.float32)
        spread = scale.repeat(128, 0).repeat(128, 1)[: shape[0], : shape[1]]
        wide = to_bf16(values[codes].astype(np.float32) * spread)
        coded[f"{module}.weight"] = ("F8_E4M3", shape, codes.tobytes())
        coded[f"{module}.weight_scale_inv"] = ("F32", blocks, scale.tobytes())
        plain[f"{module}.weight"] = ("BF16", shape, wide.bits.tobytes())
    for folder, tensors, quantization in ((fp8, coded, FP8), (bf16, plain, None)):
        shutil.copytree(tiny, folder)
        config = json.loads((folder / "config.json").read_text())
        config["quantization_config"] = quantization
        (folder / "config.json").write_text(json.dumps(config))
        write(folder, tensors)


@pytest.fixture(scope="module")
def twins(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("twins")
    make_twins(tiny_model, folder / "fp8", folder / "bf16")
    return folder / "fp8", folder / "bf16"


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_an_fp8_model_is_its_bf16_twin(twins: tuple[Path, Path], ranks: int) -> None:
    fp8, bf16 = (engine(folder, ranks, expert_parallel=False) for folder in twins)
    logits = fp8.logits(PROMPT)
    assert np.isfinite(logits).all() and np.std(logits) > 1e-3
    np.testing.assert_array_equal(logits, bf16.logits(PROMPT))
    options = _core.RequestOptions(max_tokens=24, ignore_eos=True)
    tokens = [[t for o in e.generate(PROMPT, options) for t in o.token_ids] for e in (fp8, bf16)]
    assert tokens[0] == tokens[1] and len(tokens[0]) == 24
    assert fp8.stats()["load_bytes"] < 0.6 * bf16.stats()["load_bytes"]
    assert _core.inspect_checkpoint(str(twins[0]))["faults"] == []


def test_a_nan_in_fp8_is_refused(twins: tuple[Path, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(twins[0], tmp_path / "model"))
    path = folder / "model.safetensors"
    raw = bytearray(path.read_bytes())
    size = int.from_bytes(raw[:8], "little")
    name = "model.layers.0.self_attn.kv_b_proj"
    begin = json.loads(raw[8 : 8 + size])[f"{name}.weight"]["data_offsets"][0]
    raw[8 + size + begin + 40] = 0x7F
    path.write_bytes(raw)
    with pytest.raises(RuntimeError, match=rf"{folder}: {name}\.weight\[1, 8\] is NaN"):
        engine(folder)


# ---------------------------------------------------------------- one reading


@pytest.mark.parametrize("direct", ["0", "1"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_each_byte_is_read_once_however_many_ranks(
    tiny_model: Path, ranks: int, direct: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KDTREE_DIRECT_IO", direct)
    seen: list[tuple[int, int]] = []
    loaded = engine(
        tiny_model,
        ranks,
        drafter=str(tiny_model / "drafter"),
        progress=lambda done, total: seen.append((done, total)),
    )
    stats = loaded.stats()
    reports = [_core.inspect_checkpoint(str(f)) for f in (tiny_model, tiny_model / "drafter")]
    total = sum(report["total_bytes"] for report in reports)
    assert stats["model_bytes"] == total
    assert stats["load_bytes"] == total  # nothing in it is left out
    # A batch of reads a file; a tensor a read would be over a hundred.
    assert stats["load_reads"] <= 8
    assert stats["load_seconds"] > 0 and 0 < stats["load_buffer_bytes"] < 2 * total
    assert seen[-1] == (total, total) and seen == sorted(seen)
    assert {t for _, t in seen} == {total}


def test_a_small_buffer_gives_the_same_model(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = engine(tiny_model).logits(PROMPT)
    monkeypatch.setenv("KDTREE_LOAD_BUFFER_BYTES", str(1 << 20))
    monkeypatch.setenv("KDTREE_READERS", "7")
    np.testing.assert_array_equal(engine(tiny_model).logits(PROMPT), want)


@pytest.mark.parametrize("name", ["READERS", "LOAD_BUFFER_BYTES", "DIRECT_IO"])
def test_a_wrong_variable_is_named(
    tiny_model: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"KDTREE_{name}", "many")
    with pytest.raises(ValueError, match=f"^KDTREE_{name} is 'many' in the environment; want "):
        engine(tiny_model)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_progress_function_that_raises_ends_the_load(tiny_model: Path, ranks: int) -> None:
    def progress(done: int, total: int) -> None:
        raise KeyError("enough")

    with pytest.raises((KeyError, RuntimeError), match="enough"):
        engine(tiny_model, ranks, progress=progress)
    engine(tiny_model, ranks)


# ---------------------------------------------------------------- files that are not whole


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("model-*.safetensors"))


def cut(folder: Path) -> str:
    path = shards(folder)[1]
    path.write_bytes(path.read_bytes()[:-1000])
    return rf"{path}: tensor '.*': truncated: its data ends at \d+ of \d+ bytes"


def cut_in_the_header(folder: Path) -> str:
    path = shards(folder)[0]
    path.write_bytes(path.read_bytes()[:100])
    return rf"{path}: truncated: a header of \d+ bytes in a file of 100"


def remove(folder: Path) -> str:
    path = shards(folder)[1]
    path.unlink()
    return f"{path}: cannot open: No such file or directory"


def swap_in_index(folder: Path) -> str:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    name = "model.norm.weight"
    files = [p.name for p in shards(folder)]
    index["weight_map"][name] = files[1 - files.index(index["weight_map"][name])]
    path.write_text(json.dumps(index))
    return rf"tensor '{name}' belongs to .* by the index"


def another_dtype(folder: Path) -> str:
    path = next(p for p in shards(folder) if b'"model.norm.weight"' in p.read_bytes())
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    header["model.norm.weight"]["dtype"] = "F16"
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + size :])
    return r"1 tensors are not as config.json asks: model.norm.weight: dtype F16, want BF16 or F32$"


def no_file(folder: Path) -> str:
    path = shards(folder)[0]
    path.unlink()
    path.mkdir()
    return f"{path}: not a regular file"


FAULTS = [cut, cut_in_the_header, remove, swap_in_index, another_dtype, no_file]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("change", FAULTS)
def test_a_checkpoint_that_is_not_whole(
    tiny_model: Path, tmp_path: Path, change: Callable[[Path], str], ranks: int
) -> None:
    folder = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    fault = change(folder)
    with pytest.raises(RuntimeError, match=fault) as error:
        engine(folder, ranks)
    assert "\n" not in str(error.value)
    assert [f for f in _core.inspect_checkpoint(str(folder))["faults"] if f] != []
