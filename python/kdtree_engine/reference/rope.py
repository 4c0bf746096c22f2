"""Rotary position embedding, plain and yarn (arXiv 2309.00071), in both pairings."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]
Floats = npt.NDArray[Any]


def yarn_mscale(factor: float, mscale: float) -> float:
    """The attention factor m(s, c) = 0.1 c ln s + 1."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def inverse_frequencies(dim: int, theta: float, yarn: Mapping[str, Any] | None = None) -> F64:
    """[dim / 2] radians a position. `yarn`: the checkpoint's rope_scaling, None for plain rope.

    Yarn keeps the frequencies that turn more than beta_fast times within the original context,
    divides those that turn less than beta_slow times by `factor`, and blends linearly between.
    """
    plain = theta ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)
    if yarn is None:
        return plain
    context = yarn["original_max_position_embeddings"]

    def index_of(turns: float) -> float:
        return dim * math.log(context / (2 * math.pi * turns)) / (2 * math.log(theta))

    low, high = index_of(yarn.get("beta_fast", 32.0)), index_of(yarn.get("beta_slow", 1.0))
    if yarn.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low if high != low else 0.001
    ramp = np.clip((np.arange(dim // 2) - low) / width, 0, 1)
    return plain * (1 - ramp) + plain / yarn["factor"] * ramp


def rotation_scale(yarn: Mapping[str, Any] | None) -> float:
    """What yarn multiplies the cosines and sines by: m(factor, mscale) / m(factor, mscale_all_dim).

    Without those two keys (Qwen3's spelling) it is `attention_factor`, or m(factor, 1) when that is
    absent too.
    """
    if yarn is None:
        return 1.0
    factor = yarn["factor"]
    if yarn.get("attention_factor") is not None:
        return float(yarn["attention_factor"])
    if yarn.get("mscale") and yarn.get("mscale_all_dim"):
        return yarn_mscale(factor, yarn["mscale"]) / yarn_mscale(factor, yarn["mscale_all_dim"])
    return yarn_mscale(factor, 1.0)


def softmax_scale(head_dim: int, yarn: Mapping[str, Any] | None) -> float:
    """MLA's softmax scale: head_dim^-1/2, times m(factor, mscale_all_dim)^2 under yarn."""
    scale = head_dim**-0.5
    if yarn is not None and yarn.get("mscale_all_dim"):
        scale *= yarn_mscale(yarn["factor"], yarn["mscale_all_dim"]) ** 2
    return float(scale)


def cos_sin(positions: npt.ArrayLike, frequencies: F64, scale: float = 1.0) -> tuple[F64, F64]:
    """Cosines and sines [T, dim / 2] of the angles position * frequency, times `scale`."""
    angles = np.asarray(positions, dtype=np.float64)[:, None] * frequencies
    return np.cos(angles) * scale, np.sin(angles) * scale


def rotate(x: Floats, cos: Floats, sin: Floats, interleaved: bool) -> Floats:
    """Rotates x [T, heads, dim] by the angles of its row; the result keeps x's dtype and order.

    Angle i turns the pair (2i, 2i + 1) when `interleaved` (DeepSeek, Kimi), else (i, i + dim / 2)
    (Qwen, Llama).
    """
    c, s = cos[:, None, :].astype(x.dtype), sin[:, None, :].astype(x.dtype)
    out = np.empty_like(x)
    half = x.shape[-1] // 2
    first = slice(0, None, 2) if interleaved else slice(0, half)
    second = slice(1, None, 2) if interleaved else slice(half, None)
    a, b = x[..., first], x[..., second]
    out[..., first] = a * c - b * s
    out[..., second] = a * s + b * c
    return out
