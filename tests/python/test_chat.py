"""Chats through a scripted engine: answers taken apart, whole and streamed."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

import fake_core
import kdtree_engine
from conftest import KIMI_NAMES
from kdtree_engine.llm import LLM
from kdtree_engine.sampling_params import SamplingParams
from kdtree_engine.tool_calls import ChatDelta, parse_answer

Fake = type[fake_core.Engine]
IDS = {name: 256 + at for at, name in KIMI_NAMES.items()}
USER = [{"role": "user", "content": "hi"}]
WEATHER = {"type": "function", "function": {"name": "get_weather"}}
WRITTEN = """hm 😀</think>Let me ask.<|tool_calls_section_begin|><|tool_call_begin|>functions.\
get_weather:0<|tool_call_argument_begin|>{"city": "x"}<|tool_call_end|><|tool_call_begin|>\
functions.bad<|tool_calls_section_end|><|im_end|>"""
_NAMES = re.compile("(" + "|".join(map(re.escape, IDS)) + ")")
ANSWER = [i for p in _NAMES.split(WRITTEN) for i in ([IDS[p]] if p in IDS else p.encode())]


@pytest.fixture
def llm(fake_engine: Fake, kimi_folder: Path) -> LLM:
    fake_engine.script, fake_engine.eos = ANSWER, IDS["<|im_end|>"]
    return LLM(kimi_folder)


def parts(answer: Any) -> ChatDelta:
    return ChatDelta(answer.content, answer.reasoning, answer.tool_calls, answer.broken_calls)


def test_chat_takes_the_answer_apart(llm: LLM) -> None:
    output = llm.chat(USER, SamplingParams(max_tokens=200), tools=[WEATHER])[0]
    answer = output.outputs[0]
    assert isinstance(answer, kdtree_engine.ChatOutput) and answer.finish_reason == "stop"
    assert answer.reasoning == "hm 😀" and answer.content == "Let me ask."
    assert [(c.id, c.name, c.arguments) for c in answer.tool_calls] == [
        ("functions.get_weather:0", "get_weather", '{"city": "x"}')
    ]
    assert [b.reason for b in answer.broken_calls] == ["the call has no arguments"]
    assert answer.token_ids == ANSWER
    message = answer.as_message()
    assert message["reasoning_content"] == "hm 😀" and message["content"] == "Let me ask."
    again = llm.chat(
        [
            *USER,
            message,
            {"role": "tool", "tool_call_id": "functions.get_weather:0", "content": "rain"},
        ],
        SamplingParams(max_tokens=200),
    )
    assert again[0].outputs[0].tool_calls[0].id == "functions.get_weather:1"  # type: ignore[attr-defined]


def test_chat_of_many_conversations(llm: LLM) -> None:
    outputs = llm.chat([USER, USER], SamplingParams(max_tokens=200))
    assert [o.outputs[0].content for o in outputs] == ["Let me ask."] * 2  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=r"prompt 1: sampling_params is 5"):
        llm.chat([USER, USER], [SamplingParams(), 5])  # type: ignore[list-item]


def test_without_thinking_the_answer_is_content(llm: LLM, fake_engine: Fake) -> None:
    fake_engine.script = [*b"plain", IDS["<|im_end|>"]]
    kwargs = {"thinking": False}
    answer = llm.chat(USER, SamplingParams(max_tokens=9), chat_template_kwargs=kwargs)[0].outputs[0]
    assert parts(answer) == ChatDelta("plain")


@pytest.mark.parametrize("stride", [1, 2, 3, 5, 7, 500])
@pytest.mark.parametrize("skip", [True, False])
def test_streams_give_the_same_parts_at_any_stride(
    llm: LLM, fake_engine: Fake, stride: int, skip: bool
) -> None:
    fake_engine.stride = stride
    params = SamplingParams(max_tokens=200, skip_special_tokens=skip)
    stream, total, text = llm.stream_chat(USER, params, tools=[WEATHER]), ChatDelta(), ""
    for chunk in stream:
        total.add(parts(chunk))
        text += chunk.text
    assert total == parts(stream.output.outputs[0])
    assert total == parse_answer(llm.get_tokenizer(), ANSWER[:-1], thinking=True)
    assert text == stream.output.outputs[0].text
    assert ("<|tool_call_begin|>" in text) and text.endswith("<|tool_calls_section_end|>")


@pytest.mark.parametrize("include", [True, False])
@pytest.mark.parametrize("stride", [1, 4, 500])
@pytest.mark.parametrize(
    ("stop", "reasoning", "content"),
    [
        ("me a", "hm 😀", "Let "),
        ("hm", "", ""),
        ("</think>", "hm 😀", ""),
        (".<|tool_calls", "hm 😀", "Let me ask"),
        (".<|tool_calls_section_begin|><|tool_call_begin|>func", "hm 😀", "Let me ask"),
        ("not there", "hm 😀", "Let me ask."),
    ],
)
def test_stop_strings_end_the_parts_too(
    llm: LLM, fake_engine: Fake, stop: str, reasoning: str, content: str, stride: int, include: bool
) -> None:
    fake_engine.stride = stride
    params = SamplingParams(max_tokens=200, stop=stop, include_stop_str_in_output=include)
    stream = llm.stream_chat(USER, params)
    total = ChatDelta()
    for chunk in stream:
        total.add(parts(chunk))
    answer: Any = stream.output.outputs[0]
    assert total == parts(answer)
    assert answer.reasoning.startswith(reasoning) and answer.content.startswith(content)
    shown = answer.reasoning + answer.content
    if not include:
        assert shown == reasoning + content
        assert bool(answer.broken_calls) == (stop == "not there")
    assert "<|" not in shown or include


def test_an_answer_that_is_cut_off(llm: LLM) -> None:
    for length in range(1, len(ANSWER)):
        answer: Any = llm.chat(USER, SamplingParams(max_tokens=length))[0].outputs[0]
        assert parts(answer) == parse_answer(llm.get_tokenizer(), ANSWER[:length], thinking=True)
        assert all(json.loads(c.arguments) for c in answer.tool_calls)


def test_a_closed_stream_keeps_what_came(llm: LLM) -> None:
    with llm.stream_chat(USER, SamplingParams(max_tokens=200)) as stream:
        seen = next(stream).reasoning
        while "😀" not in seen:
            seen += next(stream).reasoning
    answer: Any = stream.output.outputs[0]
    assert answer.reasoning == seen and answer.finish_reason == "abort"


def test_thinking_as_text(llm: LLM, fake_engine: Fake, kimi_folder: Path) -> None:
    """A vocabulary without tokens for thinking, as K2-Thinking's file lists them."""
    path = kimi_folder / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    del settings["added_tokens_decoder"][str(IDS["<think>"])]
    del settings["added_tokens_decoder"][str(IDS["</think>"])]
    path.write_text(json.dumps(settings))
    fake_engine.script = [*b"hm</think>a", IDS["<|im_end|>"]]
    answer = LLM(kimi_folder).chat(USER, SamplingParams(max_tokens=99))[0].outputs[0]
    assert parts(answer) == ChatDelta("a", "hm")
    fake_engine.script = [*b"<think>hm</think>a", IDS["<|im_end|>"]]
    kwargs = {"thinking": False}
    output = LLM(kimi_folder).chat(USER, SamplingParams(max_tokens=99), chat_template_kwargs=kwargs)
    assert parts(output[0].outputs[0]) == ChatDelta("a", "hm")


def test_speculative_config_of_one_chat(llm: LLM, fake_engine: Fake) -> None:
    for stream in (False, True):
        options: Any = {"speculative_config": {"method": "none"}}
        if stream:
            result = llm.stream_chat(USER, **options)
            list(result)
            spec = result.output.spec
        else:
            spec = llm.chat(USER, **options)[0].spec
        assert spec.method == "none"
