"""Held-out functions to complete, and the prompts of `kdtree bench`."""

import ast
import random
import textwrap
import warnings
from dataclasses import asdict, dataclass
from typing import Any

import tiktoken

from .chat import documented_functions

Document = tuple[str, str]
MAX_PROMPT_TOKENS = 240
MAX_CONTEXT_LINES = 24


@dataclass(frozen=True)
class Head:
    """A function to complete: lines before it, and its signature with the docstring."""

    path: str
    name: str
    context: str
    head: str
    indent: int


@dataclass
class Completion:
    """What the model wrote for a head, up to where the function ends."""

    path: str
    head: str
    body: str
    tokens: list[int]  # of the body
    ended: bool  # a line at the function's own indentation or less follows
    parses: bool  # with something in the body besides the docstring

    def as_dict(self) -> dict[str, Any]:
        """Without the tokens."""
        fields = asdict(self)
        del fields["tokens"]
        return fields


def _in_turn(documents: list[Document], seed: int) -> list[Document]:
    """Shuffled documents, the held-out packages and files taking turns."""
    by_package: dict[str, list[Document]] = {}
    for document in documents:
        group, package, _ = document[0].split("/", 2)
        key = package if group == "heldout" else "files"
        # prompts are quoted in the model folder: only from packages under BSD, MIT or Apache
        if document[0].endswith(".py") and group in ("heldout", "source"):
            by_package.setdefault(key, []).append(document)
    rng = random.Random(seed)
    for group_documents in by_package.values():
        group_documents.sort()
        rng.shuffle(group_documents)
    longest = max(map(len, by_package.values()), default=0)
    return [d[i] for i in range(longest) for d in by_package.values() if i < len(d)]


def held_out_heads(
    documents: list[Document], encoding: tiktoken.Encoding, count: int, seed: int
) -> list[Head]:
    """At most `count` heads, one a document, whose prompt stays under 240 tokens."""
    rng = random.Random(seed)
    heads: list[Head] = []
    for path, text in _in_turn(documents, seed):
        if len(heads) == count:
            break
        found = list(documented_functions(text))
        if not found:
            continue
        function, lines = rng.choice(found), text.split("\n")
        head = "\n".join(lines[function.first_line - 1 : function.body_line - 1]) + "\n"
        if len(encoding.encode_ordinary(head)) > 180:
            continue
        first = function.first_line - 1
        while first > 0 and first > function.first_line - 1 - MAX_CONTEXT_LINES:
            longer = "\n".join(lines[first - 1 : function.first_line - 1]) + "\n" + head
            if len(encoding.encode_ordinary(longer)) > MAX_PROMPT_TOKENS:
                break
            first -= 1
        context = "".join(line + "\n" for line in lines[first : function.first_line - 1])
        heads.append(Head(path, function.name, context, head, function.indent))
    return heads


def tokens_of(head: Head, encoding: tiktoken.Encoding) -> list[int]:
    """The prompt's tokens."""
    return encoding.encode_ordinary(head.context + head.head)


def complete(head: Head, generated: list[int], encoding: tiktoken.Encoding) -> Completion:
    """Cuts generated tokens at the function's end and judges the function."""
    lines = encoding.decode(generated).split("\n")
    body, ended = [], False
    for line in lines:
        if line.strip() and len(line) - len(line.lstrip()) <= head.indent:
            ended = True
            break
        body.append(line)
    if not ended:
        body.pop()  # the last line may be cut short
    text = "\n".join(body).rstrip() + "\n"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(textwrap.dedent(head.head + text))
        function = tree.body[0]
        parses = isinstance(function, ast.FunctionDef) and len(function.body) > 1
    except (SyntaxError, ValueError, IndexError, RecursionError):
        parses = False
    tokens = encoding.encode_ordinary(text)
    return Completion(head.path, head.head, text, tokens, ended, parses)


def bench_prompts(
    documents: list[Document],
    heads: list[Head],
    completions: list[Completion],
    encoding: tiktoken.Encoding,
    count: int,
) -> list[dict[str, str]]:
    """Prompts {name, text, kind} of at most 240 tokens: function heads whose greedy completion
    ended, parsed and is longer than a line, and as many cuts of other held-out files."""
    prompts: list[dict[str, str]] = []
    for head, completion in zip(heads, completions, strict=True):
        good = completion.ended and completion.parses and len(completion.tokens) >= 24
        if good and len(prompts) < count // 2:
            text = head.context + head.head
            prompts.append({"name": f"{head.path}:{head.name}", "text": text, "kind": "function"})
    rng = random.Random(11)
    used = {head.path for head in heads}
    for path, text in _in_turn(documents, 11):
        if len(prompts) == count:
            break
        lines = text.split("\n")
        if path in used or len(lines) < 60:
            continue
        first = rng.randrange(10, len(lines) - 40)
        last = first + 1
        while last < len(lines):
            longer = "\n".join(lines[first : last + 1]) + "\n"
            if len(encoding.encode_ordinary(longer)) > 160:
                break
            last += 1
        text = "\n".join(lines[first:last]) + "\n"
        if 60 <= len(encoding.encode_ordinary(text)) <= MAX_PROMPT_TOKENS:
            prompts.append({"name": f"{path}:{first + 1}", "text": text, "kind": "code"})
    return prompts
