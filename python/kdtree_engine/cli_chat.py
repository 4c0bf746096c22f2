"""The command `kdtree chat`: a conversation in the terminal, or over standard input."""

import json
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kdtree_engine import cli_common as common
from kdtree_engine.cli_load import EngineOptions, SamplingOptions, load, option_groups

if TYPE_CHECKING:
    from kdtree_engine.llm import LLM
    from kdtree_engine.outputs import ChatChunk, RequestOutput

HELP = '''\
/help      this list
/stats     how the last answer was made, and all of them
/tree      draw the draft tree of the last round that had one
/budget N  draft nodes a round: 1 to 256, auto, or none for plain decoding
/reset     forget the conversation
/quit      leave (also Ctrl-D)
Ctrl-C stops an answer. A line that ends with \\ goes on; """ opens and ends a text of many lines.
A message that starts with / is written with two: //etc.'''
_QUOTES = '"""'


@common.errors_in_one_line
@option_groups
def chat(
    engine: EngineOptions,
    sampling: SamplingOptions,
    method: common.Method = None,
    tree_budget: common.TreeBudget = None,
    tree_topk: common.TreeTopk = None,
    draft_temperature: common.DraftTemperature = None,
    max_tokens: Annotated[
        int | None,
        typer.Option("--max-tokens", "-n", help="Most tokens of an answer.  [default: all room]"),
    ] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    chat_template_kwargs: Annotated[
        str | None,
        typer.Option(metavar="JSON", help="Variables for the model's chat template."),
    ] = None,
) -> None:
    """Talk with a model.

    In a terminal: arrows edit and recall lines, Ctrl-C stops an answer, /help lists the commands.
    Else each line of standard input is a message or a command, and the answers go to standard
    output; the first failure ends the command.

    \b
    Examples:
      kdtree chat
      kdtree chat --temperature 0.6 --top-p 0.95
      kdtree chat -m ~/models/Kimi-K2.6 --chat-template-kwargs '{"thinking": false}'
      printf 'Write a stack.\\n/stats\\n' | kdtree chat --tree-budget 16
    """
    from kdtree_engine.sampling_params import SamplingParams

    params = SamplingParams(max_tokens=max_tokens, **sampling.for_params())
    variables = _object("--chat-template-kwargs", chat_template_kwargs)
    speculative = common.speculative_options(method, tree_budget, tree_topk, draft_temperature)
    if sys.stdin is None:
        raise common.OptionError("standard input is closed: there is nobody to talk with")
    llm = load(engine, speculative)
    terminal = sys.stdin.isatty() and sys.stdout.isatty()
    conversation = Conversation(llm, params, system, variables, terminal)
    if terminal:
        print(f"{llm.model.resolve().name}: /help lists the commands, Ctrl-D leaves")
    talk(conversation)


