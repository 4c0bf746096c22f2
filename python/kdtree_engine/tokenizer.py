"""The tokenizer of a checkpoint folder: text to ids and back, and its chat template.

Two kinds of text never mix: what a user wrote is encoded as ordinary text and cannot become a
control token; only a chat template's own text can name one.
"""

import codecs
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kdtree_engine import checks
from kdtree_engine.chat_template import find_template
from kdtree_engine.checks import shown
from kdtree_engine.tokenizer_backends import (
    SPLIT_PATTERN,
    Backend,
    HuggingFaceBackend,
    TiktokenBackend,
)
from kdtree_engine.tokenizer_files import HF_FILE, RANKS_FILE, SETTINGS_FILE, read_object

__all__ = ["SPLIT_PATTERN", "TOKENIZER_FILES", "IncrementalDecoder", "Tokenizer", "has_tokenizer"]

TOKENIZER_FILES = f"{RANKS_FILE} or {HF_FILE}"
# A control token by its looks. Names in brackets, such as [INST], are plain text to some models.
_CONTROL = re.compile(r"<[|｜][^<>\s]+[|｜]>")
_RESERVED = r"<\|reserved_token_[0-9]{1,9}\|>"
# Control tokens that chat templates use as variables.
_NAMED_BY_TEMPLATES = ("bos_token", "eos_token", "pad_token", "unk_token")


def has_tokenizer(folder: Path) -> bool:
    """Whether the folder has a file that a `Tokenizer` can be made of."""
    return (folder / RANKS_FILE).is_file() or (folder / HF_FILE).is_file()


