"""Pictures of a draft tree: in the terminal, and as an SVG file that needs nothing else."""

import re
from dataclasses import dataclass
from html import escape
from math import exp
from typing import TYPE_CHECKING

from rich.cells import cell_len
from rich.console import Console
from rich.measure import Measurement
from rich.text import Text
from rich.tree import Tree as RichTree

if TYPE_CHECKING:
    from kdtree_engine._core import StepOutput
    from kdtree_engine.tokenizer import Tokenizer

LEGEND = "· space, ⏎ line end; the token's probability, its path's; ✓ accepted by the target"
_NOISE = "; probabilities given part of the noise of the draws"
_VISIBLE = {"\n": "⏎", "\t": "⇥", "\r": "␍", " ": "·"}


@dataclass(frozen=True)
class Drawing:
    """What a picture shows, indexed by slot; slot 0 is the root."""

    labels: list[str]
    parents: list[int]  # -1 for the root
    depths: list[int]
    probability: list[float]  # of the token at its depth, by the drafter; 1 for the root
    path_probability: list[float]  # of the whole path
    accepted: list[int]  # slots the target agreed with, root first
    bonus: str  # the target's token after the last of them
    sampled: bool = False  # the probabilities have part of the noise of the target's draws

    def children(self, slot: int) -> list[int]:
        """Slots below `slot`, the likeliest first."""
        return [s for s, parent in enumerate(self.parents) if parent == slot]

    @property
    def caption(self) -> str:
        nodes, accepted = len(self.labels) - 1, len(self.accepted) - 1
        return (
            f"{nodes} draft nodes verified in one forward: {accepted} accepted and the target's "
            f"own {self.bonus}, so {accepted + 1} token{'s' if accepted else ''}"
        )


def visible(text: str) -> str:
    """A token on one line: spaces and line ends as signs, other control characters as U+FFFD.

    Four spaces or more are counted: `·×7`.
    """
    signs = "".join(_VISIBLE.get(c, c if c.isprintable() else "\ufffd") for c in text)
    return re.sub("·{4,}", lambda run: f"·×{len(run[0])}", signs)


def drawing(step: "StepOutput", tokenizer: "Tokenizer", sampled: bool = False) -> Drawing:
    """What to draw of a round; `sampled`: at a temperature above zero.

    Raises ValueError for a round without a tree.
    """
    tree = step.tree
    if tree is None:
        raise ValueError("this round has no tree: it was a plain step")
    tokens = [step.root_token_id, *(int(t) for t in tree.tokens[1:])]
    parents = [int(p) for p in tree.parents]
    logw = [float(w) for w in tree.logw]
    accepted = [int(slot) for slot in tree.accepted]
    # Fewer tokens than accepted slots: the text ended inside the accepted path.
    has_bonus = len(step.token_ids) >= len(accepted)
    bonus = visible(tokenizer.decode(step.token_ids[-1:])) if has_bonus else "(end)"
    return Drawing(
        labels=[visible(tokenizer.decode([t])) for t in tokens],
        parents=parents,
        depths=[int(d) for d in tree.depths],
        probability=[
            1.0 if parent < 0 else exp(min(0.0, w - logw[parent]))
            for w, parent in zip(logw, parents, strict=True)
        ],
        path_probability=[exp(w) for w in logw],
        accepted=accepted,
        bonus=bonus,
        sampled=sampled,
    )


def print_tree(drawn: Drawing, console: Console) -> None:
    """Draws the tree on the terminal: the accepted path marked, the bonus token at its end."""
    accepted = set(drawn.accepted)

    def label(slot: int) -> Text:
        text = Text(drawn.labels[slot], style="bold green" if slot in accepted else "")
        if slot == 0:
            text.append("  root, the last token so far", style="dim")
        else:
            chances = f"  {drawn.probability[slot]:.2f}  path {drawn.path_probability[slot]:.3f}"
            text.append(chances, style="dim")
            if slot in accepted:
                text.append("  ✓", style="bold green")
        return text

    root = RichTree(label(0))
    branches = {0: root}
    for slot in range(1, len(drawn.labels)):  # a parent comes before its children
        branches[slot] = branches[drawn.parents[slot]].add(label(slot))
    bonus = Text(drawn.bonus, style="bold yellow")
    bonus.append("  bonus, the target's own", style="dim")
    branches[drawn.accepted[-1]].add(bonus)
    # A deep node is not cut where the terminal is narrower than that.
    endless = console.options.update(max_width=1_000_000)
    width = console.width
    console.width = max(width, Measurement.get(console, endless, root).minimum)
    console.print(root)
    console.width = width
    legend = LEGEND + _NOISE * drawn.sampled
    console.print(Text(legend, style="dim"), soft_wrap=True)
    console.print(Text(drawn.caption), soft_wrap=True)


