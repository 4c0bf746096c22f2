"""A chat model's answer taken apart: reasoning, content and tool calls.

Kimi marks the parts with control tokens, so the parts are found by token ids and no text that a
model quotes can pass for a mark. The wire format of the calls (Moonshot, tool call guidance):

    section begin ( call begin  functions.NAME:N  argument begin  JSON  call end )+ section end

where N counts the calls of the whole conversation. Reasoning ends at `</think>`, or where a section
or a call begins. Calls are handed out whole: one that is cut off or malformed is a `BrokenCall`.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kdtree_engine.tokenizer import Tokenizer


class Mark(Enum):
    """What a control token says. Values: the names it may have."""

    THINK = ("<think>",)
    THINK_END = ("</think>",)
    SECTION = ("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>")
    SECTION_END = ("<|tool_calls_section_end|>", "<|tool_call_section_end|>")
    CALL = ("<|tool_call_begin|>",)
    ARGUMENT = ("<|tool_call_argument_begin|>",)
    CALL_END = ("<|tool_call_end|>",)


# Some models write these out, letter by letter, where the vocabulary has the plural alone.
_WRITTEN_SECTION, _WRITTEN_SECTION_END = Mark.SECTION.value[1], Mark.SECTION_END.value[1]
_NAME = re.compile(r"[^\s<>{}\"'`\\\x00-\x1f]{1,256}")
_OWN_ID = re.compile(r"functions\.[^\s<>]+:[0-9]+")


@dataclass(frozen=True)
class ToolCall:
    """A call the model makes. `arguments`: the text of a JSON object, as the model wrote it.

    `id`: `functions.NAME:N`, where N counts all calls of the conversation from 0.
    """

    id: str
    name: str
    arguments: str

    def as_message_part(self) -> dict[str, Any]:
        """The entry of `tool_calls` in an assistant's message (OpenAI's form)."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


@dataclass(frozen=True)
class BrokenCall:
    """What was meant as a call and is none: its text, without control tokens, and the reason."""

    text: str
    reason: str


@dataclass
class ChatDelta:
    """What an answer has gained."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)
    broken_calls: list[BrokenCall] = field(default_factory=list)

    def add(self, other: "ChatDelta") -> None:
        """Appends what came later."""
        self.content += other.content
        self.reasoning += other.reasoning
        self.tool_calls = self.tool_calls + other.tool_calls
        self.broken_calls = self.broken_calls + other.broken_calls


def marks_of(tokenizer: "Tokenizer") -> dict[int, Mark]:
    """The ids of the tokenizer's marks."""
    ids = tokenizer.special_tokens
    return {ids[name]: mark for mark in Mark for name in mark.value if name in ids}


class _State(Enum):
    REASONING = "reasoning"
    CONTENT = "content"
    SECTION = "between calls"
    HEADER = "header"
    ARGUMENTS = "arguments"