class Tokenizer:
    """The tokenizer of a checkpoint folder: Kimi's `tiktoken.model`, else a `tokenizer.json`.

    Attributes: `vocab_size`, `special_tokens` (name to id of the named control tokens),
    `bos_token_id` (None: the checkpoint has none), `add_bos` (whether a prompt begins with it),
    `chat_template` (its source, None: none). Raises OSError for a missing file, ValueError naming
    file and line for a bad one, and ImportError where a `tokenizer.json` needs a package.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = checks.path("folder", folder)
        settings = read_object(self.folder / SETTINGS_FILE)
        by_ranks = (self.folder / RANKS_FILE).is_file() or not (self.folder / HF_FILE).is_file()
        make = TiktokenBackend if by_ranks else HuggingFaceBackend
        self._backend: Backend = make(self.folder, settings)
        self._bytes = self._backend.token_bytes
        self.vocab_size = self._backend.vocab_size
        self.special_tokens = self._backend.control.ids
        for name, token_id in self.special_tokens.items():
            if token_id >= self.vocab_size:
                raise ValueError(
                    f"{self.folder}: token {name!r} has id {token_id}, vocab_size is "
                    f"{self.vocab_size}"
                )
        self._name_of = {token_id: name for name, token_id in self.special_tokens.items()}
        self._kept = {self.special_tokens[name] for name in self._backend.control.kept}
        names = {key: _token_name(settings, key) for key in _NAMED_BY_TEMPLATES}
        self._template_names = {key: n for key, n in names.items() if n in self.special_tokens}
        add_bos = settings.get("add_bos_token", self._backend.adds_bos)
        if not isinstance(add_bos, bool):
            raise ValueError(
                f"{self.folder / SETTINGS_FILE}: add_bos_token is {add_bos!r}, want true or false"
            )
        bos = self._template_names.get("bos_token")
        self.bos_token_id = self.special_tokens[bos] if bos is not None else None
        self.add_bos = add_bos and self.bos_token_id is not None
        self._template = find_template(self.folder, settings, for_kimi=by_ranks)
        self._names = re.compile(
            "|".join(map(re.escape, sorted(self.special_tokens, key=len, reverse=True)))
            + ("|" if self.special_tokens else "")
            + _RESERVED
        )

    @property
    def chat_template(self) -> str | None:
        """The source of the chat template, None: the checkpoint has none."""
        return self._template.source

    def encode(self, text: str, add_bos: bool = False) -> list[int]:
        """Ids of ordinary text; names of control tokens in it are text like any other.

        Raises ValueError for text with lone surrogates, which has no UTF-8.
        """
        checks.text("text", text)
        checks.flag("add_bos", add_bos)
        ids = [self.bos_token_id] if add_bos and self.bos_token_id is not None else []
        return ids + self._backend.encode(text)

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = False) -> str:
        """The text of the ids; bytes that are not UTF-8 become U+FFFD.

        Raises ValueError for an id outside the vocabulary.
        """
        ids = checks.listed("token_ids", token_ids, "integers")
        checks.flag("skip_special_tokens", skip_special_tokens)
        raw = b"".join(self.token_bytes(i, skip_special_tokens) for i in ids)
        return raw.decode("utf-8", "replace")

    def token_bytes(self, token_id: int, skip_special_tokens: bool = False) -> bytes:
        """The bytes one id stands for: a control token's name, or nothing if those are skipped.

        Tokens that the checkpoint lists as not special, such as Kimi's tool-call marks, are kept.
        Ids without a name are `<|reserved_token_N|>`, where N is the id itself.
        """
        index = checks.integer("token id", token_id)
        if not 0 <= index < self.vocab_size:
            raise ValueError(
                f"token id {shown(index)} is out of range, vocab_size is {self.vocab_size}"
            )
        raw = self._bytes[index] if index < len(self._bytes) else None
        if raw is not None:
            return raw
        if skip_special_tokens and index not in self._kept:
            return b""
        return self._name_of.get(index, f"<|reserved_token_{index}|>").encode()

    def is_special(self, token_id: int) -> bool:
        """Whether the id is a control token, named or reserved."""
        index = checks.integer("token id", token_id)
        ordinary = 0 <= index < len(self._bytes) and self._bytes[index] is not None
        return 0 <= index < self.vocab_size and not ordinary

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> list[int]:
        """Ids of a conversation in the checkpoint's template.

        `messages` have "role" and "content". Control tokens come from the template alone: the same
        names inside messages, tools or variables stay text. Raises ValueError for a conversation
        that the template refuses, for a template that is missing or broken, and for one with
        control tokens that the tokenizer does not have.
        """
        rendered, ordinary = self._template.render(
            messages,
            tools,
            checks.flag("add_generation_prompt", add_generation_prompt),
            variables,
            control=self.special_tokens,
            named=self._template_names,
        )
        return self._encode_template(rendered, ordinary)

    def _encode_template(self, text: str, ordinary: dict[int, str]) -> list[int]:
        """Ids of rendered text; `ordinary` gives the characters of users' text that were replaced.

        Only names that stand in the text as they are are control tokens.
        """
        source = self._template.name
        checks.text(f"{source}: the text it gives", text)
        ids: list[int] = []
        at = 0
        for match in self._names.finditer(text):
            token_id = self._control_id(match[0])
            if token_id is not None:
                ids += self._encode_piece(text[at : match.start()], ordinary)
                ids.append(token_id)
                at = match.end()
        return ids + self._encode_piece(text[at:], ordinary)

    def _encode_piece(self, piece: str, ordinary: dict[int, str]) -> list[int]:
        if unknown := _CONTROL.search(piece):
            raise ValueError(
                f"{self._template.name} uses {shown(unknown[0])}, which is none of the "
                "tokenizer's control tokens: is it the template of another model, or a "
                f"{SETTINGS_FILE} missing?"
            )
        return self.encode(piece.translate(ordinary)) if piece else []

    def _control_id(self, name: str) -> int | None:
        """The id of a control token's name; a reserved one is named by its own id."""
        if name in self.special_tokens:
            return self.special_tokens[name]
        token_id = int(re.sub("[^0-9]", "", name))
        return token_id if self.is_special(token_id) and token_id not in self._name_of else None


class IncrementalDecoder:
    """Turns a stream of ids into text without ever cutting a UTF-8 character in two.

    All that `push` and `finish` return together equals `Tokenizer.decode` of all ids.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = False) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_ids: Iterable[int]) -> str:
        """The characters that these ids complete."""
        raw = b"".join(self._tokenizer.token_bytes(i, self._skip) for i in token_ids)
        return self._utf8.decode(raw)

    def finish(self) -> str:
        """What is left: U+FFFD for a character that was never completed, else nothing."""
        return self._utf8.decode(b"", final=True)


def _token_name(settings: dict[str, Any], key: str) -> str:
    """The name that tokenizer_config.json gives a token, a text or an object with one; or ""."""
    value = settings.get(key, "[BOS]" if key == "bos_token" else "")
    value = value.get("content") if isinstance(value, dict) else value
    return value if isinstance(value, str) else ""
