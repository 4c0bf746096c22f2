"""What the commands share: options, errors in one line, what they print."""

import codecs
import functools
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.measure import Measurement
from rich.progress import (
    BarColumn,
    Progress,
    TextColumn,
)
from rich.table import Table

from kdtree_engine import checks
from kdtree_engine.sampling_params import MAX_BUDGET, METHODS, SpeculativeConfig

if TYPE_CHECKING:
    from kdtree_engine.llm import LLM, Stream
    from kdtree_engine.outputs import StreamChunk

Command = TypeVar("Command", bound=Callable[..., Any])

DraftModel = Annotated[
    Path | None,
    typer.Option(help="Drafter's folder.  [default: the folder 'drafter' inside the model's]"),
]
TensorParallelSize = Annotated[
    int,
    typer.Option("--tensor-parallel-size", "--tp", metavar="N", help="Ranks that share the model."),
]
ExpertParallel = Annotated[
    bool,
    typer.Option("--expert-parallel", help="Whole experts a rank instead of a slice of each."),
]
NumThreads = Annotated[
    int,
    typer.Option("--num-threads", "-t", show_default=False, help="[default: one a core]"),
]
MaxModelLen = Annotated[
    int,
    typer.Option(
        show_default=False, help="Most tokens of prompt and text.  [default: the model's own]"
    ),
]

# None where the option is not given: given with a method that has no use for it, it is refused.
Method = Annotated[
    str | None,
    typer.Option(help=f"{', '.join(METHODS)}.  [default: ddtree if there is a drafter]"),
]
TreeBudget = Annotated[
    str | None, typer.Option(metavar="N|auto", help="Draft nodes a round.  [default: auto]")
]
TreeTopk = Annotated[
    int | None,
    typer.Option(help="Candidates at each depth.  [default: as many as the budget]"),
]
DraftTemperature = Annotated[
    float | None,
    typer.Option(
        help="Divides the drafter's logits; the text does not depend on it.  [default: 1.0]"
    ),
]
Chat = Annotated[bool, typer.Option("--chat", help="Put the prompt in the model's chat template.")]


_OPTION_NAMES = re.compile(
    r"^(?:speculative_config: )?"
    r"(method|tree_budget|tree_topk|draft_temperature|max_tokens|num_threads|max_model_len|device|"
    r"tensor_parallel_size|expert_parallel|rank_timeout|gpu_memory|overhead|max_num_seqs|verify|out|"
    r"only|temperature|top_p|top_k|min_p|seed)(?= (?:is|must|has) )"
)
# The same further on in a message, but not inside a path or a quotation.
_NAMES_INSIDE = re.compile(
    r"(?<![\w./'-])(max_model_len|max_num_seqs|gpu_memory|tree_budget|expert_parallel|"
    r"tensor_parallel_size|(?:(?<=and )|(?<=lower ))overhead)(?![\w/'-]|\.\w)"
)
# Of pydantic's kinds of faults.
_WANTED = {
    "float_parsing": "a number",
    "int_parsing": "an integer",
    "int_parsing_size": "an integer of fewer digits",
    "string_unicode": "valid Unicode",
    "greater_than_equal": "at least {ge}",
}
_ARGUMENT_NAMES = {"prompt": "PROMPT", "path": "PATH", "json_file": "--json"}
_WIDEST = 1_000_000  # of a line that no terminal folds
_LONG_WORD = 24  # longer ones, such as names of files, a table may fold
# What a terminal shows that cannot show these.
_ASCII = {"·": ".", "⏎": "\\n", "⇥": "\\t", "␍": "\\r", "×": "x", "✓": "*"}
_ASCII |= {bar: str(height + 1) for height, bar in enumerate("▁▂▃▄▅▆▇█")}


class OptionError(ValueError):
    """The command line asks for what cannot be: status 2, where a failure has status 1."""


def prepare_streams() -> None:
    """Makes sure that both output streams are there, and replace what their encoding lacks.

    Ends the process when standard output is closed, as there is nobody to work for.
    """

    def replaced(error: UnicodeError) -> tuple[str, int]:
        if not isinstance(error, UnicodeEncodeError):
            raise error
        missing = error.object[error.start : error.end]
        return "".join(_ASCII.get(c, "?") for c in missing), error.end

    codecs.register_error("kdtree", replaced)
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    if sys.stdout is None:
        _complain("standard output is closed")
        raise SystemExit(1)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="kdtree")


def drop_bad_sizes() -> None:
    """Takes a terminal's size from the environment that is none, before rich uses it."""
    for size in ("COLUMNS", "LINES"):
        if not re.fullmatch("[1-9][0-9]{0,5}", os.environ.get(size, "")):
            os.environ.pop(size, None)


def _complain(text: str) -> None:
    with suppress(OSError):  # nobody reads standard error either
        print(f"kdtree: error: {printable(text)}", file=sys.stderr)