def _object(option: str, text: str | None) -> dict[str, Any]:
    try:
        value = {} if text is None else json.loads(text)
    except (ValueError, RecursionError) as error:
        raise common.OptionError(f"{option} is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise common.OptionError(f"{option} is {text!r}, want a JSON object")
    return value


def talk(conversation: "Conversation") -> None:
    """Reads messages and commands to the end of the input."""
    if conversation.terminal:
        with suppress(ImportError):  # gives input() line editing and history
            import readline  # noqa: F401
    while True:
        try:
            message = read_message(conversation.terminal)
        except KeyboardInterrupt:
            if not conversation.terminal:
                raise
            print("\n(Ctrl-D or /quit leaves)")
            continue
        if message is None:
            return
        try:
            if not conversation.take(message):
                return
        except (ValueError, RuntimeError) as error:
            if not conversation.terminal:
                raise
            print(f"error: {common.printable(str(error))}")


def read_message(terminal: bool) -> str | None:
    """The next message, of one line or many; None at the end of the input."""
    line = _read_line(">>> ", terminal)
    if line is None:
        return None
    lines = []
    if line.startswith(_QUOTES):
        line = line[len(_QUOTES) :]
        while line is not None and not line.rstrip().endswith(_QUOTES):
            lines.append(line)
            line = _read_line("... ", terminal)
        lines += [] if line is None else [line.rstrip()[: -len(_QUOTES)]]
        return "\n".join(lines).strip("\n")
    while line is not None and line.endswith("\\"):
        lines.append(line[:-1])
        line = _read_line("... ", terminal)
    return "\n".join(lines if line is None else [*lines, line])


def _read_line(prompt: str, terminal: bool) -> str | None:
    if terminal:
        try:
            return input(prompt)
        except EOFError:
            print()
            return None
        except UnicodeDecodeError:
            raise common.OptionError("standard input is not UTF-8") from None
    raw = sys.stdin.buffer.readline()
    return common.utf8("standard input", raw).rstrip("\r\n") if raw else None


class Conversation:
    """What was said, and what a command may ask about it."""

    def __init__(
        self, llm: "LLM", params: Any, system: str | None, variables: dict[str, Any], terminal: bool
    ) -> None:
        self.terminal = terminal
        self._llm, self._params, self._variables = llm, params, variables
        self._system = [] if system is None else [{"role": "system", "content": system}]
        self._messages: list[dict[str, Any]] = list(self._system)
        self._speculative: dict[str, Any] | None = None  # None: as the engine was loaded
        self._last: RequestOutput | None = None
        self._all: Any = None  # SpecStats of all answers
        self._num_tokens = 0  # the same, with those of the prompts' passes
        self._last_tree: Any = None

    def take(self, message: str) -> bool:
        """Does what a command says, or answers; False: the conversation is over."""
        if not message.strip():
            return True
        if not message.startswith("/") or message.startswith("//"):
            self._answer(message[1:] if message.startswith("//") else message)
            return True
        name, _, argument = message[1:].strip().partition(" ")
        if name == "quit":
            return False
        commands = {
            "help": lambda: print(HELP),
            "stats": self._show_stats,
            "tree": self._show_tree,
            "reset": self._reset,
        }
        if name == "budget":
            self._set_budget(argument.strip())
        elif name in commands and not argument:
            commands[name]()
        else:
            raise ValueError(f"there is no command {message.strip()!r}: /help lists them")
        return True

    # ------------------------------------------------------------------ answers

    def _answer(self, text: str) -> None:
        """Streams the answer; what was shown of it becomes part of the conversation."""
        question = {"role": "user", "content": text}
        stream = self._llm.stream_chat(
            [*self._messages, question],
            self._params,
            chat_template_kwargs=self._variables,
            speculative_config=self._speculative,
        )
        with _Screen(self.terminal) as screen, stream:
            bar = common.prefill_bar(not self.terminal)
            with _stopped_by_ctrl_c(self.terminal) as stopped, bar as show_prefill:
                for chunk in stream:
                    show_prefill(chunk)
                    if chunk.step.tree is not None and len(chunk.step.tree.tokens) > 1:
                        self._last_tree = chunk.step
                    screen.show(chunk)
                    if stopped:
                        break
            screen.stopped = bool(stopped)
        self._last = stream.output
        answer: Any = self._last.outputs[0]
        if answer.content or answer.tool_calls:
            self._messages += [question, answer.as_message()]
        spec = self._last.spec
        if self._all is None:
            self._all = type(spec)(spec.method, spec.tree_budget)
        self._all.add(spec)
        self._num_tokens += len(answer.token_ids)

    # ------------------------------------------------------------------ commands

    def _show_stats(self) -> None:
        if self._last is None:
            raise ValueError("there was no answer yet")
        print(common.stats_line(self._last))
        print(
            f"[all answers: {self._num_tokens} tokens in {self._all.target_forwards} "
            f"target forwards, {self._all.tokens_per_forward:.2f} tokens per forward, "
            f"{self._all.tokens_per_second:.1f} tokens/s]"
        )

    def _show_tree(self) -> None:
        from kdtree_engine import render

        if self._last_tree is None:
            raise ValueError("no round had a tree yet: /budget 16 asks for trees")
        sampled = self._params.temperature > 0
        drawn = render.drawing(self._last_tree, self._llm.get_tokenizer(), sampled)
        render.print_tree(drawn, common.stdout_console())

    def _reset(self) -> None:
        self._messages = list(self._system)

    def _set_budget(self, text: str) -> None:
        loaded = self._llm.speculative
        if text == "none":
            self._speculative = {"method": "none"}
        elif text:
            if loaded.method == "none":
                raise ValueError(
                    "/budget needs the drafter: start kdtree chat without --method none"
                )
            try:
                budget = common.parse_budget(text, "/budget")
            except common.OptionError as error:
                raise common.OptionError(f"{error}, or none") from None
            options: dict[str, Any] = {"method": "ddtree", "tree_budget": budget}
            if loaded.method == "ddtree":
                options["draft_temperature"] = loaded.draft_temperature
                topk = loaded.tree_topk
                options["tree_topk"] = min(topk, budget) if isinstance(budget, int) else topk
            self._llm.check_speculative(options)
            self._speculative = options
        now = self._speculative or {"method": loaded.method, "tree_budget": loaded.tree_budget}
        trees = f"{now['tree_budget']} draft nodes a round" if now["method"] == "ddtree" else ""
        print(f"[{trees or now['method']}]")


class _Screen:
    """Shows an answer as it comes: reasoning dimmed, or on standard error without a terminal."""

    def __init__(self, terminal: bool) -> None:
        self._terminal = terminal
        self._reasoning = self.stopped = False
        self._column = 0

    def __enter__(self) -> "_Screen":
        return self

    def __exit__(self, *_: object) -> None:
        self._turn(False)
        if self.stopped:
            self._write(" [stopped]")
        if self._column:
            self._write("\n")

    def show(self, chunk: "ChatChunk") -> None:
        if chunk.reasoning:
            self._turn(True)
            self._write(chunk.reasoning)
        if chunk.content:
            self._turn(False)
            self._write(chunk.content)
        for call in chunk.tool_calls:
            self._note(f"[calls {call.name} {call.arguments}]")
        for broken in chunk.broken_calls:
            self._note(f"[a call that cannot be made, as {broken.reason}: {broken.text}]")

    def _turn(self, reasoning: bool) -> None:
        """From content to reasoning or back, on a line of its own."""
        if reasoning == self._reasoning:
            return
        if self._column:
            self._write("\n")
        self._reasoning = reasoning
        if self._terminal:
            sys.stdout.write("\x1b[2m" if reasoning else "\x1b[0m")

    def _write(self, text: str) -> None:
        out = sys.stdout if self._terminal or not self._reasoning else sys.stderr
        out.write(common.printable(text) if self._terminal else text)
        out.flush()
        self._column = 0 if text.endswith("\n") else 1

    def _note(self, text: str) -> None:
        if self._column:
            self._write("\n")
        print(common.printable(text), file=sys.stdout if self._terminal else sys.stderr)


@contextmanager
def _stopped_by_ctrl_c(terminal: bool) -> Iterator[list[bool]]:
    """A list that Ctrl-C fills, between two steps of the engine; a second one interrupts."""
    stopped: list[bool] = []
    if not terminal:
        yield stopped
        return

    def stop(*_: object) -> None:
        if stopped:
            raise KeyboardInterrupt
        stopped.append(True)

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield stopped
    finally:
        signal.signal(signal.SIGINT, before)
