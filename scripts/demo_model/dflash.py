"""The DFlash drafter's network, with the names of z-lab's checkpoints.

A block is the last committed token followed by masks; its positions attend to the target's
tapped features at earlier positions and to each other in both directions. Embedding and
head are the target's.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .config import DrafterConfig, TargetConfig
from .layers import MLP, initialize, linear, rms_norm


def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the pairs (i, i + dim / 2) of the last dimension."""
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


class BlockAttention(nn.Module):
    """Grouped-query attention of block rows over context rows and block rows."""

    def __init__(self, hidden: int, config: DrafterConfig) -> None:
        super().__init__()
        c = self.config = config
        self.q_proj = nn.Linear(hidden, c.num_attention_heads * c.head_dim, bias=False)
        self.k_proj = nn.Linear(hidden, c.num_key_value_heads * c.head_dim, bias=False)
        self.v_proj = nn.Linear(hidden, c.num_key_value_heads * c.head_dim, bias=False)
        self.o_proj = nn.Linear(c.num_attention_heads * c.head_dim, hidden, bias=False)
        self.q_norm = nn.RMSNorm(c.head_dim)
        self.k_norm = nn.RMSNorm(c.head_dim)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2)

    def forward(self, x: Tensor, context: Tensor, rope: list[Tensor], mask: Tensor) -> Tensor:
        """x [batch, rows, hidden], context [batch, time, hidden]; rope: cos and sin of the rows,
        cos and sin of the context; mask [batch, 1, rows, time + rows], added to the scores."""
        c = self.config
        row_cos, row_sin, context_cos, context_sin = rope
        q = rms_norm(self._heads(linear(x, self.q_proj)), self.q_norm.weight, c.rms_norm_eps)
        q = rotate_halves(q, row_cos, row_sin)
        keys, values = [], []
        for source, cos, sin in ((context, context_cos, context_sin), (x, row_cos, row_sin)):
            k = self._heads(linear(source, self.k_proj))
            k = rms_norm(k, self.k_norm.weight, c.rms_norm_eps)
            keys.append(rotate_halves(k, cos, sin))
            values.append(self._heads(linear(source, self.v_proj)))
        repeat = c.num_attention_heads // c.num_key_value_heads
        k = torch.cat(keys, 2).repeat_interleave(repeat, 1)
        v = torch.cat(values, 2).repeat_interleave(repeat, 1)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return linear(out.transpose(1, 2).flatten(2), self.o_proj)


class DrafterLayer(nn.Module):
    """One Qwen3-style layer."""

    def __init__(self, hidden: int, config: DrafterConfig) -> None:
        super().__init__()
        self.eps = config.rms_norm_eps
        self.input_layernorm = nn.RMSNorm(hidden)
        self.self_attn = BlockAttention(hidden, config)
        self.post_attention_layernorm = nn.RMSNorm(hidden)
        self.mlp = MLP(hidden, config.intermediate_size)

    def forward(self, x: Tensor, context: Tensor, rope: list[Tensor], mask: Tensor) -> Tensor:
        """As `BlockAttention`."""
        h = rms_norm(x, self.input_layernorm.weight, self.eps)
        x = x + self.self_attn(h, context, rope, mask)
        return x + self.mlp(rms_norm(x, self.post_attention_layernorm.weight, self.eps))


class Drafter(nn.Module):
    """The drafter. `blocks` are the layers as they are called, perhaps compiled."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: DrafterConfig, target: TargetConfig) -> None:
        super().__init__()
        self.config, self.mask_token = config, target.special("<|mask|>")
        hidden = target.hidden_size
        self.fc = nn.Linear(len(config.target_layer_ids) * hidden, hidden, bias=False)
        self.hidden_norm = nn.RMSNorm(hidden)
        self.layers = nn.ModuleList(
            DrafterLayer(hidden, config) for _ in range(config.num_hidden_layers)
        )
        self.norm = nn.RMSNorm(hidden)
        dim = config.head_dim
        frequency = config.rope_theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
        position = torch.arange(target.max_position_embeddings, dtype=torch.float64)
        angle = position[:, None] * frequency
        self.register_buffer("cos", angle.cos().float(), persistent=False)
        self.register_buffer("sin", angle.sin().float(), persistent=False)
        self.blocks: list[Any] = list(self.layers)
        initialize(self, 2 * config.num_hidden_layers)

    def forward(self, embedded: Tensor, features: Tensor, anchors: Tensor) -> Tensor:
        """Normed hidden states [batch, n, block, hidden] of n blocks per sequence.

        embedded [batch, n, block, hidden] are the embeddings of the blocks' tokens, features
        [batch, time, taps * hidden] the target's, anchors [batch, n] the blocks' first
        positions. A block sees features at positions before its anchor, and itself.
        """
        batch, n, size, hidden = embedded.shape
        time, device = features.shape[1], embedded.device
        context = rms_norm(linear(features, self.fc), self.hidden_norm.weight, 1e-6)
        position = (anchors.unsqueeze(-1) + torch.arange(size, device=device)).view(batch, 1, -1)
        rope = [self.cos[position], self.sin[position], self.cos[:time], self.sin[:time]]
        row_anchor = anchors.repeat_interleave(size, 1).unsqueeze(-1)
        sees_context = torch.arange(time, device=device) < row_anchor
        block = torch.arange(n * size, device=device) // size
        sees_block = (block[:, None] == block).expand(batch, -1, -1)
        sees = torch.cat((sees_context, sees_block), -1).unsqueeze(1)
        mask = torch.zeros(sees.shape, dtype=embedded.dtype, device=device)
        mask = mask.masked_fill(~sees, float("-inf"))
        x = embedded.reshape(batch, n * size, hidden)
        for layer in self.blocks:
            x = layer(x, context, rope, mask)
        return rms_norm(x, self.norm.weight, self.config.rms_norm_eps).view_as(embedded)

    def embed_blocks(self, target: Any, ids: Tensor, anchors: Tensor) -> Tensor:
        """Embeddings of blocks that start with the token at each anchor, masks after it."""
        size = self.config.block_size
        mask = target.embed(torch.full((1,), self.mask_token, device=ids.device))
        embedded = mask.expand(*anchors.shape, size, -1).clone()
        embedded[:, :, 0] = target.embed(ids.gather(1, anchors))
        return embedded
