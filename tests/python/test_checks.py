"""Values of wrong types and sizes, given to what takes values from outside."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kdtree_engine import checks, ddtree, kdtr


class Unspeakable:
    def __repr__(self) -> str:
        raise RuntimeError


@pytest.mark.parametrize("value", [5, np.int64(5), np.uint8(5), np.array(5)])
def test_integers_of_every_kind_are_taken(value: Any) -> None:
    number = checks.integer("x", value, 5, 5)
    assert number == 5 and type(number) is int


@pytest.mark.parametrize(
    "value",
    [None, True, 5.0, "5", b"5", np.True_, np.array([5]), np.float32(5), [5], Unspeakable()],
)
def test_other_values_are_no_integers(value: Any) -> None:
    with pytest.raises(ValueError, match=r"^x is .*want an integer$"):
        checks.integer("x", value)


def test_messages_stay_short() -> None:
    for value in ("a" * 10_000, 10**10_000, [0] * 10_000, Unspeakable()):
        assert len(checks.shown(value)) < 150


@pytest.mark.parametrize("value", [None, 5, "ab", b"ab", memoryview(b"ab"), {1: 2}, {1}])
def test_what_is_no_list(value: Any) -> None:
    with pytest.raises(ValueError, match=r"^x is .*want a list of integers$"):
        checks.integers("x", value)


@pytest.mark.parametrize("value", [None, 5, "", b"a", "a\0b", "\udcff"])
def test_what_is_no_path(value: Any, tmp_path: Path) -> None:
    calls = (
        lambda: checks.path("path", value),
        lambda: kdtr.read(value),
        lambda: kdtr.read_table(value),
        lambda: kdtr.write(value, {}),
    )
    for call in calls:
        with pytest.raises(ValueError, match=r"^path is "):
            call()


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        (None, "arrays is None, want a dict of arrays"),
        ([np.zeros(1)], r"arrays is \[array"),
        ({5: np.zeros(1)}, "array 5: the name is no str"),
        ({10**5000: np.zeros(1)}, r"array int \(too large to show\): the name is no str"),
        ({"a": kdtr.BF16Array([1])}, "array 'a': BF16Array holds list, want a numpy array"),  # type: ignore[arg-type]
    ],
)
def test_kdtr_names_what_it_cannot_write(arrays: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(kdtr.KdtrError, match=message):
        kdtr.write(tmp_path / "x.kdtr", arrays)
    assert not (tmp_path / "x.kdtr").exists()


@pytest.mark.parametrize("file", [None, 5, "KDTR", bytearray(64)])
def test_kdtr_parses_bytes_only(file: Any) -> None:
    with pytest.raises(kdtr.KdtrError, match="KDTR data: file is "):
        kdtr.parse(file)


def test_tree_arguments_are_named() -> None:
    logprobs, ids = np.log(np.array([[0.5, 0.3]], np.float32)), np.array([[1, 2]])
    ragged: Any = [[1], [1, 2]]
    endless: list[Any] = []
    endless.append(endless)
    for wrong in (ragged, endless):
        with pytest.raises(ValueError, match=r"logprobs is \[.*want an array"):
            ddtree.build_tree(wrong, ids, 1)
        with pytest.raises(ValueError, match=r"token_ids is \[.*want an array"):
            ddtree.build_tree(logprobs, wrong, 1)
    for budget in (-(10**5000), True, 1.0, endless, np.array([1])):
        with pytest.raises(ValueError, match="budget is "):
            ddtree.build_tree(logprobs, ids, budget)  # type: ignore[arg-type]
    for backend in (None, 10**5000, np.array([]), "gpu"):
        with pytest.raises(ValueError, match="backend is "):
            ddtree.build_tree(logprobs, ids, 1, backend)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="tree is None, want a DraftTree"):
        ddtree.accept(None, [1])  # type: ignore[arg-type]
