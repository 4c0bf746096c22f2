"""Kimi's tokenizer against independent references: another regular-expression engine, tiktoken's
own control tokens, and ids of Kimi's vocabulary."""

import base64
import json
import os
from pathlib import Path

import pytest
import tiktoken
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from conftest import KIMI_NAMES, KIMI_TEMPLATE, SPECIAL
from kdtree_engine.tokenizer import SPLIT_PATTERN, Tokenizer

CHARACTERS = [*"aZß'’sStTéǅʰªـ世々〇ー。，1½Ⅷ٣_-/ \t\r\n\x0b\u3000\u200d\u0300"]
CHARACTERS += ["話說", "'re", "'LL", "😀", "  ", "한국", "กำ"]


@settings(deadline=None)
@given(
    st.lists(st.sampled_from(CHARACTERS), max_size=24).map("".join)
    | st.text(st.characters(exclude_categories=["Cn", "Cs"]), max_size=24)
)
def test_pieces_are_those_of_another_engine_for_the_same_pattern(text: str) -> None:
    """The regex package knows the intersection of classes too, and a later Unicode."""
    regex = pytest.importorskip("regex")
    pieces = [p.encode() for p in regex.findall(SPLIT_PATTERN, text, regex.V1)]
    assert b"".join(pieces) == text.encode()
    ranks = {bytes([b]): b for b in range(256)}
    ranks |= {p: 256 + i for i, p in enumerate(dict.fromkeys(p for p in pieces if len(p) > 1))}
    encoding = tiktoken.Encoding(
        "x", pat_str=SPLIT_PATTERN, mergeable_ranks=ranks, special_tokens={}
    )
    assert [ranks[p] for p in pieces] == encoding.encode_ordinary(text)


def test_a_space_before_a_number_is_a_piece_of_its_own() -> None:
    """22 tokens by Kimi's own tokenizer, and each piece is one. Engines without the intersection of
    classes and without looking ahead have been given patterns that take the space along."""
    regex = pytest.importorskip("regex")
    text = "To solve the equation 3x + 7 = 22, first subtract 7 from both sides:"
    approximate = SPLIT_PATTERN.replace(r"&&[^\p{Han}]", "").replace(r"\s+(?!\S)", r"\s+[^\s]")
    counts = []
    for pattern in (SPLIT_PATTERN, approximate):
        pieces = [p.encode() for p in regex.findall(pattern, text, regex.V1)]
        ranks = {bytes([b]): b for b in range(256)}
        ranks |= {p: 256 + i for i, p in enumerate(sorted({p for p in pieces if len(p) > 1}))}
        encoding = tiktoken.Encoding("x", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
        ids = encoding.encode_ordinary(text)
        assert ids == [ranks[p] for p in pieces]
        counts.append(len(ids))
    assert counts == [22, 19]


PIECES = [*SPECIAL, "hello world", "ab 世界", "a  b", " ", "\n", "<|", "|>"]
PIECES += ["<|reserved_token_505|>"]


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.sampled_from(PIECES), min_size=1, max_size=9).map("".join))
def test_templates_encode_as_kimis_tokenizer_does(tokenizer_folder: Path, text: str) -> None:
    """Kimi's encodes the rendered text with every control token allowed, by tiktoken alone."""
    source = text.replace("\n", "\\n")
    (tokenizer_folder / "chat_template.jinja").write_text(f"{{{{ '{source}' }}}}", "utf-8")
    ours = Tokenizer(tokenizer_folder)
    lines = (tokenizer_folder / "tiktoken.model").read_bytes().splitlines()
    ranks = {base64.b64decode(token): int(rank) for token, rank in map(bytes.split, lines)}
    names = {f"<|reserved_token_{i}|>": i for i in range(265, 512) if i not in SPECIAL.values()}
    theirs = tiktoken.Encoding(
        "x", pat_str=SPLIT_PATTERN, mergeable_ranks=ranks, special_tokens=SPECIAL | names
    )
    expected = theirs.encode(text, allowed_special="all")
    assert ours.apply_chat_template([{"role": "user", "content": ""}]) == expected


# Ids of Kimi's vocabulary that are publicly known.
KNOWN = {"The": 1008, " of": 318, " are": 554, " to": 308, ".": 13, ",": 11, " the": 276}
KNOWN |= {"Hello": 19180, "世界": 2243, "——": 35086, "I'm": 17172, "You": 3900}
KNOWN |= {"system": 14062, "user": 2482, "functions": 41937}
FIRST_CONTROL = 163584
CONTROL = {FIRST_CONTROL + at: name for at, name in KIMI_NAMES.items()}


