"""A prompt of 57,000 tokens: chunks, trees and logits behind it, against numpy in float64.

Serving engines have given broken text from about 55,000 tokens of context on, where an offset
outgrew its type or a table its size. One head and two layers: some 20 s of one core in all.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import make_tiny_model
from kdtree_engine.reference import model as reference

_core: Any = pytest.importorskip("kdtree_engine._core")
if not hasattr(_core, "op_linear"):
    pytest.skip("the compiled module is not built", allow_module_level=True)

PROMPT, GENERATED = 57_000, 24
SIZES = {"HEADS": 1, "NOPE": 16, "ROPE": 16, "V_DIM": 16, "KV_LORA": 16, "LAYERS": 2}
# Sharper attention and more of it in the residual stream, so that keys that are left out show.
GAINS = {"q_b_proj": 2.0, "o_proj": 4.0}
# Of a tile of scores. Many small products would wait for each other on a busy machine.
ROWS, KEYS = 512, 8192
F64 = npt.NDArray[np.float64]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    class Writer(make_tiny_model.Writer):
        def linear(self, name: str, rows: int, columns: int, gain: float = 1.0) -> None:
            super().linear(name, rows, columns, gain * GAINS.get(name.split(".")[-1], 1.0))

    with pytest.MonkeyPatch.context() as patch:
        for name, value in SIZES.items():
            patch.setattr(make_tiny_model, name, value)
        patch.setattr(make_tiny_model, "Writer", Writer)
        path = make_tiny_model.make(tmp_path_factory.mktemp("long"))
    yarn = {"factor": 64.0, "original_max_position_embeddings": 1024}
    for file in (path / "config.json", path / "drafter" / "config.json"):
        config = json.loads(file.read_text()) | {"max_position_embeddings": 1024 * 64}
        if "rope_scaling" in config:
            config["rope_scaling"] |= yarn
        file.write_text(json.dumps(config))
    return path


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    return [int(i) for i in np.random.default_rng(11).integers(0, make_tiny_model.VOCAB, PROMPT)]


def engine_of(folder: Path, chunk: int) -> Any:
    return _core.Engine(
        str(folder),
        str(folder / "drafter"),
        num_threads=2,
        max_num_seqs=1,
        prefill_chunk_size=chunk,
    )


def generate(engine: Any, prompt: list[int], **options: Any) -> list[int]:
    options = {"max_tokens": GENERATED, "ignore_eos": True, **options}
    outputs = engine.generate(prompt, _core.RequestOptions(**options))
    return [t for output in outputs for t in output.token_ids]


@pytest.fixture(scope="module")
def plain(folder: Path, prompt: list[int]) -> list[int]:
    return generate(engine_of(folder, 256), prompt, method="none")


def test_trees_and_other_chunks_give_the_tokens_of_plain_decoding(
    folder: Path, prompt: list[int], plain: list[int]
) -> None:
    assert len(plain) == GENERATED and len(set(plain)) > 4
    assert generate(engine_of(folder, 1000), prompt, tree_budget=32) == plain


class Attention:
    """A chain's attention by one head, tile by tile, for a model of two layers.

    The second gives the last `rows` rows alone, and with `forget` does so as if there were not so
    many keys before them.
    """

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.first: F64 | None = None  # the first layer's
        self.in_first = False
        self.forget = 0

    def __call__(
        self, q_latent: F64, q_rope: F64, latent: F64, parents: Any, scale: float, dtype: Any
    ) -> F64:
        query = np.concatenate([q_latent, q_rope], axis=-1)[:, 0] * scale
        self.in_first = not self.in_first
        if not self.in_first:
            begin = len(query) - self.rows
            result = np.zeros_like(q_latent)
            result[begin:, 0] = self.tiles(query, latent, begin, self.forget)
            return result
        if self.first is None:
            cuts = range(0, len(query), ROWS)
            self.first = np.concatenate([self.tiles(query, latent, c) for c in cuts])[:, None]
        return self.first

    @staticmethod
    def tiles(query: F64, latent: F64, begin: int, forget: int = 0) -> F64:
        """Up to ROWS rows from `begin` on. No score comes near where float64's exp overflows."""
        rows = np.arange(begin, min(begin + ROWS, len(query)))
        mixed, total = np.zeros((len(rows), SIZES["KV_LORA"])), np.zeros((len(rows), 1))
        for at in range(0, rows[-1] + 1, KEYS):
            keys = np.arange(at, min(at + KEYS, rows[-1] + 1))
            weights = query[rows] @ latent[keys].T
            np.exp(weights, out=weights)
            if keys[-1] >= begin - forget:
                weights[keys > rows[:, None]] = 0
                weights[:, (keys >= begin - forget) & (keys < begin)] = 0
            mixed += weights @ latent[keys, : SIZES["KV_LORA"]]
            total += weights.sum(axis=1, keepdims=True)
        return mixed / total


def test_logits_are_those_of_numpy(
    folder: Path, prompt: list[int], plain: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = prompt + plain[:-1]
    got = engine_of(folder, 1000).logits(ids)[PROMPT - 1 :]
    assert got.argmax(axis=1).tolist() == plain
    attention = Attention(GENERATED)
    monkeypatch.setattr(reference, "mla_attention", attention)
    target = reference.TargetModel(folder)

    def error(forget: int) -> float:
        attention.forget = forget
        out = target.forward(ids, reference.chain(len(ids)), target.new_cache())
        want = out.logits[-GENERATED:]
        return float((np.abs(got - want).max(axis=1) / np.abs(want).max(axis=1)).max())

    assert error(0) < 1e-4
    assert error(57) > 1e-3  # what it would find: one key in a thousand that is not seen
