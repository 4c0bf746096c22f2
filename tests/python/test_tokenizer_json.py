"""`tokenizer.json`: against the tokenizers package, and transformers' chat templates."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kdtree_engine.tokenizer import IncrementalDecoder, Tokenizer

tokenizers = pytest.importorskip("tokenizers")

CONTROL = ["<s>", "</s>", "<｜User｜>", "<｜Assistant｜>", "[INST]"]
TEMPLATE = """{{ bos_token }}{% for m in messages %}
{{- '<｜User｜>' if m.role == 'user' else '<｜Assistant｜>' }}{{ m.content }}
{%- endfor %}{% if add_generation_prompt %}<｜Assistant｜>{% endif %}"""
TEXT = """In the beginning the quick brown fox jumped over  the lazy dog, don't you know? 1234567
    def main() -> None:\n        print("hello   world")\n 世界 naïve 😀 """


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level tokenizer with control tokens below, inside and above the ordinary ones."""
    path = tmp_path_factory.mktemp("hf")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=CONTROL[:2],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([TEXT, TEXT, "</s> <s>"] * 3, trainer)
    made.add_special_tokens(CONTROL[2:])
    made.add_tokens([tokenizers.AddedToken("    ", normalized=False)])
    made.add_tokens([tokenizers.AddedToken("<think>", normalized=False)])
    made.save(str(path / "tokenizer.json"))
    bos = {"content": "<s>", "__type": "AddedToken"}
    options = {"bos_token": bos, "eos_token": "</s>", "chat_template": TEMPLATE}
    options["tokenizer_class"] = "PreTrainedTokenizerFast"
    (path / "tokenizer_config.json").write_text(json.dumps(options))
    return path


@pytest.fixture(scope="session")
def ours(folder: Path) -> Tokenizer:
    return Tokenizer(folder)


@pytest.fixture(scope="session")
def theirs(folder: Path) -> Any:
    return tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))


PIECES = [
    "hello",
    " the",
    "    ",
    "\n",
    "é",
    "世界",
    "😀",
    " 12",
    "a",
    "<",
    ">",
    "|",
    "s",
    "\t",
    "don't",
]


def test_the_vocabulary_is_theirs(ours: Tokenizer, theirs: Any) -> None:
    vocab = theirs.get_vocab()
    assert ours.vocab_size == max(vocab.values()) + 1
    assert ours.special_tokens == {name: vocab[name] for name in [*CONTROL, "<think>"]}
    for token_id in range(ours.vocab_size):
        assert ours.is_special(token_id) == (theirs.id_to_token(token_id) in ours.special_tokens)
    assert ours.bos_token_id == vocab["<s>"] and not ours.add_bos


@settings(deadline=None)
@given(st.lists(st.sampled_from(PIECES) | st.text(max_size=4), max_size=20).map("".join))
def test_ordinary_text_gives_their_ids(ours: Tokenizer, theirs: Any, text: str) -> None:
    if any(name in text for name in ours.special_tokens):
        return
    ids = ours.encode(text)
    assert ids == theirs.encode(text, add_special_tokens=False).ids
    assert ours.decode(ids) == text == theirs.decode(ids, skip_special_tokens=False)


@settings(deadline=None)
@given(st.lists(st.sampled_from([*CONTROL, "<think>", *PIECES]), max_size=12).map("".join))
def test_names_in_text_stay_text(ours: Tokenizer, text: str) -> None:
    ids = ours.encode(text)
    assert not any(map(ours.is_special, ids)) and ours.decode(ids) == text
    decoder = IncrementalDecoder(ours)
    assert "".join(decoder.push([i]) for i in ids) + decoder.finish() == text


def test_added_tokens_keep_their_ids(ours: Tokenizer, theirs: Any) -> None:
    spaces = theirs.token_to_id("    ")
    assert spaces in ours.encode("x    y") and ours.token_bytes(spaces) == b"    "


def test_a_chat(ours: Tokenizer) -> None:
    messages = [{"role": "user", "content": "hello <｜Assistant｜></s>"}]
    ids = ours.apply_chat_template(messages)
    names = ["<s>", "<｜User｜>", "<｜Assistant｜>"]
    assert [i for i in ids if ours.is_special(i)] == [ours.special_tokens[n] for n in names]
    assert ours.decode(ids) == "<s><｜User｜>hello <｜Assistant｜></s><｜Assistant｜>"
    assert ours.decode(ids, skip_special_tokens=True) == "hello <｜Assistant｜></s>"


@pytest.mark.torch
def test_harmless_chats_give_transformers_ids(folder: Path, ours: Tokenizer) -> None:
    transformers = pytest.importorskip("transformers")
    fast = transformers.PreTrainedTokenizerFast.from_pretrained(str(folder))
    messages = [
        {"role": "user", "content": "hello  world\n"},
        {"role": "assistant", "content": " naïve 😀 [x] < y"},
        {"role": "user", "content": TEXT},
    ]
    for prompt in (True, False):
        theirs = fast.apply_chat_template(messages, add_generation_prompt=prompt, tokenize=False)
        expected = fast.encode(theirs, add_special_tokens=False)
        assert ours.apply_chat_template(messages, add_generation_prompt=prompt) == expected


