"""Reads an exported folder back into PyTorch and measures its bench prompts.

This is what `kdtree bench` can be compared with: the same files, prompts and budgets, in
float32 on a CPU or bf16 on a GPU, and no tree attention.
"""

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from . import tokenizer
from .config import NANO, NANO_DRAFTER, DrafterConfig, TargetConfig
from .device import Device
from .dflash import Drafter
from .evaluate import bench_acceptance
from .model import Target
from .quant import dequantize, unpack


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Float32 tensors of a checkpoint by name, INT4 weights dequantised as `weight`."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    stored: dict[str, Tensor] = {}
    for file in sorted(set(index["weight_map"].values())):
        stored |= load_file(folder / file)
    tensors = {}
    for name, tensor in stored.items():
        base, _, kind = name.rpartition(".")
        if kind == "weight_packed":
            q = unpack(tensor)
            tensors[base + ".weight"] = dequantize(q, stored[base + ".weight_scale"])
        elif kind not in ("weight_scale", "weight_shape"):
            tensors[name] = tensor.float()
    return tensors


def load(
    folder: Path, config: TargetConfig, drafter_config: DrafterConfig, device: Device
) -> tuple[Target, Drafter]:
    """The target and the drafter of an exported folder."""
    tensors = read_tensors(folder)
    target = Target(config, device.dtype)
    weights = {}
    for name in target.state_dict():
        layer, _, leaf = name.rpartition(".")
        if leaf == "correction_bias":
            weights[name] = tensors[f"model.{layer}.gate.e_score_correction_bias"]
        elif leaf in ("gate_proj", "up_proj", "down_proj"):
            experts = range(config.n_routed_experts)
            parts = [tensors[f"model.{layer}.experts.{e}.{leaf}.weight"] for e in experts]
            weights[name] = torch.stack(parts)
        else:
            weights[name] = tensors[name if name.startswith("lm_head") else "model." + name]
    target.load_state_dict(weights)
    drafter = Drafter(drafter_config, config)
    drafter.load_state_dict(load_file(folder / "drafter" / "model.safetensors"))
    target.requires_grad_(False)
    drafter.requires_grad_(False)
    return target.to(device.name), drafter.to(device.name)


def main() -> None:
    """Command line: the acceptance of a folder's bench prompts as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="the exported folder")
    arguments = parser.parse_args()
    folder: Path = arguments.model
    device = Device()
    target, drafter = load(folder, NANO, NANO_DRAFTER, device)
    bench = json.loads((folder / "heldout_prompts.json").read_text())
    encoding = tokenizer.load(folder / "tiktoken.model")
    tables = bench_acceptance(target, drafter, bench, encoding, device, None)
    print(json.dumps(tables, indent=1))


if __name__ == "__main__":
    main()