class ChatParser:
    """Takes the text and the marks of an answer in their order; `take` gives what is certain.

    The result depends on all of the text and marks, never on how they were cut into pieces.

    `thinking`: the prompt has opened the reasoning. `tools`: OpenAI's form; to find the name of a
    call that came without one. `calls_before`: number of calls in the conversation so far.
    `written_think`: `<think>` and `</think>` come as text, for vocabularies without such tokens.
    """

    def __init__(
        self,
        *,
        thinking: bool = False,
        tools: Iterable[Mapping[str, Any]] = (),
        calls_before: int = 0,
        written_think: bool = False,
    ) -> None:
        self._state = _State.REASONING if thinking else _State.CONTENT
        self._tools = _schemas(tools)
        self._num_calls = calls_before
        self._written_think = written_think
        self._in_section = False
        self._pending = ""  # text that may be the start of a written mark
        self._header = self._arguments = self._stray = ""
        self._new = ChatDelta()

    def take(self) -> ChatDelta:
        """What became certain since the last call."""
        new, self._new = self._new, ChatDelta()
        return new

    # ------------------------------------------------------------------ input

    def text(self, text: str) -> None:
        """Text between two marks, or a part of it."""
        self._pending += text
        while (found := self._written_mark()) is not None:
            mark, start, end = found
            before, self._pending = self._pending[:start], self._pending[end:]
            self._add(before)
            self._turn(mark)
        held = self._held()
        ready = len(self._pending) - held
        self._add(self._pending[:ready])
        self._pending = self._pending[ready:]

    def mark(self, mark: Mark, shown: str = "") -> None:
        """A control token; `shown`: its name, which stays text inside a call's arguments."""
        whole = self._pending.rstrip()
        if mark is Mark.CALL and whole.endswith(_WRITTEN_SECTION):
            self._pending = whole.removesuffix(_WRITTEN_SECTION)
            self._in_section = True
        self._flush()
        if self._state is _State.ARGUMENTS and mark in (Mark.THINK, Mark.THINK_END):
            self._arguments += shown  # a document or a program that talks of such marks
            return
        self._turn(mark)

    def finish(self) -> None:
        """The answer has ended."""
        self._flush()
        cut_off = "the answer ended inside the call"
        if self._state is _State.ARGUMENTS and self._arguments.strip():
            self._finish_call(cut_off)  # only the mark at the end may be missing
        elif self._state in (_State.HEADER, _State.ARGUMENTS):
            self._break(cut_off)
        self._end_stray()
        self._state = _State.CONTENT

    # ------------------------------------------------------------------ written marks

    def _written(self) -> dict[str, Mark]:
        """Marks that may come as text where the parser stands."""
        if self._state is _State.SECTION:
            return {_WRITTEN_SECTION_END: Mark.SECTION_END}
        if not self._written_think or self._state in (_State.HEADER, _State.ARGUMENTS):
            return {}
        return {"<think>": Mark.THINK, "</think>": Mark.THINK_END}

    def _written_mark(self) -> tuple[Mark, int, int] | None:
        """The first written mark that is complete."""
        found = [
            (mark, at, at + len(name))
            for name, mark in self._written().items()
            if (at := self._pending.find(name)) >= 0
        ]
        return min(found, key=lambda one: one[1], default=None)

    def _held(self) -> int:
        """How many of the last characters may still become a written mark."""
        text, names = self._pending, list(self._written())
        if self._state in (_State.REASONING, _State.CONTENT):
            whole = text.rstrip()
            if whole.endswith(_WRITTEN_SECTION):  # a mark if a call begins next
                return len(text) - len(whole) + len(_WRITTEN_SECTION)
            names.append(_WRITTEN_SECTION)
        return open_suffix(text, names)

    def _flush(self) -> None:
        pending, self._pending = self._pending, ""
        self._add(pending)

    # ------------------------------------------------------------------ the parts

    def _add(self, text: str) -> None:
        match self._state:
            case _State.REASONING:
                self._new.reasoning += text
            case _State.CONTENT:
                self._new.content += text
            case _State.SECTION:
                self._stray += text
            case _State.HEADER:
                self._header += text
            case _State.ARGUMENTS:
                self._arguments += text

    def _turn(self, mark: Mark) -> None:
        in_call = self._state in (_State.HEADER, _State.ARGUMENTS)
        if mark is Mark.ARGUMENT:
            if self._state is _State.HEADER:
                self._state = _State.ARGUMENTS
            return
        if in_call:
            self._end_call(mark)
        match mark:
            case Mark.THINK:
                self._end_stray()
                self._state = _State.REASONING
            case Mark.THINK_END:
                if self._state is _State.REASONING:
                    self._state = _State.CONTENT
            case Mark.SECTION:
                self._in_section = True
                self._state = _State.SECTION
            case Mark.SECTION_END:
                self._end_stray()
                self._in_section = False
                if self._state is not _State.REASONING:
                    self._state = _State.CONTENT
            case Mark.CALL:
                self._end_stray()
                self._header = self._arguments = ""
                self._state = _State.HEADER

    def _end_stray(self) -> None:
        """Text between calls: nothing but space is expected there."""
        stray, self._stray = self._stray.strip(), ""
        if stray:
            self._new.broken_calls.append(BrokenCall(stray, "text outside a call"))

    def _end_call(self, mark: Mark) -> None:
        if self._state is _State.HEADER:
            self._break("the call has no arguments")
        elif mark in (Mark.CALL_END, Mark.SECTION_END, Mark.CALL):
            self._finish_call()
        else:
            self._break("another part of the answer began inside the call")
        self._state = _State.SECTION if self._in_section else _State.CONTENT

    def _break(self, reason: str) -> None:
        text = f"{self._header.strip()} {self._arguments}".strip()
        self._new.broken_calls.append(BrokenCall(text, reason))
        self._header = self._arguments = ""

    def _finish_call(self, cut_off: str = "") -> None:
        arguments = self._arguments.strip() or "{}"
        try:
            value = json.loads(arguments, parse_constant=_no_constant)
        except (ValueError, RecursionError) as error:
            self._break(cut_off or f"the arguments are not JSON: {error}")
            return
        if not isinstance(value, dict):
            self._break("the arguments are not a JSON object")
            return
        name = self._name(self._header.strip(), value)
        if name is None:
            self._break("the call names no function")
            return
        own_id = f"functions.{name}:{self._num_calls}"
        self._new.tool_calls.append(ToolCall(own_id, name, arguments))
        self._num_calls += 1
        self._header = self._arguments = ""

    def _name(self, header: str, arguments: dict[str, Any]) -> str | None:
        """The function of a header: named in it, or the only one that takes the arguments."""
        at = header.find("functions.")
        name, colon, number = (header[at + 10 :] if at >= 0 else header).rpartition(":")
        if colon and number.isdecimal() and _NAME.fullmatch(name):
            return name
        plain = header[at + 10 :] if at >= 0 else header
        if plain in self._tools or (at >= 0 and _NAME.fullmatch(plain)):
            return plain
        if not _NAME.fullmatch(header):
            return None
        fitting = [name for name, takes in self._tools.items() if takes(arguments)]
        return fitting[0] if len(fitting) == 1 else None


