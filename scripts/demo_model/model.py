"""The target: DeepSeek-V3 / Kimi K2's architecture in PyTorch, for training.

Parameters are float32 masters; every product runs in the dtype of the activations, which is
bf16 on a GPU and float32 on a CPU. Module names are the checkpoint's.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .config import TargetConfig
from .experts import Experts
from .layers import MLP, initialize, linear, rms_norm


def yarn_tables(config: TargetConfig) -> tuple[Tensor, Tensor]:
    """cos and sin [max_position, rope_dim / 2] of yarn (Peng et al. 2023, section 3), with the
    ramp between 32 and 1 rotations. mscale = mscale_all_dim, so the tables are not scaled."""
    dim, base = config.qk_rope_head_dim, config.rope_theta
    frequency = base ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)

    def dimension_at(rotations: float) -> float:
        wavelength = config.original_max_position_embeddings / (rotations * 2 * math.pi)
        return dim * math.log(wavelength) / (2 * math.log(base))

    low = max(math.floor(dimension_at(32)), 0)
    high = min(math.ceil(dimension_at(1)), dim - 1)
    ramp = (torch.arange(dim // 2, dtype=torch.float64) - low) / max(high - low, 1e-3)
    ramp = ramp.clamp(0, 1)
    frequency = frequency * (1 - ramp) + frequency / config.yarn_factor * ramp
    position = torch.arange(config.max_position_embeddings, dtype=torch.float64)
    angle = position[:, None] * frequency
    return angle.cos().float(), angle.sin().float()


def softmax_scale(config: TargetConfig) -> float:
    """1 / sqrt(head_dim) times the square of yarn's attention factor."""
    return config.qk_head_dim**-0.5 * (0.1 * math.log(config.yarn_factor) + 1) ** 2


def rotate_interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the pairs (0, 1), (2, 3), ... of the last dimension."""
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1)
    return turned.flatten(-2).to(x.dtype)


class Attention(nn.Module):
    """Multi-head latent attention in its expanded form."""

    def __init__(self, config: TargetConfig) -> None:
        super().__init__()
        c = self.config = config
        heads = c.num_attention_heads
        self.q_a_proj = nn.Linear(c.hidden_size, c.q_lora_rank, bias=False)
        self.q_a_layernorm = nn.RMSNorm(c.q_lora_rank)
        self.q_b_proj = nn.Linear(c.q_lora_rank, heads * c.qk_head_dim, bias=False)
        latent = c.kv_lora_rank + c.qk_rope_head_dim
        self.kv_a_proj_with_mqa = nn.Linear(c.hidden_size, latent, bias=False)
        self.kv_a_layernorm = nn.RMSNorm(c.kv_lora_rank)
        kv = heads * (c.qk_nope_head_dim + c.v_head_dim)
        self.kv_b_proj = nn.Linear(c.kv_lora_rank, kv, bias=False)
        self.o_proj = nn.Linear(heads * c.v_head_dim, c.hidden_size, bias=False)

    def queries(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """(nope, rope) parts [..., heads, dim] of the queries; cos and sin broadcast to them."""
        c = self.config
        low = rms_norm(linear(x, self.q_a_proj), self.q_a_layernorm.weight, c.latent_rms_norm_eps)
        q = linear(low, self.q_b_proj).unflatten(-1, (c.num_attention_heads, c.qk_head_dim))
        nope, rope = q.split([c.qk_nope_head_dim, c.qk_rope_head_dim], -1)
        return nope, rotate_interleaved(rope, cos, sin)

    def latents(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """The normed latent [..., kv_lora] and the shared rope key [..., rope_dim]."""
        c = self.config
        row = linear(x, self.kv_a_proj_with_mqa)
        latent, rope = row.split([c.kv_lora_rank, c.qk_rope_head_dim], -1)
        latent = rms_norm(latent, self.kv_a_layernorm.weight, c.latent_rms_norm_eps)
        return latent, rotate_interleaved(rope, cos, sin)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Causal attention over x [batch, time, hidden]; cos and sin [time, rope_dim / 2]."""
        c = self.config
        heads = c.num_attention_heads
        q_nope, q_rope = self.queries(x, cos[:, None], sin[:, None])
        latent, k_rope = self.latents(x, cos, sin)
        kv = linear(latent, self.kv_b_proj).unflatten(-1, (heads, -1))
        k_nope, v = kv.split([c.qk_nope_head_dim, c.v_head_dim], -1)
        k_rope = k_rope.unsqueeze(-2).expand(*k_rope.shape[:-1], heads, -1)
        q = torch.cat((q_nope, q_rope), -1).transpose(1, 2)
        k = torch.cat((k_nope, k_rope), -1).transpose(1, 2)
        out = F.scaled_dot_product_attention(
            q, k, v.transpose(1, 2), is_causal=True, scale=softmax_scale(c)
        )
        return linear(out.transpose(1, 2).flatten(2), self.o_proj)


