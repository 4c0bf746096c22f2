"""Shared fixtures: models to test on. Makes the modules of scripts/ importable."""

import base64
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import fake_core

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

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
