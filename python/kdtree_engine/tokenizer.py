"""Kimi's tokenizer: a tiktoken rank file, named control tokens above the ranks, a chat template.

Two kinds of text never mix: what a user wrote is encoded as ordinary text and cannot become a
control token; only a chat template's own text can name one.
"""

import base64
import binascii
import codecs
import json
import os
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import tiktoken

from kdtree_engine import checks
from kdtree_engine.checks import shown

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
_DEFAULT_RESERVED = 256  # ids above the ranks when config.json does not say the vocabulary's size

# A control token by its looks. Names in brackets, such as [INST], are plain text to some models.
_CONTROL = re.compile(r"<[|｜][^<>\s]+[|｜]>")

RANKS_FILE = "tiktoken.model"
SETTINGS_FILE = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"


class Tokenizer:
    """The tokenizer of a checkpoint folder.

    Attributes: `vocab_size`, `special_tokens` (name to id of the named control tokens),
    `bos_token_id` (None: the checkpoint has none), `chat_template` (its source, None: none).
    Raises OSError for a missing rank file and ValueError naming file and line for a bad one.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = checks.path("folder", folder)
        ranks = _read_ranks(self.folder / RANKS_FILE)
        self._bytes = sorted(ranks, key=ranks.__getitem__)
        settings = _read_object(self.folder / SETTINGS_FILE)
        self.vocab_size = _vocab_size(self.folder / "config.json", len(ranks))
        self.special_tokens, kept = _special_tokens(self.folder, settings, len(ranks))
        for name, token_id in self.special_tokens.items():
            if token_id >= self.vocab_size:
                raise ValueError(
                    f"{self.folder}: token {name!r} has id {token_id}, vocab_size is "
                    f"{self.vocab_size}"
                )
        self._name_of = {token_id: name for name, token_id in self.special_tokens.items()}
        self._kept = {self.special_tokens[name] for name in kept}
        self._encoding = tiktoken.Encoding(
            self.folder.name, pat_str=SPLIT_PATTERN, mergeable_ranks=ranks, special_tokens={}
        )
        bos = settings.get("bos_token", "[BOS]")
        bos = bos.get("content") if isinstance(bos, dict) else bos
        add_bos = settings.get("add_bos_token", True)
        if not isinstance(add_bos, bool):
            raise ValueError(
                f"{self.folder / 'tokenizer_config.json'}: add_bos_token is {add_bos!r}, "
                "want true or false"
            )
        self.bos_token_id = self.special_tokens.get(bos) if isinstance(bos, str) else None
        self.add_bos = add_bos and self.bos_token_id is not None
        template = self.folder / TEMPLATE_FILE
        self.chat_template = _read_text(template) if template.is_file() else None

    def encode(self, text: str, add_bos: bool = False) -> list[int]:
        """Ids of ordinary text; names of control tokens in it are text like any other.

        Raises ValueError for text with lone surrogates, which has no UTF-8.
        """
        checks.text("text", text)
        checks.flag("add_bos", add_bos)
        ids = [self.bos_token_id] if add_bos and self.bos_token_id is not None else []
        for chunk in _chunks(text):
            ids += self._encoding.encode_ordinary(chunk)
        return ids

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
        """
        index = checks.integer("token id", token_id)
        if not 0 <= index < self.vocab_size:
            raise ValueError(
                f"token id {shown(index)} is out of range, vocab_size is {self.vocab_size}"
            )
        if index < len(self._bytes):
            return self._bytes[index]
        if skip_special_tokens and index not in self._kept:
            return b""
        return self._name_of.get(index, f"<|reserved_token_{index}|>").encode()

    def is_special(self, token_id: int) -> bool:
        """Whether the id is a control token, named or reserved."""
        return len(self._bytes) <= checks.integer("token id", token_id) < self.vocab_size

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
        if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
            raise ValueError(
                f"messages is {shown(messages)}, want a list with at least one message"
            )
        for index, message in enumerate(messages):
            _check_message(f"messages[{index}]", message)
        checks.flag("add_generation_prompt", add_generation_prompt)
        if tools is not None:
            tools = _dicts("tools", tools)
        mark, starts = f"\ue000{secrets.token_hex(8)}\ue001", self._name_starts()
        given = {"messages": list(messages), "tools": tools, **variables}
        try:
            context = {name: _marked(name, v, starts, mark) for name, v in given.items()}
        except RecursionError:
            raise ValueError("messages, tools or variables are nested too deeply") from None
        context["add_generation_prompt"] = add_generation_prompt
        return self._encode_template(self._render(context), mark)

    def _name_starts(self) -> "re.Pattern[str]":
        """First characters of the control tokens' names, and of what _CONTROL takes for one."""
        starts = "".join(sorted({"<", *(name[0] for name in self.special_tokens)}))
        return re.compile(f"[{re.escape(starts)}]")

    def _render(self, context: dict[str, Any]) -> str:
        import jinja2
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        if self.chat_template is None:
            raise ValueError(f"{self.folder} has no {TEMPLATE_FILE}: use a plain prompt")
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        try:
            return environment.from_string(self.chat_template).render(context)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(
                f"{self.folder / TEMPLATE_FILE}:{error.lineno}: {error.message}"
            ) from error
        except Exception as error:  # a template may raise anything
            raise ValueError(f"{self.folder / TEMPLATE_FILE}: {error}") from error

    def _encode_template(self, text: str, mark: str) -> list[int]:
        """Ids of rendered text; `mark` stands inside names that are not control tokens."""
        source = str(self.folder / TEMPLATE_FILE)
        checks.text(f"{source}: the text it gives", text)
        names = sorted(self.special_tokens, key=len, reverse=True)
        ids: list[int] = []
        for piece in re.split(f"({'|'.join(map(re.escape, names)) or '(?!)'})", text):
            if piece in self.special_tokens:
                ids.append(self.special_tokens[piece])
                continue
            if unknown := _CONTROL.search(piece):
                raise ValueError(
                    f"{source} uses {shown(unknown[0])}, which is none of the tokenizer's control "
                    f"tokens: is it the template of another model, or a {SETTINGS_FILE} missing?"
                )
            ids += self.encode(piece.replace(mark, ""))
        return ids


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


