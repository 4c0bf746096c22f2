"""Options of one request, under vLLM's names. Every field is applied or refused, never ignored."""

from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field
from typing import Any

# Fields that only sampling or log-probabilities could honour: their only accepted values.
_OFF: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "temperature": (0,),
    "top_p": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "seed": (None,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "min_tokens": (0,),
    "logprobs": (None,),
    "prompt_logprobs": (None,),
    "logit_bias": (None, {}),
    "bad_words": (None, [], ()),
    "structured_outputs": (None,),
}


@dataclass
class SamplingParams:
    """How one request is continued. This version decodes greedily (temperature 0).

    Applied: `max_tokens` (None: as many as the context holds; aliases `max_new_tokens` and
    `max_completion_tokens`), `stop` (strings; the text ends before the first), `stop_token_ids`,
    `ignore_eos`, `skip_special_tokens`, `include_stop_str_in_output`. The other fields are vLLM's;
    any value but their neutral one is a ValueError naming the field.
    """

    n: int = 1
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] = field(default_factory=list)
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: dict[int, float] | None = None
    bad_words: list[str] | None = None
    structured_outputs: Any = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    max_new_tokens: InitVar[int | None] = None
    max_completion_tokens: InitVar[int | None] = None

    def __post_init__(self, max_new_tokens: int | None, max_completion_tokens: int | None) -> None:
        for name, alias in (
            ("max_new_tokens", max_new_tokens),
            ("max_completion_tokens", max_completion_tokens),
        ):
            if alias is None:
                continue
            if self.max_tokens not in (16, alias):
                raise ValueError(
                    f"{name} is {alias!r} and max_tokens {self.max_tokens!r}: give one"
                )
            self.max_tokens = alias
        for name, neutral in _OFF.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not any(value == v for v in neutral):
                raise ValueError(
                    f"{name} is {value!r}: this version decodes greedily and takes only "
                    f"{' or '.join(repr(v) for v in neutral)}"
                )
        if self.max_tokens is not None:
            self.max_tokens = integer("max_tokens", self.max_tokens)
            if self.max_tokens < 0:
                raise ValueError(f"max_tokens is {self.max_tokens}, want at least 0")
        for name in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} is {getattr(self, name)!r}, want True or False")
        self.stop = [self.stop] if isinstance(self.stop, str) else list(self.stop or ())
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise ValueError(f"stop holds {text!r}, want strings that are not empty")
        self.stop_token_ids = [integer("stop_token_ids", i) for i in self.stop_token_ids or ()]


def integer(name: str, value: Any) -> int:
    """`value` as an int; floats are refused, whole or not, as they hide mistakes."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise ValueError(f"{name} is {value!r}, want an integer")
    return int(value.__index__())


@dataclass(frozen=True)
class SpeculativeConfig:
    """How drafts are made; the keys of `speculative_config` but for `model`.

    `method`: "none" (plain decoding), "dflash" (a chain), "ddtree" (a tree). `tree_budget`: draft
    nodes below the root, 1 to 256, or "auto": chosen each round by a measured cost curve.
    `tree_topk`: candidates a depth, 0: as many as the budget. `draft_temperature`: divides the
    drafter's logits when the tree is built; the output does not depend on it.
    """

    method: str = "ddtree"
    tree_budget: int | str = "auto"
    tree_topk: int = 0
    draft_temperature: float = 1.0

    @classmethod
    def from_dict(cls, options: dict[str, Any], default_method: str) -> "SpeculativeConfig":
        """Checks names and values; ValueError names the key."""
        method = options.get("method", default_method)
        if method not in METHODS:
            raise ValueError(f"speculative_config: method is {method!r}, want one of {METHODS}")
        if method != "ddtree":
            for key in ("tree_budget", "tree_topk", "draft_temperature"):
                if key in options:
                    raise ValueError(
                        f"speculative_config: {key} is {options[key]!r}, method {method!r} builds "
                        "no tree: leave it out or use 'ddtree'"
                    )
            return cls(method=method)
        budget = options.get("tree_budget", "auto")
        if budget != "auto":
            budget = integer("speculative_config: tree_budget", budget)
            if not 1 <= budget <= MAX_BUDGET:
                raise ValueError(
                    f"speculative_config: tree_budget is {budget}, want 1 to {MAX_BUDGET} or 'auto'"
                )
        topk = integer("speculative_config: tree_topk", options.get("tree_topk", 0))
        if not 0 <= topk <= MAX_BUDGET:
            raise ValueError(
                f"speculative_config: tree_topk is {topk}, want 1 to {MAX_BUDGET}, or 0"
            )
        heat = options.get("draft_temperature", 1.0)
        if isinstance(heat, bool) or not isinstance(heat, int | float):
            raise ValueError(f"speculative_config: draft_temperature is {heat!r}, want a number")
        if not 1e-3 <= heat <= 1e3:
            raise ValueError(f"speculative_config: draft_temperature is {heat}, want 0.001 to 1000")
        return cls(method, budget, topk, float(heat))


METHODS = ("none", "dflash", "ddtree")
MAX_BUDGET = 256
