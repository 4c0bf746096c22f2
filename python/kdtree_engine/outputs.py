"""What a request gives back, and the turning of committed tokens into text."""

from collections import deque
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any

from kdtree_engine.sampling_params import SamplingParams, SpeculativeConfig
from kdtree_engine.text_builder import TextBuilder
from kdtree_engine.tokenizer import Tokenizer
from kdtree_engine.tool_calls import BrokenCall, ChatDelta, ChatParser, ToolCall, marks_of

if TYPE_CHECKING:
    from kdtree_engine._core import StepOutput

STAGES = ("draft", "build", "verify", "commit")


@dataclass
class SpecStats:
    """How the tokens of one request were made.

    `target_forwards` counts decoding rounds; the prefill, which gives the first token, is not one.
    `accept_length_histogram`: tokens a round committed, the bonus token included, to the number of
    such rounds.
    `timings` in milliseconds: prefill, decode (wall clock after prefill), and the time in each
    stage of the rounds.
    """

    method: str
    tree_budget: int | str | None  # None: the method builds no tree
    target_forwards: int = 0
    decoded_tokens: int = 0  # tokens the rounds committed
    accept_length_histogram: dict[int, int] = field(default_factory=dict)
    timings: dict[str, float] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Method and budget, such as "ddtree 16"."""
        return self.method if self.tree_budget is None else f"{self.method} {self.tree_budget}"

    def add(self, other: "SpecStats") -> None:
        """Counts another request's rounds too."""
        self.target_forwards += other.target_forwards
        self.decoded_tokens += other.decoded_tokens
        for length, count in other.accept_length_histogram.items():
            histogram = self.accept_length_histogram
            histogram[length] = histogram.get(length, 0) + count
        for stage, milliseconds in other.timings.items():
            self.timings[stage] = self.timings.get(stage, 0.0) + milliseconds

    @property
    def tokens_per_forward(self) -> float:
        """Tokens committed a round, 0 before the first."""
        return self.decoded_tokens / self.target_forwards if self.target_forwards else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Tokens the rounds committed by the wall clock after prefill."""
        milliseconds = self.timings.get("decode_ms", 0.0)
        return 1000 * self.decoded_tokens / milliseconds if milliseconds > 0 else 0.0


@dataclass
class CompletionOutput:
    """One continuation."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None  # "stop", "length", "abort", "error"; None while it runs
    stop_reason: int | str | None  # the stop string or stop token id, None for the end of text


@dataclass
class ChatOutput(CompletionOutput):
    """One answer of a chat: `text` taken apart.

    `reasoning`: what came before the answer, where the model marks it. `tool_calls`: the calls in
    their order, each with a JSON object as arguments. `broken_calls`: what was meant as a call and
    cannot be made, with the reason.
    """

    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)
    broken_calls: list[BrokenCall] = field(default_factory=list)

    def as_message(self) -> dict[str, Any]:
        """The answer as a message that continues the conversation (OpenAI's form)."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [call.as_message_part() for call in self.tool_calls]
        return message


@dataclass
class RequestOutput:
    """A finished request, as vLLM names its parts, and `spec`: how it was decoded.

    `seed`: the one its tokens were drawn with, None where they were not (temperature 0).
    """

    request_id: int
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    spec: SpecStats
    seed: int | None = None


@dataclass
class StreamChunk:
    """What one step of the engine added to a streamed request."""

    text: str
    token_ids: list[int]
    step: "StepOutput"
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass
class ChatChunk(StreamChunk):
    """What one step added to a streamed chat. Calls come whole, when they are complete."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)
    broken_calls: list[BrokenCall] = field(default_factory=list)


