"""Checkpoint folders made by rule: a real model's names, types and sizes without its training.

    plan = synth.plan("kimi-k2.6", layers=2)
    synth.write(plan, Path("out"))

docs/adr/0015-synthetic-checkpoints.md says how the values are made.
"""

import base64
import json
import os
import shutil
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from itertools import islice, product
from pathlib import Path
from typing import Any

from kdtree_engine import _core, checks
from kdtree_engine.tokenizer_files import RANKS_FILE, SETTINGS_FILE

LIKES = ("kimi-k2.6", "kimi-k2-instruct", "tiny")
# A thread makes one piece at a time, so the pieces take less than 200 MB together.
_PIECE = 8 << 20
_MAX_THREADS = 16
_NUM_CONTROL = 256
# Kimi's control tokens at their distance from the first id above the ranks; those that are shown
# with the text are not special.
_CONTROL = {0: "[BOS]", 1: "[EOS]", 2: "<|im_end|>", 3: "<|im_user|>", 4: "<|im_assistant|>"}
_CONTROL |= {6: "<|start_header_id|>", 7: "<|end_header_id|>", 9: "[EOT]", 10: "<|im_system|>"}
_CONTROL |= {17: "<|im_middle|>", 18: "<|media_begin|>", 19: "<|media_content|>"}
_CONTROL |= {20: "<|media_end|>", 21: "<|media_pad|>", 254: "[UNK]", 255: "[PAD]"}
_SHOWN = {11: "<|tool_calls_section_begin|>", 12: "<|tool_calls_section_end|>"}
_SHOWN |= {13: "<|tool_call_begin|>", 14: "<|tool_call_argument_begin|>"}
_SHOWN |= {15: "<|tool_call_end|>", 22: "<think>", 23: "</think>"}


@dataclass(frozen=True)
class Folder:
    """A model of the checkpoint: `made` is what `_core.synth_checkpoint` says of it."""

    path: Path  # inside the checkpoint
    made: dict[str, Any]
    small_files: dict[str, str]

    @property
    def bytes(self) -> int:
        shards = sum(len(shard["header"]) + shard["bytes"] for shard in self.made["shards"])
        return shards + sum(len(text.encode()) for text in self.small_files.values())


@dataclass(frozen=True)
class Plan:
    """What is to be written: the target, then its drafter if there is to be one."""

    like: str
    folders: tuple[Folder, ...]

    @property
    def bytes(self) -> int:
        return sum(folder.bytes for folder in self.folders)

    @property
    def num_tensors(self) -> int:
        return sum(folder.made["num_tensors"] for folder in self.folders)


def plan(like: str, *, drafter: bool = True, **numbers: int) -> Plan:
    """The checkpoint that `write` would make.

    `numbers` are any of layers, experts, hidden, vocab and seed; a size of 0 or none takes that of
    the model named. Raises ValueError naming the option that no model can have.
    """
    target = _core.synth_checkpoint(like, drafter=False, **numbers)
    files = {
        "config.json": target["config"],
        "generation_config.json": target["generation_config"],
        "model.safetensors.index.json": _index(target),
        **_tokenizer_files(target["vocab_size"]),
    }
    folders = [Folder(Path(), target, files)]
    if checks.flag("drafter", drafter):
        made = _core.synth_checkpoint(like, drafter=True, **numbers)
        folders.append(Folder(Path("drafter"), made, {"config.json": made["config"]}))
    return Plan(like, tuple(folders))


def write(
    plan: Plan, out: str | os.PathLike[str], progress: Callable[[int, int], None] | None = None
) -> None:
    """Writes the checkpoint to the folder `out`, which must be empty or not there.

    Everything goes to `out`.partial, which is renamed at the end and removed if anything goes
    wrong. `progress(done_bytes, total_bytes)` is called as files grow. Raises ValueError when `out`
    cannot be written to, OSError naming the file when the disk is too small or fails.
    """
    folder = Path(os.path.realpath(checks.path("out", out)))
    _check_folder(folder)
    needed, free = plan.bytes, shutil.disk_usage(folder.parent).free
    if needed > free:
        raise OSError(f"{folder} needs {needed:,} bytes, and its disk has {free:,} free")
    partial = folder.with_name(folder.name + ".partial")
    try:
        partial.mkdir()
    except FileExistsError:
        raise ValueError(
            f"{partial} is there: it is being written by another process, or was left by one that "
            "was killed, and can be removed then"
        ) from None
    try:
        _write_all(plan, partial, progress or (lambda done, total: None))
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _check_folder(folder: Path) -> None:
    if not folder.parent.is_dir():
        raise ValueError(f"out is {folder}: there is no folder {folder.parent}")
    if not folder.exists():
        return
    if not folder.is_dir():
        raise ValueError(f"out is {folder}: it is a file")
    if any(folder.iterdir()):
        raise ValueError(f"out is {folder}: it is not empty")
    if folder.stat().st_dev != folder.parent.stat().st_dev:  # nothing can be renamed to it
        raise ValueError(f"out is {folder}: it is the root of a disk, name a folder in it")


