"""Muon for the matrices, AdamW for the rest.

Muon (Jordan et al. 2024): the momentum of a matrix is replaced by the nearest orthogonal
matrix, found by five Newton-Schulz steps. All matrices of one shape, experts included, go
through them as one batch; the update is scaled by 0.2 sqrt(larger side), which gives it the
root mean square of an AdamW update (Liu et al. 2025, "Muon is scalable for LLM training").
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
_NOT_MATRICES = ("embed_tokens", "lm_head", "mlp.gate.weight")


def orthogonalize(matrices: Tensor) -> Tensor:
    """The orthogonal factor of each of [n, rows, columns], rows <= columns, approximately."""
    a, b, c = NEWTON_SCHULZ
    x = matrices.bfloat16() if matrices.is_cuda else matrices
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


class Muon:
    """Muon over parameters of two or three dimensions, the last two being a matrix."""

    def __init__(
        self,
        parameters: list[nn.Parameter],
        rate: float,
        weight_decay: float,
        momentum: float = 0.95,
        orthogonalize: Callable[[Tensor], Tensor] = orthogonalize,
    ) -> None:
        self.rate, self.weight_decay, self.momentum = rate, weight_decay, momentum
        self.orthogonalize = orthogonalize
        self.by_shape: dict[tuple[int, int], list[nn.Parameter]] = {}
        for parameter in parameters:
            rows, columns = sorted(parameter.shape[-2:])
            self.by_shape.setdefault((rows, columns), []).append(parameter)
        self.state = {
            shape: torch.zeros(
                sum(p.numel() for p in group) // (shape[0] * shape[1]),
                *shape,
                device=group[0].device,
            )
            for shape, group in self.by_shape.items()
        }

    @torch.no_grad()
    def warm_up(self) -> None:
        """Compiles the orthogonalisation for every shape."""
        for shape in self.by_shape:
            self.orthogonalize(self.state[shape])

    @torch.no_grad()
    def step(self, factor: float) -> None:
        """One update with the learning rate scaled by `factor`."""
        rate = self.rate * factor
        for shape, group in self.by_shape.items():
            flat = []
            for p in group:
                assert p.grad is not None
                grad = p.grad.reshape(-1, *p.shape[-2:])
                flat.append(grad if grad.shape[1:] == shape else grad.mT)
            gradient = torch.cat(flat)
            moment = self.state[shape].lerp_(gradient, 1 - self.momentum)
            update = self.orthogonalize(gradient.lerp(moment, self.momentum)).float()
            updates = []
            parts = update.split([part.shape[0] for part in flat])
            for p, part in zip(group, parts, strict=True):
                updates.append((part if p.shape[-2:] == shape else part.mT).reshape(p.shape))
            torch._foreach_mul_(list[Tensor](group), 1 - rate * self.weight_decay)
            torch._foreach_add_(list[Tensor](group), updates, alpha=-rate * 0.2 * shape[1] ** 0.5)


class Optimizer:
    """Muon for matrices inside the layers; AdamW for embedding, head, router and norms."""

    def __init__(
        self,
        model: nn.Module,
        muon_rate: float,
        adam_rate: float,
        weight_decay: float,
        orthogonalize: Callable[[Tensor], Tensor] = orthogonalize,
    ) -> None:
        matrices: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        for name, parameter in model.named_parameters():
            is_matrix = parameter.dim() >= 2 and not any(n in name for n in _NOT_MATRICES)
            (matrices if is_matrix else others).append(parameter)
        self.muon = Muon(matrices, muon_rate, weight_decay, orthogonalize=orthogonalize)
        self.adam_rate = adam_rate
        self.adam = torch.optim.AdamW(
            others, adam_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=others[0].is_cuda
        )
        self.others = others
        self.parameters = [*matrices, *others]

    def step(self, factor: float) -> None:
        """One update with both learning rates scaled by `factor`; clears the gradients.

        Gradients of the AdamW group are clipped to norm 1; Muon does not depend on the norm.
        """
        for group in self.adam.param_groups:
            group["lr"] = self.adam_rate * factor
        nn.utils.clip_grad_norm_(self.others, 1.0)
        self.muon.step(factor)
        self.adam.step()
        self.clear()

    def clear(self) -> None:
        """Drops the gradients."""
        for parameter in self.parameters:
            parameter.grad = None
