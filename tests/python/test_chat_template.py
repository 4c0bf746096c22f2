"""Chat templates: Kimi's conversations, limits, and prompts that no text can break out of."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from conftest import KIMI_NAMES
from kdtree_engine import chat_template
from kdtree_engine.tokenizer import Tokenizer
from kdtree_engine.tool_declarations import typescript_declarations

IDS = {name: 256 + at for at, name in KIMI_NAMES.items()}
USER = [{"role": "user", "content": "hi"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a place.\nNow.",
        "parameters": {
            "type": "object",
            "required": ["city"],
            "properties": {
                "unit": {"type": "string", "enum": ["C", "F"], "default": "C"},
                "city": {"type": "string", "description": "Its name.", "minLength": 1},
                "days": {"type": "array", "items": {"type": "integer", "maximum": 9}},
            },
        },
    },
}


@pytest.fixture
def kimi(kimi_folder: Path) -> Tokenizer:
    return Tokenizer(kimi_folder)


def rendered(tokenizer: Tokenizer, messages: Any, **options: Any) -> str:
    return tokenizer.decode(tokenizer.apply_chat_template(messages, **options))


# ---------------------------------------------------------------- Kimi's conversations


def test_thinking_is_opened_or_closed_in_the_prompt(kimi: Tokenizer) -> None:
    begin = "<|im_user|>user<|im_middle|>hi<|im_end|><|im_assistant|>assistant<|im_middle|>"
    assert rendered(kimi, USER) == begin + "<think>"
    assert rendered(kimi, USER, thinking=False) == begin + "<think></think>"
    ended = rendered(kimi, USER, add_generation_prompt=False)
    assert ended + "<|im_assistant|>assistant<|im_middle|>" == begin


def test_a_conversation_with_calls(kimi: Tokenizer) -> None:
    function = {"name": "get_weather", "arguments": '{"city":"x"}'}
    entry = {"id": "call_1", "type": "function", "function": function}
    messages = [
        {"role": "system", "content": "Be short."},
        *USER,
        {"role": "assistant", "content": "", "tool_calls": [entry], "reasoning_content": "hm"},
        {"role": "tool", "name": "get_weather", "tool_call_id": "call_1", "content": "rain"},
    ]
    assert rendered(kimi, messages).endswith(
        "<|im_assistant|>assistant<|im_middle|><think>hm</think><|tool_calls_section_begin|>"
        "<|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
        '{"city":"x"}<|tool_call_end|><|tool_calls_section_end|><|im_end|>'
        "<|im_system|>get_weather<|im_middle|>## Return of functions.get_weather:0\nrain<|im_end|>"
        "<|im_assistant|>assistant<|im_middle|><think>"
    )


def test_parts_of_a_message(kimi: Tokenizer) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert "<|im_middle|>ab<|im_end|>" in rendered(kimi, [{"role": "user", "content": parts}])


@pytest.mark.parametrize("content", ["", []])
def test_an_empty_message_is_empty(kimi: Tokenizer, content: Any) -> None:
    text = rendered(kimi, [{"role": "user", "content": content}])
    assert text.startswith("<|im_user|>user<|im_middle|><|im_end|><|im_assistant|>")
    call = {"id": "functions.f:0", "function": {"name": "f", "arguments": {"b": 1, "a": "é"}}}
    for nothing in (content, None):
        answer = {"role": "assistant", "content": nothing, "tool_calls": [call]}
        assert (
            "<think></think><|tool_calls_section_begin|><|tool_call_begin|>functions.f:0"
            '<|tool_call_argument_begin|>{"b": 1, "a": "é"}<|tool_call_end|>'
        ) in rendered(kimi, [*USER, answer | {"reasoning_content": ""}, *USER])


def test_tools_are_declared_as_types(kimi: Tokenizer) -> None:
    assert rendered(kimi, USER, tools=[WEATHER]).startswith(
        """\
<|im_system|>tool_declare<|im_middle|># Tools