_STYLE = """
text{font:13px ui-monospace,Menlo,Consolas,monospace;fill:#1f2328}
.small{font-size:10px;fill:#59636e}
.box{fill:#fff;stroke:#b6bec9}
.edge{fill:none;stroke:#b6bec9;stroke-width:1.2}
.yes{fill:#dafbe1;stroke:#1a7f37;stroke-width:1.6}
.path{stroke:#1a7f37;stroke-width:2.4}
.bonus{fill:#fff8c5;stroke:#9a6700;stroke-width:1.6}
"""
_ROW, _HEIGHT, _GAP, _MARGIN, _CHAR, _CAPTION_CHAR = 40, 30, 34, 16, 8, 7.5


def _rows(drawn: Drawing) -> list[float]:
    """The row of each slot: leaves one below the other, a parent level with its first child.

    The bonus token comes after the slots, as the last child of the last accepted one.
    """
    parents = [*drawn.parents, drawn.accepted[-1]]
    below: list[list[int]] = [[] for _ in parents]
    for slot, parent in enumerate(parents[1:], 1):
        below[parent].append(slot)
    rows = [0.0] * len(parents)
    stack, next_row = [0], 0
    order = []
    while stack:
        slot = stack.pop()
        order.append(slot)
        children = below[slot]
        if not children:
            rows[slot] = next_row
            next_row += 1
        stack += reversed(children)
    for slot in reversed(order):
        if below[slot]:
            rows[slot] = rows[below[slot][0]]
    return rows


def to_svg(drawn: Drawing) -> str:
    """The tree from left to right, with the accepted path and the bonus token marked."""
    rows = _rows(drawn)
    caption = drawn.caption + _NOISE * drawn.sampled
    last = drawn.accepted[-1]
    widths: dict[int, int] = {}
    for slot, text in enumerate(drawn.labels):
        depth = drawn.depths[slot]
        widths[depth] = max(widths.get(depth, 44), _CHAR * cell_len(text) + 18)
    bonus_depth = drawn.depths[last] + 1
    bonus_width = max(44, _CHAR * cell_len(drawn.bonus) + 18)
    deepest = max(bonus_depth, *drawn.depths)
    left, x = {}, _MARGIN
    for depth in range(deepest + 1):
        left[depth] = x
        x += max(widths.get(depth, 44), bonus_width if depth == bonus_depth else 0) + _GAP
    bonus_row = rows[-1]
    width = max(x - _GAP + _MARGIN, int(_CAPTION_CHAR * cell_len(caption)) + 2 * _MARGIN)
    height = int((max(rows) + 1) * _ROW + 2 * _MARGIN + 22)
    accepted = set(drawn.accepted)
    edges, boxes = [], []

    def middle(row: float) -> float:
        return _MARGIN + row * _ROW + _HEIGHT / 2

    def edge(from_slot: int, depth: int, row: float, css: str) -> None:
        x0 = left[drawn.depths[from_slot]] + widths[drawn.depths[from_slot]]
        x1, y0, y1 = left[depth], middle(rows[from_slot]), middle(row)
        bend = (x0 + x1) / 2
        edges.append(f'<path class="edge{css}" d="M{x0} {y0}C{bend} {y0} {bend} {y1} {x1} {y1}"/>')

    def box(text: str, note: str, depth: int, row: float, box_width: int, css: str) -> None:
        x0, y = left[depth], middle(row)
        boxes.append(
            f'<rect class="{css}" x="{x0}" y="{y - _HEIGHT / 2}" width="{box_width}" '
            f'height="{_HEIGHT}" rx="6"/>'
            f'<text x="{x0 + box_width / 2}" y="{y - 2}" text-anchor="middle">{escape(text)}</text>'
            f'<text class="small" x="{x0 + box_width / 2}" y="{y + 11}" '
            f'text-anchor="middle">{escape(note)}</text>'
        )

    for slot, text in enumerate(drawn.labels):
        depth, parent = drawn.depths[slot], drawn.parents[slot]
        chosen = slot in accepted
        if parent >= 0:
            edge(parent, depth, rows[slot], " path" if chosen else "")
        note = f"{drawn.probability[slot]:.2f}" if parent >= 0 else "root"
        box(text, note, depth, rows[slot], widths[depth], "box yes" if chosen else "box")
    edge(last, bonus_depth, bonus_row, " path")
    box(drawn.bonus, "bonus", bonus_depth, bonus_row, bonus_width, "box bonus")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" role="img">\n'
        f"<title>{escape(caption)}</title>\n<style>{_STYLE}</style>\n"
        f'<rect width="{width}" height="{height}" fill="#fff"/>\n'
        + "\n".join(edges + boxes)
        + f'\n<text x="{_MARGIN}" y="{height - _MARGIN}" style="font-size:12px">'
        f"{escape(caption)}</text>\n</svg>\n"
    )
