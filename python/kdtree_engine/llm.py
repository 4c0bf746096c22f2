"""`LLM`: a loaded model that continues prompts, in the manner of vLLM's class of that name."""

import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import Progress

from kdtree_engine import _core, checks
from kdtree_engine.chat import ChatPrompt, chat_prompt_ids
from kdtree_engine.checks import shown
from kdtree_engine.locations import default_model, find_drafter, find_nccl
from kdtree_engine.outputs import RequestOutput
from kdtree_engine.outputs import Sequence as _Sequence
from kdtree_engine.sampling_params import SamplingParams, SpeculativeConfig, checked_keys
from kdtree_engine.streams import ChatStream, Stream
from kdtree_engine.tokenizer import TOKENIZER_FILES, Tokenizer, has_tokenizer

Prompt = str | Mapping[str, Any]
_Result = TypeVar("_Result")
# The compiled module's own limits, checked here too: it takes no number that overflows its types.
ENGINE_LIMITS = {
    "num_threads": (0, 1024),
    "max_model_len": (0, 1 << 24),
    "max_num_seqs": (1, 1024),
    "prefill_chunk_size": (1, 4096),
    "tensor_parallel_size": (1, 64),
}


class LLM:
    """A target model with its drafter.

    `model`: a checkpoint folder, None for the bundled model. `speculative_config`: a dict with
    `method` ("none", "dflash", "ddtree"; the default is "ddtree" when there is a drafter),
    `model` (the drafter's folder, by default `drafter` inside the model's), `tree_budget` (1 to 256
    or "auto"), `tree_topk`, `draft_temperature`, `num_speculative_tokens` (must be the drafter's
    block size less one). The method changes the speed, never the tokens. `device`: "auto" (a GPU if
    there is one that this build has code for, else the CPU; the CPU where `num_threads` is given),
    "cpu", "cuda", "cuda:N", or "check:A,B", which computes on both and raises RuntimeError at the
    first op whose results differ by more than rounding. `num_threads`: of the CPU, 0 for one a
    core. `max_model_len`: most tokens of prompt and text, None or 0 for the model's own.

    `tensor_parallel_size`: ranks that share the model, each a thread with its slices of every
    matrix: device "cuda" then is a GPU for each rank, "cuda:0,cuda:1" and the like name them, and
    "cpu" shares `num_threads` between them. `expert_parallel` gives each rank whole experts instead
    of a slice of each. A rank that fails, or has not come after `rank_timeout` seconds, ends the
    engine with a RuntimeError that names it. Under torchrun, mpirun or srun the ranks are shared
    between the processes: that of rank 0 goes on, the others work for it until it is done and end
    with SystemExit in this constructor.

    Raises ValueError for a bad argument and RuntimeError for a checkpoint that is malformed or not
    supported, each naming the field. Not for use from several threads at once: a request
    that is started or advanced in the middle of another call is a RuntimeError.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        speculative_config: Mapping[str, Any] | None = None,
        device: str = "auto",
        num_threads: int = 0,
        max_model_len: int | None = None,
        max_num_seqs: int = 8,
        prefill_chunk_size: int = 256,
        tensor_parallel_size: int = 1,
        expert_parallel: bool = False,
        rank_timeout: float = 300.0,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self.model = checks.path("model", default_model() if model is None else model)
        if not self.model.is_dir():
            raise ValueError(
                f"model {str(self.model)!r} is not a folder: name a downloaded checkpoint folder"
            )
        sizes = {
            "num_threads": num_threads,
            "max_model_len": 0 if max_model_len is None else max_model_len,
            "max_num_seqs": max_num_seqs,
            "prefill_chunk_size": prefill_chunk_size,
            "tensor_parallel_size": tensor_parallel_size,
        }
        sizes = {n: checks.integer(n, value, *ENGINE_LIMITS[n]) for n, value in sizes.items()}
        checks.word("device", device)
        if sizes["num_threads"] and device == "auto":
            device = "cpu"
        if sizes["num_threads"] and device.startswith("cuda"):
            raise ValueError(
                f"num_threads is {num_threads}; device {shown(device)} has no use for it"
            )
        checks.flag("expert_parallel", expert_parallel)
        timeout = checks.real("rank_timeout", rank_timeout, 0.1, 1e6)
        if progress is not None and not callable(progress):
            raise ValueError(f"progress is {shown(progress)}, want a function")
        options = checked_keys({} if speculative_config is None else speculative_config)
        drafter = find_drafter(self.model, options.get("model"))
        self.speculative = SpeculativeConfig.from_dict(options, "ddtree" if drafter else "none")
        if self.speculative.method == "none" and "model" not in options:
            drafter = None
        if self.speculative.method != "none" and drafter is None:
            raise ValueError(
                f"speculative_config: method {self.speculative.method!r} needs a drafter, and "
                f"{self.model} has no folder 'drafter': name one as 'model', or use method 'none'"
            )
        self._tokenizer = Tokenizer(self.model) if has_tokenizer(self.model) else None
        if sizes["tensor_parallel_size"] > 1 and (nccl := find_nccl()):
            _core.set_nccl_library(str(nccl))
        self._engine = _core.Engine(
            str(self.model),
            str(drafter) if drafter else None,
            device,
            **sizes,
            expert_parallel=expert_parallel,
            timeout_s=timeout,
            progress=progress,
        )
        if not self._engine.is_leader:
            self._engine.follow()
            raise SystemExit(0)
        self.config: dict[str, Any] = self._engine.config()
        self._check_block(options.get("num_speculative_tokens"))
        self._check_mask_token(drafter)
        self._running: dict[int, _Sequence] = {}
        self._busy = False

    def _check_block(self, wanted: int | None) -> None:
        drafter = self.config["drafter"]
        if wanted is None:
            return
        have = drafter["block_size"] - 1 if drafter else 0
        if wanted != have:
            raise ValueError(
                f"speculative_config: num_speculative_tokens is {shown(wanted)}, the drafter "
                f"proposes {have} tokens a block"
            )

    def _check_mask_token(self, folder: Path | None) -> None:
        drafter = self.config["drafter"]
        text = drafter.get("mask_token") if drafter else None
        if not text or self._tokenizer is None:
            return
        mask_id = drafter["mask_token_id"]
        name = self._tokenizer.decode([mask_id])
        # A drafter may give a name to an id that has none.
        unnamed = name == f"<|reserved_token_{mask_id}|>"
        if name != text and not (unnamed and text not in self._tokenizer.special_tokens):
            raise RuntimeError(
                f"{folder}/config.json: dflash_config.mask_token is {shown(text)}, but "
                f"mask_token_id {mask_id} is {shown(name)} in the tokenizer of {self.model}"
            )

    # ------------------------------------------------------------------ generation

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = False,
        *,
        speculative_config: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Continues the prompts, all together, and returns the results in their order.

        A prompt is a string, {"prompt": "..."} or {"prompt_token_ids": [...]}. `sampling_params`:
        one for all or one each. `use_tqdm` shows a progress bar. `speculative_config`, without
        `model`, replaces the engine's own for this call. Raises ValueError when a prompt or an
        option is refused; then nothing is generated. Raises RuntimeError when the model's logits
        were no numbers; then the other requests of the call end too.
        """
        single = isinstance(prompts, str | Mapping)
        items: list[Any] = [prompts] if single else checks.listed("prompts", prompts, "prompts")
        return self._generate(
            items, single, sampling_params, use_tqdm, speculative_config=speculative_config
        )

    def _generate(
        self,
        items: list[Any],
        single: bool,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
        *,
        speculative_config: Mapping[str, Any] | None,
    ) -> list[RequestOutput]:
        checks.flag("use_tqdm", use_tqdm)
        if isinstance(sampling_params, Sequence):
            if len(sampling_params) != len(items):
                raise ValueError(
                    f"sampling_params has {len(sampling_params)} entries for {len(items)} prompts"
                )
            params: list[Any] = list(sampling_params)
        else:
            params = [sampling_params] * len(items)
        speculative = self._speculative_for(speculative_config)
        sequences: list[_Sequence] = []
        try:
            for index, (prompt, one) in enumerate(zip(items, params, strict=True)):
                try:
                    sequences.append(self._add(prompt, one, speculative, streamed=False))
                except ValueError as error:
                    raise ValueError(str(error) if single else f"prompt {index}: {error}") from None
            console = Console(stderr=True)
            with Progress(console=console, disable=not (use_tqdm and console.is_terminal)) as bar:
                task = bar.add_task("requests", total=len(sequences))
                while not all(s.finished for s in sequences):
                    self._step()
                    for index, sequence in enumerate(sequences):
                        sequence.check(f"prompt {index}: ")
                    bar.update(task, completed=sum(s.finished for s in sequences))
        finally:
            self._release(sequences)
        return [s.output() for s in sequences]

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        speculative_config: Mapping[str, Any] | None = None,
    ) -> Stream:
        """Continues one prompt; iterate over the result for its `StreamChunk`s.

        Their texts together are the whole text, and none splits a character. Chunks without tokens
        report progress of the prefill. The request starts now, and ends early when the stream is
        closed. Iterating raises RuntimeError when the model's logits were no numbers, after what
        came before them.
        """
        speculative = self._speculative_for(speculative_config)
        return Stream(self, self._add(prompt, sampling_params, speculative, streamed=True))

    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = False,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        speculative_config: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answers one conversation (a list of messages) or a list of conversations.

        `outputs[0]` of each result is a `ChatOutput`: content, reasoning and tool calls, each by
        its own name. `tools`: OpenAI's form. `chat_template_kwargs`: variables for the
        checkpoint's template, such as `thinking` for Kimi K2.5 and K2.6. Raises as `generate`,
        and ValueError for a conversation that the template refuses.
        """
        items = checks.listed("messages", messages, "messages")
        many = bool(items) and isinstance(items[0], Sequence) and not isinstance(items[0], str)
        tokenizer = self.get_tokenizer()
        prompts: list[Any] = [
            ChatPrompt(tokenizer, one, tools, chat_template_kwargs)
            for one in (items if many else [items])
        ]
        return self._generate(
            prompts, not many, sampling_params, use_tqdm, speculative_config=speculative_config
        )

    def stream_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling_params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        speculative_config: Mapping[str, Any] | None = None,
    ) -> ChatStream:
        """Answers one conversation; iterate over the result for its `ChatChunk`s.

        As `stream`, and each chunk has what it adds to content, reasoning and tool calls.
        """
        speculative = self._speculative_for(speculative_config)
        prompt = ChatPrompt(self.get_tokenizer(), messages, tools, chat_template_kwargs)
        return ChatStream(self, self._add(prompt, sampling_params, speculative, streamed=True))

    def chat_prompt(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> dict[str, Any]:
        """The prompt of one conversation in the checkpoint's chat template."""
        return {"prompt_token_ids": chat_prompt_ids(self.get_tokenizer(), messages, **options)}

    def check_speculative(self, options: Mapping[str, Any]) -> None:
        """Raises the ValueError that a request with this `speculative_config` would."""
        self._speculative_for(options)

    def get_tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer; ValueError if it has none."""
        if self._tokenizer is None:
            raise ValueError(f"{self.model} has no {TOKENIZER_FILES}: use prompt_token_ids")
        return self._tokenizer

    def stats(self) -> dict[str, Any]:
        """Counters of the engine since it was loaded (see `_core.Engine.stats`)."""
        return self._open_engine().stats()

    def logits(self, token_ids: Sequence[int]) -> Any:
        """float32 logits [n, vocab_size] after each of the n tokens."""
        ids = checks.integers("token_ids", token_ids, 0, self._last_id)
        return self._open_engine().logits(ids)

    def close(self) -> None:
        """Ends what runs and gives the memory back; the object is of no use afterwards."""
        if hasattr(self, "_engine"):
            self._release(list(self._running.values()))
            del self._engine

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------------ inside

    def _open_engine(self) -> _core.Engine:
        if not hasattr(self, "_engine"):
            raise RuntimeError("the LLM is closed")
        return self._engine

    @property
    def _last_id(self) -> int:
        return int(self.config["model"]["vocab_size"]) - 1

    def _speculative_for(self, options: Mapping[str, Any] | None) -> SpeculativeConfig:
        if options is None:
            return self.speculative
        checked = checked_keys(options)
        if "model" in checked:
            raise ValueError("speculative_config: model can only be set when the LLM is made")
        self._check_block(checked.get("num_speculative_tokens"))
        config = SpeculativeConfig.from_dict(checked, self.speculative.method)
        if config.method != "none" and not self.config["drafter"]:
            raise ValueError(
                f"speculative_config: method is {config.method!r}, no drafter was loaded"
            )
        return config

    def _add(
        self,
        prompt: Prompt | ChatPrompt,
        params: SamplingParams | None,
        speculative: SpeculativeConfig,
        streamed: bool,
    ) -> _Sequence:
        engine = self._open_engine()
        if params is not None and not isinstance(params, SamplingParams):
            raise ValueError(f"sampling_params is {shown(params)}, want SamplingParams")
        # A copy: what was changed since it was made is checked, and may change later.
        params = SamplingParams() if params is None else replace(params)
        if params.temperature and params.seed is None:
            params.seed = secrets.randbelow(1 << 53)  # as much as any reader of JSON can hold
        text, ids = self._prompt_ids(prompt)
        if params.stop and self._tokenizer is None:
            raise ValueError(f"stop needs a tokenizer, and {self.model} has no {TOKENIZER_FILES}")
        room = max(0, self.config["max_model_len"] - len(ids))
        budget = speculative.tree_budget
        options = _core.RequestOptions(
            max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
            stop_token_ids=checks.integers(
                "stop_token_ids", params.stop_token_ids, 0, self._last_id
            ),
            ignore_eos=params.ignore_eos,
            method=speculative.method,
            tree_budget=budget if isinstance(budget, int) else 0,
            tree_topk=speculative.tree_topk,
            draft_temperature=speculative.draft_temperature,
            temperature=params.temperature,
            # As many as there are cut nothing off.
            top_k=params.top_k if 0 < params.top_k <= self._last_id else 0,
            top_p=params.top_p,
            min_p=params.min_p,
            seed=params.seed or 0,
        )
        parser = prompt.parser() if isinstance(prompt, ChatPrompt) else None

        def start() -> _Sequence:
            request_id = engine.add_request(ids, options)
            sequence = _Sequence(
                request_id, text, ids, params, speculative, self._tokenizer, streamed, parser
            )
            self._running[request_id] = sequence
            return sequence

        return self._alone(start)

    def _prompt_ids(self, prompt: Prompt | ChatPrompt) -> tuple[str | None, list[int]]:
        if isinstance(prompt, ChatPrompt):
            prompt = {"prompt_token_ids": prompt.token_ids}
        if isinstance(prompt, Mapping) and set(prompt) == {"prompt"}:
            prompt = checks.text("prompt", prompt["prompt"])
        if isinstance(prompt, str):
            tokenizer = self.get_tokenizer()
            checks.text("prompt", prompt)
            ids = tokenizer.encode(prompt, add_bos=tokenizer.add_bos or not prompt)
            if not ids:
                raise ValueError("prompt is empty: want at least one token")
            return prompt, ids
        if not isinstance(prompt, Mapping) or set(prompt) != {"prompt_token_ids"}:
            raise ValueError(
                f"prompt is {shown(prompt)}, want a string, {{'prompt': '...'}} or "
                "{'prompt_token_ids': [...]}"
            )
        ids = checks.integers("prompt_token_ids", prompt["prompt_token_ids"], 0, self._last_id)
        if not ids:
            raise ValueError("prompt_token_ids is empty: want at least one token")
        return None, ids

    def _alone(self, call: Callable[[], _Result]) -> _Result:
        """Calls it, and refuses to inside another one: outputs of a step between the two would be
        lost or change places."""
        if self._busy:
            raise RuntimeError(
                "the LLM is in a call: a signal handler, finaliser or other thread can start and "
                "advance requests only after it"
            )
        try:
            self._busy = True
            return call()
        finally:
            self._busy = False

    def _step(self) -> None:
        """One step of the engine; its outputs go to the requests they belong to."""
        self._alone(self._step_alone)

    def _step_alone(self) -> None:
        for step in self._open_engine().step():
            sequence = self._running.get(step.request_id)
            if sequence is None:
                continue
            sequence.advance(step)
            if sequence.finished:
                self._release([sequence])

    def _release(self, sequences: Sequence[_Sequence]) -> None:
        """Forgets the requests; those still running in the engine are ended there."""
        for sequence in sequences:
            if self._running.pop(sequence.request_id, None) is not None:
                self._engine.abort(sequence.request_id)
                sequence.finish_reason = sequence.finish_reason or "abort"
