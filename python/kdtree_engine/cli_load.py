"""Options of the commands that run a model, and its loading."""

import functools
import inspect
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TransferSpeedColumn,
)

from kdtree_engine import cli_common as common
from kdtree_engine.cli_common import OptionError

if TYPE_CHECKING:
    from kdtree_engine.llm import LLM

SLOW_LOAD_S = 2.0  # a load that takes longer is summed up in a line
SLOW_START_S = 1.5  # from then on it is said who is waited for


@dataclass(frozen=True)
class EngineOptions:
    """Options of every command that runs a model; `option_groups` adds them to it."""

    model: Annotated[
        Path | None,
        typer.Option(
            "--model",
            "-m",
            help="Checkpoint folder.  [default: $KDTREE_MODEL, or the bundled model]",
        ),
    ] = None
    draft_model: common.DraftModel = None
    max_model_len: common.MaxModelLen = 0
    num_threads: common.NumThreads = 0
    device: Annotated[
        str,
        typer.Option(
            help="Where to compute: auto (a GPU if there is one and no --num-threads, else the "
            "CPU), cpu, cuda, cuda:N, or check:A,B (both, compared op by op). With --tp: cuda is a "
            "GPU for each rank; cuda:0,cuda:0 and the like name them."
        ),
    ] = "auto"
    tensor_parallel_size: common.TensorParallelSize = 1
    expert_parallel: common.ExpertParallel = False
    rank_timeout: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS", help="How long a rank waits for the others.  [default: 300]"
        ),
    ] = None

    def for_llm(self) -> dict[str, Any]:
        """Arguments of `LLM`, but for `speculative_config`."""
        options = {**vars(self)}
        del options["draft_model"]
        if self.rank_timeout is None:
            del options["rank_timeout"]
        elif self.tensor_parallel_size == 1:
            raise OptionError(
                "--rank-timeout needs ranks: give their number with --tp, under torchrun, mpirun "
                "and srun too, whose WORLD_SIZE alone makes none"
            )
        return options


@dataclass(frozen=True)
class SamplingOptions:
    """How tokens are chosen; `option_groups` adds these to a command."""

    # None where the option is not given: given for greedy decoding, it is refused.
    temperature: Annotated[
        float | None,
        typer.Option(
            "--temperature",
            "-T",
            help="Draw tokens from softmax(logits / temperature), 0.001 to 1000.  [default: 0, "
            "always the likeliest]",
        ),
    ] = None
    top_p: Annotated[
        float | None,
        typer.Option(
            help="Draw from the fewest tokens, likeliest first, that have this probability "
            "together.  [default: 1]"
        ),
    ] = None
    top_k: Annotated[
        int | None, typer.Option(help="Draw from so many of the likeliest.  [default: 0, all]")
    ] = None
    min_p: Annotated[
        float | None,
        typer.Option(
            help="Draw from tokens at least this many times as probable as the likeliest.  "
            "[default: 0]"
        ),
    ] = None
    seed: Annotated[
        int | None,
        typer.Option(
            help="The same seed gives the same text.  [default: a new one each time; bench takes 0]"
        ),
    ] = None

    def for_params(self) -> dict[str, Any]:
        """Arguments of `SamplingParams`."""
        given = {name: value for name, value in vars(self).items() if value is not None}
        others = [name for name in given if name != "temperature"]
        if others and not self.temperature:
            raise OptionError(
                f"--{others[0].replace('_', '-')} has no effect on greedy decoding: add a "
                "--temperature above 0, such as --temperature 0.7"
            )
        return given