## functions
namespace functions {
// The weather of a place.
// Now.
type get_weather = (_: {
  // Its name.
  // minLength: 1
  city: string,
  days?: Array<
    // maximum: 9
    number
  >,
  // Default: "C"
  unit?: "C" | "F"
}) => any;
}
<|im_end|>"""
    )


def test_tools_without_a_type_are_shown_as_json_with_sorted_keys(kimi: Tokenizer) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "odd", "b": 1}}}
    tool["function"]["parameters"]["properties"] = {"x": {"type": "odd"}}  # type: ignore[index]
    assert rendered(kimi, USER, tools=[tool]).startswith(
        '<|im_system|>tool_declare<|im_middle|>[{"function":{"name":"f","parameters":{"b":1,'
        '"properties":{"x":{"type":"odd"}},"type":"odd"}},"type":"function"}]<|im_end|>'
    )


# ---------------------------------------------------------------- types of tools


@pytest.mark.parametrize(
    ("schema", "declared"),
    [
        ({"type": "string"}, "string"),
        ({"type": "integer"}, "number"),
        ({}, "any"),
        (True, "any"),
        ({"type": ["string", "null"]}, "string | null"),
        ({"type": ["object", "array"]}, "{} | Array<any>"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "string | null"),
        ({"enum": ["a", 1, None]}, '"a" | 1 | None'),
        ({"type": "array"}, "Array<any>"),
        ({"type": "array", "items": {"type": "boolean"}}, "Array<boolean>"),
        ({"type": "object"}, "{}"),
        ({"type": "object", "additionalProperties": False}, "{\n    [k: string]: never\n  }"),
        (
            {"type": "object", "properties": {"b": {"type": "null"}, "a": {"type": "number"}}},
            "{\n    a?: number,\n    b?: null\n  }",
        ),
    ],
)
def test_types_of_schemas(schema: Any, declared: str) -> None:
    function = {"name": "f", "parameters": {"type": "object", "properties": {"x": schema}}}
    text = typescript_declarations([{"type": "function", "function": function}])
    assert text is not None
    assert text.endswith(f"type f = (_: {{\n  x?: {declared}\n}}) => any;\n}}\n")


def test_definitions_become_interfaces() -> None:
    schema = {
        "type": "object",
        "$defs": {"Point": {"type": "object", "properties": {"x": {"type": "number"}}}},
        "properties": {"at": {"$ref": "#/$defs/Point"}, "next": {"$ref": "#"}},
        "required": ["next"],
    }
    function = {"name": "move", "description": "Go.", "parameters": schema}
    assert typescript_declarations([{"type": "function", "function": function}]) == (
        "# Tools\n\n## functions\nnamespace functions {\n"
        "interface parameters {\n  at?: Point,\n  next: parameters\n}\n"
        "interface Point {\n  x?: number\n}\n"
        "// Go.\ntype move = (_: parameters) => any;\n}\n"
    )


@pytest.mark.parametrize(
    "schema",
    [5, {"type": "odd"}, {"$ref": "#/no"}, {"$ref": "http:x"}, {"anyOf": 1}, {"type": [1]},
     {"title": "x"}, {"type": "object", "properties": 3}, {"type": 5}],
)  # fmt: skip
def test_schemas_without_a_type(schema: Any) -> None:
    function = {"name": "f", "parameters": {"properties": {"x": schema}}}
    assert typescript_declarations([{"type": "function", "function": function}]) is None


def test_nothing_to_declare() -> None:
    assert typescript_declarations([]) is None
    assert typescript_declarations([{"type": "plugin"}, {"type": "function"}]) is None
    deep: Any = {"type": "string"}
    for _ in range(5000):
        deep = {"type": "array", "items": deep}
    function = {"name": "f", "parameters": {"properties": {"x": deep}}}
    assert typescript_declarations([{"type": "function", "function": function}]) is None


# ---------------------------------------------------------------- text stays text

HOSTILE = [*IDS, "<|reserved_token_261|>", "<|im_", "end|>", "<", "|>", "[", "EOS]", "\U000f0000"]
HOSTILE += ["<|im_end|", "x", "é", "\n", "{{ x }}", "{% raw %}", "</think>"]
TEXT = st.lists(st.sampled_from(HOSTILE), max_size=8).map("".join)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(TEXT, min_size=9, max_size=9))
def test_no_text_becomes_a_control_token(kimi: Tokenizer, texts: list[str]) -> None:
    """Control tokens are those of the same conversation with harmless text, in the same order."""

    def specials(a: list[str]) -> tuple[list[int], str]:
        function = {"name": a[0], "arguments": a[1]}
        tool = {"name": a[2], "description": a[3], "parameters": {"properties": {a[4]: {}}}}
        messages = [
            {"role": "system", "content": a[5]},
            {"role": "user", "name": a[6], "content": [{"type": "text", "text": a[7]}]},
            {"role": "assistant", "content": a[8], "reasoning_content": a[0],
             "tool_calls": [{"id": "functions.x:0", "function": function}]},
            {"role": "tool", "tool_call_id": a[1], "content": a[2]},
        ]  # fmt: skip
        ids = kimi.apply_chat_template(messages, tools=[{"type": "function", "function": tool}])
        return [i for i in ids if kimi.is_special(i)], kimi.decode(ids)

    got, text = specials(texts)
    assert got == specials(["x"] * 9)[0]
    for line in "\n".join(texts).split("\n"):
        assert line in text


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[0].content | reverse }}",
        "{{ messages[0].content | upper }}{{ messages[1].content }}",
        "{{ messages[0].content[:1] }}{{ messages[1].content[1:] }}",
        "{% for c in messages[0].content %}{{ c }}{% endfor %}",
        "{{ messages | tojson }}",
        "{{ messages[0].content | replace('x', '') }}",
        "{{ messages | map(attribute='content') | join }}",
    ],
)
@pytest.mark.parametrize("text", ["<|im_end|>", ">|dne_mi|<", "<x|im_end|>", "<|im_", "end|>", "<"])
def test_no_template_turns_text_into_control_tokens(
    kimi_folder: Path, template: str, text: str
) -> None:
    (kimi_folder / "chat_template.jinja").write_text(template)
    tokenizer = Tokenizer(kimi_folder)
    messages = [{"role": "user", "content": t} for t in (text, "<|im_end|>", "end|>")]
    assert not any(map(tokenizer.is_special, tokenizer.apply_chat_template(messages)))


def test_lengths_and_characters_are_those_of_the_text(kimi_folder: Path) -> None:
    (kimi_folder / "chat_template.jinja").write_text(
        "{{ messages[0].content | length }} {{ messages[0].content }}"
    )
    text = "\U000f0000<|im_end|>\U000f0001[EOS]\ue000"
    messages = [{"role": "user", "content": text}]
    assert rendered(Tokenizer(kimi_folder), messages) == f"{len(text)} {text}"


def test_text_that_leaves_no_character_free(kimi: Tokenizer) -> None:
    text = "".join(map(chr, range(0xF0000, 0xFFFFE)))
    with pytest.raises(ValueError, match="every character of Unicode's plane 15"):
        kimi.apply_chat_template([{"role": "user", "content": text}])


def test_reserved_tokens_are_named_by_their_id(kimi_folder: Path) -> None:
    path = kimi_folder / "chat_template.jinja"
    path.write_text("<|reserved_token_261|>{{ messages[0].content }}")
    messages = [{"role": "user", "content": "<|reserved_token_261|>"}]
    tokenizer = Tokenizer(kimi_folder)
    ids = tokenizer.apply_chat_template(messages)
    assert ids == [261, *b"<|reserved_token_261|>"]
    for number in (5, 256, 258, 512, 999_999_999):  # a byte, two with names, two too large
        path.write_text(f"<|reserved_token_{number}|>")
        with pytest.raises(ValueError, match=f"uses '<.reserved_token_{number}.>', which is none"):
            Tokenizer(kimi_folder).apply_chat_template(messages)


# ---------------------------------------------------------------- where templates are, what they do


def test_templates_inside_tokenizer_config(kimi_folder: Path) -> None:
    (kimi_folder / "chat_template.jinja").unlink()
    path = kimi_folder / "tokenizer_config.json"
    common = json.loads(path.read_text())

    def with_template(value: Any) -> Tokenizer:
        path.write_text(json.dumps({**common, "chat_template": value}))
        return Tokenizer(kimi_folder)

    assert rendered(with_template("{{ bos_token }}A{{ eos_token }}"), USER) == "[BOS]A[EOS]"
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    assert rendered(with_template(named), USER) == "D"
    assert rendered(with_template(named), USER, tools=[WEATHER]) == "T"
    with pytest.raises(ValueError, match=r"tokenizer_config\.json: chat_template:1: "):
        with_template("{% if").apply_chat_template(USER)
    for wrong in (5, [5], [{"name": "default"}], {"default": "x"}):
        with pytest.raises(ValueError, match=r"tokenizer_config\.json: chat_template is "):
            with_template(wrong)
    with pytest.raises(ValueError, match=r"chat_template has no entry 'default', found \['a'\]"):
        with_template([{"name": "a", "template": "x"}])
    with pytest.raises(ValueError, match=r"has no chat_template\.jinja: use a plain prompt"):
        with_template(None).apply_chat_template(USER)


def templated(folder: Path, source: str) -> str:
    (folder / "chat_template.jinja").write_text(source, "utf-8")
    return rendered(Tokenizer(folder), USER)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{% for i in range(5) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{{ {'b': 1, 'a': 'é'} | tojson(sort_keys=True) }}", '{"a": "é", "b": 1}'),
        ("{{ {'b': [1]} | tojson(indent=1) }}", '{\n "b": [\n  1\n ]\n}'),
        ("{{ 'é' | tojson(ensure_ascii=True) }}", '"\\u00e9"'),
        ("{{ 'a' ~ 1 ~ none }}{{ 'b' * 3 }}{{ 'c' + 'd' }}{{ 7 % 4 }}{{ 2 ** 8 }}{{ 2.0 ** -1 }}",
         "a1Nonebbbcd32560.5"),
        ("{{ ['a', 'b'] | join('-') }}{{ messages | join('+', attribute='role') }}", "a-buser"),
        ("{{ 'aXbX' | replace('X', 'y') }}{{ 'aXbX' | replace('X', 'y', 1) }}", "aybyaybX"),
        ("{{ 'a-b'.split('-') | join }}{{ ' x '.strip() }}{{ 'ab'.replace('a', 'c') }}", "abxcb"),
        ("{% for m in messages %}{{ loop.last }}{{ loop.length }}{% endfor %}", "True1"),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{%- set ns = namespace(n=1) -%}{%- set ns.n = ns.n + 1 -%}{{ ns.n }}", "2"),
    ],
)  # fmt: skip
def test_what_templates_use(kimi_folder: Path, source: str, text: str) -> None:
    assert templated(kimi_folder, source) == text


DOUBLED = "{% set a = 'x' * 99999 %}" + "{% set a = SUM %}" * 40 + "{{ a }}"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ 'x' * 10 ** 12 }}", "a text of more than 16777216 characters"),
        ("{{ 10 ** 12 * [1] }}", "a text of more than"),
        ("{{ 2 ** (2 ** 40) }}", "a number of more than 4096 bits"),
        ("{% set ns = namespace(a=3) %}{% for i in range(64) %}{% set ns.a = ns.a * ns.a %}"
         "{% endfor %}", "a number of more than"),
        (DOUBLED.replace("SUM", "a ~ a"), "a text of more than"),
        (DOUBLED.replace("SUM", "a + a"), "a text of more than"),
        (DOUBLED.replace("SUM", "[a, a] | join"), "a text of more than"),
        (DOUBLED.replace("SUM", "a | replace('x', a)"), "a text of more than"),
        (DOUBLED.replace("SUM", "a.replace('x', a)"), "a text of more than"),
        (DOUBLED.replace("SUM", "a.join([a] * 999)"), "a text of more than"),
        ("{{ 'x'.center(10 ** 12) }}", "attribute 'center' of 'str' object is unsafe"),
        ("{{ '{:>9999999999}'.format(1) }}", "attribute 'format' of 'str' object is unsafe"),
        ("{{ '%9999999999d' % 1 }}", "formats with % are not supported"),
        ("{{ 'x' | center(10 ** 12) }}", "No filter named 'center'"),
        ("{{ {} | tojson(indent=10 ** 12) }}", "indent is 1000000000000, want 0 to 16"),
        ("{{ lipsum(n=10 ** 9) }}", "'lipsum' is undefined"),
        ("{% for i in range(9999) %}{{ 'x' * 9999 }}{% endfor %}", "a text of more than"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{{ messages.append(1) }}", "not safely|unsafe"),
        ("{{ messages[0].update(a=1) }}", "not safely|unsafe"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ cycler.__init__.__globals__ }}", "unsafe"),
        ("{% include 'x' %}", "no loader"),
        ("{#" + "x" * (1 << 20), "1048578 characters, want at most 1048576"),
        ("{{ '\\ud800' }}", "chat_template.jinja: the text it gives is not valid Unicode"),
    ],
)  # fmt: skip
def test_limits_of_templates(kimi_folder: Path, source: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        templated(kimi_folder, source)
    assert "chat_template.jinja" in str(error.value)


@pytest.mark.parametrize(
    "source",
    [
        "{% set r = range(99999) %}{% for a in r %}{% for b in r %}{% endfor %}{% endfor %}",
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}"
        "{% endmacro %}{{ f(40) }}",
    ],
)
def test_templates_end_in_time(
    kimi_folder: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    monkeypatch.setattr(chat_template, "MAX_SECONDS", 0.2)
    start = time.monotonic()
    with pytest.raises(ValueError, match=r"it ran for more than 0\.2 seconds"):
        templated(kimi_folder, source)
    assert time.monotonic() - start < 10


def test_a_template_does_not_change_what_it_is_given(kimi_folder: Path) -> None:
    messages = [{"role": "user", "content": "<a>", "extra": [1]}]
    tools = [{"b": 1, "a": 2}]
    Tokenizer(kimi_folder).apply_chat_template(messages, tools=tools)
    assert messages == [{"role": "user", "content": "<a>", "extra": [1]}]
    assert list(tools[0]) == ["b", "a"]
