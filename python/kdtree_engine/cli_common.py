"""What the commands share: options, loading with a progress bar, errors in one line."""

import functools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

if TYPE_CHECKING:
    from kdtree_engine.llm import LLM, Stream
    from kdtree_engine.outputs import StreamChunk

Command = TypeVar("Command", bound=Callable[..., Any])

Model = Annotated[
    Path | None,
    typer.Option("--model", "-m", help="Checkpoint folder.  [default: the bundled model]"),
]
DraftModel = Annotated[
    Path | None,
    typer.Option(help="Drafter's folder.  [default: the folder 'drafter' inside the model's]"),
]
Device = Annotated[str, typer.Option(help="Where to compute: cpu.")]
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
TreeTopk = Annotated[
    int,
    typer.Option(
        show_default=False, help="Candidates at each depth.  [default: as many as the budget]"
    ),
]
DraftTemperature = Annotated[
    float, typer.Option(help="Divides the drafter's logits; the text does not depend on it.")
]
Chat = Annotated[bool, typer.Option("--chat", help="Put the prompt in the model's chat template.")]


def errors_in_one_line(command: Command) -> Command:
    """Ends a command with one line on stderr and status 1 where Python would print a traceback."""

    @functools.wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            result = command(*args, **kwargs)
            sys.stdout.flush()
            return result
        except typer.Exit:
            raise
        except KeyboardInterrupt:
            print("\nkdtree: interrupted", file=sys.stderr)
            raise SystemExit(130) from None
        except BrokenPipeError:
            # The reader of our output has gone; Python must not fail again when it flushes.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            raise SystemExit(1) from None
        except (ValueError, RuntimeError, OSError, ImportError, MemoryError) as error:
            text = " ".join(str(error).split()) or type(error).__name__
            print(f"kdtree: error: {text}", file=sys.stderr)
            raise SystemExit(1) from None

    return wrapped  # type: ignore[return-value]


def stderr_console() -> Console:
    return Console(stderr=True, highlight=False)


def load(
    model: Path | None, speculative: dict[str, Any], quiet: bool = False, **options: Any
) -> "LLM":
    """Loads the model with a progress bar on stderr, or one line when that is no terminal."""
    from kdtree_engine.llm import LLM, default_model

    name = (model or default_model()).resolve().name
    console = stderr_console()
    if quiet or not console.is_terminal:
        llm = LLM(model, speculative_config=speculative, **options)
        if not quiet:
            print(f"loaded {name}", file=sys.stderr)
        return llm
    columns = (TextColumn("loading {task.description}"), BarColumn(), DownloadColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(name, total=None)

        def progress(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        return LLM(model, speculative_config=speculative, progress=progress, **options)


@contextmanager
def prefill_bar(quiet: bool) -> Iterator[Callable[["StreamChunk"], None]]:
    """Gives a function to call with every chunk; the bar is gone when the first text comes."""
    console = stderr_console()
    if quiet or not console.is_terminal:
        yield lambda chunk: None
        return
    columns = (TextColumn("reading the prompt"), BarColumn(), TextColumn("{task.completed} tokens"))
    with Progress(*columns, console=console, transient=True, redirect_stdout=False) as bar:
        task = bar.add_task("prefill", total=None)

        def show(chunk: "StreamChunk") -> None:
            step = chunk.step
            bar.update(task, completed=step.num_prefilled, total=step.prompt_length)
            if step.num_prefilled >= step.prompt_length:
                bar.stop()

        yield show


def speculative_options(
    draft_model: Path | None,
    method: str | None = None,
    tree_budget: str | None = None,
    tree_topk: int = 0,
    draft_temperature: float = 1.0,
) -> dict[str, Any]:
    """The `speculative_config` that options of the command line stand for."""
    options: dict[str, Any] = {}
    if draft_model is not None:
        options["model"] = draft_model
    if method is not None:
        options["method"] = method
    if tree_budget is not None:
        options["tree_budget"] = parse_budget(tree_budget)
    if tree_topk != 0:
        options["tree_topk"] = tree_topk
    if draft_temperature != 1.0:
        options["draft_temperature"] = draft_temperature
    return options


def parse_budget(text: str, option: str = "--tree-budget") -> int | str:
    """ "auto" or a whole number; its range is checked with the other options."""
    if text == "auto":
        return text
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{option} is {text!r}, want 1 to 256 or auto") from None


def read_prompt(prompt: str) -> str:
    """The prompt itself, or all of standard input for "-"."""
    if prompt != "-":
        return prompt
    raw = sys.stdin.buffer.read()
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"standard input is not UTF-8 at byte {error.start}") from None


def check_writable(option: str, path: Path | None) -> None:
    """Refuses a file to be written later whose folder is not there, before the work is done."""
    if path is not None and (path.is_dir() or not path.parent.is_dir()):
        raise ValueError(f"{option} is {path}: it must be a file in a folder that exists")


def start(llm: "LLM", prompt: str, chat: bool, system: str | None, params: Any) -> "Stream":
    """A stream that continues the prompt, or answers it in the chat template."""
    if not chat:
        if system is not None:
            raise ValueError("--system needs --chat")
        return llm.stream(prompt, params)
    messages = [{"role": "user", "content": prompt}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    return llm.stream(llm.chat_prompt(messages), params)


def printable(text: str) -> str:
    """Text for a terminal, without the control characters that could steer it."""
    return "".join(c if c in "\t\n" or c.isprintable() else "\ufffd" for c in text)
