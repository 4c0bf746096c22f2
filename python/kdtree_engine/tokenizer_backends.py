"""The two ways of turning ordinary text into ids: a tiktoken rank file, and a tokenizer.json."""

import json
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import tiktoken

from kdtree_engine import checks
from kdtree_engine.checks import shown
from kdtree_engine.tokenizer_files import (
    DEFAULT_RESERVED,
    HF_FILE,
    RANKS_FILE,
    ControlTokens,
    read_control_tokens,
    read_object,
    read_ranks,
    read_vocab_size,
)

_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
# Kimi K2's rule for cutting text into pieces before byte-pair merging; the first match wins.
SPLIT_PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
# Kimi's own tokenizer cuts long text here first; the cuts bound time and change ids only there.
_MAX_CHUNK_CHARS = 400_000
_MAX_RUN_CHARS = 25_000
_RUNS = re.compile(r"\S+|\s+")
# An added token that is not marked special is a control token by its looks alone.
_LOOKS_LIKE_CONTROL = re.compile(r"<.+>|\[[A-Z_]+\]", re.DOTALL)


class Backend(Protocol):
    """What both kinds of files give.

    `token_bytes`: what the ordinary tokens stand for; None: a control token, or an id without one.
    """

    token_bytes: list[bytes | None]
    control: ControlTokens
    vocab_size: int
    adds_bos: bool  # unless tokenizer_config.json says otherwise

    def encode(self, text: str) -> list[int]:
        """Ids of ordinary text."""


class TiktokenBackend:
    """Kimi's format: ranks in `tiktoken.model`, control tokens in the ids above them."""

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        ranks = read_ranks(folder / RANKS_FILE)
        self.token_bytes: list[bytes | None] = [*sorted(ranks, key=ranks.__getitem__)]
        self.vocab_size = read_vocab_size(
            folder, len(ranks), RANKS_FILE, len(ranks) + DEFAULT_RESERVED
        )
        self.control = read_control_tokens(folder, settings, len(ranks))
        # Kimi's tokenizer class puts none in front; folders without settings are of our own making.
        self.adds_bos = not settings
        self._encoding = tiktoken.Encoding(
            folder.name, pat_str=SPLIT_PATTERN, mergeable_ranks=ranks, special_tokens={}
        )

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for chunk in _chunks(text):
            ids += self._encoding.encode_ordinary(chunk)
        return ids


class HuggingFaceBackend:
    """Byte-level BPE of a `tokenizer.json`, without its control tokens.

    These are taken out of the vocabulary that text is matched with, so no text can give one.
    """

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        path = folder / HF_FILE
        data = read_object(path)
        model = _part(path, data, "model")
        if model.get("type", "BPE") != "BPE" or not isinstance(model.get("vocab"), dict):
            raise ValueError(
                f"{path}: model.type is {shown(model.get('type'))}, this version knows 'BPE' "
                "with a vocab"
            )
        for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
            if model.get(name):
                raise ValueError(f"{path}: model.{name} is {shown(model[name])}, want none")
        if not any(kind == "ByteLevel" for kind in _kinds(data.get("decoder"))):
            raise ValueError(f"{path}: decoder is not 'ByteLevel', which this version knows alone")
        self.control = ControlTokens()
        plain = [t for t in _added(path, data) if not self._take_control(str(path), t)]
        self.token_bytes = self._byte_table(path, model["vocab"], plain)
        size = len(self.token_bytes)
        self.vocab_size = read_vocab_size(folder, size, HF_FILE, size)
        self.adds_bos = _puts_bos_in_front(data.get("post_processor"))
        self._tokenizer = _load_text_part(path, data, plain, self.control.ids)

    def _take_control(self, source: str, token: dict[str, Any]) -> bool:
        name, special = token.get("content"), token.get("special") is True
        if not special and not (isinstance(name, str) and _LOOKS_LIKE_CONTROL.fullmatch(name)):
            return False
        for flag in ("lstrip", "rstrip", "single_word"):
            if token.get(flag):
                raise ValueError(f"{source}: token {name!r} has {flag}, which is not supported")
        self.control.add(source, name, token.get("id"), special)
        return True

    def _byte_table(
        self, path: Path, vocab: dict[str, Any], plain: list[dict[str, Any]]
    ) -> list[bytes | None]:
        byte_of = _byte_characters()
        named: dict[int, bytes] = {}
        for token, token_id in vocab.items():
            if token in self.control.ids:
                continue
            checks.integer(f"{path}: the id of {shown(token)}", token_id, 0, 1 << 24)
            if token_id in named:
                raise ValueError(f"{path}: {shown(token)} has id {token_id}, as another token has")
            try:
                named[token_id] = bytes(byte_of[c] for c in token)
            except KeyError as error:
                raise ValueError(
                    f"{path}: token {shown(token)} has {error.args[0]!r}, which stands for no byte"
                ) from None
        for byte, character in sorted((b, c) for c, b in byte_of.items()):
            if character not in vocab:
                raise ValueError(f"{path}: no token for the single byte 0x{byte:02x}")
        for added in plain:
            content = checks.text(f"{path}: added_tokens: content", added.get("content"))
            token_id = checks.integer(f"{path}: the id of {content!r}", added.get("id"), 0, 1 << 24)
            named[token_id] = content.encode()
        ids = self.control.ids
        for name, token_id in ids.items():
            if token_id in named:
                raise ValueError(f"{path}: {name!r} has id {token_id}, as another token has")
        size = max([*named, *ids.values()], default=-1) + 1
        if size > 1 << 24:
            raise ValueError(f"{path}: an id is {size - 1}, want less than {1 << 24}")
        return [named.get(token_id) for token_id in range(size)]

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids


