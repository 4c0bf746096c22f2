"""Options of one request, under vLLM's names. Every field is applied or refused, never ignored."""

from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from math import ulp
from numbers import Number
from typing import Any

from kdtree_engine.checks import flag, integer, integers, listed, path, real, shown, text

# Fields of vLLM's that are not supported: their only accepted values.
_OFF: dict[str, tuple[Any, ...]] = {
    "n": (1,),
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
    """How one request is continued: greedily, or with a `temperature` by drawing each token.

    `temperature`: 0 (greedy) or 0.001 to 1000. Tokens are drawn from softmax(logits / temperature),
    of which stay the `top_k` likeliest (0 or -1: all), of those the ones at least `min_p` (0 to 1)
    times as probable as the first, and of those the fewest that hold `top_p` (above 0, at most 1)
    of their probability. `seed`: 0 to 2**63 - 1, None for a fresh one for each request; the result
    carries it. The text depends on seed, prompt and these options alone, whatever the method. At
    temperature 0 the others have no effect: the greatest logit stays whatever they are.

    `max_tokens` (None: as many as the context holds; aliases `max_new_tokens` and
    `max_completion_tokens`), `stop` (strings; the text ends before the first), `stop_token_ids`,
    `ignore_eos`, `skip_special_tokens` and `include_stop_str_in_output` are applied too. The other
    fields are vLLM's; any value but their neutral one is a ValueError naming the field.
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
        limits = {
            "max_tokens": self.max_tokens,
            "max_new_tokens": max_new_tokens,
            "max_completion_tokens": max_completion_tokens,
        }
        given = {name: integer(name, v, 0) for name, v in limits.items() if v is not None}
        if len(given) > 1 and given.get("max_tokens") == 16:
            del given["max_tokens"]  # the default
        if len(set(given.values())) > 1:
            listing = " and ".join(f"{name} {shown(value)}" for name, value in given.items())
            raise ValueError(f"{listing} differ: give one")
        self.max_tokens = next(iter(given.values()), None)
        for name, neutral in _OFF.items():
            value = getattr(self, name)
            # Other types, such as arrays, may not compare to one truth value.
            plain = isinstance(value, Number | dict | list | tuple | type(None))
            of_kind = [v for v in neutral if isinstance(v, Number) == isinstance(value, Number)]
            if isinstance(value, bool) or not plain or not any(value == v for v in of_kind):
                raise ValueError(
                    f"{name} is {shown(value)}, which this version does not support: it takes only "
                    f"{' or '.join(repr(v) for v in neutral)}"
                )
        self._check_sampling()
        for name in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output"):
            flag(name, getattr(self, name))
        if isinstance(self.stop, str):
            self.stop = [self.stop]
        self.stop = listed("stop", [] if self.stop is None else self.stop, "strings")
        for index, string in enumerate(self.stop):
            if not text(f"stop[{index}]", string):
                raise ValueError(f"stop[{index}] is '', want strings that are not empty")
        ids = [] if self.stop_token_ids is None else self.stop_token_ids
        self.stop_token_ids = integers("stop_token_ids", ids, 0)

    def _check_sampling(self) -> None:
        want = "0 or 0.001 to 1000"
        self.temperature = real("temperature", self.temperature, 0, 1e3, want)
        if self.temperature != 0:
            self.temperature = real("temperature", self.temperature, 1e-3, 1e3, want)
        self.top_p = real("top_p", self.top_p, ulp(0.0), 1, "above 0 and at most 1")
        self.top_k = integer("top_k", self.top_k, -1)
        self.min_p = real("min_p", self.min_p, 0, 1)
        if self.seed is not None:
            self.seed = integer("seed", self.seed, 0, (1 << 63) - 1)


@dataclass(frozen=True)
class SpeculativeConfig:
    """How drafts are made; the keys of `speculative_config` but for `model`.

    `method`: "none" (plain decoding), "dflash" (a chain), "ddtree" (a tree). `tree_budget`: draft
    nodes below the root, 1 to 256, or "auto": chosen each round by a measured cost curve.
    `tree_topk`: candidates a depth, at most the budget (64 with "auto"), 0: as many as the budget.
    `draft_temperature`: divides the drafter's logits when the tree is built; the output does not
    depend on it.
    """

    method: str = "ddtree"
    tree_budget: int | str = "auto"
    tree_topk: int = 0
    draft_temperature: float = 1.0

    @classmethod
    def from_dict(cls, options: dict[str, Any], default_method: str) -> "SpeculativeConfig":
        """Checks names and values; ValueError names the key."""
        method = options.get("method", default_method)
        if not isinstance(method, str) or method not in METHODS:
            raise ValueError(
                f"speculative_config: method is {shown(method)}, want one of {METHODS}"
            )
        if method != "ddtree":
            for key in ("tree_budget", "tree_topk", "draft_temperature"):
                if key in options:
                    raise ValueError(
                        f"speculative_config: {key} is {shown(options[key])}, method {method!r} "
                        "builds no tree: leave it out or use 'ddtree'"
                    )
            return cls(method=method)
        budget = options.get("tree_budget", "auto")
        if not isinstance(budget, str) or budget != "auto":
            try:
                budget = integer("speculative_config: tree_budget", budget, 1, MAX_BUDGET)
            except ValueError as error:
                raise ValueError(f"{error} or 'auto'") from None
        topk = integer("speculative_config: tree_topk", options.get("tree_topk", 0), 0, MAX_BUDGET)
        if isinstance(budget, int) and topk > budget:
            raise ValueError(
                f"speculative_config: tree_topk is {topk}, more than tree_budget, {budget}: a tree "
                "has no room for them"
            )
        heat = options.get("draft_temperature", 1.0)
        return cls(
            method, budget, topk, real("speculative_config: draft_temperature", heat, 1e-3, 1e3)
        )


METHODS = ("none", "dflash", "ddtree")
MAX_BUDGET = 256


_CONFIG_KEYS = (
    "method",
    "model",
    "tree_budget",
    "tree_topk",
    "draft_temperature",
    "num_speculative_tokens",
)


def checked_keys(options: Any) -> dict[str, Any]:
    """`speculative_config` with known keys only; its values are checked where they are used."""
    if not isinstance(options, Mapping):
        raise ValueError(f"speculative_config is {shown(options)}, want a dict")
    for key in options:
        if key not in _CONFIG_KEYS:
            raise ValueError(
                f"speculative_config: unknown key {shown(key)}, known are {_CONFIG_KEYS}"
            )
    checked = dict(options)
    for key, check in (("model", path), ("num_speculative_tokens", integer)):
        if key in checked:
            checked[key] = check(f"speculative_config: {key}", checked[key])
    return checked
