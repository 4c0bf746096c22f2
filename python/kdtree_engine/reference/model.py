"""The target's forward pass over a tree: DeepSeek-V3's architecture, as Kimi K2 uses it."""

import os
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from kdtree_engine.kdtr import BF16Array
from kdtree_engine.reference import moe, rope
from kdtree_engine.reference.accept import compaction_rows
from kdtree_engine.reference.attention import mla_attention
from kdtree_engine.reference.checkpoint import read_config, read_tensors, rope_keys, to_numpy
from kdtree_engine.reference.quant import dequantize

Floats = npt.NDArray[Any]


def rms_norm(x: Floats, weight: Floats, eps: float) -> Floats:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis, in x's dtype."""
    mean_square = np.mean(x * x, axis=-1, keepdims=True)
    return x / np.sqrt(mean_square + float(eps)) * weight


def chain(length: int) -> npt.NDArray[np.int32]:
    """The parents of a chain: -1, 0, 1, ..."""
    return np.arange(-1, length - 1, dtype=np.int32)


def depths(parents: npt.ArrayLike) -> npt.NDArray[np.int64]:
    """The depth of each slot; the root's is 0."""
    above = np.asarray(parents)
    result = np.zeros(len(above), np.int64)
    for slot in range(1, len(above)):
        result[slot] = result[above[slot]] + 1
    return result


def latent_eps(config: dict[str, Any]) -> float:
    """eps of q_a_layernorm and kv_a_layernorm.

    The key latent_rms_norm_eps when present. Else 1e-6 for model_type deepseek_v3, whose reference
    code builds these two norms without the config's eps, and rms_norm_eps for the kimi dialects, as
    their serving engines do; a text_config is Kimi's, whichever of the two types it names.
    """
    if "latent_rms_norm_eps" in config:
        return float(config["latent_rms_norm_eps"])
    deepseek = config.get("model_type") == "deepseek_v3" and "text_config" not in config
    return 1e-6 if deepseek else float(config["rms_norm_eps"])


@dataclass
class LatentCache:
    """The latent rows of one sequence, [length, kv_lora_rank + qk_rope_head_dim] a layer."""

    layers: list[Floats]

    def __len__(self) -> int:
        return len(self.layers[0])

    def commit(self, accepted: list[int], prefix_len: int) -> None:
        """Keeps the prefix and the accepted slots' rows, in order."""
        rows, _ = compaction_rows(accepted, prefix_len)
        self.layers = [np.concatenate([c[:prefix_len], c[rows]]) for c in self.layers]


@dataclass
class Forward:
    """What a forward pass gives."""

    logits: Floats  # [T, vocab_size]
    hidden: list[Floats] = field(repr=False)  # residual stream [T, hidden_size] after each layer

    def features(self, target_layer_ids: list[int]) -> Floats:
        """[T, n * hidden_size] the drafter's features: the streams after these layers."""
        return np.concatenate([self.hidden[layer] for layer in target_layer_ids], axis=-1)


