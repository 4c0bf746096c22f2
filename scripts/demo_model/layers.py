"""Pieces that the target and the drafter share. Parameters are float32 masters; every product
runs in the dtype of the activations."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm computed in float32."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


def linear(x: Tensor, layer: nn.Linear) -> Tensor:
    """A linear layer with its master weights cast to the dtype of `x`."""
    return F.linear(x, layer.weight.to(x.dtype))


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., hidden] to the same shape."""
        return linear(F.silu(linear(x, self.gate_proj)) * linear(x, self.up_proj), self.down_proj)


def initialize(model: nn.Module, residual_writes: int) -> None:
    """Normal with 1 / sqrt(fan-in), smaller where a matrix writes to the residual stream."""
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2:
            continue
        std = parameter.shape[-1] ** -0.5
        if "embed_tokens" in name:
            std = 0.5
        elif "lm_head" in name:
            std *= 0.5
        elif name.endswith("mlp.gate.weight"):
            std = 0.02
        elif "o_proj" in name or "down_proj" in name:
            std *= residual_writes**-0.5
        nn.init.normal_(parameter, 0.0, std)
