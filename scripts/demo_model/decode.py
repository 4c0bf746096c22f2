"""Batched decoding of the target with a latent cache and absorbed attention.

All rows are at the same position; a row takes its prompt's token while it has one and a
sampled token afterwards. On a GPU each step is a CUDA graph, one for each window of the cache
that it reads, so that early steps do not read the whole cache.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .device import Device
from .experts import Experts
from .layers import linear, rms_norm
from .model import Layer, Target, softmax_scale

WINDOW = 96  # the cache is read in multiples of this many positions


@dataclass
class _Absorbed:
    """A layer's weights as decoding uses them."""

    key: Tensor  # [heads, nope, kv_lora]
    value: Tensor  # [heads, v, kv_lora]
    experts: tuple[Tensor, Tensor] | None  # as Experts.products takes them


class Decoder:
    """Decodes batches of one shape: `batch` rows of at most `length` tokens."""

    @torch.no_grad()
    def __init__(self, target: Target, device: Device, batch: int, length: int) -> None:
        c = target.config
        self.target, self.device, self.batch, self.length = target, device, batch, length
        place = device.name
        self.tokens = torch.zeros(batch, length + 1, dtype=torch.long, device=place)
        self.prompt_length = torch.ones(batch, dtype=torch.long, device=place)
        self.temperature = torch.zeros(batch, 1, device=place)
        self.position = torch.zeros(1, dtype=torch.long, device=place)
        width = c.kv_lora_rank + c.qk_rope_head_dim
        self.caches = [
            torch.zeros(batch, length, width, dtype=device.dtype, device=place)
            for _ in target.layers
        ]
        self.absorbed = []
        for layer in target.decoder_layers():
            kv = layer.self_attn.kv_b_proj.weight.to(device.dtype)
            key, value = kv.view(c.num_attention_heads, -1, c.kv_lora_rank).split(
                [c.qk_nope_head_dim, c.v_head_dim], 1
            )
            mlp = layer.mlp
            experts = mlp.weights(device.dtype) if isinstance(mlp, Experts) else None
            self.absorbed.append(_Absorbed(key.contiguous(), value.contiguous(), experts))
        ids = torch.arange(c.vocab_size, device=place)
        self.never = ids == c.special("<|mask|>")
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def _attend(self, index: int, layer: Layer, x: Tensor, window: int) -> Tensor:
        c, attention, cache = self.target.config, layer.self_attn, self.caches[index]
        absorbed = self.absorbed[index]
        cos = self.target.cos.index_select(0, self.position)
        sin = self.target.sin.index_select(0, self.position)
        q_nope, q_rope = attention.queries(x, cos, sin)
        latent, k_rope = attention.latents(x, cos, sin)
        cache.index_copy_(1, self.position, torch.cat((latent, k_rope), -1).unsqueeze(1))
        q = torch.cat((torch.einsum("bhn,hnc->bhc", q_nope, absorbed.key), q_rope), -1)
        seen = cache[:, :window]
        scores = torch.bmm(q, seen.mT).float() * softmax_scale(c)
        future = torch.arange(window, device=x.device) > self.position
        weights = scores.masked_fill(future, float("-inf")).softmax(-1).to(x.dtype)
        latents = torch.bmm(weights, seen[..., : c.kv_lora_rank])
        heads = torch.einsum("bhc,hvc->bhv", latents, absorbed.value)
        return linear(heads.flatten(1), attention.o_proj)

    @torch.no_grad()
    def _step(self, window: int) -> None:
        target = self.target
        eps = target.config.rms_norm_eps
        x = target.embed(self.tokens.index_select(1, self.position)[:, 0])
        for index, layer in enumerate(target.decoder_layers()):
            h = rms_norm(x, layer.input_layernorm.weight, eps)
            x = x + self._attend(index, layer, h, window)
            h = rms_norm(x, layer.post_attention_layernorm.weight, eps)
            mlp, weights = layer.mlp, self.absorbed[index].experts
            if isinstance(mlp, Experts) and weights is not None:
                chosen, share, _ = mlp.route(h)
                routed, _ = mlp.products(h, chosen, share, *weights)
                x = x + routed + mlp.shared_experts(h)
            else:
                x = x + mlp(h)
        logits = target.logits(rms_norm(x, target.norm.weight, eps))
        logits = logits.masked_fill(self.never, float("-inf"))
        noise = -torch.log(-torch.log(torch.rand_like(logits).clamp(1e-9, 1 - 1e-7)))
        sampled = (logits + self.temperature * noise).argmax(-1)
        following = self.position + 1
        given = self.tokens.index_select(1, following)[:, 0]
        chosen = torch.where(following < self.prompt_length, given, sampled)
        self.tokens.index_copy_(1, following, chosen.unsqueeze(1))
        self.position += 1

    def _replay(self, window: int) -> None:
        if not self.device.is_cuda:
            return self._step(window)
        if window not in self._graphs:
            # capturing runs nothing, but the warm-up before it does: put back what it moved
            position, tokens = self.position.clone(), self.tokens.clone()
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self._step(window)
            torch.cuda.current_stream().wait_stream(stream)
            self.position.copy_(position)
            self.tokens.copy_(tokens)
            self._graphs[window] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graphs[window]):
                self._step(window)
        self._graphs[window].replay()
        return None

    def run(self, prompts: Tensor, prompt_length: Tensor, temperature: Tensor) -> Tensor:
        """Fills rows to `length` tokens; returns [batch, length].

        `prompts` [batch, width] with `prompt_length` [batch] tokens used of each row (at least
        one); `temperature` [batch], 0 for greedy.
        """
        self.tokens.zero_()
        self.tokens[:, : prompts.shape[1]] = prompts
        self.prompt_length.copy_(prompt_length)
        self.temperature.copy_(temperature.view(-1, 1))
        self.position.zero_()
        for position in range(self.length - 1):
            self._replay(min((position // WINDOW + 1) * WINDOW, self.length))
        return self.tokens[:, : self.length].clone()


@torch.no_grad()
def agreement(target: Target, rows: Tensor, first: int) -> float:
    """Share of the greedily decoded tokens from position `first` on that are also the argmax
    of one causal forward pass."""
    hidden, _, _, _ = target(rows)
    logits = target.logits(hidden[:, first - 1 : -1])
    logits[..., target.config.special("<|mask|>")] = float("-inf")
    return (logits.argmax(-1) == rows[:, first:]).float().mean().item()


def pad(rows: list[list[int]], device: Device) -> tuple[Tensor, Tensor]:
    """(rows padded to one width, their lengths)."""
    lengths = torch.tensor([len(row) for row in rows], device=device.name)
    width = int(lengths.max())
    padded = torch.tensor([row + [0] * (width - len(row)) for row in rows], device=device.name)
    return padded, lengths


def logits_of(target: Target, ids: list[int], device: Device) -> Tensor:
    """float32 logits [time, vocabulary] of one sequence."""
    with torch.no_grad():
        hidden, _, _, _ = target(torch.tensor([ids], device=device.name))
        return F.linear(hidden[0].float(), target.lm_head.weight.float())