def _part(path: Path, data: dict[str, Any], name: str) -> dict[str, Any]:
    value = data.get(name)
    if not isinstance(value, dict):
        raise ValueError(f"{path}: {name} is {shown(value)}, want an object")
    return value


def _kinds(part: Any) -> Iterator[Any]:
    """The types of a part of tokenizer.json, which may be a sequence of parts."""
    if isinstance(part, dict):
        yield part.get("type")
        for name in ("decoders", "processors"):
            inner = part.get(name)
            for one in inner if isinstance(inner, list) else []:
                yield from _kinds(one)


def _added(path: Path, data: dict[str, Any]) -> list[dict[str, Any]]:
    added = data.get("added_tokens", [])
    if not isinstance(added, list) or not all(isinstance(token, dict) for token in added):
        raise ValueError(f"{path}: added_tokens is {shown(added)}, want a list of objects")
    return added


def _puts_bos_in_front(processor: Any) -> bool:
    """Whether the file's own template of a single text begins with a control token."""
    if isinstance(processor, dict) and isinstance(processor.get("processors"), list):
        return any(map(_puts_bos_in_front, processor["processors"]))
    single = processor.get("single") if isinstance(processor, dict) else None
    return isinstance(single, list) and bool(single) and "SpecialToken" in single[0]


def _byte_characters() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for (GPT-2's table)."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in visible]
    table = {chr(byte): byte for byte in visible}
    return table | {chr(256 + index): byte for index, byte in enumerate(others)}


def _load_text_part(
    path: Path, data: dict[str, Any], plain: list[dict[str, Any]], control: dict[str, int]
) -> Any:
    try:
        import tokenizers
    except ImportError:
        raise ImportError(
            f"{path} needs the package tokenizers: pip install 'kdtree-engine[tokenizers]'"
        ) from None
    model = dict(data["model"])
    model["vocab"] = {t: i for t, i in model["vocab"].items() if t not in control}
    # The package numbers added tokens anew, except for those that the vocabulary has too.
    model["vocab"] |= {token["content"]: token["id"] for token in plain}
    merges = model.get("merges") or []
    model["merges"] = [m for m in merges if _merged(m) not in control]
    if model.get("unk_token") in control:
        model["unk_token"] = None
    parts = {**data, "model": model, "added_tokens": plain}
    parts |= {"post_processor": None, "truncation": None, "padding": None}
    try:
        return tokenizers.Tokenizer.from_str(json.dumps(parts))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the package's own panics are no Exceptions
        raise ValueError(f"{path}: {error}") from None


def _merged(pair: Any) -> Any:
    """The token that a merge makes: "a b" or ["a", "b"]."""
    if isinstance(pair, str):
        return pair.replace(" ", "", 1)
    return "".join(map(str, pair)) if isinstance(pair, list) else None


def _chunks(text: str) -> Iterator[str]:
    """The text in pieces that are encoded apart (see _MAX_CHUNK_CHARS)."""
    for start in range(0, len(text), _MAX_CHUNK_CHARS):
        part = text[start : start + _MAX_CHUNK_CHARS]
        cuts = [0]
        for run in _RUNS.finditer(part):
            cuts += range(run.start() + _MAX_RUN_CHARS, run.end(), _MAX_RUN_CHARS)
        cuts.append(len(part))
        yield from (part[a:b] for a, b in pairwise(cuts))
