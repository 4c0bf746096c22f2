"""What goes into the corpus: text clean-up, quality and licence filters, near-duplicates."""

import ast
import hashlib
import html
import re
import warnings

MIN_CHARS, MAX_CHARS = 200, 200_000
_NUMBER_TABLE = re.compile(r"[0-9a-fA-FxX.,;:+\-\s\[\]()]{3000}")
_SKIP_DIRECTORY = re.compile(
    r"(^|/)(_?vendor(ed)?|third_?party|extern(als?)?|node_modules|__pycache__|lib2to3/tests/data)/"
)
_COPYLEFT_HEADER = re.compile(
    r"\b[AL]?GPL(v\d)?\b|General Public Licen[cs]e|Mozilla Public Licen[cs]e", re.I
)
_BLOCK_TAG = re.compile(r"<(br|/?p|/?div|li|tr|/?h\d|/?pre)\b[^>]*>", re.I)


def is_test(path: str) -> bool:
    """Whether a path looks like a test module."""
    return bool(re.search(r"(^|/)(tests?|testing)/|(^|/)test_[^/]*$|_test\.py$", path))


def clean(text: str, path: str, is_source: bool) -> str | None:
    """The text as it goes into the corpus, or None when a filter drops it.

    Source files must parse as Python 3, carry no copyleft notice in their header and be
    written by hand as far as line lengths tell; vendored directories are left out because
    they have licences of their own.
    """
    if not MIN_CHARS <= len(text) <= MAX_CHARS or "\x00" in text:
        return None
    text = text.replace("\r\n", "\n").replace("\ufeff", "")
    head = text[:20_000]
    if sum(ord(c) > 127 for c in head) > 0.02 * len(head) or _NUMBER_TABLE.search(text):
        return None
    if not is_source:
        return text
    if _SKIP_DIRECTORY.search(path) or _COPYLEFT_HEADER.search(text[:4000]):
        return None
    lines = text.split("\n")
    if max(map(len, lines)) > 600 or len(text) / len(lines) > 80:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return text


def strip_html(page: str) -> str:
    """The readable text of an HTML page, paragraphs kept apart by blank lines."""
    page = re.sub(r"(?is)<(script|style|head)\b.*?</\1>", "", page)
    page = html.unescape(re.sub(r"<[^>]+>", "", _BLOCK_TAG.sub("\n", page)))
    return re.sub(r"\n\s*\n+", "\n\n", page).strip() + "\n"


class NearDuplicates:
    """Finds files most of whose lines have been seen in files kept before."""

    def __init__(self, max_seen_share: float = 0.6) -> None:
        self.max_seen_share = max_seen_share
        self._lines: set[int] = set()

    def admit(self, text: str) -> bool:
        """Keep `text` and remember its lines, unless it is mostly made of known lines."""
        lines = {line.strip() for line in text.split("\n")}
        keys = [
            int.from_bytes(hashlib.blake2b(line.encode(), digest_size=8).digest(), "little")
            for line in lines
            if len(line) >= 16
        ]
        seen = sum(key in self._lines for key in keys)
        if seen > self.max_seen_share * max(len(keys), 1):
            return False
        self._lines.update(keys)
        return True
