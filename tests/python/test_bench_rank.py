"""`kdtree bench rank`: what it measures, and what it refuses."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

_core: Any = pytest.importorskip("kdtree_engine._core")
if not hasattr(_core, "bench_rank"):
    pytest.skip("the compiled module is not built", allow_module_level=True)

Run = Callable[..., tuple[int, str, str]]
TINY = ("bench", "rank", "--like", "tiny", "--device", "cpu", "--context", "32")


@pytest.mark.parametrize(("ranks", "layers"), [(2, 3), (4, 2)])
def test_times_on_ranks(run: Run, tmp_path: Path, ranks: int, layers: int) -> None:
    out_file = tmp_path / "rank.json"
    options = ("--tp", str(ranks), "--layers", str(layers), "--rows", "1,8,257")
    status, out, err = run(*TINY, *options, "--json", str(out_file))
    assert status == 0, err
    assert f"tiny, {layers} layers, {ranks} ranks on cpu" in " ".join(out.split())
    assert f"{ranks} ranks: the whole pass" in " ".join(out.split())
    result = json.loads(out_file.read_text())
    assert result["communication"] and result["communication"] in err
    # The embedding, and two a layer: attention and experts.
    assert result["num_all_reduces"] == 1 + 2 * layers
    assert (result["hidden_size"], result["tensor_parallel_size"]) == (256, ranks)
    assert (result["like"], result["layers"], result["context"]) == ("tiny", layers, 32)
    assert result["load_bytes"] == _core.synth_checkpoint("tiny", layers=layers)["bytes"]
    assert result["isa"] and result["load_seconds"] > 0
    assert [r["rows"] for r in result["rows"]] == [1, 8, 257]
    for record in result["rows"]:
        assert record["alone_us"] > 0 and record["ranks_us"] > 0 and record["all_reduce_us"] > 0
        assert record["added_us"] == record["ranks_us"] - record["alone_us"]
        assert record["all_reduces_us"] == record["all_reduce_us"] * result["num_all_reduces"]
    # 257 rows are some 100 times the work of one, whatever else the machine does.
    assert result["rows"][2]["alone_us"] > result["rows"][0]["alone_us"]


def test_times_are_whole_on_narrow_terminals(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    options = ("--layers", "1", "--rows", "257", "--json", str(tmp_path / "rank.json"))
    status, out, err = run(*TINY, *options)
    (record,) = json.loads((tmp_path / "rank.json").read_text())["rows"]
    assert status == 0 and f"{record['alone_us']:.1f}" in out.split(), err
    assert f"{record['all_reduce_us']:.1f}" in out.split() and "…" not in out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rows", "1,258"], "--rows has '258', want 1 to 257"),
        (["--rows", "1,,2"], "--rows has '', want 1 to 257"),
        (["--rows", "x"], "--rows has 'x', want 1 to 257"),
        (["--tp", "1"], "--tensor-parallel-size is 1; want 2 to 64"),
        (["--tp", "65"], "--tensor-parallel-size is 65; want 2 to 64"),
        (["--like", "kimi"], "--like is 'kimi'; want kimi-k2.6"),
        (["--like", "tiny,layers=2"], "--like is 'tiny,layers=2'; want"),
        (["--layers", "0"], "--layers"),
        (["--layers", "2000"], "--layers is 2000"),
        (["--context", "3840"], "--context is 3840; want 0 to 3839"),
        (["--context", "-1"], "--context"),
        (["--device", "tpu"], "'tpu'"),
        (["--json", "/not/there/x.json"], "--json is /not/there/x.json"),
    ],
)
def test_options_are_checked(run: Run, options: list[str], message: str) -> None:
    status, _, err = run(*TINY, *options)
    assert status == 2 and message in err, err


def test_without_a_gpu_the_cpu_is_named(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    status, _, err = run(*TINY, "--device", "cuda:900,cuda:901")
    assert status == 1 and ("; --device cpu measures on the CPU" in err or "want 'cuda:0'" in err)
    for message, named in (
        ("rank 0: device is 'cuda:0': no NVIDIA driver was found (libcuda.so.1)", True),
        ("rank 1: cuda:1 is Old (sm_70); this engine needs sm_80 or newer", True),
        ("rank 1 of 2 has left the group", False),
    ):

        def fail(*args: Any, message: str = message, **kwargs: Any) -> None:
            raise RuntimeError(message)

        monkeypatch.setattr(_core, "bench_rank", fail)
        status, _, err = run("bench", "rank")
        assert status == 1 and message in err and ("; --device cpu " in err) == named, err


def test_a_model_that_cannot_be_cut_says_so(run: Run) -> None:
    status, _, err = run(*TINY, "--tp", "16")
    assert status == 2 and "16, which does not divide num_attention_heads, 8" in err


def test_arguments_of_the_module_are_named() -> None:
    def call(**other: Any) -> None:
        given = {"device": "cpu", "tensor_parallel_size": 2, "rows": [1], "context": 0, **other}
        _core.bench_rank("synth:tiny,layers=1", **given)

    for name, value in (
        ("rows", []),
        ("rows", [0]),
        ("rows", [1.5]),
        ("context", -1),
        ("tensor_parallel_size", "2"),
    ):
        with pytest.raises(ValueError, match=f"^{name}"):
            call(**{name: value})
