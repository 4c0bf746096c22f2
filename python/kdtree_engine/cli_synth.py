"""`kdtree synth`: writes a checkpoint made by rule."""

import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table

from kdtree_engine import cli_common as common

if TYPE_CHECKING:
    from kdtree_engine.synth import Plan


Size = Annotated[
    int | None, typer.Option(min=1, show_default=False, help="[default: as the model has it]")
]


@common.errors_in_one_line
def synth(
    like: Annotated[
        str, typer.Option(metavar="NAME", help="kimi-k2.6, kimi-k2-instruct (FP8), or tiny.")
    ],
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder to write, empty or not there.")
    ] = None,
    layers: Size = None,
    experts: Size = None,
    hidden: Size = None,
    vocab: Size = None,
    seed: Annotated[int, typer.Option(min=0, help="Another seed, other weights.")] = 0,
    drafter: Annotated[bool, typer.Option(help="With a drafter in the folder 'drafter'.")] = True,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the sizes and write nothing.")
    ] = False,
) -> None:
    """Write a checkpoint with a model's names, types and sizes, and weights made by rule.

    For tests and measurements: it loads and decodes like the model, and its text is nonsense. The
    same options and seed give the same bytes. When writing fails or is interrupted, nothing is
    left.

    \b
    Examples:
      kdtree synth --like tiny --out tiny
      kdtree synth --like kimi-k2.6 --layers 2 --out k2.6-2-layers
      kdtree synth --like kimi-k2.6 --dry-run
    """
    from kdtree_engine import synth as maker

    if out is None and not dry_run:
        raise common.OptionError("--out is missing: name the folder to write, or give --dry-run")
    try:
        plan = maker.plan(
            like,
            layers=layers or 0,
            experts=experts or 0,
            hidden=hidden or 0,
            vocab=vocab or 0,
            seed=seed,
            drafter=drafter,
        )
    except ValueError as error:
        raise common.OptionError(f"--{error}") from None
    if dry_run:
        _print(plan)
        return
    assert out is not None
    started = time.monotonic()
    columns = (TextColumn("writing {task.description}"), BarColumn(), DownloadColumn())
    console = common.stderr_console()
    try:
        with Progress(
            *columns, TransferSpeedColumn(), console=console, transient=True,
            disable=not console.is_terminal,
        ) as bar:  # fmt: skip
            task = bar.add_task(out.name, total=plan.bytes)
            maker.write(plan, out, lambda done, total: bar.update(task, completed=done))
    except ValueError as error:
        text = str(error)
        raise common.OptionError(f"--{text}" if text.startswith("out ") else text) from None
    seconds = time.monotonic() - started
    print(
        f"wrote {out}: {plan.num_tensors:,} tensors, {plan.bytes:,} bytes, {seconds:.1f} s, "
        f"{plan.bytes / seconds / 1e9:.2f} GB/s",
        file=sys.stderr,
    )


def _print(plan: "Plan") -> None:
    for folder in plan.folders:
        made, shards = folder.made, folder.made["shards"]
        name = f"{plan.like}/{folder.path}" if folder.path.name else plan.like
        print(f"{name}: {made['num_tensors']:,} tensors, {made['bytes']:,} bytes")
        _print_table("part", made["bytes_by_part"].items())
        files = "1 shard" if len(shards) == 1 else f"{len(shards)} shards"
        print(f"{files}, {folder.bytes:,} bytes with headers and small files")
        _print_table("file", [(s["file"], len(s["header"]) + s["bytes"]) for s in shards])
    print(f"in all {plan.num_tensors:,} tensors, {plan.bytes:,} bytes, {plan.bytes / 1e9:.1f} GB")


def _print_table(first: str, rows: Iterable[tuple[str, int]]) -> None:
    table = Table()
    table.add_column(first)
    table.add_column("bytes", justify="right")
    for name, size in rows:
        table.add_row(name, f"{size:,}")
    common.print_table(table)
