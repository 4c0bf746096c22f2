"""Checkpoints made by rule: files, options, and that they load and decode."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kdtree_engine.cli import main

_core: Any = pytest.importorskip("kdtree_engine._core")
if not hasattr(_core, "synth_checkpoint"):
    pytest.skip("the compiled module is not built", allow_module_level=True)
from kdtree_engine import LLM, SamplingParams, synth  # noqa: E402

NAMES = {"BF16": "bfloat16", "F32": "float32", "I32": "int32", "F8_E4M3": "float8_e4m3fn"}
SMALL = {"layers": 2, "experts": 9, "hidden": 160, "vocab": 600}
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(["synth", *arguments])
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return run


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("synth") / "tiny"
    synth.write(synth.plan("tiny"), folder)
    return folder


# ---------------------------------------------------------------- files


def _serialized(safetensors: Any, tensors: dict[str, dict[str, Any]]) -> bytes:
    """What the package writes for these tensors; its call differs between versions."""
    arrays = {name: np.frombuffer(t["data"], np.uint8) for name, t in tensors.items()}
    specs = {}
    for name, t in tensors.items():
        kind, array = {"dtype": NAMES[t["dtype"]], "shape": t["shape"]}, arrays[name]
        if hasattr(safetensors, "TensorSpec"):
            where = {"data_ptr": array.ctypes.data, "data_len": array.nbytes}
            specs[name] = safetensors.TensorSpec(**kind, **where)
        else:
            specs[name] = {**kind, "data": t["data"]}
    return bytes(safetensors.serialize(specs, {"format": "pt"}))


@pytest.mark.parametrize("like", synth.LIKES)
def test_safetensors_writes_and_reads_the_same_files(like: str, tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors")
    plan = synth.plan(like, **SMALL)
    synth.write(plan, tmp_path / "out")
    for folder in plan.folders:
        weight_map = {}
        for shard in folder.made["shards"]:
            raw = (tmp_path / "out" / folder.path / shard["file"]).read_bytes()
            made = bytearray(shard["bytes"])
            folder.made["read"](shard["offset"], made)
            assert raw == shard["header"] + made
            tensors = dict(safetensors.deserialize(raw))
            weight_map |= dict.fromkeys(tensors, shard["file"])
            assert _serialized(safetensors, tensors) == raw
        assert len(weight_map) == folder.made["num_tensors"]
        index = tmp_path / "out" / folder.path / "model.safetensors.index.json"
        assert index.exists() == (folder.path == Path())
        if index.exists():
            assert json.loads(index.read_text())["weight_map"] == weight_map
    files = [f for f in (tmp_path / "out").rglob("*") if f.is_file()]
    assert sum(f.stat().st_size for f in files) == plan.bytes


def test_seeds(tiny: Path, tmp_path: Path) -> None:
    for seed, same in ((0, True), (1, False)):
        synth.write(synth.plan("tiny", seed=seed), tmp_path / str(seed))
        for file in tiny.rglob("*.safetensors"):
            other = tmp_path / str(seed) / file.relative_to(tiny)
            assert (file.read_bytes() == other.read_bytes()) == same
        assert (tiny / "config.json").read_bytes() == (
            tmp_path / f"{seed}/config.json"
        ).read_bytes()


def test_configs_are_those_of_the_models() -> None:
    nested = json.loads(synth.plan("kimi-k2.6").folders[0].small_files["config.json"])
    text = nested["text_config"]
    assert nested["model_type"] == "kimi_k25" and text["model_type"] == "kimi_k2"
    assert nested["media_placeholder_token_id"] == 163605
    assert (text["bos_token_id"], text["eos_token_id"], text["pad_token_id"]) == (
        163584, 163586, 163839,
    )  # fmt: skip
    assert text["rope_scaling"] == {
        "type": "yarn", "factor": 64, "beta_fast": 32, "beta_slow": 1, "mscale": 1,
        "mscale_all_dim": 1, "original_max_position_embeddings": 4096,
    }  # fmt: skip
    assert text["quantization_config"]["format"] == "pack-quantized"
    assert "re:mm_projector.*" in text["quantization_config"]["ignore"]
    flat = json.loads(synth.plan("kimi-k2-instruct").folders[0].small_files["config.json"])
    assert "text_config" not in flat and flat["model_type"] == "kimi_k2"
    assert flat["quantization_config"] == {
        "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8",
        "weight_block_size": [128, 128],
    }  # fmt: skip
    assert flat["rope_scaling"]["factor"] == 32 and flat["rope_scaling"]["beta_fast"] == 1
    assert flat["rms_norm_eps"] == 1e-6 and flat["eos_token_id"] == 163585


# ---------------------------------------------------------------- use


def test_inspect_finds_no_fault(tiny: Path, tmp_path: Path) -> None:
    synth.write(synth.plan("kimi-k2.6", **SMALL), tmp_path / "k2.6")
    for folder in (tiny, tiny / "drafter", tmp_path / "k2.6"):
        report = _core.inspect_checkpoint(str(folder))
        assert report["faults"] == []
    made = synth.plan("tiny").folders[0].made
    assert _core.inspect_checkpoint(str(tiny))["bytes_by_part"] == made["bytes_by_part"]


def test_decodes_the_same_tokens_with_and_without_trees(tiny: Path) -> None:
    params = SamplingParams(max_tokens=32, ignore_eos=True)
    prompts = [{"prompt_token_ids": [5, 900, 17]}, {"prompt_token_ids": list(range(40))}]
    with LLM(tiny, device="cpu", num_threads=1) as llm:
        plain = llm.generate(prompts, params, speculative_config={"method": "none"})
        # The drafter knows nothing, but so flat a tree holds a quarter of the vocabulary.
        flat = {"method": "ddtree", "tree_budget": 256, "draft_temperature": 1000.0}
        trees = llm.generate(prompts, params, speculative_config=flat)
        logits = llm.logits(list(range(64)))
    for a, b in zip(plain, trees, strict=True):
        assert a.outputs[0].token_ids == b.outputs[0].token_ids
        assert len(set(a.outputs[0].token_ids)) > 10
        assert b.spec.tokens_per_forward > 1
    assert plain[0].outputs[0].token_ids != plain[1].outputs[0].token_ids
    assert np.isfinite(logits).all() and 2 < logits.std() < 8


def test_activations_stay_in_range_over_many_layers(tmp_path: Path) -> None:
    synth.write(synth.plan("tiny", layers=40, drafter=False), tmp_path / "deep")
    with LLM(tmp_path / "deep", device="cpu", num_threads=1) as llm:
        logits = llm.logits(list(range(100, 132)))
    assert np.isfinite(logits).all() and 2 < logits.std() < 8
    assert len(set(logits.argmax(axis=1))) > 16


def test_text_of_made_up_words(tiny: Path) -> None:
    from kdtree_engine.tokenizer import Tokenizer

    tokenizer = Tokenizer(tiny)
    assert tokenizer.vocab_size == 1024
    for text in ("any text\n世界", " ba be"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode(" ba be") == [256, 257]
    assert tokenizer.special_tokens["<|im_end|>"] == 770
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "<|im_end|>"}])
    assert ids[0] == 771 and ids.count(770) == 1
    ranks = synth.plan("kimi-k2.6").folders[0].small_files["tiktoken.model"].splitlines()
    assert len(ranks) == 163584 == len({line.split()[0] for line in ranks})


# ---------------------------------------------------------------- command


def test_dry_run_of_the_whole_model(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    status, out, _ = run("--like", "kimi-k2.6", "--dry-run")
    assert status == 0
    assert "kimi-k2.6: 208,215 tensors, 594,205,904,896 bytes" in out
    assert "kimi-k2.6/drafter: 69 tensors" in out
    assert "62 shards" in out and "model-00062-of-000062.safetensors" in out
    assert out.splitlines()[-1].startswith("in all 208,284 tensors, ")
    out = run("--like", "tiny", "--dry-run", "--no-drafter")[1]
    assert "5 shards" in out and "drafter" not in out
    monkeypatch.setenv("COLUMNS", "20")
    assert {"3,803,136", "1,179,648"} <= {*run("--like", "tiny", "--dry-run")[1].split()}


def test_command_writes(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()  # an empty folder is taken
    status, _, err = run("--like", "tiny", "--layers", "1", "--no-drafter", "--out", str(out))
    assert status == 0 and err.startswith(f"wrote {out}: ") and "GB/s" in err
    assert not (out / "drafter").exists() and [p.name for p in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--like llama --dry-run", "--like is 'llama'; want kimi-k2.6"),
        ("--like tiny --hidden 100 --dry-run", "--hidden is 100; want a multiple of 32"),
        ("--like tiny --experts 3 --dry-run", "--experts is 3; want 4 to"),
        ("--like tiny --vocab 511 --dry-run", "--vocab is 511; want 512 to"),
        ("--like tiny --layers 2000 --dry-run", "--layers is 2000; want 1 to 1024"),
        ("--like tiny", "--out is missing"),
        ("--like tiny --out DIR/no/out", "--out is DIR/no/out: there is no folder DIR/no"),
        ("--like tiny --out DIR/full", "--out is DIR/full: it is not empty"),
        ("--like tiny --out DIR/full/file", "--out is DIR/full/file: it is a file"),
    ],
)
def test_wrong_options(options: str, message: str, run: Run, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    status, out, err = run(*(word.replace("DIR", str(tmp_path)) for word in options.split()))
    assert (status, out) == (2, "")
    assert err.startswith(f"kdtree: error: {message.replace('DIR', str(tmp_path))}")
    assert err.count("\n") == 1


# ---------------------------------------------------------------- failures


def test_full_disks_are_refused_before_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = synth.plan("tiny")
    usage = type(synth.shutil.disk_usage(tmp_path))(10, 10, plan.bytes - 1)
    monkeypatch.setattr(synth.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(OSError, match=f"out needs {plan.bytes:,} bytes, and its disk has"):
        synth.write(plan, tmp_path / "out")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("at", [1, 3, 6])
def test_interrupted_writing_leaves_nothing(at: int, tmp_path: Path) -> None:
    calls = 0

    def progress(done: int, total: int) -> None:
        nonlocal calls
        calls += 1
        assert (tmp_path / "out.partial").is_dir() and not (tmp_path / "out").exists()
        if calls == at:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        synth.write(synth.plan("tiny"), tmp_path / "out", progress)
    assert calls == at and not list(tmp_path.iterdir())


def test_a_failing_disk_leaves_nothing_and_names_the_file(tmp_path: Path) -> None:
    code = """if True:
        import resource, sys
        from kdtree_engine.cli import main
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        main(["synth", "--like", "tiny", "--out", sys.argv[1]])
    """
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "out")], capture_output=True, text=True
    )
    assert done.returncode == 1
    assert done.stderr.startswith("kdtree: error: File too large: ")
    assert "model-00001-of-000005.safetensors" in done.stderr
    assert not list(tmp_path.iterdir())


def test_two_processes_do_not_write_the_same_folder(tmp_path: Path) -> None:
    (tmp_path / "out.partial").mkdir()
    with pytest.raises(ValueError, match=r"out\.partial is there"):
        synth.write(synth.plan("tiny"), tmp_path / "out")
    assert os.listdir(tmp_path) == ["out.partial"]


def test_binding_checks_its_arguments() -> None:
    for name, value, message in (
        ("seed", -1, "seed is -1; want 0 or more"),
        ("layers", "2", "layers is '2'; want an integer"),
        ("layer", 2, "option is 'layer'; want layers, experts, hidden, vocab or seed"),
        ("drafter", 1, "drafter is 1; want True or False"),
    ):
        with pytest.raises(ValueError, match=message):
            _core.synth_checkpoint("tiny", **{name: value})
    made = _core.synth_checkpoint("tiny")
    for arguments, message in (
        ((-1, bytearray(1)), "offset is -1"),
        ((made["bytes"], bytearray(1)), "there are 12156736"),
        ((0, [1]), "want a buffer"),
        ((0, np.zeros((2, 2))), "out has 2 dimensions"),
    ):
        with pytest.raises(ValueError, match=message):
            made["read"](*arguments)
    with pytest.raises((ValueError, BufferError)):
        made["read"](0, b"constant")
