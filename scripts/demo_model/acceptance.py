"""How many tokens a draft commits, worked out from a known continuation.

No tree attention is needed: the target's own continuation is decoded once, the drafter is run
with every position of it as an anchor, and for each anchor the best-first draft tree tells at
which size it comes to hold each token of the continuation. That gives every budget at once.
"""

import heapq
import multiprocessing.pool
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .device import Device
from .dflash import Drafter
from .model import Target

BUDGETS = (8, 16, 32, 64)


def entry_sizes(
    logprobs: npt.NDArray[np.float64], path_ranks: npt.NDArray[np.int64], budget: int
) -> list[int]:
    """Node count at which the best-first tree takes in each token of a path; 0 for never.

    logprobs [depth, width] descend along a row; path_ranks [depth] are the path's ranks in
    those rows (width or more: not among them).
    """
    rows = logprobs.tolist()
    ranks = path_ranks.tolist()
    sizes = [0] * len(rows)
    heap = [(-rows[0][0], 0, 0, True)]
    for count in range(1, budget + 1):
        if not heap:
            break
        cost, depth, rank, parent_on_path = heapq.heappop(heap)
        on_path = parent_on_path and rank == ranks[depth]
        if on_path:
            sizes[depth] = count
        row = rows[depth]
        if rank + 1 < len(row):
            sibling = cost + row[rank] - row[rank + 1]
            heapq.heappush(heap, (sibling, depth, rank + 1, parent_on_path))
        if depth + 1 < len(rows):
            heapq.heappush(heap, (cost - rows[depth + 1][0], depth + 1, 0, on_path))
    return sizes


def _entry_sizes_of_row(job: tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]) -> list:
    return [entry_sizes(lp, ranks, BUDGETS[-1]) for lp, ranks in zip(*job, strict=True)]


@dataclass
class Accepted:
    """Accepted drafted tokens for every anchor of every row, by setting (`chain`, `tree_8`)."""

    by_setting: dict[str, list[npt.NDArray[np.int64]]]

    def tokens_per_forward(self, rows: list[int] | None = None) -> dict[str, float]:
        """Committed tokens (accepted and the bonus) per target forward, all rows pooled."""
        result = {}
        for setting, per_row in self.by_setting.items():
            tokens = forwards = 0
            for index in rows if rows is not None else range(len(per_row)):
                position, accepted = 0, per_row[index]
                while position < len(accepted):
                    step = int(accepted[position]) + 1
                    position += step
                    tokens += step
                    forwards += 1
            result[setting] = round(tokens / max(forwards, 1), 3)
        return result


@torch.no_grad()
def measure(
    target: Target,
    drafter: Drafter,
    rows: list[list[int]],
    prompt_lengths: list[int],
    device: Device,
    pool: multiprocessing.pool.Pool | None,
) -> Accepted:
    """What drafts commit along `rows`, each a prompt with the target's continuation of it."""
    c = drafter.config
    drafted = c.block_size - 1
    jobs = []
    for row, first in zip(rows, prompt_lengths, strict=True):
        ids = torch.tensor([row], device=device.name)
        anchors = torch.arange(first, len(row) - drafted, device=device.name).unsqueeze(0)
        _, features, _, _ = target(ids, c.target_layer_ids)
        embedded = drafter.embed_blocks(target, ids, anchors)
        states = drafter(embedded, features, anchors)[0, :, 1:]
        logprobs, ranked = target.logits(states).log_softmax(-1).topk(BUDGETS[-1], -1)
        ahead = anchors[0, :, None] + torch.arange(1, drafted + 1, device=device.name)
        jobs.append((logprobs.double().cpu().numpy(), _ranks(ranked, ids[0][ahead])))
    run = map if pool is None else pool.imap
    results: dict[str, list[npt.NDArray[np.int64]]] = {"chain": []}
    results |= {f"tree_{budget}": [] for budget in BUDGETS}
    for (_, ranks), sizes in zip(jobs, run(_entry_sizes_of_row, jobs), strict=True):
        results["chain"].append(np.cumprod(ranks == 0, -1).sum(-1))
        entered = np.array(sizes)
        for budget in BUDGETS:
            inside = (entered > 0) & (entered <= budget)
            results[f"tree_{budget}"].append(np.cumprod(inside, -1).sum(-1))
    return Accepted(results)


def _ranks(ranked: Tensor, wanted: Tensor) -> npt.NDArray[np.int64]:
    """Index of `wanted` [n, depth] in `ranked` [n, depth, width], the width when absent."""
    equal = ranked == wanted.unsqueeze(-1)
    rank = torch.where(equal.any(-1), equal.int().argmax(-1), ranked.shape[-1])
    return rank.cpu().numpy().astype(np.int64)