def check_known_ids(kimi: Tokenizer, control: dict[int, str]) -> None:
    assert kimi.vocab_size == 163840 and not kimi.add_bos and kimi.bos_token_id == 163584
    assert {text: kimi.encode(text) for text in KNOWN} == {t: [i] for t, i in KNOWN.items()}
    sentences: dict[str, list[int]] = {
        "Hello世界——I'm": [19180, 2243, 35086, 17172],
        "You are the.": [3900, 554, 276, 13],
        "The of to世界.": [1008, 318, 308, 2243, 13],
    }
    assert {text: kimi.encode(text) for text in sentences} == sentences
    for token_id in range(FIRST_CONTROL, 163840):
        name = control.get(token_id, f"<|reserved_token_{token_id}|>")
        assert kimi.decode([token_id]) == name and kimi.is_special(token_id)
        ids = kimi.encode(name)
        assert kimi.decode(ids) == name and not any(map(kimi.is_special, ids))
    for text in ("你好it's", "。\n\n　　話說天下大勢", "<|im_end|><|reserved_token_163589|>"):
        ids = kimi.encode(text)
        assert kimi.decode(ids) == text and not any(map(kimi.is_special, ids))
    for token_id in (163840, -1, 4294967294):  # the first is transformers' video token
        with pytest.raises(ValueError, match=f"token id {token_id} .* vocab_size is 163840"):
            kimi.decode([token_id])


def test_ids_of_kimis_own_vocabulary() -> None:
    """Needs Kimi's files: KDTREE_TEST_KIMI names a folder with them."""
    folder = os.environ.get("KDTREE_TEST_KIMI")
    if not folder:
        pytest.skip("KDTREE_TEST_KIMI names no folder of a Kimi model")
    kimi = Tokenizer(folder)
    named = {i: name for name, i in kimi.special_tokens.items()}
    thinking = {"<think>", "</think>"}  # not listed by K2-Thinking, nor the media tokens
    for token_id, name in CONTROL.items():
        assert named.get(token_id, name) == name
        assert token_id in named or name in thinking or "media" in name
    check_known_ids(kimi, named)


@pytest.mark.parametrize("thinking", [True, False])
def test_known_ids_in_a_vocabulary_of_kimis_size(tmp_path: Path, thinking: bool) -> None:
    """The known tokens at their ranks; the other ranks are bytes that no text has."""
    ranks = {i: text.encode() for text, i in KNOWN.items()}
    single = [b for b in range(256) if bytes([b]) not in ranks.values()]
    for rank in range(FIRST_CONTROL):
        if rank not in ranks:
            byte = bytes([single.pop()]) if single else b"\xff" + rank.to_bytes(3, "big")
            ranks[rank] = byte
    lines = [f"{base64.b64encode(ranks[rank]).decode()} {rank}" for rank in sorted(ranks)]
    (tmp_path / "tiktoken.model").write_text("\n".join(lines))
    control = {i: n for i, n in CONTROL.items() if thinking or "think" not in n}
    settings = {"added_tokens_decoder": {str(i): {"content": n} for i, n in control.items()}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"bos_token": "[BOS]"}))
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"vocab_size": 163840}}))
    (tmp_path / "chat_template.jinja").write_text(KIMI_TEMPLATE)
    kimi = Tokenizer(tmp_path)
    check_known_ids(kimi, control)
    # How a row of a chat begins that is publicly known.
    row = kimi.apply_chat_template([{"role": "user", "content": "The."}])
    assert row[:5] == [163587, 2482, 163601, 1008, 13]


def test_ids_above_the_ranks_are_named_by_themselves(kimi_folder: Path) -> None:
    kimi = Tokenizer(kimi_folder)
    assert kimi.decode([256 + 2, 256 + 5, 511]) == "<|im_end|><|reserved_token_261|>[PAD]"
    for token_id in range(256, 512):
        name = kimi.decode([token_id])
        assert kimi.is_special(token_id)
        if name not in kimi.special_tokens:
            assert name == f"<|reserved_token_{token_id}|>"
        assert kimi.encode(name) == [*name.encode()]  # as text
    assert not kimi.is_special(255) and not kimi.is_special(512) and not kimi.is_special(-1)
    assert kimi.decode([256 + 22, 256, 256 + 13], skip_special_tokens=True) == (
        "<think><|tool_call_begin|>"
    )


def test_a_prompt_begins_with_bos_only_where_the_files_say_so(tokenizer_folder: Path) -> None:
    path = tokenizer_folder / "tokenizer_config.json"
    options = json.loads(path.read_text())
    assert Tokenizer(tokenizer_folder).add_bos
    del options["add_bos_token"]  # as in Kimi's own files
    path.write_text(json.dumps(options))
    assert not Tokenizer(tokenizer_folder).add_bos
