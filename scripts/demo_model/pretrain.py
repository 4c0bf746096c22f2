"""Pretrains the target by the clock, the last part through INT4 experts, and freezes it.

One learning-rate schedule: warm-up, constant to half of the time, then linear to 3 %. The
frozen target is what the exported files hold: experts that INT4 represents exactly, all else
rounded to bf16.
"""

import argparse
import math
import multiprocessing
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import data
from .config import NANO
from .device import Device, Pacer, log
from .model import Target
from .optim import Optimizer, orthogonalize
from .quant import dequantized


@dataclass(frozen=True)
class PretrainSettings:
    """Times in seconds, sizes in tokens."""

    seconds: float = 300.0
    int4_seconds: float = 75.0
    sequences: int = 128
    length: int = 1024
    muon_rate: float = 6e-3
    adam_rate: float = 3e-3
    weight_decay: float = 0.15
    warmup_steps: int = 100
    validations: int = 5  # before the INT4 part
    validation_tokens: int = 1 << 20  # of each held-out stream at most
    log_every: int = 200


# Shares of the streams in a batch, first and in the last quarter of the time. `source` gets
# what the others leave.
FIRST_MIX = {"stdlib": 0.06, "docs": 0.08, "chat": 0.08}
LAST_MIX = {"stdlib": 0.08, "docs": 0.09, "chat": 0.08}


class Sampler:
    """Cuts of the training streams; every epoch visits each token of a stream once, at cuts
    that start elsewhere each time."""

    def __init__(self, corpus: data.Corpus, device: Device, seed: int = 0) -> None:
        self.device = device.name
        self.streams = {
            split: torch.from_numpy(corpus.streams[split].astype("int32")).to(device.name)
            for split in data.TRAINING
        }
        self.generator = torch.Generator(device="cpu").manual_seed(seed)
        self.drawn = dict.fromkeys(data.TRAINING, 0)  # tokens
        self._starts: dict[tuple[str, int], Tensor] = {}
        self._next: dict[tuple[str, int], int] = {}

    def cuts(self, split: str, count: int, length: int) -> Tensor:
        """`count` cuts [count, length] of one stream."""
        stream, key = self.streams[split], (split, length)
        taken = []
        while count > 0:
            if self._next.get(key, 0) >= len(self._starts.get(key, ())):
                shift = int(torch.randint(length, (), generator=self.generator))
                n = max((len(stream) - shift) // length, 1)
                order = torch.randperm(n, generator=self.generator)
                self._starts[key] = (order * length + shift).to(self.device)
                self._next[key] = 0
            first = self._next[key]
            starts = self._starts[key][first : first + count]
            self._next[key] += len(starts)
            count -= len(starts)
            taken.append(starts)
        starts = torch.cat(taken).clamp(max=max(len(stream) - length, 0))
        self.drawn[split] += len(starts) * length
        return stream[starts[:, None] + torch.arange(length, device=self.device)].long()

    def batch(self, count: int, length: int, mix: dict[str, float]) -> tuple[Tensor, Tensor]:
        """Inputs and labels [count, length] in the shares of `mix`."""
        counts = {split: round(share * count) for split, share in mix.items()}
        counts["source"] = count - sum(counts.values())
        rows = torch.cat([self.cuts(s, n, length + 1) for s, n in counts.items() if n])
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    def epochs(self) -> dict[str, float]:
        """How often each stream has been gone through."""
        return {s: round(n / max(len(self.streams[s]), 1), 2) for s, n in self.drawn.items()}


def _cross_entropy(hidden: Tensor, head: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, head.to(hidden.dtype)).float(), labels)


