"""Committed tokens into text: whole characters, stop strings, and the places of marks."""

from collections import deque
from collections.abc import Container, Iterator

from kdtree_engine.sampling_params import SamplingParams
from kdtree_engine.tokenizer import IncrementalDecoder, Tokenizer
from kdtree_engine.tool_calls import open_suffix


class TextBuilder:
    """Text of one request, token by token, ended by the first stop string.

    Text that may be the start of a stop string is held back from `take`, so a reader of the stream
    never sees a part of one. `marks`: ids of control tokens whose places `take_parts` tells.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, params: SamplingParams, marks: Container[int] = ()
    ) -> None:
        self._tokenizer, self._skip = tokenizer, params.skip_special_tokens
        self._decoder = IncrementalDecoder(tokenizer, self._skip) if tokenizer else None
        self._stops: list[str] = list(params.stop or ())
        self._include_stop = params.include_stop_str_in_output
        self._longest = max(map(len, self._stops), default=0)
        self._marks = marks
        self._places: deque[tuple[int, int, int]] = deque()  # start, end, id; not yet taken
        self._taken = self._parted = 0
        self.text = ""
        self.stop: str | None = None

    def push(self, token_id: int) -> bool:
        """Adds a token; whether a stop string is complete now."""
        if self._decoder is None:
            return False
        if token_id not in self._marks:
            return self._add(self._decoder.push([token_id]))
        if self._add(self._decoder.finish()):  # no mark completes a character
            return True
        start = len(self.text)
        stopped = self._add(self._decoder.push([token_id]))
        if not stopped or start < len(self.text):
            self._places.append((start, max(start, len(self.text)), token_id))
        return stopped

    def finish(self) -> None:
        """Adds what an incomplete character leaves."""
        if self._decoder and self.stop is None:
            self._add(self._decoder.finish())

    def name(self, token_id: int) -> str:
        """The name of a control token."""
        return self._tokenizer.decode([token_id]) if self._tokenizer else ""

    def _add(self, new: str) -> bool:
        start = max(0, len(self.text) - self._longest + 1)
        self.text += new
        found = [(at, s) for s in self._stops if (at := self.text.find(s, start)) >= 0]
        if not found:
            return False
        at, self.stop = min(found, key=lambda match: match[0])
        self.text = self.text[: at + len(self.stop) if self._include_stop else at]
        return True

    def _certain(self, final: bool) -> int:
        """How much of the text no stop string can take away again."""
        return len(self.text) - (0 if final else open_suffix(self.text, self._stops))

    def take(self, final: bool) -> str:
        """The text that became certain since the last call."""
        end = self._certain(final)
        delta = self.text[self._taken : end]
        self._taken = max(self._taken, end)
        return delta

    def take_parts(self, final: bool) -> Iterator[tuple[str, int | None]]:
        """What became certain, as pieces of text that end at a mark (its id) or nowhere (None)."""
        end = self._certain(final)
        while self._places and self._places[0][1] <= end:
            start, after, token_id = self._places.popleft()
            yield self.text[self._parted : start], token_id
            self._parted = after
        if self._places:
            end = min(end, self._places[0][0])
        if end > self._parted:
            yield self.text[self._parted : end], None
            self._parted = end
