import json
from pathlib import Path

import numpy as np
import pytest

from kdtree_engine import kdtr
from kdtree_engine.reference.drafter import DraftModel
from kdtree_engine.reference.model import TargetModel, chain, latent_eps
from make_tiny_model import PRESETS, TAPS, checksums, make

DATA = Path(__file__).parents[1] / "data"
TOKENS = [3, 141, 59, 265, 358, 97, 93, 238, 462, 64]
# Two branches with branches of their own.
TREE_TOKENS = [5, 10, 20, 30, 40, 50, 60, 70]
TREE_PARENTS = [-1, 0, 0, 1, 1, 2, 3, 6]
PATHS = [[0], [0, 1], [0, 2], [0, 1, 3], [0, 1, 4], [0, 2, 5], [0, 1, 3, 6], [0, 1, 3, 6, 7]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("models")
    for name, options in PRESETS.items():
        make(path / name, options)
    return path


@pytest.fixture(scope="module")
def tiny(folder):
    return TargetModel(folder / "tiny")


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize(
    "preset, golden",
    [
        ("tiny", "golden_deepseek_v3"),
        ("groups", "golden_deepseek_v3_groups"),
        ("plain", "golden_deepseek_v3_plain"),
    ],
)
def test_agrees_with_transformers(folder, preset, golden, dtype):
    want = kdtr.read(DATA / f"{golden}.kdtr")
    assert np.array_equal(want["weights_xxh64"], checksums(folder / preset)), "run make_golden.py"
    model = TargetModel(folder / preset, dtype)
    cache = model.new_cache()
    prompt = model.forward(want["token_ids"], chain(len(want["token_ids"])), cache)
    tree = model.forward(want["tree_tokens"], want["tree_parents"], cache)
    assert prompt.logits.dtype == dtype
    assert np.abs(prompt.logits - want["logits"]).max() < 2e-5
    assert np.abs(prompt.features(TAPS) - want["features"]).max() < 2e-5
    assert np.abs(tree.logits - want["tree_logits"]).max() < 2e-5


def test_the_drafter_agrees_with_transformers(folder):
    want = kdtr.read(DATA / "golden_dflash.kdtr")
    assert np.array_equal(want["weights_xxh64"], checksums(folder / "tiny")), "run make_golden.py"
    drafter = DraftModel(folder / "tiny" / "drafter")
    context = drafter.new_context()
    drafter.extend(context, want["features"].astype(np.float64))
    hidden = drafter.forward(want["block_embeddings"].astype(np.float64), context)
    assert np.abs(hidden - want["hidden"]).max() < 1e-5
    target = TargetModel(folder / "tiny")
    logits = drafter.draft_logits(7, context, target)  # the root of the golden block
    assert np.abs(logits - target.head(want["hidden"][1:].astype(np.float64))).max() < 1e-4


def test_a_slot_gives_what_its_path_gives_as_a_chain(tiny):
    cache = tiny.new_cache()
    tiny.forward(TOKENS, chain(len(TOKENS)), cache)
    prefix = [layer.copy() for layer in cache.layers]
    tree = tiny.forward(TREE_TOKENS, TREE_PARENTS, cache).logits
    for slot, path in enumerate(PATHS):
        line = tiny.new_cache()
        line.layers = list(prefix)
        logits = tiny.forward([TREE_TOKENS[s] for s in path], chain(len(path)), line).logits
        assert np.allclose(tree[slot], logits[-1], rtol=0, atol=1e-11)


@pytest.mark.parametrize("chunk", [1, 3, 7])
def test_a_prompt_may_come_in_chunks(tiny, chunk):
    whole = tiny.forward(TOKENS, chain(len(TOKENS)), tiny.new_cache()).logits
    cache = tiny.new_cache()
    parts = [
        tiny.forward(part, chain(len(part)), cache).logits
        for part in (TOKENS[i : i + chunk] for i in range(0, len(TOKENS), chunk))
    ]
    assert np.allclose(np.concatenate(parts), whole, rtol=0, atol=1e-11)


def test_committing_keeps_the_rows_of_the_accepted_path(tiny):
    cache = tiny.new_cache()
    tiny.forward(TOKENS, chain(len(TOKENS)), cache)
    tiny.forward(TREE_TOKENS, TREE_PARENTS, cache)
    accepted = [0, 1, 3, 6]
    cache.commit(accepted, len(TOKENS))
    line = tiny.new_cache()
    tokens = TOKENS + [TREE_TOKENS[s] for s in accepted]
    tiny.forward(tokens, chain(len(tokens)), line)
    assert len(cache) == len(tokens)
    for ours, linear in zip(cache.layers, line.layers, strict=True):
        assert np.allclose(ours, linear, rtol=0, atol=1e-11)


def test_the_nested_layout_is_the_same_model(folder):
    def logits(name):
        model = TargetModel(folder / name)
        return model.forward(TOKENS, chain(len(TOKENS)), model.new_cache()).logits

    assert np.array_equal(logits("nested"), logits("kimi_groups"))
    # The same weights as deepseek_v3, whose latent norms have another eps.
    assert np.abs(logits("groups") - logits("kimi_groups")).max() > 1e-3


def test_experts_are_in_every_layer_that_the_frequency_names(folder, tmp_path):
    source = folder / "tiny"
    for file in source.glob("*"):
        (tmp_path / file.name).symlink_to(file)
    config = json.loads((source / "config.json").read_text())
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(config | {"moe_layer_freq": 2}))
    model = TargetModel(tmp_path)
    with pytest.raises(KeyError, match=r"layers.1.mlp.gate_proj"):  # a dense layer then
        model.forward(TOKENS, chain(len(TOKENS)), model.new_cache())