class TargetModel:
    """A checkpoint folder, computed in `dtype` (float64 or float32). Weights are held unpacked."""

    def __init__(self, folder: str | os.PathLike[str], dtype: npt.DTypeLike = np.float64) -> None:
        self.config = read_config(folder)
        self.dtype = np.dtype(dtype)
        tensors = read_tensors(folder)
        nested = any(name.startswith("language_model.") for name in tensors)
        self._prefix = "language_model." if nested else ""
        self._weights: dict[str, Floats] = {}
        for name, tensor in tensors.items():
            if name.endswith(".weight_packed"):
                module = name.removesuffix("_packed")
                scale = tensors[module + "_scale"]
                assert isinstance(tensor, np.ndarray) and isinstance(scale, BF16Array)
                self._weights[module] = dequantize(tensor, scale).astype(self.dtype)
            elif not name.endswith((".weight_scale", ".weight_shape")):
                self._weights[name] = to_numpy(tensor, self.dtype)
        c = self.config
        theta, self._yarn = rope_keys(c)
        self._frequencies = rope.inverse_frequencies(c["qk_rope_head_dim"], theta, self._yarn)
        head_dim = c["qk_nope_head_dim"] + c["qk_rope_head_dim"]
        self.scale = rope.softmax_scale(head_dim, self._yarn)
        self.latent_eps = latent_eps(c)

    def new_cache(self) -> LatentCache:
        """The cache of an empty sequence."""
        width = self.config["kv_lora_rank"] + self.config["qk_rope_head_dim"]
        empty = np.zeros((0, width), self.dtype)
        return LatentCache([empty] * self.config["num_hidden_layers"])

    def embed(self, tokens: npt.ArrayLike) -> Floats:
        """[T, hidden_size] the rows of the embedding."""
        return self._weight("model.embed_tokens")[np.asarray(tokens)]

    def head(self, hidden: Floats) -> Floats:
        """[T, vocab_size] logits of normed hidden states; the drafter shares this product."""
        tied = self.config.get("tie_word_embeddings", False)
        return hidden @ self._weight("model.embed_tokens" if tied else "lm_head").T

    def forward(self, tokens: npt.ArrayLike, parents: npt.ArrayLike, cache: LatentCache) -> Forward:
        """Runs the slots of a tree behind `cache` and appends their rows to it.

        `tokens`, `parents` [T]: slot 0 is the root (parent -1), a parent comes before its children.
        A slot stands at position len(cache) + depth and sees the whole cache, its ancestors and
        itself. A prompt is a `chain`.
        """
        positions = len(cache) + depths(parents)
        cos_sin = rope.cos_sin(positions, self._frequencies, rope.rotation_scale(self._yarn))
        eps = self.config["rms_norm_eps"]
        x = self.embed(tokens)
        hidden = []
        for layer in range(self.config["num_hidden_layers"]):
            name = f"model.layers.{layer}"
            normed = rms_norm(x, self._weight(f"{name}.input_layernorm"), eps)
            x = x + self._attention(f"{name}.self_attn", normed, parents, cos_sin, cache, layer)
            normed = rms_norm(x, self._weight(f"{name}.post_attention_layernorm"), eps)
            x = x + self._feed_forward(f"{name}.mlp", normed, layer)
            hidden.append(x)
        return Forward(self.head(rms_norm(x, self._weight("model.norm"), eps)), hidden)

    def _weight(self, module: str) -> Floats:
        return self._weights[f"{self._prefix}{module}.weight"]

    def _attention(
        self,
        name: str,
        x: Floats,
        parents: npt.ArrayLike,
        cos_sin: tuple[Floats, Floats],
        cache: LatentCache,
        layer: int,
    ) -> Floats:
        c = self.config
        heads, nope, rank = c["num_attention_heads"], c["qk_nope_head_dim"], c["kv_lora_rank"]
        interleaved = c.get("rope_interleave", True)
        if c.get("q_lora_rank"):
            q = x @ self._weight(f"{name}.q_a_proj").T
            q = rms_norm(q, self._weight(f"{name}.q_a_layernorm"), self.latent_eps)
            q = q @ self._weight(f"{name}.q_b_proj").T
        else:
            q = x @ self._weight(f"{name}.q_proj").T
        q = q.reshape(len(x), heads, -1)
        q_rope = rope.rotate(q[:, :, nope:], *cos_sin, interleaved)

        kv = x @ self._weight(f"{name}.kv_a_proj_with_mqa").T
        latent = rms_norm(kv[:, :rank], self._weight(f"{name}.kv_a_layernorm"), self.latent_eps)
        k_rope = rope.rotate(kv[:, None, rank:], *cos_sin, interleaved)[:, 0]
        rows = np.concatenate([latent, k_rope], axis=1)
        cache.layers[layer] = np.concatenate([cache.layers[layer], rows])

        kv_b = self._weight(f"{name}.kv_b_proj").reshape(heads, nope + c["v_head_dim"], rank)
        q_latent = np.einsum("thn,hnc->thc", q[:, :, :nope], kv_b[:, :nope])
        mixed = mla_attention(
            q_latent, q_rope, cache.layers[layer], parents, self.scale, self.dtype
        )
        values = np.einsum("thc,hvc->thv", mixed, kv_b[:, nope:])
        return values.reshape(len(x), -1) @ self._weight(f"{name}.o_proj").T

    def _feed_forward(self, name: str, x: Floats, layer: int) -> Floats:
        c = self.config
        sparse = c.get("n_routed_experts") and layer >= c.get("first_k_dense_replace", 0)
        if not sparse or layer % c.get("moe_layer_freq", 1) != 0:
            return moe.mlp(x, *self._gated(name))
        bias = f"{self._prefix}{name}.gate.e_score_correction_bias"
        ids, weights = moe.route(
            x @ self._weight(f"{name}.gate").T,
            self._weights[bias],
            c["num_experts_per_tok"],
            c.get("n_group", 1),
            c.get("topk_group", 1),
            c.get("norm_topk_prob", True),
            c.get("routed_scaling_factor", 1.0),
            self.dtype,
        )
        matrices = [self._gated(f"{name}.experts.{e}") for e in range(c["n_routed_experts"])]
        routed = moe.experts(x, ids, weights, matrices)
        if not c.get("n_shared_experts"):
            return routed
        return routed + moe.mlp(x, *self._gated(f"{name}.shared_experts"))

    def _gated(self, name: str) -> tuple[Floats, Floats, Floats]:
        """The three matrices of a gated MLP."""
        gate, up, down = (self._weight(f"{name}.{part}_proj") for part in ("gate", "up", "down"))
        return gate, up, down