def _chunks(text: str) -> Iterator[str]:
    """The text in pieces that are encoded apart (see _MAX_CHUNK_CHARS)."""
    for start in range(0, len(text), _MAX_CHUNK_CHARS):
        part = text[start : start + _MAX_CHUNK_CHARS]
        cuts = [0]
        for run in _RUNS.finditer(part):
            cuts += range(run.start() + _MAX_RUN_CHARS, run.end(), _MAX_RUN_CHARS)
        cuts.append(len(part))
        yield from (part[a:b] for a, b in pairwise(cuts))


def _check_message(where: str, message: Any) -> None:
    """A dict with a role, and a content: a text, parts of one, or none beside tool calls."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise ValueError(f"{where} is {shown(message)}, want a dict with a 'role'")
    content, calls = message.get("content"), message.get("tool_calls")
    if calls is not None:
        calls = _dicts(f"{where}: tool_calls", calls)
    if not isinstance(content, str) and not (content is None and calls):
        _dicts(f"{where}: content", content, "dicts, or a str")


def _dicts(name: str, value: Any, what: str = "dicts") -> list[Any]:
    """A list of dicts."""
    items = checks.listed(name, value, what)
    for index, item in enumerate(items):
        if not isinstance(item, Mapping):
            raise ValueError(f"{name}[{index}] is {shown(item)}, want a dict")
    return items


def _marked(name: str, value: Any, starts: "re.Pattern[str]", mark: str) -> Any:
    """`value` with `mark` put behind each character that could start a control token's name.

    Takes what JSON can hold: other objects could become any text in a template.
    """
    if isinstance(value, str):
        return starts.sub(lambda match: match[0] + mark, checks.text(name, value))
    if isinstance(value, Mapping):
        return {
            _marked(f"{name}: key", key, starts, mark): _marked(
                f"{name}[{shown(key)}]", item, starts, mark
            )
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_marked(f"{name}[{i}]", item, starts, mark) for i, item in enumerate(value)]
    if value is None or isinstance(value, bool | int | float):
        return value
    raise ValueError(f"{name} is {shown(value)}, want what JSON can hold")


def _to_json(value: Any, indent: int | None = None, separators: Any = None, **_: Any) -> str:
    """jinja2's own filter escapes characters for HTML, which no prompt wants."""
    return json.dumps(value, ensure_ascii=False, indent=indent, separators=separators)


def _refuse(message: str) -> None:
    raise ValueError(message)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 at byte {error.start}") from error