def _write_all(plan: Plan, root: Path, progress: Callable[[int, int], None]) -> None:
    total, done = plan.bytes, 0
    buffers = threading.local()
    with ThreadPoolExecutor(min(os.cpu_count() or 1, _MAX_THREADS)) as threads:
        for folder in plan.folders:
            (root / folder.path).mkdir(exist_ok=True)
            for name, text in folder.small_files.items():
                (root / folder.path / name).write_text(text, encoding="utf-8")
                done += len(text.encode())
            for shard in folder.made["shards"]:
                path = root / folder.path / shard["file"]
                pieces = _write_shard(path, shard, folder.made["read"], threads, buffers)
                with closing(pieces):
                    for written in pieces:
                        done += written
                        progress(done, total)


def _write_shard(
    path: Path,
    shard: dict[str, Any],
    read: Callable[[int, Any], None],
    threads: ThreadPoolExecutor,
    buffers: threading.local,
) -> Generator[int, None, None]:
    """Yields the bytes of each piece written, in whatever order."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    header = shard["header"]

    def piece(begin: int) -> int:
        if not hasattr(buffers, "own"):
            buffers.own = bytearray(_PIECE)
        part = memoryview(buffers.own)[: min(_PIECE, shard["bytes"] - begin)]
        read(shard["offset"] + begin, part)
        return _write_at(file, part, len(header) + begin)

    running: deque[Future[int]] = deque()
    try:
        yield _write_at(file, memoryview(header), 0)
        for begin in range(0, shard["bytes"], _PIECE):
            if len(running) == 2 * _MAX_THREADS:
                yield running.popleft().result()
            running.append(threads.submit(piece, begin))
        while running:
            yield running.popleft().result()
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        for future in running:
            future.cancel()
        for future in running:
            if not future.cancelled():
                future.exception()  # waits: the file is in use
        os.close(file)


def _write_at(file: int, data: memoryview, offset: int) -> int:
    done = 0
    while done < len(data):
        done += os.pwrite(file, data[done:], offset + done)
    return done


def _index(made: dict[str, Any]) -> str:
    """The text of model.safetensors.index.json."""
    weight_map = {
        name: shard["file"]
        for shard in made["shards"]
        for name in json.loads(shard["header"][8:])
        if name != "__metadata__"
    }
    index = {"metadata": {"total_size": made["bytes"]}, "weight_map": weight_map}
    return json.dumps(index, indent=2, sort_keys=True) + "\n"


def _tokenizer_files(vocab_size: int) -> dict[str, str]:
    """A tokenizer in Kimi's format: all bytes, made-up words, then the control tokens."""
    first_control = vocab_size - _NUM_CONTROL
    tokens = [bytes([byte]) for byte in range(256)]
    tokens += islice(_words(), first_control - len(tokens))
    ranks = "".join(f"{base64.b64encode(t).decode()} {rank}\n" for rank, t in enumerate(tokens))
    added = {
        str(first_control + at): {"content": name, "special": at in _CONTROL}
        for at, name in sorted((_CONTROL | _SHOWN).items())
    }
    settings = {
        "add_bos_token": False,
        "added_tokens_decoder": added,
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "pad_token": "[PAD]",
        "tokenizer_class": "TikTokenTokenizer",
        "unk_token": "[UNK]",
    }
    template = Path(__file__).parent / "models" / "k2-nano" / "chat_template.jinja"
    return {
        RANKS_FILE: ranks,
        SETTINGS_FILE: json.dumps(settings, indent=2) + "\n",
        "chat_template.jinja": template.read_text(encoding="utf-8"),
    }


def _words() -> Iterator[bytes]:
    """Words of one syllable, of two and so on, each with the space before it."""
    syllables = [a + b for a in "bdfgjklmnprstvz" for b in "aeiou"]
    length = 1
    while True:
        yield from (f" {''.join(word)}".encode() for word in product(syllables, repeat=length))
        length += 1
