"""Answers taken apart: reasoning, content, calls, whatever a model writes and however it comes."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conftest import KIMI_NAMES, write_kimi_tokenizer
from kdtree_engine.sampling_params import SamplingParams
from kdtree_engine.text_builder import TextBuilder
from kdtree_engine.tokenizer import Tokenizer
from kdtree_engine.tool_calls import (
    BrokenCall,
    ChatDelta,
    ChatParser,
    Mark,
    ToolCall,
    count_calls,
    marks_of,
    open_suffix,
    parse_answer,
    with_own_call_ids,
)

IDS = {name: 256 + at for at, name in KIMI_NAMES.items()}
SPLIT = re.compile("(" + "|".join(re.escape(n) for n in IDS) + ")")
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {key: {"type": "string"} for key in properties},
                "required": required,
            },
        },
    }
    for name, properties, required in (
        ("get_weather", ["city", "unit"], ["city"]),
        ("list-files", ["path"], ["path"]),
        ("now", [], []),
    )
]
BEGIN, END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("kimi")
    write_kimi_tokenizer(folder)
    return Tokenizer(folder)


def ids_of(text: str) -> list[int]:
    """Token ids of what a model writes; names of control tokens are these tokens."""
    ids: list[int] = []
    for piece in SPLIT.split(text):
        ids += [IDS[piece]] if piece in IDS else piece.encode()
    return ids


def call(header: str, arguments: str) -> str:
    return f"<|tool_call_begin|>{header}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"


def parsed(tokenizer: Tokenizer, text: str, **options: Any) -> ChatDelta:
    return parse_answer(tokenizer, ids_of(text), **options)


# ---------------------------------------------------------------- well-formed answers


def test_reasoning_content_and_calls(tokenizer: Tokenizer) -> None:
    answer = parsed(
        tokenizer,
        "Let me see.</think>I look it up."
        + BEGIN
        + call("functions.get_weather:0", '{"city": "北京"}')
        + call("functions.list-files:1", '{\n "path": "/"\n}')
        + END,
        thinking=True,
    )
    assert answer == ChatDelta(
        "I look it up.",
        "Let me see.",
        [
            ToolCall("functions.get_weather:0", "get_weather", '{"city": "北京"}'),
            ToolCall("functions.list-files:1", "list-files", '{\n "path": "/"\n}'),
        ],
    )


def test_the_model_may_open_its_reasoning_itself(tokenizer: Tokenizer) -> None:
    assert parsed(tokenizer, "<think>a</think>b") == ChatDelta("b", "a")
    assert parsed(tokenizer, "<think>a</think>b", thinking=True) == ChatDelta("b", "a")
    assert parsed(tokenizer, "b<think>a</think>c") == ChatDelta("bc", "a")
    assert parsed(tokenizer, "only thought", thinking=True) == ChatDelta("", "only thought")
    assert parsed(tokenizer, "no thought") == ChatDelta("no thought")


def test_a_stray_end_of_thinking_is_not_shown(tokenizer: Tokenizer) -> None:
    assert parsed(tokenizer, "Hi</think> there") == ChatDelta("Hi there")


@pytest.mark.parametrize("begin", [BEGIN, ""])
def test_a_call_ends_the_reasoning(tokenizer: Tokenizer, begin: str) -> None:
    end = END if begin else ""
    text = "hm" + begin + call("functions.now:0", "{}") + end + "done"
    answer = parsed(tokenizer, text, thinking=True)
    assert (answer.reasoning, answer.content) == ("hm", "done")
    assert [c.name for c in answer.tool_calls] == ["now"] and not answer.broken_calls


def test_calls_are_numbered_through_the_conversation(tokenizer: Tokenizer) -> None:
    text = BEGIN + call("functions.now:0", "{}") + call("now:7", "") + END
    answer = parsed(tokenizer, text, calls_before=3)
    assert [c.id for c in answer.tool_calls] == ["functions.now:3", "functions.now:4"]
    assert [c.arguments for c in answer.tool_calls] == ["{}", "{}"]


def test_long_arguments_come_whole(tokenizer: Tokenizer) -> None:
    arguments = json.dumps({"path": "é" * 20_000})
    answer = parsed(tokenizer, BEGIN + call("functions.list-files:0", arguments) + END)
    assert answer.tool_calls[0].arguments == arguments


def test_arguments_may_speak_of_thinking(tokenizer: Tokenizer) -> None:
    arguments = '{"path": "<think>a</think>"}'
    answer = parsed(tokenizer, BEGIN + call("functions.list-files:0", arguments) + END)
    assert json.loads(answer.tool_calls[0].arguments) == {"path": "<think>a</think>"}


def test_names_of_marks_as_text_are_text(tokenizer: Tokenizer) -> None:
    """A model that explains the format writes the names letter by letter."""
    text = f"Kimi writes {BEGIN}{call('functions.f:0', '{}')}{END} and </think>."
    answer = parse_answer(tokenizer, tokenizer.encode(text))
    assert answer == ChatDelta(content=text)


# ---------------------------------------------------------------- names


@pytest.mark.parametrize(
    ("header", "arguments", "name"),
    [
        ("functions.get_weather:0", '{"city": "x"}', "get_weather"),
        (" functions.get_weather:0\n", '{"city": "x"}', "get_weather"),
        ("get_weather:12", "{}", "get_weather"),
        ("functions.a.b-c:0", "{}", "a.b-c"),
        ("functions.mcp:server:3", "{}", "mcp:server"),
        ("functions.unknown", "{}", "unknown"),
        ("get_weather", "{}", "get_weather"),
        ("3", '{"city": "x", "unit": "K"}', "get_weather"),
        ("call_59ad0f", '{"path": "/"}', "list-files"),
        ("3", "{}", "now"),
        ("3", '{"city": "x", "path": "/"}', None),
        ("call_59ad0f", '{"unit": "K"}', None),
        ("", "{}", None),
        ("functions.list_files\n<path", "{}", None),
        ("two words:0", "{}", None),
    ],
)
def test_names_of_functions(
    tokenizer: Tokenizer, header: str, arguments: str, name: str | None
) -> None:
    answer = parsed(tokenizer, BEGIN + call(header, arguments) + END, tools=TOOLS)
    assert [c.name for c in answer.tool_calls] == ([name] if name else [])
    if name is None:
        text = f"{header.strip()} {arguments}".strip()
        assert answer.broken_calls == [BrokenCall(text, "the call names no function")]


# ---------------------------------------------------------------- broken answers


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (call("functions.f:0", '{"a": 1'), "the arguments are not JSON"),
        (call("functions.f:0", '{"a": NaN}'), "the arguments are not JSON: NaN"),
        (call("functions.f:0", f'{{"a": {"1" * 5000}}}'), "the arguments are not JSON: Exceeds"),
        (call("functions.f:0", '{"a": ' + "[" * 100_000), "the arguments are not JSON"),
        (call("functions.f:0", "[1]"), "the arguments are not a JSON object"),
        (call("functions.f:0", '"{}"'), "the arguments are not a JSON object"),
        ("<|tool_call_begin|>functions.f:0<|tool_call_end|>", "the call has no arguments"),
        ("<|tool_call_begin|>functions.list_files\n<path", "the answer ended inside the call"),
        ("<|tool_call_begin|>", "the answer ended inside the call"),
        (
            "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>",
            "the answer ended inside the call",
        ),
        (
            '<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"a": 1',
            "the answer ended inside the call",
        ),
        (f"<|tool_call_begin|>functions.f:0{END}", "the call has no arguments"),
        ("<|tool_call_begin|>functions.f:0<think>", "the call has no arguments"),
        (
            f"<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{{}}{BEGIN}",
            "another part of the answer began inside the call",
        ),
        (f"{BEGIN}functions.f:0 {{}}{END}", "text outside a call"),
        (f"{BEGIN}functions.f:0", "text outside a call"),
    ],
)
def test_broken_calls_are_named(tokenizer: Tokenizer, text: str, reason: str) -> None:
    answer = parsed(tokenizer, "before" + text)
    assert answer.tool_calls == [] and answer.content == "before" and answer.reasoning == ""
    assert len(answer.broken_calls) == 1
    assert answer.broken_calls[0].reason.startswith(reason)
    assert not SPLIT.search(answer.broken_calls[0].text)


def test_a_broken_call_does_not_take_the_next_one_with_it(tokenizer: Tokenizer) -> None:
    text = BEGIN + "<|tool_call_begin|>functions.bad" + call("functions.now:1", "{}") + END
    answer = parsed(tokenizer, text + "after")
    assert [c.id for c in answer.tool_calls] == ["functions.now:0"]
    assert answer.broken_calls == [BrokenCall("functions.bad", "the call has no arguments")]
    assert answer.content == "after"


def test_a_complete_call_needs_no_mark_at_its_end(tokenizer: Tokenizer) -> None:
    open_call = "<|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{}"
    for text in (open_call, BEGIN + open_call, open_call + END, open_call + open_call):
        answer = parsed(tokenizer, text)
        assert {c.name for c in answer.tool_calls} == {"now"} and not answer.broken_calls


@pytest.mark.parametrize(
    "text",
    ["<|tool_call_end|>", "<|tool_call_argument_begin|>", END, BEGIN + END, "[BOS]", "<|im_user|>"],
)
def test_stray_marks_are_not_shown(tokenizer: Tokenizer, text: str) -> None:
    assert parsed(tokenizer, f"a{text}b") == ChatDelta("ab")


# ---------------------------------------------------------------- marks that come as text

WRITTEN = "<|tool_call_section_begin|>"


def test_a_written_section_mark_is_not_shown(tokenizer: Tokenizer) -> None:
    ids = [*b"a", *WRITTEN.encode(), *b"\n", *ids_of(call("functions.now:0", "{}"))]
    answer = parse_answer(tokenizer, [*ids, *b"<|tool_call_section_end|>", *b"b"])
    assert answer.content == "ab" and [c.name for c in answer.tool_calls] == ["now"]
    assert not answer.broken_calls


def test_a_written_section_mark_without_a_call_is_text(tokenizer: Tokenizer) -> None:
    for text in (WRITTEN, f"It is {WRITTEN} here", WRITTEN + "\n", WRITTEN[:9], WRITTEN + WRITTEN):
        assert parse_answer(tokenizer, text.encode()) == ChatDelta(text)


def test_thinking_as_text_where_the_vocabulary_has_no_such_tokens(tokenizer: Tokenizer) -> None:
    text = b"<think>a < b</think>c</thin"
    answer = parse_answer(tokenizer, text, written_think=True)
    assert answer == ChatDelta("c</thin", "a < b")
    assert parse_answer(tokenizer, text).content == text.decode()


# ---------------------------------------------------------------- any split

PIECES = [
    *IDS,
    "functions.now:0",
    "{}",
    '{"city": "x"}',
    "\n",
    "é😀",
    "a",
    "<",
    "|",
    "3",
    "</think",
]
PIECES += [WRITTEN, "<|tool_call_section_end|>", "\udcff", "\udcf0\udc9f"]
ANSWERS = st.lists(st.sampled_from(PIECES), max_size=30)


def answer_ids(pieces: list[str]) -> list[int]:
    ids: list[int] = []
    for piece in pieces:
        raw = piece.encode("utf-8", "surrogateescape")
        ids += [IDS[piece]] if piece in IDS else raw
    return ids


def in_pieces(tokenizer: Tokenizer, pieces: list[list[int]], **options: Any) -> ChatDelta:
    """The sum of what a stream gives when it gets the token ids in these pieces."""
    marks = marks_of(tokenizer)
    builder = TextBuilder(tokenizer, SamplingParams(), marks)
    parser, total = ChatParser(**options), ChatDelta()
    for at, piece in enumerate(pieces):
        last = at == len(pieces) - 1
        for token in piece:
            builder.push(token)
        if last:
            builder.finish()
        for text, token_id in builder.take_parts(last):
            parser.text(text)
            if token_id is not None:
                parser.mark(marks[token_id], builder.name(token_id))
        total.add(parser.take())
    parser.finish()
    total.add(parser.take())
    return total


@given(ANSWERS, st.booleans(), st.booleans(), st.lists(st.integers(1, 9), min_size=1))
def test_any_split_gives_the_same_parts(
    tokenizer: Tokenizer, pieces: list[str], thinking: bool, written: bool, cuts: list[int]
) -> None:
    ids, split, at = answer_ids(pieces), [], 0
    while at < len(ids):
        step = cuts[at % len(cuts)]
        split.append(ids[at : at + step])
        at += step
    options: Any = {"thinking": thinking, "written_think": written, "tools": TOOLS}
    assert in_pieces(tokenizer, split, **options) == parse_answer(tokenizer, ids, **options)


def test_two_calls_cut_in_two_anywhere(tokenizer: Tokenizer) -> None:
    text = "hm</think>I look.\n" + BEGIN + call("functions.get_weather:0", '{"city": "京"}')
    ids = ids_of(text + call("functions.list-files:1", '{\n "path": "a\\"b"\n}') + END)
    whole = parse_answer(tokenizer, ids, thinking=True)
    assert (whole.reasoning, whole.content) == ("hm", "I look.\n") and not whole.broken_calls
    assert [(c.name, json.loads(c.arguments)) for c in whole.tool_calls] == [
        ("get_weather", {"city": "京"}), ("list-files", {"path": 'a"b'}),
    ]  # fmt: skip
    for at in range(len(ids) + 1):
        assert in_pieces(tokenizer, [ids[:at], ids[at:]], thinking=True) == whole


@pytest.mark.parametrize("size", [1, 7, 4096, 100_000])
def test_long_arguments_in_pieces(tokenizer: Tokenizer, size: int) -> None:
    arguments = json.dumps({"path": '"}\n' * 4000})
    ids = ids_of(BEGIN + call("functions.list-files:0", arguments) * 2 + END)
    pieces = [ids[at : at + size] for at in range(0, len(ids), size)]
    answer = in_pieces(tokenizer, pieces)
    assert [c.arguments for c in answer.tool_calls] == [arguments] * 2
    assert answer.content == "" and not answer.broken_calls


@given(ANSWERS, st.booleans())
def test_no_mark_is_shown_and_no_text_is_lost(
    tokenizer: Tokenizer, pieces: list[str], thinking: bool
) -> None:
    others = [p for p in PIECES if p not in IDS and ("section" in p or p[0] >= "\udc80")]
    pieces = [p for p in pieces if p not in others]
    answer = parse_answer(tokenizer, answer_ids(pieces), thinking=thinking, tools=TOOLS)
    for text in (answer.content, answer.reasoning):
        assert not SPLIT.search(text)
    given_text = "".join(p for p in pieces if p not in IDS)
    kept = answer.content + answer.reasoning
    kept += "".join(b.text for b in answer.broken_calls)
    kept += "".join(c.name + c.arguments for c in answer.tool_calls)
    for letter in "aé😀":  # JSON's own signs and headers may go, what was said may not
        assert kept.count(letter) >= given_text.count(letter) - 3 * len(answer.tool_calls)


@given(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=30),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=30),
    st.lists(
        st.tuples(
            st.from_regex(r"[a-z_.\-]{1,12}", fullmatch=True),
            st.dictionaries(st.text(max_size=5), st.text(max_size=9) | st.integers(), max_size=4),
        ),
        max_size=4,
    ),
)
def test_well_formed_answers_come_back(
    tokenizer: Tokenizer, reasoning: str, content: str, calls: list[tuple[str, dict[str, Any]]]
) -> None:
    """Against the writer of the format: what is put in comes out."""
    ids = [*tokenizer.encode(reasoning), IDS["</think>"], *tokenizer.encode(content)]
    ids += [IDS[BEGIN]]
    for index, (name, arguments) in enumerate(calls):
        ids += [IDS["<|tool_call_begin|>"], *tokenizer.encode(f"functions.{name}:{index}")]
        ids += [IDS["<|tool_call_argument_begin|>"], *tokenizer.encode(json.dumps(arguments))]
        ids += [IDS["<|tool_call_end|>"]]
    answer = parse_answer(tokenizer, [*ids, IDS[END]], thinking=True)
    assert (answer.reasoning, answer.content) == (reasoning, content)
    assert [(c.name, json.loads(c.arguments)) for c in answer.tool_calls] == calls
    assert answer.broken_calls == []


def test_every_mark_is_found_in_kimis_names(tokenizer: Tokenizer) -> None:
    assert set(marks_of(tokenizer).values()) == set(Mark)


@pytest.mark.parametrize(
    ("text", "strings", "length"),
    [("ab", ["bc"], 1), ("ab", ["ab"], 0), ("aab", ["abc", "b"], 2), ("", ["a"], 0), ("x", [], 0)],
)
def test_open_suffix(text: str, strings: list[str], length: int) -> None:
    assert open_suffix(text, strings) == length


# ---------------------------------------------------------------- ids in the history


def conversation(*ids: Any) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "x"}]
    for call_id in ids:
        function = {"name": "f", "arguments": "{}"}
        entry = {"type": "function", "function": function, "id": call_id}
        messages.append({"role": "assistant", "content": None, "tool_calls": [entry]})
        messages.append({"role": "tool", "tool_call_id": call_id, "content": "r"})
    return messages


def test_foreign_ids_in_the_history_become_kimis_own() -> None:
    messages = conversation("call_59ad", "functions.f:0")
    changed = with_own_call_ids(messages)
    assert [m["tool_calls"][0]["id"] for m in changed[1::2]] == ["functions.f:0", "functions.f:1"]
    assert [m["tool_call_id"] for m in changed[2::2]] == ["functions.f:0", "functions.f:1"]
    assert messages == conversation("call_59ad", "functions.f:0")  # left as they were
    assert count_calls(messages) == 2


def test_kimis_own_ids_stay() -> None:
    messages = conversation("functions.f:4", "functions.f:9")
    assert with_own_call_ids(messages) == messages
    twice = with_own_call_ids(conversation("functions.f:0", "functions.f:0"))
    assert [m["tool_calls"][0]["id"] for m in twice[1::2]] == ["functions.f:0", "functions.f:1"]
    assert with_own_call_ids(conversation(None))[1]["tool_calls"][0]["id"] == "functions.f:0"


def test_a_folder_without_marks_gives_content_alone(tokenizer_folder: Path) -> None:
    plain = Tokenizer(tokenizer_folder)
    assert parse_answer(plain, [259, 510, 264]) == ChatDelta("hello world")