def parse_answer(tokenizer: "Tokenizer", token_ids: Iterable[int], **options: Any) -> ChatDelta:
    """A whole answer taken apart; `options` as for `ChatParser`."""
    from kdtree_engine.tokenizer import IncrementalDecoder

    marks, parser = marks_of(tokenizer), ChatParser(**options)
    decoder = IncrementalDecoder(tokenizer, skip_special_tokens=True)
    for token_id in token_ids:
        if token_id in marks:
            parser.text(decoder.finish())
            parser.mark(marks[token_id], tokenizer.decode([token_id]))
        else:
            parser.text(decoder.push([token_id]))
    parser.text(decoder.finish())
    parser.finish()
    return parser.take()


def open_suffix(text: str, strings: Iterable[str]) -> int:
    """Length of the longest end of `text` that one of `strings` begins with, and goes on from."""
    longest = 0
    for string in strings:
        for length in range(min(len(text), len(string) - 1), longest, -1):
            if string.startswith(text[len(text) - length :]):
                longest = length
                break
    return longest


def count_calls(messages: Iterable[Mapping[str, Any]]) -> int:
    """Number of tool calls in a conversation."""
    return sum(len(m.get("tool_calls") or ()) for m in messages)


def with_own_call_ids(messages: Sequence[Mapping[str, Any]]) -> list[Any]:
    """The conversation with ids of calls in Kimi's form.

    Kimi copies the form of the ids it sees, and calls with foreign ones are then lost: where any
    id is foreign, all become `functions.NAME:N`, in calls and in results alike.
    """
    calls = [c for m in messages for c in m.get("tool_calls") or ()]
    ids = [call.get("id") for call in calls]
    if all(isinstance(i, str) and _OWN_ID.fullmatch(i) for i in ids) and len({*ids}) == len(ids):
        return list(messages)
    own: dict[Any, str] = {}
    number = 0
    changed: list[Any] = []
    for message in messages:
        message = dict(message)
        if message.get("tool_calls"):
            renamed = []
            for call in message["tool_calls"]:
                function = call.get("function")
                name = function.get("name") if isinstance(function, Mapping) else None
                new_id = f"functions.{name}:{number}"
                if isinstance(call.get("id"), str):
                    own[call["id"]] = new_id
                renamed.append({**call, "id": new_id})
                number += 1
            message["tool_calls"] = renamed
        answered = message.get("tool_call_id")
        if isinstance(answered, str) and answered in own:
            message["tool_call_id"] = own[answered]
        changed.append(message)
    return changed


def _schemas(tools: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """For each function's name, whether it takes given arguments, by their names."""
    known: dict[str, Any] = {}
    for tool in tools:
        function = tool.get("function")
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(name, str):
            continue
        schema = function.get("parameters")
        schema = schema if isinstance(schema, Mapping) else {}
        properties, required = schema.get("properties"), schema.get("required")
        names = {*properties} if isinstance(properties, Mapping) else set()
        needed = set(map(str, required)) if isinstance(required, list) else set()
        known[name] = lambda given, n=names, r=needed: r <= given.keys() <= n
    return known


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")
