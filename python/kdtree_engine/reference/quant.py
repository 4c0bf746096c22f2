"""INT4 weights in compressed-tensors' `pack-quantized` layout: a bf16 scale for 32 columns."""

from typing import Any

import numpy as np
import numpy.typing as npt

from kdtree_engine.kdtr import BF16Array, to_bf16

GROUP_SIZE = 32
I8 = npt.NDArray[np.int8]


def pack_int4(codes: npt.NDArray[Any]) -> npt.NDArray[np.int32]:
    """[N, K] codes -8 ... 7 to [N, K / 8] words.

    Code k lies in word k / 8 at bits 4 (k % 8), stored as code + 8.
    Raises ValueError for a code out of range and a K that is no multiple of 8.
    """
    if codes.min(initial=0) < -8 or codes.max(initial=0) > 7:
        raise ValueError(f"codes reach from {codes.min()} to {codes.max()}, want -8 to 7")
    if codes.shape[1] % 8 != 0:
        raise ValueError(f"codes have {codes.shape[1]} columns, want a multiple of 8")
    nibbles = (codes.astype(np.int64) + 8).astype(np.uint32).reshape(len(codes), -1, 8)
    words = np.bitwise_or.reduce(nibbles << np.arange(0, 32, 4, dtype=np.uint32), axis=-1)
    return words.astype(np.uint32).view(np.int32)


def unpack_int4(packed: npt.NDArray[np.int32]) -> I8:
    """[N, K / 8] words to [N, K] codes -8 ... 7."""
    words = np.ascontiguousarray(packed).view(np.uint32)
    nibbles = (words[:, :, None] >> np.arange(0, 32, 4, dtype=np.uint32)) & np.uint32(15)
    return (nibbles.astype(np.int8) - np.int8(8)).reshape(len(words), -1)


def dequantize(packed: npt.NDArray[np.int32], scale: BF16Array) -> npt.NDArray[np.float32]:
    """[N, K] float32 weights code * scale; the product is exact in float32.

    `packed` [N, K / 8], `scale` [N, K / 32]. (compressed-tensors rounds this product to bf16; the
    engine does not.)
    """
    codes = unpack_int4(packed).astype(np.float32)
    return codes * np.repeat(scale.to_float32(), GROUP_SIZE, axis=1)


def quantize(weight: npt.NDArray[np.float32]) -> tuple[I8, BF16Array]:
    """[N, K] weights to codes -7 ... 7 and bf16 scales [N, K / 32], greatest / 7."""
    groups = weight.reshape(len(weight), -1, GROUP_SIZE)
    scale = to_bf16(np.maximum(np.abs(groups).max(axis=-1), 1e-8) / np.float32(7))
    codes = np.rint(groups / scale.to_float32()[:, :, None]).clip(-7, 7)
    return codes.astype(np.int8).reshape(weight.shape), scale
