"""Shared fixtures: models to test on. Makes the modules of scripts/ importable."""

import base64
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import fake_core

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
# What is printed, and when, depends on them.
for name in ("COLUMNS", "FORCE_COLOR", "PYTHONUNBUFFERED", "TTY_COMPATIBLE"):
    os.environ.pop(name, None)

SPECIAL = {"[BOS]": 500, "[EOS]": 509, "<|im_end|>": 510, "<|im_user|>": 501}
SPECIAL |= {"<|im_assistant|>": 502, "<|im_system|>": 503, "<|im_middle|>": 504}
TEMPLATE = """\
{%- for message in messages -%}
<|im_{{ message['role'] }}|>{{ message['role'] }}<|im_middle|>{{ message['content'] }}<|im_end|>
{%- endfor -%}
{%- if add_generation_prompt -%}
<|im_assistant|>assistant<|im_middle|>
{%- endif -%}
"""

# Kimi K2.6's names at their distance from the first id above the ranks (163584 there).
KIMI_NAMES = {0: "[BOS]", 1: "[EOS]", 2: "<|im_end|>", 3: "<|im_user|>", 4: "<|im_assistant|>"}
KIMI_NAMES |= {6: "<|start_header_id|>", 7: "<|end_header_id|>", 9: "[EOT]", 10: "<|im_system|>"}
KIMI_NAMES |= {11: "<|tool_calls_section_begin|>", 12: "<|tool_calls_section_end|>"}
KIMI_NAMES |= {13: "<|tool_call_begin|>", 14: "<|tool_call_argument_begin|>"}
KIMI_NAMES |= {15: "<|tool_call_end|>", 17: "<|im_middle|>", 18: "<|media_begin|>"}
KIMI_NAMES |= {19: "<|media_content|>", 20: "<|media_end|>", 21: "<|media_pad|>"}
KIMI_NAMES |= {22: "<think>", 23: "</think>", 254: "[UNK]", 255: "[PAD]"}
# What K2.6's template does with thinking, tools and calls, in our words.
KIMI_TEMPLATE = """\
{%- set thinking = thinking if thinking is defined else true -%}
{%- set ns = namespace(last=-1) -%}
{%- for m in messages -%}
  {%- if m.role == 'assistant' and not m.tool_calls -%}
    {%- set ns.last = loop.index0 -%}
  {%- endif -%}
{%- endfor -%}
{%- if tools -%}
  <|im_system|>tool_declare<|im_middle|>
  {{- tools_ts_str or tools | tojson(separators=(',', ':')) -}}<|im_end|>
{%- endif -%}
{%- for m in messages -%}
  {%- if m.role == 'user' -%}<|im_user|>
  {%- elif m.role == 'assistant' -%}<|im_assistant|>
  {%- else -%}<|im_system|>{%- endif -%}
  {{- m.name or m.role -}}<|im_middle|>
  {%- if m.role == 'assistant' -%}
    <think>{{ m.reasoning_content if loop.index0 > ns.last or preserve_thinking }}</think>
  {%- elif m.role == 'tool' -%}
    {{- '## Return of ' ~ m.tool_call_id ~ '\n' -}}
  {%- endif -%}
  {%- if m.content is string -%}{{- m.content -}}
  {%- elif m.content -%}{%- for part in m.content -%}{{- part.text -}}{%- endfor -%}{%- endif -%}
  {%- if m.tool_calls -%}
    <|tool_calls_section_begin|>
    {%- for call in m.tool_calls -%}
      <|tool_call_begin|>{{ call.id }}<|tool_call_argument_begin|>
      {{- call.function.arguments if call.function.arguments is string
          else call.function.arguments | tojson -}}<|tool_call_end|>
    {%- endfor -%}
    <|tool_calls_section_end|>
  {%- endif -%}
  <|im_end|>
{%- endfor -%}
{%- if add_generation_prompt -%}
  <|im_assistant|>assistant<|im_middle|>{{ '<think>' if thinking else '<think></think>' }}
{%- endif -%}
"""


