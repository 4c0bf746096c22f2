"""The files that make up a tokenizer, read with care: they come from outside."""

import base64
import binascii
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kdtree_engine import checks

RANKS_FILE = "tiktoken.model"
HF_FILE = "tokenizer.json"
SETTINGS_FILE = "tokenizer_config.json"
DEFAULT_RESERVED = 256  # ids above the ranks when config.json does not say the vocabulary's size


@dataclass
class ControlTokens:
    """Named control tokens: `ids` by name, `kept` those that are shown with the text."""

    ids: dict[str, int] = field(default_factory=dict)
    kept: set[str] = field(default_factory=set)

    def add(self, source: str, name: Any, token_id: Any, special: bool, low: int = 0) -> None:
        """Takes one token of a file; ValueError names the file and what is wrong."""
        if not isinstance(name, str) or not name:
            raise ValueError(f"{source}: token {token_id} has content {name!r}, want a name")
        checks.text(f"{source}: the name of token {token_id}", name)
        if not isinstance(token_id, int) or isinstance(token_id, bool) or token_id < low:
            wanted = f"{low} or more, above the ranks" if low else "a whole number"
            raise ValueError(f"{source}: token {name!r} has id {token_id!r}, want {wanted}")
        if name in self.ids or token_id in self.ids.values():
            raise ValueError(f"{source}: token {name!r} with id {token_id} is there twice")
        self.ids[name] = token_id
        if not special:
            self.kept.add(name)


def read_text(path: Path) -> str:
    """The text of a UTF-8 file."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 at byte {error.start}") from error


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file, an empty one if there is no file."""
    if not path.is_file():
        return {}
    text = read_text(path)
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}:{error.lineno}: {error.msg}") from error
    except RecursionError as error:
        raise ValueError(f"{path}: nested too deeply") from error
    except ValueError as error:  # an integer of thousands of digits
        raise ValueError(f"{path}: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: want a JSON object, found {type(value).__name__}")
    return value


def read_ranks(path: Path) -> dict[bytes, int]:
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


def read_vocab_size(folder: Path, num_tokens: int, beside: str, default: int) -> int:
    """vocab_size of config.json (Kimi K2.5 nests it in text_config), or `default` without one.

    `num_tokens`: how many the file `beside` has.
    """
    config = read_object(folder / "config.json")
    nested = config.get("text_config")
    size = (nested if isinstance(nested, dict) else config).get("vocab_size")
    if size is None:
        return default
    if not isinstance(size, int) or isinstance(size, bool) or size < num_tokens:
        raise ValueError(
            f"{folder / 'config.json'}: vocab_size is {size!r}, {beside} beside it has "
            f"{num_tokens} tokens"
        )
    return size


def read_control_tokens(folder: Path, settings: dict[str, Any], num_ranks: int) -> ControlTokens:
    """Control tokens beside a rank file: of tokenizer_config.json, else special_tokens.json."""
    tokens = ControlTokens()
    source = folder / SETTINGS_FILE
    added = settings.get("added_tokens_decoder")
    if added is None:
        source = folder / "special_tokens.json"
        for name, token_id in read_object(source).items():
            tokens.add(str(source), name, token_id, True, num_ranks)
        return tokens
    if not isinstance(added, dict):
        raise ValueError(f"{source}: added_tokens_decoder is not an object")
    for key, entry in added.items():
        if not re.fullmatch("[0-9]{1,9}", key) or not isinstance(entry, dict):
            raise ValueError(f"{source}: added_tokens_decoder has a bad entry {key!r}")
        special = entry.get("special", True) is not False
        tokens.add(str(source), entry.get("content"), int(key), special, num_ranks)
    return tokens
