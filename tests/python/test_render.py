"""Pictures of draft trees: what they show, and that an SVG is well formed whatever the tokens."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from rich.console import Console

from kdtree_engine import render
from kdtree_engine.reference.tree import build_tree
from kdtree_engine.tokenizer import Tokenizer

SVG = "{http://www.w3.org/2000/svg}"


def _step(tokens: list[int], accepted: list[int], budget: int = 6) -> Any:
    logprobs = np.log(np.array([[0.6, 0.2, 0.1], [0.5, 0.3, 0.1]], np.float32))
    tree = build_tree(logprobs, np.array([[259, 60, 10], [264, 38, 27]], np.int32), budget)
    names = ("tokens", "parents", "depths", "logw")
    fields = {name: getattr(tree, name) for name in names}
    return SimpleNamespace(
        tree=SimpleNamespace(**fields, accepted=np.array(accepted, np.int32)),
        root_token_id=32,
        token_ids=tokens,
    )


@pytest.fixture
def tokenizer(tokenizer_folder: Path) -> Tokenizer:
    return Tokenizer(tokenizer_folder)


def test_drawing(tokenizer: Tokenizer) -> None:
    drawn = render.drawing(_step([259, 264, 33], [0, 1, 2]), tokenizer)
    assert drawn.labels[:3] == ["·", "hello", "·world"] and drawn.bonus == "!"
    assert drawn.probability[:3] == pytest.approx([1.0, 0.6, 0.5])
    assert drawn.path_probability[:3] == pytest.approx([1.0, 0.6, 0.3])
    assert drawn.children(0)[0] == 1 and drawn.parents[2] == 1
    assert drawn.caption == (
        "6 draft nodes verified in one forward: 2 accepted and the target's own !, so 3 tokens"
    )


def test_rejected_at_the_root(tokenizer: Tokenizer) -> None:
    drawn = render.drawing(_step([10], [0]), tokenizer)
    assert drawn.accepted == [0] and drawn.bonus == "⏎"


def test_a_round_without_a_tree_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match="no tree"):
        render.drawing(SimpleNamespace(tree=None), tokenizer)


def test_visible_text() -> None:
    assert render.visible("   ") == "···" and render.visible("\n       x") == "⏎·×7x"
    assert render.visible(" a\n\t\r\x1b\u200b") == "·a⏎⇥␍\ufffd\ufffd"


def test_terminal_picture(tokenizer: Tokenizer) -> None:
    drawn = render.drawing(_step([259, 264, 33], [0, 1, 2]), tokenizer)
    console = Console(width=100, record=True, quiet=True, highlight=False)
    with console.capture():
        render.print_tree(drawn, console)
    console = Console(width=100, file=None, force_terminal=False, highlight=False)
    with console.capture() as capture:
        render.print_tree(drawn, console)
    lines = capture.get().splitlines()
    assert (
        lines[0] == "·  root, the last token so far"
        and lines[1] == "├── hello  0.60  path 0.600  ✓"
    )
    assert "·world  0.50  path 0.300  ✓" in lines[2]
    assert lines[3].endswith("── !  bonus, the target's own")
    assert sum(line.endswith("✓") for line in lines) == 2
    assert sum("──" in line for line in lines) == 7
    assert lines[-2] == render.LEGEND


def test_nothing_of_a_tree_is_cut_on_narrow_terminals(tokenizer: Tokenizer) -> None:
    drawn = render.drawing(_step([259, 264, 33], [0, 1, 2]), tokenizer)
    for width in (1, 4, 9, 15):
        console = Console(width=width, highlight=False)
        with console.capture() as capture:
            render.print_tree(drawn, console)
        words = capture.get().replace("│", "").split()
        assert words.count("path") == 6 and words.count("✓") >= 2 and "bonus," in words
        assert {"0.60", "0.600", "0.50", "0.300"} <= set(words)


@pytest.mark.parametrize("accepted", [[0], [0, 1], [0, 1, 2]])
def test_svg_is_well_formed_and_shows_every_node(tokenizer: Tokenizer, accepted: list[int]) -> None:
    drawn = render.drawing(_step([259, 264, 60][: len(accepted)], accepted), tokenizer)
    root = ElementTree.fromstring(render.to_svg(drawn))
    boxes = [r for r in root.iter(f"{SVG}rect") if "box" in r.get("class", "")]
    assert len(boxes) == len(drawn.labels) + 1  # and the bonus token
    marked = [r for r in boxes if "yes" in r.get("class", "")]
    assert len(marked) == len(accepted)
    texts = [t.text for t in root.iter(f"{SVG}text")]
    assert all(label in texts for label in [*drawn.labels, drawn.bonus])
    assert "href" not in render.to_svg(drawn)


def test_svg_boxes_do_not_overlap_and_lie_inside(tokenizer: Tokenizer) -> None:
    for accepted in ([0], [0, 1], [0, 1, 2], [0, 3]):
        drawn = render.drawing(_step([60], accepted, budget=12), tokenizer)
        root = ElementTree.fromstring(render.to_svg(drawn))
        places = [
            tuple(float(r.get(k, "0")) for k in ("x", "y", "width", "height"))
            for r in root.iter(f"{SVG}rect")
            if r.get("class")
        ]
        width, height = float(root.get("width", "0")), float(root.get("height", "0"))
        for i, (x, y, w, h) in enumerate(places):
            assert x >= 0 and y >= 0 and x + w <= width and y + h <= height
            for x2, y2, w2, h2 in places[:i]:
                assert x + w <= x2 or x2 + w2 <= x or y + h <= y2 or y2 + h2 <= y


def test_svg_bonus_is_the_last_child_of_the_last_accepted_node(tokenizer: Tokenizer) -> None:
    for accepted in ([0], [0, 1], [0, 1, 2], [0, 3]):
        drawn = render.drawing(_step([60], accepted, budget=12), tokenizer)
        root = ElementTree.fromstring(render.to_svg(drawn))
        boxes = [r for r in root.iter(f"{SVG}rect") if "box" in r.get("class", "")]
        y = [float(b.get("y", "0")) for b in boxes]
        siblings, bonus = drawn.children(accepted[-1]), y[-1]
        assert all(y[s] < bonus for s in siblings)
        if not siblings:
            assert bonus == y[accepted[-1]]
        if accepted == [0, 1]:  # before the rows of its parent's next child
            assert drawn.children(0)[0] == 1
            assert all(bonus < y[s] for s in drawn.children(0)[1:])


def test_svg_holds_the_caption(tokenizer: Tokenizer) -> None:
    drawn = render.drawing(_step([10], [0], budget=1), tokenizer)
    width = float(ElementTree.fromstring(render.to_svg(drawn)).get("width", "0"))
    assert width >= 7.3 * len(drawn.caption) + 32  # 12 px, monospaced


def test_svg_escapes_tokens() -> None:
    drawn = render.Drawing(
        labels=["<script>", "]]>&amp;\"'"],
        parents=[-1, 0],
        depths=[0, 1],
        probability=[1.0, 0.5],
        path_probability=[1.0, 0.5],
        accepted=[0],
        bonus="</svg>",
    )
    root = ElementTree.fromstring(render.to_svg(drawn))
    texts = [t.text for t in root.iter(f"{SVG}text")]
    assert "<script>" in texts and "]]>&amp;\"'" in texts and "</svg>" in texts
    assert not list(root.iter(f"{SVG}script"))