class Sequence:
    """A request in the engine: gathers its steps into chunks and the final output."""

    def __init__(
        self,
        request_id: int,
        prompt: str | None,
        prompt_token_ids: list[int],
        params: SamplingParams,
        speculative: SpeculativeConfig,
        tokenizer: Tokenizer | None,
        streamed: bool,
        chat: ChatParser | None = None,
    ) -> None:
        self.request_id, self.prompt = request_id, prompt
        self.prompt_token_ids, self.params = prompt_token_ids, params
        self.token_ids: list[int] = []
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.chunks: deque[StreamChunk] = deque()  # not yet read by a stream
        self._streamed = streamed
        tree = speculative.method == "ddtree"
        self.spec = SpecStats(speculative.method, speculative.tree_budget if tree else None)
        self.spec.timings = dict.fromkeys(
            ("prefill_ms", "decode_ms", *(f"{stage}_ms" for stage in STAGES)), 0.0
        )
        self._chat, self._answer = chat, ChatDelta()
        self._marks = marks_of(tokenizer) if chat and tokenizer else {}
        self._text = TextBuilder(tokenizer, params, self._marks)
        self._start = perf_counter()
        self._decode_start: float | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def check(self, where: str = "") -> None:
        """Raises RuntimeError if the engine had to give the request up."""
        if self.finish_reason == "error":
            raise RuntimeError(
                f"{where}the model's logits are not all numbers after "
                f"{len(self.prompt_token_ids) + len(self.token_ids)} tokens: its weights are "
                "damaged, or too large for float32"
            )

    def advance(self, step: "StepOutput") -> None:
        """Takes one step's tokens, up to a stop string if that comes first."""
        self._measure(step)
        new: list[int] = []
        is_stop_token = step.finished and step.stop_token_id >= 0
        for index, token in enumerate(step.token_ids):
            new.append(token)
            last = index + 1 == len(step.token_ids)
            hidden = is_stop_token and last and not self.params.include_stop_str_in_output
            if not hidden and self._text.push(token):
                break
        self.token_ids += new
        if self._text.stop is None and step.finished:
            self._text.finish()
        if self._text.stop is not None:
            self.finish_reason, self.stop_reason = "stop", self._text.stop
        elif step.finished:
            self.finish_reason = step.finish_reason
            if step.stop_token_id in self.params.stop_token_ids:
                self.stop_reason = step.stop_token_id
        delta = self._take_apart() if self._chat else None
        if self._streamed:
            text = self._text.take(self.finished)
            chunk = (text, new, step, self.finish_reason, self.stop_reason)
            self.chunks.append(ChatChunk(*chunk, **vars(delta)) if delta else StreamChunk(*chunk))

    def _take_apart(self) -> ChatDelta:
        """What the step added to the parts of a chat's answer."""
        assert self._chat is not None
        for text, token in self._text.take_parts(self.finished):
            self._chat.text(text)
            if token is not None:
                self._chat.mark(self._marks[token], self._text.name(token))
        if self.finished:
            self._chat.finish()
        delta = self._chat.take()
        self._answer.add(delta)
        return delta

    def _measure(self, step: "StepOutput") -> None:
        now = perf_counter()
        timings = self.spec.timings
        if self._decode_start is None:  # this step was part of the prefill
            timings["prefill_ms"] = 1000 * (now - self._start)
            if step.num_prefilled >= step.prompt_length:
                self._decode_start = now
            return
        timings["decode_ms"] = 1000 * (now - self._decode_start)
        self.spec.target_forwards += 1
        self.spec.decoded_tokens += step.accept_length
        histogram = self.spec.accept_length_histogram
        histogram[step.accept_length] = histogram.get(step.accept_length, 0) + 1
        for stage in STAGES:
            timings[f"{stage}_ms"] += getattr(step, f"{stage}_ms")

    def output(self) -> RequestOutput:
        """The request as it stands."""
        common = (0, self._text.text, list(self.token_ids), self.finish_reason, self.stop_reason)
        answer = vars(self._answer)
        completion = ChatOutput(*common, **answer) if self._chat else CompletionOutput(*common)
        return RequestOutput(
            self.request_id,
            self.prompt,
            self.prompt_token_ids,
            [completion],
            self.finished,
            self.spec,
            self.params.seed if self.params.temperature else None,
        )
