"""Odd but legal models: logits against the float64 reference, tree against plain, NaN weights."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import make_tiny_model
from kdtree_engine.reference.model import TargetModel, chain

_core: Any = pytest.importorskip("kdtree_engine._core")
if not hasattr(_core, "op_linear"):
    pytest.skip("the compiled module is not built", allow_module_level=True)

CASES: list[dict[str, Any]] = [
    {"HEADS": 1},
    {"HEADS": 5, "V_DIM": 7, "NOPE": 10, "ROPE": 6, "KV_LORA": 20},
    {"KV_LORA": 1, "Q_LORA": 1, "ROPE": 2, "NOPE": 1, "V_DIM": 1},
    {"VOCAB": 517, "MASK_TOKEN": 500},
    {"HIDDEN": 96, "INTERMEDIATE": 37},
    {"EXPERTS": 1, "TOP_K": 1},
    {"TOP_K": 8},
    {"EXPERTS": 33, "TOP_K": 7, "MOE_INTERMEDIATE": 96},
    {"LAYERS": 1, "TAPS": [0]},
    {"TAPS": [2, 0, 1]},
    {"BLOCK_SIZE": 2},
    {"BLOCK_SIZE": 33},
    {"DRAFT_HEADS": 3, "DRAFT_KV_HEADS": 1, "DRAFT_HEAD_DIM": 14},
]


@pytest.mark.parametrize("sizes", CASES, ids=str)
def test_odd_shapes_agree_with_the_reference(
    sizes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in sizes.items():
        assert hasattr(make_tiny_model, name)
        monkeypatch.setattr(make_tiny_model, name, value)
    folder = make_tiny_model.make(tmp_path)
    engine = _core.Engine(str(folder), str(folder / "drafter"), num_threads=2)
    ids = np.random.default_rng(0).integers(0, make_tiny_model.VOCAB, 70)
    target = TargetModel(folder, np.float64)
    want = target.forward(ids, chain(len(ids)), target.new_cache()).logits
    got = engine.logits([int(i) for i in ids])
    assert np.abs(got - want).max() < 1e-5 * np.abs(want).max()

    prompt = [int(i) for i in ids[:20]]

    def tokens(method: str, budget: int) -> list[int]:
        options = _core.RequestOptions(
            max_tokens=40, ignore_eos=True, method=method, tree_budget=budget
        )
        return [t for o in engine.generate(prompt, options) for t in o.token_ids]

    plain = tokens("none", 0)
    for method, budget in (("dflash", 0), ("ddtree", 1), ("ddtree", 7), ("ddtree", 256)):
        assert tokens(method, budget) == plain


def test_a_request_whose_logits_are_no_numbers_ends_and_the_others_go_on(tmp_path: Path) -> None:
    folder = make_tiny_model.make(tmp_path)
    name = "model.embed_tokens.weight"
    for shard in sorted(folder.glob("*.safetensors")):
        content = bytearray(shard.read_bytes())
        length = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + length])
        if name in header:
            # The row of token 7 becomes NaN.
            row = 8 + length + header[name]["data_offsets"][0] + 7 * make_tiny_model.HIDDEN * 2
            content[row : row + 2 * make_tiny_model.HIDDEN] = b"\xff" * (2 * make_tiny_model.HIDDEN)
            shard.write_bytes(content)
    engine = _core.Engine(str(folder), str(folder / "drafter"))
    ends = {}
    for prompt in ([1, 2], [1, 7], [3, 4]):
        options = _core.RequestOptions(max_tokens=3, ignore_eos=True, method="none")
        ends[engine.add_request(prompt, options)] = prompt
    reasons = {}
    while engine.has_unfinished():
        for output in engine.step():
            if output.finished:
                reasons[tuple(ends[output.request_id])] = output.finish_reason
    assert reasons == {(1, 7): "error", (1, 2): "length", (3, 4): "length"}
