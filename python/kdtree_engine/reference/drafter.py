"""The DFlash drafter (arXiv 2602.06036): Qwen3-style layers that fill a block in one pass."""

import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kdtree_engine.reference import moe, rope
from kdtree_engine.reference.attention import gqa_attention
from kdtree_engine.reference.checkpoint import read_config, read_tensors, rope_keys, to_numpy
from kdtree_engine.reference.model import TargetModel, rms_norm

Floats = npt.NDArray[Any]


@dataclass
class DraftContext:
    """Rotated keys and values of the committed tokens, [length, kv_heads, head_dim] a layer."""

    keys: list[Floats]
    values: list[Floats]

    def __len__(self) -> int:
        return len(self.keys[0])


class DraftModel:
    """A drafter's checkpoint folder, computed in `dtype`. Embedding and head are the target's."""

    def __init__(self, folder: str | os.PathLike[str], dtype: npt.DTypeLike = np.float64) -> None:
        c = self.config = read_config(folder)
        self.dtype = np.dtype(dtype)
        self._weights = {
            name.removeprefix("model."): to_numpy(tensor, dtype)
            for name, tensor in read_tensors(folder).items()
        }
        options = c | c.get("dflash_config", {})  # each of these keys stands in either place
        self.block_size: int = options["block_size"]
        self.target_layer_ids: list[int] = options["target_layer_ids"]
        self.mask_token_id: int = options["mask_token_id"]
        theta, self._yarn = rope_keys(c)
        self._frequencies = rope.inverse_frequencies(c["head_dim"], theta, self._yarn)
        all_slide = options.get("use_swa", False)
        window = options["swa_window_size"] if all_slide else options.get("sliding_window", 0)
        kind = "sliding_attention" if all_slide else "full_attention"
        kinds = c.get("layer_types") or [kind] * c["num_hidden_layers"]
        self.layer_window = [window if k == "sliding_attention" else 0 for k in kinds]
        # Where the checkpoint does not say: sliding layers are causal, full ones are not.
        causal = options.get("causal", options.get("is_causal"))
        self.layer_causal = [w > 0 if causal is None else causal for w in self.layer_window]

    def new_context(self) -> DraftContext:
        """The context of an empty sequence."""
        empty = np.zeros(
            (0, self.config["num_key_value_heads"], self.config["head_dim"]), self.dtype
        )
        layers = self.config["num_hidden_layers"]
        return DraftContext([empty] * layers, [empty] * layers)

    def extend(self, context: DraftContext, features: Floats) -> None:
        """Appends committed tokens, with the target's `features` [S, n * hidden_size] at them."""
        c = rms_norm(features @ self._weight("fc").T, self._weight("hidden_norm"), self._eps)
        positions = len(context) + np.arange(len(c))
        for layer in range(self.config["num_hidden_layers"]):
            k, v = self._keys_and_values(layer, c, positions)
            context.keys[layer] = np.concatenate([context.keys[layer], k])
            context.values[layer] = np.concatenate([context.values[layer], v])

    def forward(self, block: Floats, context: DraftContext) -> Floats:
        """Normed hidden states [b, hidden_size] of a block behind `context`, which stays as it is.

        `block` [b, hidden_size]: the target's embeddings of the root and of b - 1 mask tokens. Row
        j stands at position len(context) + j and, through the target's head, predicts the token at
        this position; row 0 is not used.
        """
        x = block
        positions = len(context) + np.arange(len(block))
        head_dim = self.config["head_dim"]
        for layer in range(self.config["num_hidden_layers"]):
            name = f"layers.{layer}"
            h = rms_norm(x, self._weight(f"{name}.input_layernorm"), self._eps)
            q = (h @ self._weight(f"{name}.self_attn.q_proj").T).reshape(len(x), -1, head_dim)
            q = rms_norm(q, self._weight(f"{name}.self_attn.q_norm"), self._eps)
            k, v = self._keys_and_values(layer, h, positions)
            mixed = gqa_attention(
                self._rotate(q, positions),
                np.concatenate([context.keys[layer], k]),
                np.concatenate([context.values[layer], v]),
                len(context),
                self.layer_causal[layer],
                self.layer_window[layer],
                head_dim**-0.5,
                self.dtype,
            )
            x = x + mixed.reshape(len(x), -1) @ self._weight(f"{name}.self_attn.o_proj").T
            h = rms_norm(x, self._weight(f"{name}.post_attention_layernorm"), self._eps)
            matrices = (self._weight(f"{name}.mlp.{p}_proj") for p in ("gate", "up", "down"))
            x = x + moe.mlp(h, *matrices)
        return rms_norm(x, self._weight("norm"), self._eps)

    def draft_logits(self, root_token: int, context: DraftContext, target: TargetModel) -> Floats:
        """[block_size - 1, vocab_size] logits of the tokens after `root_token`."""
        block = [root_token] + [self.mask_token_id] * (self.block_size - 1)
        return target.head(self.forward(target.embed(block), context)[1:])

    @property
    def _eps(self) -> float:
        return float(self.config["rms_norm_eps"])

    def _weight(self, module: str) -> Floats:
        return self._weights[f"{module}.weight"]

    def _rotate(self, x: Floats, positions: npt.NDArray[np.int64]) -> Floats:
        scale = rope.rotation_scale(self._yarn)
        return rope.rotate(x, *rope.cos_sin(positions, self._frequencies, scale), False)

    def _keys_and_values(
        self, layer: int, x: Floats, positions: npt.NDArray[np.int64]
    ) -> tuple[Floats, Floats]:
        name = f"layers.{layer}.self_attn"
        shape = (len(x), self.config["num_key_value_heads"], self.config["head_dim"])
        k = (x @ self._weight(f"{name}.k_proj").T).reshape(shape)
        k = rms_norm(k, self._weight(f"{name}.k_norm"), self._eps)
        v = (x @ self._weight(f"{name}.v_proj").T).reshape(shape)
        return self._rotate(k, positions), v