def _check_arguments(arguments: dict[str, Any]) -> None:
    """Refuses what the shell passed on that is not UTF-8, by the name of its option."""
    for name, value in arguments.items():
        option = _ARGUMENT_NAMES.get(name, f"--{name.replace('_', '-')}")
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, str | Path):
                check_text(option, str(one))


def _one_line(error: BaseException) -> tuple[str, int]:
    """What to say of an error, in words of the command line, and the exit status."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror, 1
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, OptionError):
        return text, 2
    named = _OPTION_NAMES.match(text)
    if named is None or not isinstance(error, ValueError):
        return text, 1
    return f"--{named[1].replace('_', '-')}{with_option_names(text[named.end() :])}", 2


def usage_error(error: Any) -> OptionError:
    """One line for a command line that typer cannot use, with the option and the value."""
    for fault in getattr(error.__cause__, "errors", list)():  # pydantic's, of a value
        if want := _WANTED.get(fault["type"]):
            want = want.format(**fault.get("ctx", {}))
            option = error.param.opts[0]
            return OptionError(f"{option} is {checks.shown(fault['input'])}, want {want}")
    text = error.format_message().removesuffix(".")
    takes_text = error.ctx and any(p.name == "prompt" for p in error.ctx.command.params)
    if takes_text and "extra argument" in text:
        text += ": text of several words needs quotes"
    help_of = f" (see {error.ctx.command_path} --help)" if error.ctx else ""
    return OptionError(f"{text[:1].lower()}{text[1:]}{help_of}")


def with_option_names(text: str) -> str:
    """A message in words of the command line: max_model_len is --max-model-len."""

    def option(name: re.Match[str]) -> str:
        return "--tp" if name[0] == "tensor_parallel_size" else f"--{name[0].replace('_', '-')}"

    return _NAMES_INSIDE.sub(option, text)


def _drop_output() -> None:
    """Sends what cannot be written away, lest Python fail again when it flushes at the end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def errors_in_one_line(command: Command) -> Command:
    """Ends a command with one line on stderr where Python would print a traceback.

    The status is 2 for a wrong option and 1 for a failure.
    """

    @functools.wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            _check_arguments(kwargs)
            try:
                return command(*args, **kwargs)
            finally:
                sys.stdout.flush()
        except typer.Exit:
            raise
        except KeyboardInterrupt:
            print("\nkdtree: interrupted", file=sys.stderr)
            raise SystemExit(130) from None
        except BrokenPipeError:  # the reader of our output has gone
            _drop_output()
            raise SystemExit(1) from None
        except (ValueError, RuntimeError, OSError, ImportError, MemoryError) as error:
            text, status = _one_line(error)
            _complain(text)
            try:
                sys.stdout.flush()
            except OSError:  # on a full disk
                _drop_output()
            raise SystemExit(status) from None

    return wrapped  # type: ignore[return-value]


def stdout_console() -> Console:
    """Folds to the terminal's width; what goes to a file or a pipe keeps its lines whole."""
    whole = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    return Console(highlight=False, width=_WIDEST if whole else None)


def print_table(table: Table, console: Console | None = None) -> None:
    """Prints a table of which nothing is cut.

    Where it is too wide for the console, its columns stand closer and fold at spaces, and in words
    of more than 24 characters. Where even that is too wide, lines are longer than the console's.
    """
    console = console or stdout_console()
    endless = console.options.update(max_width=_WIDEST)
    width = console.width
    if Measurement.get(console, endless, table).maximum > width:
        table.box, table.show_edge, table.padding = SIMPLE_HEAD, False, 0
        spare = width - len(table.columns) + 1
        wanted = []
        for column in table.columns:
            column.overflow = "fold"
            header = [column.header] if table.show_header else []
            sizes = [Measurement.get(console, endless, cell) for cell in [*header, *column.cells]]
            whole = max((size.maximum for size in sizes), default=1)
            words = max((min(_LONG_WORD, size.minimum) for size in sizes), default=1)
            column.width = whole if column.no_wrap else words
            wanted.append(whole - column.width)
            spare -= column.width
        console.width = width - min(0, spare)
        columns = zip(table.columns, wanted, strict=True)
        for column, more in sorted(columns, key=lambda c: c[0].justify != "right"):  # numbers first
            more = max(0, min(spare, more))
            column.width = (column.width or 0) + more
            spare -= more
    console.print(table)
    console.width = width


def stderr_console() -> Console:
    return Console(stderr=True, highlight=False)


@contextmanager
def prefill_bar(quiet: bool) -> Iterator[Callable[["StreamChunk"], None]]:
    """Gives a function to call with every chunk; the bar is gone when the first text comes."""
    console = stderr_console()
    if quiet or not console.is_interactive:
        yield lambda chunk: None
        return
    columns = (TextColumn("reading the prompt"), BarColumn(), TextColumn("{task.completed} tokens"))
    with Progress(*columns, console=console, transient=True, redirect_stdout=False) as bar:
        task = bar.add_task("prefill", total=None, visible=False)

        def show(chunk: "StreamChunk") -> None:
            step = chunk.step
            if not bar.live.is_started:
                return
            done, total = step.num_prefilled, step.prompt_length
            bar.update(task, completed=done, total=total, visible=True)
            if step.num_prefilled >= step.prompt_length:
                bar.stop()

        yield show


