"""The committed bundles hold what the reference gives today, and the cases their names promise."""

from pathlib import Path

import numpy as np
import pytest

from kdtree_engine import kdtr
from make_test_data import DATA, bundles
from make_tiny_model import PRESETS, checksums, make

BUNDLES = dict(bundles())


@pytest.mark.parametrize("name", list(BUNDLES))
def test_a_bundle_is_what_the_reference_gives(name):
    path = DATA / f"{name}.kdtr"
    assert path.stat().st_size < 200_000
    stored = kdtr.read(path)
    assert list(stored) == list(BUNDLES[name]), "run make_test_data.py"
    for array, want in BUNDLES[name].items():
        got = stored[array]
        if isinstance(want, kdtr.BF16Array):
            got, want = got.bits, want.bits
        assert got.dtype == want.dtype and got.shape == want.shape
        if want.dtype.kind == "f":  # exp and log may differ in the last bit elsewhere
            assert np.allclose(got, want, rtol=1e-5, atol=1e-6, equal_nan=True), array
        else:
            assert np.array_equal(got, want), array


def test_no_bundle_is_left_over():
    committed = {p.stem for p in DATA.glob("*.kdtr") if not p.stem.startswith("golden_")}
    assert committed == set(BUNDLES)


def test_the_trees_are_the_cases_that_their_names_say():
    tree = {name[5:]: kdtr.read(DATA / f"{name}.kdtr") for name in BUNDLES if name[:5] == "tree_"}
    nodes = {name: len(t["tokens"]) - 1 for name, t in tree.items()}
    depth = {name: t["depths"].max() for name, t in tree.items()}
    assert nodes["typical"] == 64 and 4 <= depth["typical"] < 15
    assert depth["wide"] <= 3 and depth["deep"] == 15
    assert nodes["underfull"] == 39 < tree["underfull"]["budget"][0]
    assert tree["chain"]["parents"].tolist() == list(range(-1, 15))
    assert not tree["star"]["parents"][1:].any() and nodes["star"] == 32
    for name in ("all_ties", "bf16_ties", "golden_b"):
        assert len(np.unique(tree[name]["logw"])) < len(tree[name]["logw"])
    assert np.isneginf(tree["inf_tails"]["logprobs"]).any()
    for budget in (0, 1, 64, 128, 256):
        assert nodes[f"budget_{budget}"] == budget


def test_accepted_paths_have_every_length():
    case = kdtr.read(DATA / "accept.kdtr")
    assert case["accept_length"].tolist() == [*range(1, 10), 1, 2, 1, 2]
    present = set(case["tokens"].tolist())
    assert case["bonus"][9] not in present
    assert case["bonus"][10] in present and case["bonus"][11] in present


def test_routing_has_no_near_ties_but_exact_ones():
    for path in DATA.glob("route_*.kdtr"):
        case = kdtr.read(path)
        choice = 1 / (1 + np.exp(-case["logits"].astype(np.float64))) + case["bias"]
        choice[np.isnan(choice)] = -1
        gaps = np.diff(np.sort(-choice, axis=1), axis=1)
        assert ((gaps == 0) | (gaps > 2e-6))[:, : case["ids"].shape[1] + 1].all(), path


@pytest.mark.parametrize("preset", ["tiny", "kimi_groups", "plain"])
def test_model_bundles_belong_to_the_tiny_checkpoints(tmp_path: Path, preset):
    stored = kdtr.read(DATA / f"model_{preset}.kdtr")["weights_xxh64"]
    assert np.array_equal(stored, checksums(make(tmp_path, PRESETS[preset])))
