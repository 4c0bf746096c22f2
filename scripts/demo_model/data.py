"""Turns the corpus into token streams, in parallel and without PyTorch.

A stream is every document of one split, each between [BOS] and [EOS], in one array:
`source`, `stdlib`, `docs` and `chat` to train on; `networkx`, `sphinx` and `files` held out.
"""

import argparse
import multiprocessing.pool
import os
import random
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from . import chat, tokenizer
from .config import SPECIAL_TOKENS
from .sources import DATA, HELD_OUT_SHARE, read_corpus, unit_hash
from .textfilter import is_test

TRAINING = ("source", "stdlib", "docs", "chat")
HELD_OUT = ("networkx", "sphinx", "files")
Tokens = npt.NDArray[np.uint16]


def split_of(name: str) -> str:
    """The split a document belongs to, from its corpus name `group/package/path`."""
    group, package, _ = name.split("/", 2)
    if group == "heldout":
        return package
    if group != "docs" and unit_hash("split" + name) < HELD_OUT_SHARE:
        return "files"
    return group


@dataclass
class Corpus:
    """Token streams by split, the bytes of text in each, and the held-out documents."""

    streams: dict[str, Tokens]
    text_bytes: dict[str, int]
    held_out: list[tuple[str, str]]
    ranks: Path

    def bits_per_byte(self, split: str, nats_per_token: float) -> float:
        """A loss in nats per token as bits per byte of text."""
        tokens_per_byte = len(self.streams[split]) / self.text_bytes[split]
        return nats_per_token / float(np.log(2)) * tokens_per_byte


def chat_tokens(ranks: Path, question: str, answer: str, bos: bool) -> list[int]:
    """One exchange in the chat template, closed by [EOS]."""
    encoding = tokenizer.load(ranks)
    first = encoding.n_vocab - len(SPECIAL_TOKENS)
    ids = {name: first + i for i, name in enumerate(SPECIAL_TOKENS)}
    text = encoding.encode_ordinary
    out = [ids["[BOS]"]] if bos else []
    for role, content in (("user", question), ("assistant", answer)):
        out += [ids[f"<|im_{role}|>"], *text(role), ids["<|im_middle|>"], *text(content)]
        out.append(ids["<|im_end|>"])
    return [*out, ids["[EOS]"]] if bos else out


def _encode_documents(
    job: tuple[Path, list[tuple[str, str]]],
) -> tuple[dict[str, Tokens], dict[str, int]]:
    """Streams and byte counts of some documents; runs in a worker process."""
    ranks, documents = job
    encoding = tokenizer.load(ranks)
    bos = encoding.encode_single_token("[BOS]")
    eos = encoding.encode_single_token("[EOS]")
    parts: dict[str, list[Tokens]] = {}
    text_bytes: dict[str, int] = {}

    def add(split: str, tokens: list[int], size: int) -> None:
        parts.setdefault(split, []).append(np.array(tokens, dtype=np.uint16))
        text_bytes[split] = text_bytes.get(split, 0) + size

    for name, text in documents:
        split = split_of(name)
        add(split, [bos, *encoding.encode_ordinary(text), eos], len(text.encode()))
        if split in ("source", "stdlib") and not is_test(name):
            for question, answer in chat.function_pairs(text, zlib.crc32(name.encode())):
                use_bos = unit_hash("bos" + question + answer) < 0.8
                tokens = chat_tokens(ranks, question, answer, use_bos)
                add("chat", tokens, len(question.encode()) + len(answer.encode()))
    return {split: np.concatenate(p) for split, p in parts.items()}, text_bytes


def encode(
    documents: list[tuple[str, str]], ranks: Path, pool: multiprocessing.pool.Pool | None
) -> Corpus:
    """Tokenises all documents and builds the chat slice; `pool` None means in this process."""
    documents = sorted(documents, key=lambda d: unit_hash("order" + d[0]))
    size = max(1, min(200, len(documents) // 16))
    jobs = [(ranks, documents[i : i + size]) for i in range(0, len(documents), size)]
    results = map(_encode_documents, jobs)
    if pool is not None:
        results = pool.imap(_encode_documents, jobs)  # type: ignore[assignment]
    parts: dict[str, list[Tokens]] = {split: [] for split in TRAINING + HELD_OUT}
    text_bytes = dict.fromkeys(parts, 0)
    for streams, sizes in results:
        for split, tokens in streams.items():
            parts[split].append(tokens)
            text_bytes[split] += sizes[split]
    profiles = [text for name, text in documents if "/factbook" in name]
    talk = [*chat.small_talk(0), *chat.capitals(profiles)]
    random.Random(0).shuffle(talk)
    for start in range(0, len(talk), 64):  # spread over the slice, each pair three times
        pairs = [chat_tokens(ranks, q, a, bos=True) for q, a in talk[start : start + 64]]
        block = np.array([token for pair in pairs for token in pair], dtype=np.uint16)
        for copy in range(3):
            at = (start * 7919 + copy * 104729) % (len(parts["chat"]) + 1)
            parts["chat"].insert(at, block)
            text_bytes["chat"] += sum(len(q) + len(a) for q, a in talk[start : start + 64])
    streams = {k: np.concatenate(p) if p else np.zeros(0, np.uint16) for k, p in parts.items()}
    held_out = [d for d in documents if split_of(d[0]) in HELD_OUT]
    return Corpus(streams, text_bytes, held_out, ranks)


def load(data: Path, pool: multiprocessing.pool.Pool | None) -> Corpus:
    """The corpus of a data folder: its xz streams with its tiktoken.model."""
    return encode(read_corpus(data), data / "tiktoken.model", pool)


def describe(corpus: Corpus) -> str:
    """A table of streams."""
    lines = []
    for split, tokens in corpus.streams.items():
        per_token = corpus.text_bytes[split] / max(len(tokens), 1)
        lines.append(f"  {split:9} {len(tokens) / 1e6:7.2f} M tokens, {per_token:.2f} bytes each")
    return "\n".join(lines)


def main() -> None:
    """Command line: prints what the corpus becomes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=DATA, help="folder of the corpus")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="worker processes")
    arguments = parser.parse_args()
    with multiprocessing.get_context("fork").Pool(arguments.processes) as pool:
        print(describe(load(arguments.data, pool)))


if __name__ == "__main__":
    main()