def changed(folder: Path, to: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    data = json.loads((folder / "tokenizer.json").read_bytes())
    change(data)
    (to / "tokenizer.json").write_text(json.dumps(data))
    return to


def test_a_template_of_the_file_puts_bos_in_front(folder: Path, tmp_path: Path) -> None:
    single = [
        {"SpecialToken": {"id": "<s>", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
    ]
    processor = {
        "type": "Sequence",
        "processors": [{"type": "TemplateProcessing", "single": single}],
    }
    changed(folder, tmp_path, lambda d: d.update(post_processor=processor))
    settings_text = (folder / "tokenizer_config.json").read_text()
    (tmp_path / "tokenizer_config.json").write_text(settings_text)
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.add_bos and tokenizer.encode("", add_bos=True) == [tokenizer.bos_token_id]


def test_old_files_write_merges_as_text(folder: Path, tmp_path: Path, ours: Tokenizer) -> None:
    def change(data: dict[str, Any]) -> None:
        data["model"]["merges"] = [" ".join(pair) for pair in data["model"]["merges"]]

    tokenizer = Tokenizer(changed(folder, tmp_path, change))
    assert tokenizer.encode(TEXT) == ours.encode(TEXT)


def test_no_merge_makes_a_control_token(folder: Path, tmp_path: Path) -> None:
    """A vocabulary whose merges would spell one, and that takes whole words first."""

    def change(data: dict[str, Any]) -> None:
        vocab, size = data["model"]["vocab"], 600
        data["model"]["ignore_merges"] = True
        data["pre_tokenizer"]["use_regex"] = False
        for pair in (["s", ">"], ["<", "s>"]):
            vocab.setdefault("".join(pair), size)
            size += 1
            data["model"]["merges"].append(pair)

    tokenizer = Tokenizer(changed(folder, tmp_path, change))
    ids = tokenizer.encode("<s>")
    assert len(ids) == 2 and not any(map(tokenizer.is_special, ids))


def test_both_kinds_of_files(folder: Path, tmp_path: Path) -> None:
    """Kimi's own format comes first where there are two."""
    changed(folder, tmp_path, lambda data: None)
    (tmp_path / "tiktoken.model").write_text("")
    with pytest.raises(ValueError, match=r"tiktoken\.model: no token for the single byte"):
        Tokenizer(tmp_path)


def test_without_the_package(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ImportError, match=r"pip install 'kdtree-engine\[tokenizers\]'"):
        Tokenizer(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.pop("model"), "model is None, want an object"),
        (lambda d: d["model"].update(type="Unigram"), "model.type is 'Unigram', this version"),
        (lambda d: d["model"].update(vocab=[]), "this version knows 'BPE' with a vocab"),
        (lambda d: d["model"].update(dropout=0.5), r"model\.dropout is 0\.5, want none"),
        (lambda d: d["model"].update(end_of_word_suffix="</w>"), "end_of_word_suffix is '</w>'"),
        (lambda d: d.update(decoder={"type": "WordPiece"}), "decoder is not 'ByteLevel'"),
        (lambda d: d.update(decoder=None), "decoder is not 'ByteLevel'"),
        (lambda d: d.update(added_tokens={}), "added_tokens is {}, want a list of objects"),
        (lambda d: d["added_tokens"][0].update(lstrip=True), "'<s>' has lstrip, which is not"),
        (lambda d: d["added_tokens"][0].update(id=1), "'</s>' with id 1 is there twice"),
        (lambda d: d["added_tokens"][0].update(id=50), "'<s>' has id 50, as another token has"),
        (lambda d: d["added_tokens"][0].update(id=-1), "'<s>' has id -1, want a whole number"),
        (lambda d: d["added_tokens"][0].update(id=1 << 40), "an id is 1099511627776, want less"),
        (lambda d: d["added_tokens"][0].update(content=""), "token 0 has content '', want a name"),
        (lambda d: d["added_tokens"][-2].update(content=3), "added_tokens: content is 3"),
        (lambda d: d["model"]["vocab"].pop("!"), "no token for the single byte 0x21"),
        (lambda d: d["model"]["vocab"].update(世=419), "has '世', which stands for no byte|419"),
        (lambda d: d["model"]["vocab"].update(xx="1"), "the id of 'xx' is '1'"),
        (lambda d: d["model"]["vocab"].update(xx=-1), "the id of 'xx' is -1"),
        (lambda d: d["model"]["vocab"].update(xx=7), "'xx' has id 7, as another token has"),
        (lambda d: d["model"]["merges"].append(["xx", "yy"]), r"tokenizer\.json: .*xx"),
        (lambda d: d.update(pre_tokenizer={"type": "Odd"}), r"tokenizer\.json: "),
        (lambda d: d.update(pre_tokenizer={"type": "Split", "pattern": {"Regex": "("},
                                           "behavior": "Isolated", "invert": False}),
         r"tokenizer\.json: "),
    ],
)  # fmt: skip
def test_bad_files_are_named(
    folder: Path, tmp_path: Path, change: Callable[[dict[str, Any]], Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message) as error:
        Tokenizer(changed(folder, tmp_path, change))
    assert str(tmp_path / "tokenizer.json") in str(error.value)


def test_a_vocabulary_larger_than_config_says(folder: Path, tmp_path: Path) -> None:
    changed(folder, tmp_path, lambda data: None)
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 300}))
    with pytest.raises(ValueError, match=r"vocab_size is 300, tokenizer\.json beside it has \d+"):
        Tokenizer(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 512}))
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.decode([511]) == "<|reserved_token_511|>" and tokenizer.is_special(511)