def test_eps_of_the_latent_norms():
    assert latent_eps({"model_type": "deepseek_v3", "rms_norm_eps": 1e-5}) == 1e-6
    assert latent_eps({"model_type": "kimi_k2", "rms_norm_eps": 1e-5}) == 1e-5
    nested = {"model_type": "deepseek_v3", "rms_norm_eps": 1e-5, "text_config": {}}
    assert latent_eps(nested) == 1e-5
    assert latent_eps({"model_type": "kimi_k2", "rms_norm_eps": 1, "latent_rms_norm_eps": 2}) == 2


def test_features_are_the_streams_after_the_layers(tiny):
    out = tiny.forward(TOKENS, chain(len(TOKENS)), tiny.new_cache())
    assert np.array_equal(out.features([2, 0]), np.hstack([out.hidden[2], out.hidden[0]]))


@pytest.mark.parametrize("preset", ["tiny", "kimi_groups"])
def test_context_may_come_in_pieces(folder, preset):
    drafter = DraftModel(folder / preset / "drafter")
    rng = np.random.default_rng(0)
    features = rng.standard_normal((17, 128))
    block = rng.standard_normal((8, 64))
    at_once, in_pieces = drafter.new_context(), drafter.new_context()
    drafter.extend(at_once, features)
    for begin, end in ((0, 5), (5, 5), (5, 6), (6, 17)):
        drafter.extend(in_pieces, features[begin:end])
        drafter.forward(block, in_pieces)  # leaves the context as it is
    assert len(in_pieces) == 17
    want = drafter.forward(block, at_once)
    assert np.allclose(drafter.forward(block, in_pieces), want, rtol=0, atol=1e-11)


@pytest.mark.parametrize(
    "keys, causal, window",
    [
        ({}, [False, False], [0, 0]),
        ({"layer_types": ["sliding_attention", "full_attention"]}, [True, False], [5, 0]),
        ({"dflash_config": {"causal": True}}, [True, True], [0, 0]),
        (
            {"layer_types": ["sliding_attention"] * 2, "dflash_config": {"causal": False}},
            [False, False],
            [5, 5],
        ),
        ({"layer_types": ["sliding_attention"] * 2, "is_causal": False}, [False, False], [5, 5]),
        ({"dflash_config": {"use_swa": True, "swa_window_size": 6}}, [True, True], [6, 6]),
    ],
)
def test_causality_and_windows_are_the_checkpoints(folder, tmp_path, keys, causal, window):
    source = folder / "tiny" / "drafter"
    config = json.loads((source / "config.json").read_text()) | {"sliding_window": 5}
    options = config["dflash_config"] | keys.get("dflash_config", {})
    (tmp_path / "config.json").write_text(json.dumps(config | keys | {"dflash_config": options}))
    (tmp_path / "model.safetensors").symlink_to(source / "model.safetensors")
    drafter = DraftModel(tmp_path)
    assert (drafter.layer_causal, drafter.layer_window) == (causal, window)
    # Which rows of the block change when its last row does tells which may look ahead.
    block = np.random.default_rng(1).standard_normal((8, 64))
    context = drafter.new_context()
    before = drafter.forward(block, context)
    block[-1] += 1
    changed = (before != drafter.forward(block, context)).any(axis=1)
    assert changed.tolist() == [not all(causal)] * 7 + [True]