def write_kimi_tokenizer(folder: Path) -> None:
    """A tokenizer of the 256 bytes, with all of Kimi's names above them and such a template."""
    lines = (f"{base64.b64encode(bytes([byte])).decode()} {byte}" for byte in range(256))
    (folder / "tiktoken.model").write_text("\n".join(lines) + "\n")
    shown = {*range(11, 16), 22, 23}  # not "special" in Kimi's own file
    added = {
        str(256 + at): {"content": name, "special": at not in shown}
        for at, name in KIMI_NAMES.items()
    }
    settings = {"added_tokens_decoder": added, "bos_token": "[BOS]", "eos_token": "[EOS]"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text(KIMI_TEMPLATE)
    (folder / "config.json").write_text(json.dumps({"text_config": {"vocab_size": 512}}))


def write_tokenizer(folder: Path) -> None:
    """A tokenizer of the 256 bytes and a few merges, for a vocabulary of 512."""
    tokens = [bytes([byte]) for byte in range(256)]
    tokens += [b"he", b"ll", b"hell", b"hello", b" w", b"or", b" wor", b"ld", b" world"]
    lines = (f"{base64.b64encode(token).decode()} {rank}" for rank, token in enumerate(tokens))
    (folder / "tiktoken.model").write_text("\n".join(lines) + "\n")
    added = {str(i): {"content": name, "special": True} for name, i in SPECIAL.items()}
    settings = {"added_tokens_decoder": added, "bos_token": "[BOS]", "add_bos_token": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text(TEMPLATE)


@pytest.fixture
def tokenizer_folder(tmp_path: Path) -> Path:
    """A folder with a tokenizer and a vocabulary size, but no weights."""
    write_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 512}))
    return tmp_path


@pytest.fixture
def kimi_folder(tmp_path: Path) -> Path:
    """As `tokenizer_folder`, with Kimi's names and a template with thinking and tools."""
    write_kimi_tokenizer(tmp_path)
    return tmp_path


@pytest.fixture
def fake_engine(
    monkeypatch: pytest.MonkeyPatch, tokenizer_folder: Path
) -> Iterator[type[fake_core.Engine]]:
    """Puts the fake in place of the compiled module; the default model is `tokenizer_folder`."""
    from kdtree_engine import llm

    engine = type("Engine", (fake_core.Engine,), {})
    monkeypatch.setattr(llm, "_core", fake_core)
    monkeypatch.setattr(fake_core, "Engine", engine)
    monkeypatch.setitem(sys.modules, "kdtree_engine._core", fake_core)
    monkeypatch.setattr("kdtree_engine._core", fake_core, raising=False)
    monkeypatch.setenv("KDTREE_MODEL", str(tokenizer_folder))
    (tokenizer_folder / "drafter").mkdir()
    yield engine


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs the command; gives exit status, standard output and standard error."""

    from kdtree_engine.cli import main

    def call(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            main(list(arguments))
        out, err = capsys.readouterr()
        return int(end.value.code or 0), out, err

    return call


@pytest.fixture
def scripted(fake_engine: type[fake_core.Engine]) -> type[fake_core.Engine]:
    fake_engine.script = [259, 264, ord("!"), ord("\n"), 259]  # "hello world!\nhello"
    return fake_engine


@pytest.fixture
def prompts(tokenizer_folder: Path) -> Path:
    path = tokenizer_folder / "heldout_prompts.json"
    listed = [{"name": f"p{i}", "text": "hello" * (i + 1), "kind": "code"} for i in range(3)]
    path.write_text(json.dumps(listed))
    return path


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random checkpoint of the real architecture with drafter and tokenizer."""
    import make_tiny_model

    folder = make_tiny_model.make(tmp_path_factory.mktemp("tiny"))
    write_tokenizer(folder)
    return folder