def speculative_options(
    method: str | None = None,
    tree_budget: str | None = None,
    tree_topk: int | None = None,
    draft_temperature: float | None = None,
) -> dict[str, Any]:
    """The `speculative_config` that options of the command line stand for, checked."""
    options: dict[str, Any] = {}
    if method is not None:
        options["method"] = method
    if tree_budget is not None:
        options["tree_budget"] = parse_budget(tree_budget)
    if tree_topk is not None:
        options["tree_topk"] = tree_topk
    if draft_temperature is not None:
        options["draft_temperature"] = draft_temperature
    if method is not None and method not in METHODS:
        raise OptionError(f"--method is {method!r}, want {', '.join(METHODS)}")
    trees = [name for name in ("tree_budget", "tree_topk", "draft_temperature") if name in options]
    if method in ("none", "dflash") and trees:
        raise OptionError(
            f"--{trees[0].replace('_', '-')} needs trees, --method {method} builds none: leave one "
            "out"
        )
    SpeculativeConfig.from_dict(options, "ddtree")
    return options


def parse_budget(text: str, option: str = "--tree-budget", auto: bool = True) -> int | str:
    """A budget, or "auto" where that is allowed."""
    if text == "auto" and auto:
        return text
    if re.fullmatch("[0-9]{1,9}", text) and 1 <= int(text) <= MAX_BUDGET:
        return int(text)
    raise OptionError(f"{option} is {text!r}, want 1 to {MAX_BUDGET}{' or auto' if auto else ''}")


def read_prompt(prompt: str) -> str:
    """The prompt itself, or all of standard input for "-"; refuses an empty one."""
    name = "PROMPT"
    if prompt == "-":
        name = "standard input"
        if sys.stdin is None:
            raise OptionError(f"{name} is closed: give some text to continue")
        prompt = utf8(name, sys.stdin.buffer.read())
    if not prompt:
        raise OptionError(f"{name} is empty: give some text to continue")
    return prompt


def check_text(name: str, text: str) -> None:
    """Refuses text that UTF-8 cannot hold."""
    try:
        checks.text(name, text)
    except ValueError as error:
        raise OptionError(str(error)) from None


def utf8(name: str, raw: bytes) -> str:
    """The text of a file's bytes; a message names the line that is not UTF-8."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise OptionError(f"{name} is not UTF-8 at byte {error.start}, on line {line}") from None


def check_checkpoint(name: str, folder: Path) -> None:
    """Refuses what is no checkpoint folder, before anything is loaded."""
    if not folder.is_dir():
        raise OptionError(f"{name} is {folder}: there is no such folder")
    if not (folder / "config.json").is_file():
        raise OptionError(f"{name} is {folder}: not a checkpoint folder (no config.json)")


def check_writable(option: str, path: Path | None) -> None:
    """Refuses a file to be written later whose folder is not there, before the work is done."""
    if path is not None and (path.is_dir() or not path.parent.is_dir()):
        raise OptionError(f"{option} is {path}: it must be a file in a folder that exists")


def start(llm: "LLM", prompt: str, chat: bool, system: str | None, params: Any) -> "Stream":
    """A stream that continues the prompt, or answers it in the chat template."""
    if not chat:
        return llm.stream(prompt, params)
    messages = [{"role": "user", "content": prompt}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    return llm.stream(llm.chat_prompt(messages), params)


def printable(text: str) -> str:
    """Text for a terminal, without the control characters that could steer it."""
    return "".join(c if c in "\t\n" or c.isprintable() else "\ufffd" for c in text)


def stats_line(output: Any) -> str:
    """A finished request in one line: tokens, method, speed, accept lengths."""
    completion, spec = output.outputs[0], output.spec
    parts = [
        f"{len(completion.token_ids)} tokens ({completion.finish_reason})",
        spec.name,
        f"{spec.tokens_per_second:.1f} tokens/s",
        f"{spec.target_forwards} target forwards",
        f"{spec.tokens_per_forward:.2f} tokens per forward",
    ]
    if output.seed is not None:
        parts.append(f"seed {output.seed}")
    bars = histogram_bars(spec.accept_length_histogram)
    return "[" + ", ".join(parts) + (f", accept lengths {bars}]" if bars else "]")


def histogram_bars(histogram: dict[int, int]) -> str:
    """A picture of the rounds by tokens committed, such as `1▃▁▇5`: one bar a length."""
    if not histogram:
        return ""
    longest, most = max(histogram), max(histogram.values())
    heights = "▁▂▃▄▅▆▇█"
    bars = ""
    for length in range(1, longest + 1):
        count = histogram.get(length, 0)
        bars += heights[(count * 8 - 1) // most if count * 8 > most else 0] if count else " "
    return f"1|{bars}|{longest}"
