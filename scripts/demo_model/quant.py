"""INT4 in groups of 32 along the input dimension, as compressed-tensors' `pack-quantized`.

The scale is absmax / 7 rounded to bf16 *before* it divides, so that a weight that has been
through `dequantized` quantises to itself and the exported file holds exactly what was trained.
"""

import torch
from torch import Tensor


def quantize(weight: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """(q, scale) of weights [..., out, in]: int8 of the same shape in [-8, 7], and bf16
    [..., out, in / group_size]."""
    grouped = weight.float().unflatten(-1, (-1, group_size))
    scale = (grouped.abs().amax(-1) / 7).clamp_min(1e-8).bfloat16()
    q = (grouped / scale.float().unsqueeze(-1)).round().clamp(-8, 7)
    return q.flatten(-2).to(torch.int8), scale


def dequantize(q: Tensor, scale: Tensor) -> Tensor:
    """q * scale in float32."""
    grouped = q.float().unflatten(-1, (scale.shape[-1], -1))
    return (grouped * scale.float().unsqueeze(-1)).flatten(-2)


def dequantized(weight: Tensor, group_size: int) -> Tensor:
    """The float32 weights that INT4 can hold nearest to `weight`."""
    return dequantize(*quantize(weight, group_size))


def fake_quantized(weight: Tensor, group_size: int) -> Tensor:
    """`dequantized` in the forward pass, the identity in the backward pass."""
    return weight + (dequantized(weight, group_size) - weight).detach()


def pack(q: Tensor) -> Tensor:
    """int32 [out, in / 8] from int8 [out, in]: column 8j + i in bits 4i to 4i + 3, plus 8."""
    nibbles = (q.to(torch.int64) + 8).unflatten(-1, (-1, 8))
    words = (nibbles << (4 * torch.arange(8))).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def unpack(words: Tensor) -> Tensor:
    """Inverse of `pack`."""
    nibbles = (words.to(torch.int64).unsqueeze(-1) >> (4 * torch.arange(8))) & 15
    return (nibbles - 8).flatten(-2).to(torch.int8)