class Trainer:
    """The target with its compiled pieces; also used to measure held-out losses."""

    def __init__(self, target: Target, device: Device, settings: PretrainSettings) -> None:
        self.target, self.device, self.settings = target, device, settings
        target.blocks = [device.compile(layer, fullgraph=True) for layer in target.layers]
        self.cross_entropy = device.compile(_cross_entropy)

    def loss(self, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(cross entropy, balance loss, expert loads) of a batch."""
        hidden, _, loads, balance = self.target(ids)
        flat = hidden.flatten(0, 1)
        return (
            self.cross_entropy(flat, self.target.lm_head.weight, labels.flatten()),
            balance,
            loads,
        )

    def held_out(self, corpus: data.Corpus) -> dict[str, float]:
        """Nats per token of the held-out streams. Gradients stay enabled, unused, because the
        compiled training graphs then serve as they are."""
        s = self.settings
        losses = {}
        for split in data.HELD_OUT:
            tokens = corpus.streams[split][: s.validation_tokens + 1]
            rows = (len(tokens) - 1) // s.length
            rows = rows // s.sequences * s.sequences or rows
            batch = min(rows, s.sequences)
            both = torch.from_numpy(tokens[: rows * s.length + 1].astype("int64"))
            both = both.to(self.device.name)
            ids, labels = both[:-1].view(rows, -1), both[1:].view(rows, -1)
            parts = [
                self.loss(ids[i : i + batch].contiguous(), labels[i : i + batch])[0].item()
                for i in range(0, rows, batch)
            ]
            losses[split] = sum(parts) / len(parts)
        return losses


def _balance_experts(target: Target, loads: Tensor, rate: float = 1e-3) -> None:
    """Loss-free balancing (DeepSeek-V3, section 2.1.2): lowers the bias of busy experts."""
    with torch.no_grad():
        for experts, load in zip(target.experts(), loads.float(), strict=True):
            experts.correction_bias += rate * torch.sign(load.mean() - load)
            experts.correction_bias -= experts.correction_bias.mean()


def _with_experts(target: Target, quantize: bool) -> None:
    for experts in target.experts():
        experts.quantize = quantize


def freeze(target: Target) -> None:
    """Replaces every weight by what the exported files hold, in place, and stops training."""
    _with_experts(target, False)
    with torch.no_grad():
        for experts in target.experts():
            for master in (experts.gate_proj, experts.up_proj, experts.down_proj):
                master.copy_(dequantized(master, target.config.group_size))
        for name, parameter in target.named_parameters():
            routed = ".mlp." in name and name.endswith(("gate_proj", "up_proj", "down_proj"))
            if not routed:
                parameter.copy_(parameter.bfloat16().float())
    target.requires_grad_(False)


def describe(corpus: data.Corpus, losses: dict[str, float]) -> dict[str, list[float]]:
    """Losses as [nats per token, bits per byte]."""
    return {
        split: [round(loss, 4), round(corpus.bits_per_byte(split, loss), 4)]
        for split, loss in losses.items()
    }


def pretrain(
    target: Target, corpus: data.Corpus, device: Device, settings: PretrainSettings
) -> dict[str, Any]:
    """Trains and freezes `target`; returns the history and the held-out losses.

    Raises RuntimeError when the loss stops being finite.
    """
    s = settings
    trainer = Trainer(target, device, s)
    sampler = Sampler(corpus, device)
    optimizer = Optimizer(
        target, s.muon_rate, s.adam_rate, s.weight_decay, device.compile(orthogonalize)
    )
    total = s.seconds + s.int4_seconds

    def warm_up() -> None:
        """Compiles everything a step needs, without taking one."""
        loss, balance, _ = trainer.loss(*sampler.batch(s.sequences, s.length, FIRST_MIX))
        (loss + 1e-3 * balance).backward()
        optimizer.clear()
        optimizer.muon.warm_up()

    pacer = Pacer(device)
    pacer.pause(warm_up)
    log("compiled")
    history: list[dict[str, Any]] = []
    result: dict[str, Any] = {"history": history}
    step, since, validated, quantizing = 0, 0, 0, False
    running = torch.zeros((), device=device.name)
    # even a very short run goes through INT4 once
    while (elapsed := pacer.elapsed()) < total or not quantizing:
        if not quantizing and elapsed >= s.seconds:
            quantizing = True
            result["masters_before_int4"] = pacer.pause(lambda: trainer.held_out(corpus))
            _with_experts(target, True)
            result["rounded_before_int4"] = pacer.pause(lambda: trainer.held_out(corpus))
            pacer.pause(warm_up)
            log("before INT4:", describe(corpus, result["masters_before_int4"]))
            log("rounded only:", describe(corpus, result["rounded_before_int4"]))
        done = elapsed / total
        factor = min(1.0, (step + 1) / s.warmup_steps)
        factor *= 1.0 if done < 0.5 else max(0.03, 1 - (done - 0.5) / 0.5 * 0.97)
        mix = FIRST_MIX if done < 0.75 else LAST_MIX
        loss, balance, loads = trainer.loss(*sampler.batch(s.sequences, s.length, mix))
        (loss + 1e-3 * balance).backward()
        optimizer.step(factor)
        _balance_experts(target, loads)
        running += loss.detach()
        step, since = step + 1, since + 1
        pacer.tick()
        if step in (1, 20, 50, 100) or step % s.log_every == 0:
            mean, seconds = running.item() / since, pacer.elapsed()
            running.zero_()
            since = 0
            if not math.isfinite(mean):
                raise RuntimeError(f"loss {mean} at step {step}")
            tokens = step * s.sequences * s.length
            ratio = (loads.amax(1) / loads.float().mean(1)).max().item()
            history.append({"step": step, "seconds": seconds, "tokens": tokens, "loss": mean})
            log(
                f"step {step} {seconds:.0f} s {tokens / 1e6:.1f} M tokens loss {mean:.4f}"
                f" rate {factor:.3f} load {ratio:.2f} {tokens / seconds / 1e3:.0f} k tokens/s"
            )
        if not quantizing and pacer.elapsed() > (validated + 1) * s.seconds / (s.validations + 1):
            validated += 1
            losses = pacer.pause(lambda: trainer.held_out(corpus))
            tokens = step * s.sequences * s.length
            history.append({"step": step, "tokens": tokens, "held_out": losses})
            log("  held out:", describe(corpus, losses), "epochs", sampler.epochs())
    result |= {"steps": step, "tokens": step * s.sequences * s.length, "epochs": sampler.epochs()}
    _with_experts(target, False)
    result["masters"] = trainer.held_out(corpus)
    freeze(target)
    result["held_out"] = trainer.held_out(corpus)
    names = ("masters", "held_out")
    result |= {f"{n}_bits_per_byte": describe(corpus, result[n]) for n in names}
    log(f"trained {step} steps; masters", describe(corpus, result["masters"]))
    log("as exported (INT4, bf16):", describe(corpus, result["held_out"]), result["epochs"])
    target.blocks = list(target.layers)
    return result


def main() -> None:
    """Command line of the stage."""
    from .sources import DATA

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=DATA, help="folder of the corpus")
    parser.add_argument("--run", type=Path, required=True, help="folder for target.pt")
    parser.add_argument("--seconds", type=float, default=300.0, help="before the INT4 part")
    parser.add_argument("--int4-seconds", type=float, default=75.0, help="the INT4 part")
    arguments = parser.parse_args()
    with multiprocessing.get_context("fork").Pool(os.cpu_count()) as pool:
        corpus = data.load(arguments.data, pool)
    device = Device()
    torch.manual_seed(0)
    target = Target(NANO, device.dtype).to(device.name)
    settings = PretrainSettings(arguments.seconds, arguments.int4_seconds)
    result = pretrain(target, corpus, device, settings)
    arguments.run.mkdir(parents=True, exist_ok=True)
    torch.save({"weights": target.state_dict(), "result": result}, arguments.run / "target.pt")


if __name__ == "__main__":
    main()