def _read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file, an empty one if there is no file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(_read_text(path))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}:{error.lineno}: {error.msg}") from error
    except RecursionError as error:
        raise ValueError(f"{path}: nested too deeply") from error
    except ValueError as error:  # an integer of thousands of digits
        raise ValueError(f"{path}: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: want a JSON object, found {type(value).__name__}")
    return value


def _read_ranks(path: Path) -> dict[bytes, int]:
    """Token bytes to rank; ranks are 0, 1, 2 ... without a gap and cover all single bytes."""
    ranks: dict[bytes, int] = {}
    line_of: dict[int, int] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if not line.strip():
            continue
        fields = line.split()
        where = f"{path}:{number}"
        if len(fields) != 2:
            raise ValueError(
                f"{where}: want a base64 token and its rank, found {len(fields)} words"
            )
        try:
            token = base64.b64decode(fields[0], validate=True)
        except binascii.Error as error:
            raise ValueError(f"{where}: {_shown(fields[0])} is not base64") from error
        if not re.fullmatch(rb"[0-9]{1,9}", fields[1]):
            raise ValueError(f"{where}: rank {_shown(fields[1])} is not a whole number")
        rank = int(fields[1])
        if not token:
            raise ValueError(f"{where}: the token is empty")
        if token in ranks:
            first = line_of[ranks[token]]
            raise ValueError(f"{where}: token {_shown(fields[0])} is also on line {first}")
        if rank in line_of:
            raise ValueError(f"{where}: rank {rank} is also on line {line_of[rank]}")
        ranks[token], line_of[rank] = rank, number
    for rank in range(len(ranks)):
        if rank not in line_of:
            raise ValueError(f"{path}: rank {rank} is missing among {len(ranks)} tokens")
    for byte in range(256):
        if bytes([byte]) not in ranks:
            raise ValueError(f"{path}: no token for the single byte 0x{byte:02x}")
    return ranks


def _shown(word: bytes) -> str:
    return repr(word[:40].decode("ascii", "replace"))


def _vocab_size(path: Path, num_ranks: int) -> int:
    """vocab_size of config.json (Kimi K2.5 nests it in text_config), or a guess without one."""
    config = _read_object(path)
    nested = config.get("text_config")
    size = (nested if isinstance(nested, dict) else config).get("vocab_size")
    if size is None:
        return num_ranks + _DEFAULT_RESERVED
    if not isinstance(size, int) or isinstance(size, bool) or size < num_ranks:
        raise ValueError(
            f"{path}: vocab_size is {size!r}, {RANKS_FILE} beside it has {num_ranks} tokens"
        )
    return size


def _special_tokens(
    folder: Path, settings: dict[str, Any], num_ranks: int
) -> tuple[dict[str, int], set[str]]:
    """Named control tokens, and those of them that are not special (kept when text is shown)."""
    entries: list[tuple[Any, Any, bool]] = []
    source = folder / SETTINGS_FILE
    added = settings.get("added_tokens_decoder")
    if added is not None:
        if not isinstance(added, dict):
            raise ValueError(f"{source}: added_tokens_decoder is not an object")
        for key, entry in added.items():
            if not re.fullmatch("[0-9]{1,9}", key) or not isinstance(entry, dict):
                raise ValueError(f"{source}: added_tokens_decoder has a bad entry {key!r}")
            entries.append(
                (entry.get("content"), int(key), entry.get("special", True) is not False)
            )
    else:
        source = folder / "special_tokens.json"
        entries = [(name, token_id, True) for name, token_id in _read_object(source).items()]
    ids: dict[str, int] = {}
    kept: set[str] = set()
    for name, token_id, special in entries:
        if not isinstance(name, str) or not name:
            raise ValueError(f"{source}: token {token_id} has content {name!r}, want a name")
        checks.text(f"{source}: the name of token {token_id}", name)
        if not isinstance(token_id, int) or isinstance(token_id, bool) or token_id < num_ranks:
            raise ValueError(
                f"{source}: token {name!r} has id {token_id!r}, want {num_ranks} or more, above "
                "the ranks"
            )
        if name in ids or token_id in ids.values():
            raise ValueError(f"{source}: token {name!r} with id {token_id} is there twice")
        ids[name] = token_id
        if not special:
            kept.add(name)
    return ids, kept
