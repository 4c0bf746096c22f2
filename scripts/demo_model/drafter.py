"""Trains the drafter on text that the target wrote.

Labels are the target's own distributions at a temperature below 1 at every position of a
block; the weight of a position falls by exp(-1 / gamma) a step, since a draft is of no use
after its first wrong token.
"""

import argparse
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .config import NANO, NANO_DRAFTER, DrafterConfig
from .device import Device, Pacer, log
from .dflash import Drafter
from .generate import load_target
from .model import Target
from .optim import Optimizer, orthogonalize


@dataclass(frozen=True)
class DrafterSettings:
    """Times in seconds; a step trains sequences * anchors blocks."""

    seconds: float = 540.0
    sequences: int = 256
    anchors: int = 24
    first_anchor: int = 8
    muon_rate: float = 1e-2
    adam_rate: float = 3e-3
    weight_decay: float = 0.05
    warmup_steps: int = 50
    label_temperature: float = 0.7
    gamma: float = 5.0
    log_every: int = 500


def _distillation(
    drafted: Tensor, true: Tensor, head: Tensor, weight: Tensor, sharpness: float
) -> tuple[Tensor, Tensor]:
    """(weighted cross entropy against the target's distributions, agreement of argmaxes) of
    rows of hidden states."""
    logits = F.linear(drafted, head).float()
    label = (F.linear(true, head).float() * sharpness).softmax(-1)
    loss = logits.logsumexp(-1) - (label * logits).sum(-1)
    return (loss * weight).sum(), (logits.argmax(-1) == label.argmax(-1)).float()


def train(
    drafter: Drafter, target: Target, pool: Tensor, device: Device, settings: DrafterSettings
) -> list[dict[str, Any]]:
    """Trains `drafter` on `pool` [n, length] in place; returns the history.

    Raises RuntimeError when the loss stops being finite.
    """
    s, c = settings, drafter.config
    drafter.blocks = [device.compile(layer, fullgraph=True) for layer in drafter.layers]
    target.blocks = [device.compile(layer, fullgraph=True) for layer in target.layers]
    distillation = device.compile(_distillation)
    optimizer = Optimizer(
        drafter, s.muon_rate, s.adam_rate, s.weight_decay, device.compile(orthogonalize)
    )
    length, drafted = pool.shape[1], c.block_size - 1
    place = device.name
    head = target.lm_head.weight.to(device.dtype)
    weight = torch.exp(-torch.arange(drafted, device=place) / s.gamma)
    weight = (weight / (weight.sum() * s.sequences * s.anchors)).repeat(s.sequences * s.anchors)
    row = torch.arange(s.sequences, device=place)[:, None, None]

    def loss_of_batch() -> tuple[Tensor, Tensor]:
        ids = pool[torch.randint(len(pool), (s.sequences,), device=place)].long()
        anchors = torch.randint(
            s.first_anchor, length - c.block_size, (s.sequences, s.anchors), device=place
        )
        with torch.no_grad():
            hidden, features, _, _ = target(ids, c.target_layer_ids)
            # the state at position p predicts the token at p + 1: block position k is
            # labelled by the state at anchor + k - 1
            true = hidden[row, anchors.unsqueeze(-1) + torch.arange(drafted, device=place)]
            embedded = drafter.embed_blocks(target, ids, anchors)
        states = drafter(embedded, features, anchors)[:, :, 1:]
        flat = distillation(
            states.flatten(0, 2), true.flatten(0, 2), head, weight, 1 / s.label_temperature
        )
        return flat[0], flat[1].view(-1, drafted).mean(0)

    def warm_up() -> None:
        loss_of_batch()[0].backward()
        optimizer.clear()
        optimizer.muon.warm_up()

    pacer = Pacer(device)
    pacer.pause(warm_up)
    log("drafter compiled")
    history = []
    step, since = 0, 0
    running, agree = torch.zeros((), device=place), torch.zeros(drafted, device=place)
    while (elapsed := pacer.elapsed()) < s.seconds:
        loss, hits = loss_of_batch()
        loss.backward()
        warm = min(1.0, (step + 1) / s.warmup_steps)
        optimizer.step(warm * max(0.02, 1 - elapsed / s.seconds))
        running += loss.detach()
        agree += hits
        step, since = step + 1, since + 1
        pacer.tick()
        if step in (1, 20, 100) or step % s.log_every == 0:
            mean, shares = running.item() / since, (agree / since).tolist()
            running.zero_()
            agree.zero_()
            since = 0
            if not math.isfinite(mean):
                raise RuntimeError(f"loss {mean} at step {step}")
            blocks = step * s.sequences * s.anchors
            history.append({"step": step, "blocks": blocks, "loss": mean, "agreement": shares})
            some = " ".join(f"{shares[i]:.3f}" for i in (0, 1, 3, 7, 14))
            log(
                f"drafter step {step} {elapsed:.0f} s {blocks / 1e6:.2f} M blocks"
                f" loss {mean:.3f} agreement at 1, 2, 4, 8, 15: {some}"
            )
    drafter.blocks, target.blocks = list(drafter.layers), list(target.layers)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.copy_(parameter.bfloat16().float())
    return history


def new_drafter(config: DrafterConfig, target: Target, device: Device) -> Drafter:
    """A drafter with its starting weights."""
    torch.manual_seed(7)
    return Drafter(config, target.config).to(device.name)


def main() -> None:
    """Command line of the stage."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, required=True, help="folder with target.pt, pool.pt")
    parser.add_argument("--seconds", type=float, default=540.0, help="training time")
    arguments = parser.parse_args()
    device = Device()
    target = load_target(arguments.run / "target.pt", device)
    assert target.config == NANO
    pool = torch.load(arguments.run / "pool.pt", map_location=device.name)
    drafter = new_drafter(NANO_DRAFTER, target, device)
    history = train(drafter, target, pool, device, DrafterSettings(arguments.seconds))
    torch.save({"weights": drafter.state_dict(), "history": history}, arguments.run / "drafter.pt")


if __name__ == "__main__":
    main()