def option_groups(command: common.Command) -> common.Command:
    """Gives a command the options of each group, a dataclass, that it has as a parameter."""
    own = inspect.signature(command).parameters.values()
    groups: dict[str, Any] = {p.name: p.annotation for p in own if is_dataclass(p.annotation)}
    options = {name: inspect.signature(group).parameters for name, group in groups.items()}

    @functools.wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        for name, group in groups.items():
            kwargs[name] = group(**{option: kwargs.pop(option) for option in options[name]})
        return command(*args, **kwargs)

    listed = [q for p in own for q in (options[p.name].values() if p.name in groups else [p])]
    wrapped.__signature__ = inspect.Signature(listed)  # type: ignore[attr-defined]
    wrapped.__annotations__ = {p.name: p.annotation for p in listed}
    return wrapped  # type: ignore[return-value]


@contextmanager
def bytes_bar(doing: str, name: str) -> Iterator[Callable[[int, int], None] | None]:
    """Gives a function to call with bytes done and in all; None where there is no terminal."""
    console = common.stderr_console()
    if not console.is_terminal:
        yield None
        return
    columns = (
        TextColumn(f"{doing} {{task.description}}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(name, total=None, visible=False)

        def progress(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total, visible=True)

        yield progress


@contextmanager
def waiting_told() -> Iterator[None]:
    """Says on stderr which ranks of other processes this one has been waiting for."""
    from kdtree_engine import _core

    done = threading.Event()

    def watch() -> None:
        told = ""
        while not done.wait(SLOW_START_S):
            missing = _core.missing_ranks()
            # Two refused processes of one number, which try on, are told of by turns.
            news = re.sub(r" \([^()]*:\d+\)", "", missing)
            if news and news != told:
                print(common.printable(f"waiting for {missing}"), file=sys.stderr)
            told = news or told

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        done.set()


def _load_summary(name: str, stats: dict[str, Any]) -> str:
    """One line on a load: what, where, and if it took more than a moment, how fast."""
    line = f"loaded {name} on {stats.get('device', 'cpu')}"
    if (ranks := stats.get("tensor_parallel_size", 1)) > 1:
        line += f", {ranks} ranks"
    seconds, size = stats.get("load_seconds", 0.0), stats.get("load_bytes", 0)
    if seconds <= SLOW_LOAD_S:
        return line
    line += f": {size / 1e9:.1f} GB in {seconds:.1f} s, {size / 1e9 / seconds:.2f} GB/s"
    with suppress(OSError):  # where there is no /proc
        peak = re.search(r"^VmHWM:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.M)
        line += f", at most {int(peak[1]) * 1024 / 1e9:.1f} GB of memory" if peak else ""
    return line


def load(engine: EngineOptions, speculative: dict[str, Any], quiet: bool = False) -> "LLM":
    """Loads the model with a progress bar on stderr, or one line when that is no terminal."""
    from kdtree_engine.llm import LLM
    from kdtree_engine.locations import default_model, find_drafter

    options = engine.for_llm()
    folder, named = engine.model or default_model(), engine.draft_model
    common.check_checkpoint("--model" if engine.model else "the model", folder)
    if named is not None:
        common.check_checkpoint("--draft-model", named)
    wants_drafter = speculative and speculative.get("method") != "none"
    if wants_drafter and find_drafter(folder, named) is None:
        raise OptionError(
            f"drafts need a drafter, and {folder} has no folder 'drafter': name one with "
            "--draft-model"
        )
    processes = os.environ.get("WORLD_SIZE", "1")
    if engine.tensor_parallel_size == 1 and processes not in ("", "1"):
        print(
            f"WORLD_SIZE is {processes}, but --tp is 1: this process works for itself alone",
            file=sys.stderr,
        )
    name = folder.resolve().name
    with ExitStack() as stack:
        progress = None if quiet else stack.enter_context(bytes_bar("loading", name))
        if engine.tensor_parallel_size > 1:
            stack.enter_context(waiting_told())
        if named is not None:
            speculative = {**speculative, "model": named}
        llm = LLM(speculative_config=speculative, progress=progress, **options)
    slow = llm.stats().get("load_seconds", 0.0) > SLOW_LOAD_S
    if not quiet and (slow or progress is None):
        print(_load_summary(name, llm.stats()), file=sys.stderr)
    return llm
