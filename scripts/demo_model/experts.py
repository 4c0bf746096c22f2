"""The mixture of experts of the target: sigmoid router, grouped products, shared expert."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .config import TargetConfig
from .layers import MLP
from .quant import fake_quantized


class Dispatch(torch.autograd.Function):
    """Copies token rows into expert order. Written by hand so that the backward pass is a
    gather over each token's k rows, where autograd would scatter with atomics."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, pair_of_row: Tensor, row_of_pair: Tensor) -> Tensor:
        """x [tokens, hidden] to [tokens * k, hidden]; pair p belongs to token p // k."""
        ctx.save_for_backward(row_of_pair)
        return x[pair_of_row // row_of_pair.shape[1]]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        """Sums the gradients of a token's rows."""
        (row_of_pair,) = ctx.saved_tensors
        (grad,) = grads
        return grad[row_of_pair].float().sum(1).to(grad.dtype), None, None


class Combine(torch.autograd.Function):
    """Weighted sum of a token's expert rows; both passes are gathers."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, pair_of_row: Tensor, row_of_pair: Tensor
    ) -> Tensor:
        """rows [tokens * k, hidden] and weight [tokens, k] to [tokens, hidden]."""
        ctx.save_for_backward(rows, weight, pair_of_row, row_of_pair)
        return (rows[row_of_pair].float() * weight.unsqueeze(-1)).sum(1).to(rows.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        """Gradients of the rows and of the weights."""
        rows, weight, pair_of_row, row_of_pair = ctx.saved_tensors
        (grad,) = grads
        k = weight.shape[1]
        row_weight = weight.flatten()[pair_of_row].unsqueeze(-1)
        grad_rows = (grad[pair_of_row // k].float() * row_weight).to(rows.dtype)
        grad_weight = (rows[row_of_pair].float() * grad.float().unsqueeze(1)).sum(-1)
        return grad_rows, grad_weight, None, None


class Experts(nn.Module):
    """Sigmoid router, routed experts as grouped products, and the shared expert."""

    correction_bias: Tensor

    def __init__(self, config: TargetConfig) -> None:
        super().__init__()
        c = self.config = config
        inner, experts = c.moe_intermediate_size, c.n_routed_experts
        self.gate = nn.Linear(c.hidden_size, experts, bias=False)
        self.register_buffer("correction_bias", torch.zeros(experts))
        self.gate_proj = nn.Parameter(torch.empty(experts, inner, c.hidden_size))
        self.up_proj = nn.Parameter(torch.empty(experts, inner, c.hidden_size))
        self.down_proj = nn.Parameter(torch.empty(experts, c.hidden_size, inner))
        self.shared_experts = MLP(c.hidden_size, inner * c.n_shared_experts)
        self.quantize = False  # train through INT4

    def route(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(expert ids, weights) [tokens, k] of x [tokens, hidden], and all scores. The bias
        takes part in the choice alone."""
        c = self.config
        scores = F.linear(x.float(), self.gate.weight.float()).sigmoid()
        chosen = (scores.detach() + self.correction_bias).topk(c.num_experts_per_tok, -1)[1]
        weight = scores.gather(1, chosen)
        weight = weight / (weight.sum(-1, keepdim=True) + 1e-20) * c.routed_scaling_factor
        return chosen, weight, scores

    def products(
        self, x: Tensor, chosen: Tensor, weight: Tensor, gate_up: Tensor, down: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The routed experts' output for x [tokens, hidden] and the expert loads; gate_up
        [experts, hidden, 2 * inner] and down [experts, inner, hidden]."""
        flat = chosen.flatten()
        key, pair_of_row = flat.sort(stable=True)
        row_of_pair = torch.empty_like(pair_of_row)
        row_of_pair = row_of_pair.scatter(
            0, pair_of_row, torch.arange(flat.shape[0], device=x.device)
        ).view_as(chosen)
        experts = torch.arange(gate_up.shape[0], device=x.device)
        ends = torch.searchsorted(key, experts, right=True)
        offsets = ends.to(torch.int32)
        rows = Dispatch.apply(x, pair_of_row, row_of_pair)
        gate, up = F.grouped_mm(rows, gate_up, offs=offsets).chunk(2, -1)
        rows = F.grouped_mm(F.silu(gate) * up, down, offs=offsets)
        load = torch.diff(ends, prepend=ends.new_zeros(1))
        return Combine.apply(rows, weight, pair_of_row, row_of_pair), load

    def weights(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """gate_up and down as `products` takes them."""
        masters = [self.gate_proj, self.up_proj, self.down_proj]
        if self.quantize:
            gate, up, down = (fake_quantized(m, self.config.group_size) for m in masters)
        else:
            gate, up, down = masters
        gate_up = torch.cat((gate, up), 1).to(dtype).transpose(1, 2)
        return gate_up, down.to(dtype).transpose(1, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(output, load of each expert, balance loss) of x [batch, time, hidden]."""
        flat = x.flatten(0, 1)
        chosen, weight, scores = self.route(flat)
        routed, load = self.products(flat, chosen, weight, *self.weights(x.dtype))
        share = (scores / scores.sum(-1, keepdim=True)).mean(0)
        balance = (share * load.float() / chosen.numel()).sum() * self.config.n_routed_experts
        return routed.view_as(x) + self.shared_experts(x), load, balance
