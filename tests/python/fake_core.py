"""A stand-in for the compiled module that commits a script of tokens: for logic above it."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from kdtree_engine.reference.tree import build_tree


@dataclass
class RequestOptions:
    max_tokens: int = 16
    stop_token_ids: list[int] = field(default_factory=list)
    ignore_eos: bool = False
    method: str = ""
    tree_budget: int = 0
    tree_topk: int = 0
    draft_temperature: float = 1.0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0


@dataclass
class StepOutput:
    request_id: int
    token_ids: list[int]
    accept_length: int
    num_prefilled: int
    prompt_length: int
    finished: bool = False
    finish_reason: str = ""
    stop_token_id: int = -1
    root_token_id: int = 0
    tree: Any = None
    draft_ms: float = 0.1
    build_ms: float = 0.1
    verify_ms: float = 1.0
    commit_ms: float = 0.1


class Engine:
    """Every request gets the tokens of `script`; `stride` of them a round with a tree or chain."""

    script: list[int] = []  # noqa: RUF012
    eos: int = -1
    stride = 3
    break_method = ""  # this method gives wrong tokens
    no_numbers = -1  # the request of this id ends with "error" after its first token

    def __init__(self, model: str, drafter: str | None, device: str, **options: Any) -> None:
        self.drafter, self.options = drafter, options
        self.device = "cpu" if device == "auto" else device
        self.active: dict[int, dict[str, Any]] = {}
        self.added: list[RequestOptions] = []
        self.aborted: list[int] = []
        if options["progress"]:
            options["progress"](1, 2)
            options["progress"](2, 2)

    is_leader = True

    def config(self) -> dict[str, Any]:
        return {
            "model": {"vocab_size": 512},
            "drafter": {"block_size": 8} if self.drafter else None,
            "max_model_len": self.options["max_model_len"] or 512,
        }

    def stats(self) -> dict[str, Any]:
        counters = {"num_threads": 1, "isa": "fake", "target_forwards": 0}
        return {"device": self.device, **counters}

    def add_request(self, prompt_token_ids: list[int], options: RequestOptions) -> int:
        self.added.append(options)
        request_id = len(self.added)
        left = list(self.script)
        if options.method == self.break_method and left:
            left[-1] += 1
        self.active[request_id] = {"ids": prompt_token_ids, "left": left, "options": options}
        self.active[request_id]["prefilled"] = 0
        return request_id

    def abort(self, request_id: int) -> bool:
        self.aborted.append(request_id)
        return self.active.pop(request_id, None) is not None

    def step(self) -> list[StepOutput]:
        return [self._advance(i, r) for i, r in list(self.active.items())]

    def _advance(self, request_id: int, request: dict[str, Any]) -> StepOutput:
        length, options = len(request["ids"]), request["options"]
        stride = 1 if options.method == "none" else self.stride
        prefilling = request["prefilled"] < length
        if prefilling and options.max_tokens > 0:
            request["prefilled"] += min(4, length - request["prefilled"])
            if request["prefilled"] < length:
                return StepOutput(request_id, [], 0, request["prefilled"], length)
            stride = 1  # the prompt's last row gives the first token
        done = request.setdefault("done", 0)
        if request_id == self.no_numbers and done > 0:
            del self.active[request_id]
            return StepOutput(request_id, [], 0, length, length, True, "error")
        tokens, stop, reason = [], -1, ""
        for token in request["left"][done : done + stride]:
            if done + len(tokens) >= options.max_tokens:
                break
            tokens.append(token)
            if token in options.stop_token_ids or (token == self.eos and not options.ignore_eos):
                stop, reason = token, "stop"
                break
        request["done"] = done + len(tokens)
        if not reason and request["done"] >= min(options.max_tokens, len(request["left"])):
            reason = "length"
        if reason:
            del self.active[request_id]
        step = StepOutput(
            request_id, tokens, len(tokens), length, length, bool(reason), reason, stop
        )
        step.root_token_id = request["ids"][-1]
        if options.method == "ddtree" and not prefilling:
            step.tree = self._tree(tokens)
        return step

    @staticmethod
    def _tree(tokens: list[int]) -> Any:
        """A tree whose likeliest path is what was committed before the last token."""
        depth, width = max(1, len(tokens) - 1), 3
        ids = np.tile(np.arange(300, 300 + width, dtype=np.int32), (depth, 1))
        ids[:, 0][: len(tokens) - 1] = tokens[:-1]
        logprobs = np.tile(np.log(np.array([0.7, 0.2, 0.1], np.float32)), (depth, 1))
        tree = build_tree(logprobs, ids, 6)
        path = [0]
        while len(path) < len(tokens):
            path.append(int(tree.first_child[path[-1]]))
        names = ("tokens", "parents", "depths", "first_child", "next_sibling", "visibility", "logw")
        fields = {name: getattr(tree, name) for name in names}
        return SimpleNamespace(**fields, accepted=np.array(path, np.int32))


def missing_ranks() -> str:
    return ""


def inspect_checkpoint(folder: str) -> dict[str, Any]:
    return {"model_type": "kimi_k2", "sizes": {"hidden_size": 64}, "faults": []}


def measure_cpu(num_threads: int = 0, cache_bytes: int = 0) -> dict[str, Any]:
    return {
        "isa": "fake",
        "num_threads": 1,
        "fma_gflops": 10.0,
        "read_gb_s": 10.0,
        "cache_gb_s": 20.0,
    }


def set_nccl_library(path: str) -> None:
    """Has no use for it."""
