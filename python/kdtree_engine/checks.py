"""Checks of values from outside: each returns the value in its type, or raises a ValueError that
names the field and the value."""

import operator
import os
from collections.abc import Iterable, Mapping, Set
from numbers import Real
from pathlib import Path
from typing import Any

_LONGEST = 120


def shown(value: Any) -> str:
    """`value` for a message: its repr, cut where it is long."""
    try:
        text = repr(value)
    except Exception:  # an integer of thousands of digits, or a broken __repr__
        return f"{type(value).__name__} (too large to show)"
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def integer(name: str, value: Any, low: int | None = None, high: int | None = None) -> int:
    """`value` as an int from `low` to `high`; floats are refused, whole or not: they hide mistakes.

    numpy's and torch's integers are taken, their booleans and arrays are not.
    """
    try:
        number: int | None = operator.index(value)
    except Exception:  # an array may raise anything
        number = None
    of_array = getattr(value, "ndim", 0) != 0 or "bool" in str(getattr(value, "dtype", ""))
    if number is None or of_array or isinstance(value, bool):
        raise ValueError(f"{name} is {shown(value)}, want an integer")
    if (low is not None and number < low) or (high is not None and number > high):
        limits = f"at least {low}" if high is None else f"{low} to {high}"
        raise ValueError(f"{name} is {shown(number)}, want {limits}")
    return number


def real(name: str, value: Any, low: float, high: float, want: str = "") -> float:
    """`value` as a float from `low` to `high`, for which a message has `want`'s words if given."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ValueError(f"{name} is {shown(value)}, want a number")
    try:
        number = float(value)
    except OverflowError:
        number = float("inf")
    if not low <= number <= high:
        raise ValueError(f"{name} is {shown(value)}, want {want or f'{low:g} to {high:g}'}")
    return number


def flag(name: str, value: Any) -> bool:
    """True or False, not what counts as one."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} is {shown(value)}, want True or False")
    return value


def listed(name: str, value: Any, what: str) -> list[Any]:
    """The items of a list, or of anything like one; not those of a text, a dict or a set."""
    try:
        if not isinstance(value, str | bytes | bytearray | memoryview | Mapping | Set):
            return list(value)
    except TypeError:
        pass
    raise ValueError(f"{name} is {shown(value)}, want a list of {what}")


def integers(name: str, value: Any, low: int | None = None, high: int | None = None) -> list[int]:
    """A list of integers from `low` to `high`; a message names the place of a wrong one."""
    items: Iterable[Any] = listed(name, value, "integers")
    return [integer(f"{name}[{index}]", item, low, high) for index, item in enumerate(items)]


def text(name: str, value: Any) -> str:
    """A str that UTF-8 can hold: one without lone surrogates."""
    if not isinstance(value, str):
        raise ValueError(f"{name} is {shown(value)}, want a str")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        around = value[max(0, error.start - 10) : error.start + 10]
        raise ValueError(
            f"{name} is not valid Unicode at character {error.start}, in {around!r}: a byte that "
            "is not UTF-8, or half of a surrogate pair"
        ) from None
    return value


def word(name: str, value: Any) -> str:
    """A `text` without NUL, which would end it early where C reads it."""
    if "\0" in text(name, value):
        raise ValueError(f"{name} is {shown(value)}: it holds a NUL character")
    return value


def path(name: str, value: Any) -> Path:
    """A path that the compiled module can open too; str or os.PathLike."""
    try:
        text = os.fspath(value)
    except TypeError:
        text = None
    if not isinstance(text, str) or not text:
        raise ValueError(f"{name} is {shown(value)}, want a path")
    return Path(word(name, text))
