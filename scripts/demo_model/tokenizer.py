"""Trains the byte-level BPE and writes it in Kimi's tokenizer format.

The ranks file is tiktoken's (base64 of the token's bytes, a space, its rank); ids are the 256
bytes, then the merges in order, then the special tokens. The split pattern is Kimi K2's.
"""

import argparse
import base64
import json
import random
from functools import lru_cache
from pathlib import Path

import tiktoken

from kdtree_engine.tokenizer import SPLIT_PATTERN

from .config import NANO, SPECIAL_TOKENS, TargetConfig

CHAT_TEMPLATE = """\
{%- if tools -%}
<|im_system|>tool_declare<|im_middle|>{{ tools | tojson(separators=(',', ':')) }}<|im_end|>
{%- endif -%}
{%- for message in messages -%}
{%- if message['role'] == 'user' -%}<|im_user|>
{%- elif message['role'] == 'assistant' -%}<|im_assistant|>
{%- else -%}<|im_system|>
{%- endif -%}
{{ message.get('name') or message['role'] }}<|im_middle|>{{ message['content'] }}<|im_end|>
{%- endfor -%}
{%- if add_generation_prompt -%}
<|im_assistant|>assistant<|im_middle|>
{%- endif -%}
"""


def _byte_of_symbol() -> dict[str, int]:
    """Inverse of the printable alphabet that the `tokenizers` package writes bytes in."""
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in kept]
    return {chr(b): b for b in kept} | {chr(256 + i): b for i, b in enumerate(others)}


def train(texts: list[str], num_tokens: int) -> list[bytes]:
    """Byte-pair tokens in rank order: the 256 bytes, then `num_tokens - 256` merges.

    Raises ValueError when the texts are too small for that many merges.
    """
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=num_tokens,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    byte_of = _byte_of_symbol()
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    tokens = [bytes([b]) for b in range(256)]
    for left, right in merges:
        tokens.append(bytes(byte_of[symbol] for symbol in left + right))
    if len(tokens) != num_tokens:
        raise ValueError(f"the texts give {len(tokens)} tokens, {num_tokens} are wanted")
    return tokens


def write_ranks(tokens: list[bytes], path: Path) -> None:
    """Writes tiktoken's ranks file."""
    lines = (f"{base64.b64encode(token).decode()} {rank}" for rank, token in enumerate(tokens))
    path.write_text("\n".join(lines) + "\n")


@lru_cache
def load(path: Path) -> tiktoken.Encoding:
    """The encoding of a ranks file, with the special tokens after its last rank."""
    ranks = {}
    for line in path.read_text().splitlines():
        token, rank = line.split()
        ranks[base64.b64decode(token)] = int(rank)
    special = {name: len(ranks) + i for i, name in enumerate(SPECIAL_TOKENS)}
    return tiktoken.Encoding(
        path.stem, pat_str=SPLIT_PATTERN, mergeable_ranks=ranks, special_tokens=special
    )


def write_config(config: TargetConfig, folder: Path) -> None:
    """Writes tokenizer_config.json and chat_template.jinja, in Kimi K2's dialect."""
    added = {
        str(config.special(name)): {
            "content": name,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": True,
        }
        for name in SPECIAL_TOKENS
    }
    settings = {
        "add_bos_token": True,
        "added_tokens_decoder": added,
        "additional_special_tokens": [n for n in SPECIAL_TOKENS if n.startswith("<|")],
        "bos_token": "[BOS]",
        "clean_up_tokenization_spaces": False,
        "eos_token": "[EOS]",
        "extra_special_tokens": {},
        "model_max_length": config.max_position_embeddings,
        "pad_token": "[PAD]",
        "tokenizer_class": "TikTokenTokenizer",
        "unk_token": "[UNK]",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def train_on_corpus(
    documents: list[tuple[str, str]], config: TargetConfig, sample_mb: float, path: Path
) -> None:
    """Trains on a sample of the documents that are not held out, and writes the ranks."""
    from .data import HELD_OUT, split_of

    training = [text for name, text in documents if split_of(name) not in HELD_OUT]
    random.Random(0).shuffle(training)
    sample, size = [], 0
    for text in training:
        if size < sample_mb * 1e6:
            sample.append(text)
            size += len(text)
    write_ranks(train(sample, config.mergeable_ranks), path)


def main() -> None:
    """Command line of the stage."""
    from .sources import DATA, read_corpus

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=DATA, help="folder of the corpus")
    parser.add_argument("--sample-mb", type=float, default=40.0, help="text to train on, MB")
    arguments = parser.parse_args()
    path = arguments.data / "tiktoken.model"
    train_on_corpus(read_corpus(arguments.data), NANO, arguments.sample_mb, path)
    print(f"{path}: {load(path).n_vocab} tokens with the special ones")


if __name__ == "__main__":
    main()
