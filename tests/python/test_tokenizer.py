"""The tokenizer: text to ids and back, control tokens, templates, malformed files."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest
import tiktoken
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from conftest import SPECIAL
from kdtree_engine.tokenizer import SPLIT_PATTERN, IncrementalDecoder, Tokenizer

TEXTS = [
    "",
    "hello world",
    "abc世界",
    " 世界",
    "a  b",
    "x\n\n\n  y",
    "naïve 😀 ½",
    "\x00\x1b[0m",
    "I'm",
]


@pytest.fixture
def tokenizer(tokenizer_folder: Path) -> Tokenizer:
    return Tokenizer(tokenizer_folder)


@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_back(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_merges_are_used(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("hello world") == [259, 264]


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("abc世界", ["abc", "世界"]),
        (" 世界", [" ", "世界"]),
        ("a  b", ["a", " ", " b"]),
        ("x\n\n\n  y", ["x", "\n\n\n", " ", " y"]),
        ("12345", ["123", "45"]),
        ("don't DON'T", ["don't", " DON'T"]),
        ("f(x)/g\n", ["f", "(x", ")/", "g", "\n"]),
        ("你好it's", ["你好", "it's"]),
        ("。\n\n　　話說天下大勢", ["。\n\n", "　", "　", "話說天下大勢"]),
        ("a 22", ["a", " ", "22"]),
    ],
)
def test_split_pattern(text: str, pieces: list[str]) -> None:
    """The pieces are seen by giving each its own token."""
    ranks = {bytes([b]): b for b in range(256)}
    raw = [p.encode() for p in pieces]
    ranks |= {r: 256 + i for i, r in enumerate(dict.fromkeys(r for r in raw if len(r) > 1))}
    encoding = tiktoken.Encoding(
        "x", pat_str=SPLIT_PATTERN, mergeable_ranks=ranks, special_tokens={}
    )
    assert [encoding.decode_single_token_bytes(t) for t in encoding.encode_ordinary(text)] == raw


def test_names_in_ordinary_text_stay_text(tokenizer: Tokenizer) -> None:
    text = "".join(SPECIAL) + "<|reserved_token_505|>"
    ids = tokenizer.encode(text)
    assert not any(tokenizer.is_special(i) for i in ids)
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_bos_is_put_in_front_only_when_asked(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("hello", add_bos=True) == [500, 259]
    assert tokenizer.encode("", add_bos=True) == [500]
    assert tokenizer.add_bos


def test_names_of_control_tokens(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode([500, 259, 510, 511, 300]) == (
        "[BOS]hello<|im_end|><|reserved_token_511|><|reserved_token_300|>"
    )
    assert tokenizer.decode([500, 259, 510, 511, 300], skip_special_tokens=True) == "hello"


@pytest.mark.parametrize("token_id", [-1, 512, 10**20])
def test_ids_out_of_range_are_refused(tokenizer: Tokenizer, token_id: int) -> None:
    with pytest.raises(ValueError, match=rf"token id {token_id} .* vocab_size is 512"):
        tokenizer.decode([1, token_id])


def test_long_text_is_cut_where_kimi_cuts_it(tokenizer: Tokenizer) -> None:
    pair = tokenizer.encode("hello")
    assert tokenizer.encode("hello" * 5_000) == pair * 5_000  # a run of exactly 25,000
    cut = tokenizer.encode("l" * 25_001)
    assert cut == [257] * 12_500 + [ord("l")]
    assert tokenizer.encode("x" + " " * 25_001 + "ll")[1:3] == [32, 32]
    for text in ("a" * 900_001, " " * 900_001, "ab " * 300_000, "\n" * 500_000):
        assert tokenizer.decode(tokenizer.encode(text)) == text


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(0, 511), max_size=60), st.booleans())
def test_incremental_decoding_equals_decoding_at_once(
    tokenizer: Tokenizer, ids: list[int], skip: bool
) -> None:
    decoder = IncrementalDecoder(tokenizer, skip)
    parts = [decoder.push([i]) for i in ids]
    assert "".join(parts) + decoder.finish() == tokenizer.decode(ids, skip)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text())
def test_incremental_decoding_never_splits_a_character(tokenizer: Tokenizer, text: str) -> None:
    decoder = IncrementalDecoder(tokenizer)
    seen = "".join(decoder.push([i]) for i in tokenizer.encode(text))
    assert seen == text and decoder.finish() == ""


@pytest.mark.parametrize("size", range(1, 8))
@pytest.mark.parametrize("text", ["a😀é", "한국어 😀", "hello👩‍👩‍👧 world"])
def test_chunks_of_any_size_give_whole_characters(
    tokenizer: Tokenizer, text: str, size: int
) -> None:
    decoder, ids = IncrementalDecoder(tokenizer), [*text.encode()]
    parts = [decoder.push(ids[at : at + size]) for at in range(0, len(ids), size)]
    assert "".join(parts) == text and decoder.finish() == ""


def test_incomplete_character_becomes_a_replacement_at_the_end(tokenizer: Tokenizer) -> None:
    decoder = IncrementalDecoder(tokenizer)
    assert decoder.push([0xF0, 0x9F, 0x98]) == ""
    assert decoder.finish() == "\ufffd"


# ---------------------------------------------------------------- chat


def test_chat_template(tokenizer: Tokenizer) -> None:
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "hello\n"}])
    assert tokenizer.decode(ids) == (
        "<|im_user|>user<|im_middle|>hello\n<|im_end|><|im_assistant|>assistant<|im_middle|>"
    )
    assert [i for i in ids if tokenizer.is_special(i)] == [501, 504, 510, 502, 504]


@pytest.mark.parametrize("text", ["<|im_end|><|im_system|>", "[EOS]", "<<|im_end|>", "<|im_end|"])
def test_a_message_cannot_name_a_control_token(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.apply_chat_template([{"role": "user", "content": text}])
    assert [i for i in ids if tokenizer.is_special(i)] == [501, 504, 510, 502, 504]
    assert f"<|im_middle|>{text}<|im_end|>" in tokenizer.decode(ids)


def test_two_strings_cannot_join_to_a_control_token(tokenizer_folder: Path) -> None:
    template = "{{ messages[0]['content'] }}{{ messages[1]['content'] }}"
    (tokenizer_folder / "chat_template.jinja").write_text(template)
    tokenizer = Tokenizer(tokenizer_folder)
    messages = [{"role": "user", "content": t} for t in ("a<|im_", "end|>")]
    assert not any(map(tokenizer.is_special, tokenizer.apply_chat_template(messages)))


def test_tools_keep_their_characters(tokenizer_folder: Path) -> None:
    (tokenizer_folder / "chat_template.jinja").write_text(
        "<|im_system|>{{ tools | tojson(separators=(',', ':')) }}"
    )
    tokenizer = Tokenizer(tokenizer_folder)
    tools = [{"name": "f<|im_end|>", "about": "é < 'x'"}]
    ids = tokenizer.apply_chat_template([{"role": "user", "content": ""}], tools=tools)
    assert tokenizer.decode(ids[1:]) == '[{"about":"é < \'x\'","name":"f<|im_end|>"}]'
    assert not any(map(tokenizer.is_special, ids[1:]))


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% if %}", r"chat_template\.jinja:1: "),
        ("a\n{% for x in %}", r"chat_template\.jinja:2: "),
        ("{{ raise_exception('no tools here') }}", "no tools here"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe|not safely"),
        ("{% for i in range(999999999) %}{% endfor %}", "range"),
        ("{{ 1 // 0 }}", "zero"),
        ("{{ missing.field }}", "undefined"),
    ],
)
def test_bad_templates_are_value_errors(
    tokenizer_folder: Path, template: str, message: str
) -> None:
    (tokenizer_folder / "chat_template.jinja").write_text(template)
    with pytest.raises(ValueError, match=message):
        Tokenizer(tokenizer_folder).apply_chat_template([{"role": "user", "content": "x"}])


def test_keys_cannot_name_a_control_token(tokenizer_folder: Path) -> None:
    (tokenizer_folder / "chat_template.jinja").write_text("{{ tools | tojson }}")
    tokenizer = Tokenizer(tokenizer_folder)
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": ""}], tools=[{"<|im_end|>": {"[EOS]": 1}}]
    )
    assert tokenizer.decode(ids) == '[{"<|im_end|>": {"[EOS]": 1}}]'
    assert not any(map(tokenizer.is_special, ids))


@pytest.mark.parametrize("names", [[], ["[BOS]", "<|im_user|>"]])
def test_a_template_with_control_tokens_of_another_tokenizer(
    tokenizer_folder: Path, names: list[str]
) -> None:
    added = {str(300 + i): {"content": name} for i, name in enumerate(names)}
    settings = json.dumps({"added_tokens_decoder": added})
    (tokenizer_folder / "tokenizer_config.json").write_text(settings)
    tokenizer = Tokenizer(tokenizer_folder)
    missing = "im_middle" if names else "im_user"
    message = rf"chat_template\.jinja uses '<\|{missing}\|>', which is none of the tokenizer's"
    with pytest.raises(ValueError, match=message):
        tokenizer.apply_chat_template([{"role": "user", "content": "x"}])
    (tokenizer_folder / "chat_template.jinja").write_text("Q: {{ messages[0]['content'] }}")
    tokenizer = Tokenizer(tokenizer_folder)
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "a <|im_middle|> b"}])
    assert tokenizer.decode(ids) == "Q: a <|im_middle|> b"


def test_only_what_json_can_hold_goes_into_a_template(tokenizer: Tokenizer) -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    for content, message in (
        (
            [{"a": "\ud800"}],
            r"messages\[0\]\['content'\]\[0\]\['a'\] is not valid Unicode at character 0",
        ),
        (
            [{"a": {1, 2}}],
            r"messages\[0\]\['content'\]\[0\]\['a'\] is \{1, 2\}, want what JSON can hold",
        ),
        ([{"a": b"x"}], r"\['a'\] is b'x', want what JSON can hold"),
        (["x"], r"messages\[0\]: content\[0\] is 'x', want a dict"),
        ([{"a": deep}], "nested too deeply"),
        (5, "messages.0.: content is 5"),
        (None, "messages.0.: content is None"),
    ):
        with pytest.raises(ValueError, match=message):
            tokenizer.apply_chat_template([{"role": "user", "content": content}])


@pytest.mark.parametrize("text", ["\ud800", "abc\udcff", None, 5, b"x"])
def test_text_that_has_no_utf8_is_refused(tokenizer: Tokenizer, text: Any) -> None:
    with pytest.raises(ValueError, match=r"^text is "):
        tokenizer.encode(text)


@pytest.mark.parametrize("ids", [None, 5, "12", {1: 2}, [1.0], [None], [True], [[1]]])
def test_ids_that_are_no_integers_are_refused(tokenizer: Tokenizer, ids: Any) -> None:
    with pytest.raises(ValueError, match=r"token.ids? is "):
        tokenizer.decode(ids)


@pytest.mark.parametrize("messages", [[], "hello", [1], [{"content": "x"}], [{"role": 3}], None])
def test_bad_conversations_are_refused(tokenizer: Tokenizer, messages: Any) -> None:
    with pytest.raises(ValueError, match="messages"):
        tokenizer.apply_chat_template(messages)


def test_no_template(tokenizer_folder: Path) -> None:
    (tokenizer_folder / "chat_template.jinja").unlink()
    with pytest.raises(ValueError, match=r"has no chat_template\.jinja"):
        Tokenizer(tokenizer_folder).apply_chat_template([{"role": "user", "content": "x"}])


# ---------------------------------------------------------------- files


def test_special_tokens_json_is_read_without_tokenizer_config(tokenizer_folder: Path) -> None:
    (tokenizer_folder / "tokenizer_config.json").unlink()
    (tokenizer_folder / "special_tokens.json").write_text(json.dumps({"[BOS]": 300, "[EOS]": 301}))
    tokenizer = Tokenizer(tokenizer_folder)
    assert tokenizer.special_tokens == {"[BOS]": 300, "[EOS]": 301}
    assert tokenizer.bos_token_id == 300


def test_tokens_listed_as_not_special_are_kept(tokenizer_folder: Path) -> None:
    added = {"300": {"content": "<tool>", "special": False}, "301": {"content": "<end>"}}
    (tokenizer_folder / "tokenizer_config.json").write_text(
        json.dumps({"added_tokens_decoder": added})
    )
    tokenizer = Tokenizer(tokenizer_folder)
    assert tokenizer.decode([300, 301], skip_special_tokens=True) == "<tool>"
    assert tokenizer.bos_token_id is None and not tokenizer.add_bos


def test_reserved_ids_without_a_config(tokenizer_folder: Path) -> None:
    (tokenizer_folder / "config.json").unlink()
    assert Tokenizer(tokenizer_folder).vocab_size == 265 + 256


def test_nested_vocab_size(tokenizer_folder: Path) -> None:
    config = {"text_config": {"vocab_size": 520}, "vocab_size": 3}
    (tokenizer_folder / "config.json").write_text(json.dumps(config))
    assert Tokenizer(tokenizer_folder).vocab_size == 520


def _b64(token: bytes) -> str:
    return base64.b64encode(token).decode()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("aGV5", "want a base64 token and its rank, found 1 words"),
        ("aGV5 265 1", "found 3 words"),
        ("a?!= 265", "is not base64"),
        ("aGV5 x", "rank 'x' is not a whole number"),
        ("aGV5 -1", "rank '-1' is not a whole number"),
        ("aGV5 99999999999999999999", "is not a whole number"),
        ("= 265", "is not base64|empty"),
        (f"{_b64(b'hello')} 265", "is also on line 260"),
        ("aGV5 7", "rank 7 is also on line 8"),
    ],
)
def test_bad_rank_lines_are_named(tokenizer_folder: Path, line: str, message: str) -> None:
    with open(tokenizer_folder / "tiktoken.model", "a") as file:
        file.write(f"\n{line}\n")
    with pytest.raises(ValueError, match=rf"tiktoken\.model:267: .*({message})"):
        Tokenizer(tokenizer_folder)


def test_gaps_in_the_ranks_are_named(tokenizer_folder: Path) -> None:
    path = tokenizer_folder / "tiktoken.model"
    lines = path.read_text().splitlines()
    path.write_text("\n".join(lines[:260] + lines[261:]))
    with pytest.raises(ValueError, match="rank 260 is missing"):
        Tokenizer(tokenizer_folder)
    path.write_text("\n".join([*lines[:-1], lines[-1].replace("264", "265")]))
    with pytest.raises(ValueError, match="rank 264 is missing"):
        Tokenizer(tokenizer_folder)
    path.write_text(f"{_b64(b'ab')} 0")
    with pytest.raises(ValueError, match="no token for the single byte 0x00"):
        Tokenizer(tokenizer_folder)
    path.write_text("")
    with pytest.raises(ValueError, match="no token for the single byte"):
        Tokenizer(tokenizer_folder)
    path.unlink()
    with pytest.raises(FileNotFoundError):
        Tokenizer(tokenizer_folder)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{\n\n1}", r"tokenizer_config\.json:3: "),
        ("[]", "want a JSON object, found list"),
        ('{"added_tokens_decoder": 1}', "added_tokens_decoder is not an object"),
        ('{"added_tokens_decoder": {"x": {}}}', "bad entry 'x'"),
        ('{"added_tokens_decoder": {"300": 1}}', "bad entry '300'"),
        ('{"added_tokens_decoder": {"300": {}}}', "token 300 has content None"),
        ('{"added_tokens_decoder": {"3": {"content": "a"}}}', "token 'a' has id 3, want 265"),
        ('{"added_tokens_decoder": {"512": {"content": "a"}}}', "id 512, vocab_size is 512"),
        (
            '{"added_tokens_decoder": {"300": {"content": "a"}, "301": {"content": "a"}}}',
            "token 'a' with id 301 is there twice",
        ),
        ('{"added_tokens_decoder": {}, "add_bos_token": 1}', "add_bos_token is 1"),
        ("[" * 100_000, "nested too deeply|Expecting"),
        ('{"a": "\udcff"}', r"^[^:]*tokenizer_config\.json: not UTF-8 at byte 7"),
        (f'{{"a": {"1" * 5000}}}', r"tokenizer_config\.json: Exceeds the limit"),
        (
            r'{"added_tokens_decoder": {"300": {"content": "\ud800"}}}',
            "the name of token 300 is not valid Unicode",
        ),
    ],
)
def test_bad_tokenizer_configs_are_named(tokenizer_folder: Path, text: str, message: str) -> None:
    path = tokenizer_folder / "tokenizer_config.json"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ValueError, match=message):
        Tokenizer(tokenizer_folder)


@pytest.mark.parametrize("size", [10, -1, "512", True])
def test_bad_vocab_sizes_are_named(tokenizer_folder: Path, size: Any) -> None:
    (tokenizer_folder / "config.json").write_text(json.dumps({"vocab_size": size}))
    with pytest.raises(ValueError, match=rf"vocab_size is {size!r}, tiktoken\.model .* 265"):
        Tokenizer(tokenizer_folder)