class Layer(nn.Module):
    """One decoder layer."""

    def __init__(self, config: TargetConfig, index: int) -> None:
        super().__init__()
        self.eps = config.rms_norm_eps
        self.input_layernorm = nn.RMSNorm(config.hidden_size)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size)
        self.dense = index < config.first_k_dense_replace
        self.mlp: MLP | Experts = (
            MLP(config.hidden_size, config.intermediate_size) if self.dense else Experts(config)
        )

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """(hidden states, expert loads, balance loss); the last two are None when dense."""
        x = x + self.self_attn(rms_norm(x, self.input_layernorm.weight, self.eps), cos, sin)
        h = rms_norm(x, self.post_attention_layernorm.weight, self.eps)
        if self.dense:
            return x + self.mlp(h), None, None
        y, load, balance = self.mlp(h)
        return x + y, load, balance


class Target(nn.Module):
    """The whole target. `blocks` are the layers as they are called, perhaps compiled."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: TargetConfig, dtype: torch.dtype) -> None:
        super().__init__()
        c = self.config = config
        self.dtype = dtype
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(Layer(c, i) for i in range(c.num_hidden_layers))
        self.norm = nn.RMSNorm(c.hidden_size)
        self.lm_head = nn.Linear(c.hidden_size, c.vocab_size, bias=False)
        cos, sin = yarn_tables(c)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self.blocks: list[Any] = list(self.layers)
        initialize(self, 2 * c.num_hidden_layers)

    def decoder_layers(self) -> list[Layer]:
        """The layers in order, with their type."""
        return [layer for layer in self.layers if isinstance(layer, Layer)]

    def experts(self) -> list[Experts]:
        """The expert layers in order."""
        return [layer.mlp for layer in self.decoder_layers() if isinstance(layer.mlp, Experts)]

    def embed(self, ids: Tensor) -> Tensor:
        """Embeddings in the dtype of the activations."""
        return F.embedding(ids, self.embed_tokens.weight).to(self.dtype)

    def forward(
        self, ids: Tensor, taps: tuple[int, ...] = ()
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        """For ids [batch, time]: the normed hidden states, the outputs of the layers `taps`
        side by side (None without taps), expert loads [layers, experts], balance loss."""
        x = self.embed(ids)
        cos, sin = self.cos[: ids.shape[1]], self.sin[: ids.shape[1]]
        tapped, loads = [], []
        total = torch.zeros((), device=ids.device)
        for index, block in enumerate(self.blocks):
            x, load, balance = block(x, cos, sin)
            if load is not None and balance is not None:
                loads.append(load)
                total = total + balance
            if index in taps:
                tapped.append(x)
        hidden = rms_norm(x, self.norm.weight, self.config.rms_norm_eps)
        features = torch.cat(tapped, -1) if taps else None
        return hidden, features, torch.stack(loads), total

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 logits."""
        return linear(hidden, self.lm_head).float()
