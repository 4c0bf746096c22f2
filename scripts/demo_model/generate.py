"""The target writes the text that the drafter is trained on.

Prompts are cuts of the corpus, a third of them starts of documents, and chat exchanges; 40 %
of the rows are continued greedily, 40 % at temperature 0.7, 20 % at 1.
"""

import argparse
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from . import data
from .config import NANO
from .decode import Decoder
from .device import Device, log
from .model import Target
from .pretrain import Sampler


@dataclass(frozen=True)
class GenerateSettings:
    """Seconds to spend, and the shape of a batch."""

    seconds: float = 75.0
    batch: int = 4096
    length: int = 384
    shortest_prompt: int = 16
    longest_prompt: int = 64
    chat_share: float = 0.3


def _document_starts(sampler: Sampler, split: str, count: int, length: int, bos: int) -> Tensor:
    """Cuts [count, length] that begin with [BOS]."""
    stream = sampler.streams[split]
    starts = torch.nonzero(stream == bos)[:, 0]
    starts = starts[starts <= len(stream) - length]
    if len(starts) == 0:
        return sampler.cuts(split, count, length)
    pick = torch.randint(len(starts), (count,), device=stream.device)
    return stream[starts[pick][:, None] + torch.arange(length, device=stream.device)].long()


def prompts(sampler: Sampler, target: Target, settings: GenerateSettings) -> Tensor:
    """One batch of prompts [batch, longest_prompt] in random order."""
    s, bos = settings, target.config.special("[BOS]")
    chat = int(s.batch * s.chat_share)
    starts = (s.batch - chat) // 3
    counts = {"stdlib": int(0.25 * (s.batch - chat - starts))}
    counts["docs"] = int(0.15 * (s.batch - chat - starts))
    counts["source"] = s.batch - chat - starts - sum(counts.values())
    rows = [
        _document_starts(sampler, "chat", chat, s.longest_prompt, bos),
        _document_starts(sampler, "source", starts, s.longest_prompt, bos),
        *(sampler.cuts(split, n, s.longest_prompt) for split, n in counts.items() if n),
    ]
    together = torch.cat(rows)
    return together[torch.randperm(s.batch, device=together.device)]


def generate(
    target: Target, corpus: data.Corpus, device: Device, settings: GenerateSettings
) -> Tensor:
    """Sequences [n, length] of int16 ids, prompts included, on the device."""
    s = settings
    decoder = Decoder(target, device, s.batch, s.length)
    sampler = Sampler(corpus, device, seed=1)
    temperature = torch.zeros(s.batch, device=device.name)
    temperature[int(0.4 * s.batch) : int(0.8 * s.batch)] = 0.7
    temperature[int(0.8 * s.batch) :] = 1.0
    rows: list[Tensor] = []
    start = time.time()
    while not rows or time.time() - start < s.seconds:
        lengths = torch.randint(
            s.shortest_prompt, s.longest_prompt + 1, (s.batch,), device=device.name
        )
        out = decoder.run(prompts(sampler, target, s), lengths, temperature)
        rows.append(out.to(torch.int16))
        device.wait()
        if len(rows) == 1:
            log(f"first batch generated in {time.time() - start:.1f} s")
    pool = torch.cat(rows)
    seconds = time.time() - start
    log(
        f"generated {tuple(pool.shape)}: {pool.numel() / 1e6:.1f} M tokens,"
        f" {pool.numel() / seconds / 1e3:.0f} k tokens/s"
    )
    return pool


def load_target(path: Path, device: Device) -> Target:
    """A frozen target from `pretrain`'s file."""
    target = Target(NANO, device.dtype)
    target.load_state_dict(torch.load(path, map_location="cpu")["weights"])
    return target.requires_grad_(False).to(device.name)


def main() -> None:
    """Command line of the stage."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=data.DATA, help="folder of the corpus")
    parser.add_argument("--run", type=Path, required=True, help="folder with target.pt")
    parser.add_argument("--seconds", type=float, default=75.0, help="time to generate")
    arguments = parser.parse_args()
    corpus = data.load(arguments.data, None)
    device = Device()
    target = load_target(arguments.run / "target.pt", device)
    pool = generate(target, corpus, device, GenerateSettings(arguments.seconds))
    torch.save(pool.cpu(), arguments.run / "pool.pt")


if __name__ == "__main__":
    main()
