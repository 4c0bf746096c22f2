"""Requests that are read while they run."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, cast

from kdtree_engine.outputs import ChatChunk, RequestOutput, Sequence, StreamChunk

if TYPE_CHECKING:
    from kdtree_engine.llm import LLM


class Stream:
    """The chunks of one running request; `output` is the request as it stands."""

    def __init__(self, llm: "LLM", sequence: Sequence) -> None:
        self._llm, self._sequence = llm, sequence

    def __iter__(self) -> Iterator[StreamChunk]:
        return self

    def __next__(self) -> StreamChunk:
        sequence = self._sequence
        while not sequence.chunks:
            if sequence.finished:
                sequence.check()
                raise StopIteration
            self._llm._step()
        return sequence.chunks.popleft()

    @property
    def output(self) -> RequestOutput:
        return self._sequence.output()

    def close(self) -> None:
        """Ends the request if it still runs."""
        self._llm._release([self._sequence])

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self._llm, "_engine"):
            self.close()


class ChatStream(Stream):
    """The chunks of one running answer: each with what it added to content, reasoning and calls."""

    def __iter__(self) -> Iterator[ChatChunk]:
        return self

    def __next__(self) -> ChatChunk:
        return cast(ChatChunk, super().__next__())

    def __enter__(self) -> "ChatStream":
        return self
