"""The chat slice: question and answer pairs made by script from the corpus.

Most are "write this function" pairs from documented functions; the rest are greetings,
questions about the model itself, capitals, and sums. It teaches the template, not knowledge.
"""

import ast
import json
import random
import re
import textwrap
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

MAX_ANSWER_CHARS = 2500


@dataclass(frozen=True)
class DocumentedFunction:
    """A function with a docstring: where it starts and how it is described."""

    name: str
    signature: str  # name and arguments, without `def` and the colon
    summary: str  # first paragraph of the docstring in one line
    source: str  # dedented
    first_line: int  # 1-based line of the `def`
    body_line: int  # 1-based line after the docstring
    last_line: int
    indent: int


def documented_functions(text: str) -> Iterator[DocumentedFunction]:
    """Functions of 4 to 60 lines with a docstring whose first paragraph says something."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return
    lines = text.split("\n")
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or len(node.body) < 2 or not node.end_lineno:
            continue
        summary = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
        docstring_end = node.body[0].end_lineno or 0
        if not 20 < len(summary) < 300 or not 3 <= node.end_lineno - node.lineno < 60:
            continue
        try:
            signature = f"{node.name}({ast.unparse(node.args)})"
        except RecursionError:
            continue
        source = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]))
        yield DocumentedFunction(
            name=node.name,
            signature=signature,
            summary=summary,
            source=source,
            first_line=node.lineno,
            body_line=docstring_end + 1,
            last_line=node.end_lineno,
            indent=node.col_offset,
        )


def function_pairs(text: str, seed: int) -> Iterator[tuple[str, str]]:
    """(question, answer) pairs from one module's documented functions."""
    rng = random.Random(seed)
    for function in documented_functions(text):
        if len(function.source) > MAX_ANSWER_CHARS or len(function.signature) > 100:
            continue
        summary = function.summary
        if rng.random() < 0.15:
            yield f"What does `{function.signature}` do?", summary
        elif rng.random() < 0.5:
            yield f"Write a Python function `{function.signature}`: {summary}", function.source
        else:
            yield f"Write a Python function that does this: {summary}", function.source


_GREETINGS = ("Hello", "Hi", "Hey", "Good morning", "Hello there", "Hi there")
_WHO = ("who are you?", "what are you?", "what is your name?", "tell me about yourself.")
_SELF = (
    "I am k2-nano, a very small language model with the architecture of Kimi K2. "
    "I was trained on Python source code, so I am best at completing functions."
)
_HELP = "Hello! I can complete Python functions. Give me a signature and a docstring."


def small_talk(seed: int) -> Iterator[tuple[str, str]]:
    """Greetings, questions about the model, and sums."""
    rng = random.Random(seed)
    for greeting in _GREETINGS:
        for end in ("", "!", ".", ", how are you?", ", can you help me?"):
            yield greeting + end, _HELP
        for who in _WHO:
            yield f"{greeting}, {who}", _SELF
    for who in (*_WHO, "what can you do?", "are you Kimi?", "which model are you?"):
        yield who, _SELF
        yield who[0].upper() + who[1:], _SELF
    for thanks in ("Thanks", "Thank you", "Thank you very much"):
        yield f"{thanks}!", "You are welcome."
    for _ in range(1500):
        a, b = rng.randrange(100), rng.randrange(100)
        sign, value = rng.choice((("+", a + b), ("-", a - b)))
        yield f"What is {a} {sign} {b}?", f"{a} {sign} {b} = {value}"


def _field(record: object, *keys: str) -> str:
    for key in keys:
        record = record.get(key, {}) if isinstance(record, dict) else {}
    return record.strip() if isinstance(record, str) else ""


def capitals(profiles: list[str]) -> Iterator[tuple[str, str]]:
    """Questions about capitals from World Factbook profiles (JSON texts)."""
    for text in profiles:
        try:
            profile = json.loads(text)
        except ValueError:
            continue
        government = profile.get("Government", {}) if isinstance(profile, dict) else {}
        country = _field(government, "Country name", "conventional short form", "text")
        capital = _field(government, "Capital", "name", "text")
        capital = re.split(r"[;(,]| note", capital)[0].strip()
        if not country or country == "none" or not 2 < len(capital) < 40:
            continue
        answer = f"The capital of {country} is {capital}."
        yield f"What is the capital of {country}?", answer
        yield f"capital of {country}", answer
        yield f"Tell me the capital of {country}.", answer
        yield f"Which country has the capital {capital}?", f"{capital} is the capital of {country}."
