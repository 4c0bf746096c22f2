"""`kdtree bench rank`: what a forward pass costs on ranks, against one of them alone."""

import json
import re
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from kdtree_engine import cli_common as common

_MAX_ROWS = 257
# A rank's GPU is not there or too old, or this build has no kernels.
_NO_GPU = re.compile(r"rank \d+: (device is 'cuda|cuda:\d+ is )")
_ON_THE_CPU = "; --device cpu measures on the CPU, with --like tiny where memory is short"


def parse_rows(text: str) -> list[int]:
    """The numbers of a list such as 1,2,65."""
    for part in text.split(","):
        if not (re.fullmatch("[0-9]{1,9}", part) and 1 <= int(part) <= _MAX_ROWS):
            raise common.OptionError(f"--rows has {part!r}, want 1 to {_MAX_ROWS}")
    return [int(part) for part in text.split(",")]


def with_sums(times: list[dict[str, Any]], num_all_reduces: int) -> list[dict[str, Any]]:
    """The records with what the ranks add to one alone, and a pass's sums as measured alone."""
    return [
        {
            **record,
            "added_us": record["ranks_us"] - record["alone_us"],
            "all_reduces_us": record["all_reduce_us"] * num_all_reduces,
        }
        for record in times
    ]


@common.errors_in_one_line
def bench_rank(
    like: Annotated[
        str, typer.Option(metavar="NAME", help="kimi-k2.6, kimi-k2-instruct (FP8), or tiny.")
    ] = "kimi-k2.6",
    layers: Annotated[int, typer.Option(min=1, help="Of the model; the first is dense.")] = 4,
    tensor_parallel_size: common.TensorParallelSize = 2,
    device: Annotated[
        str, typer.Option(help="cpu, cuda (a GPU for each rank), or a list: cuda:0,cuda:0.")
    ] = "cuda",
    rows: Annotated[str, typer.Option(metavar="N,N,...", help="Of a pass.")] = "1,2,3,8,16,65",
    context: Annotated[int, typer.Option(min=0, help="Tokens in the cache.")] = 1024,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Also write the results here.")
    ] = None,
) -> None:
    """Time the target's forward pass on ranks that share a model, and on one of them alone.

    The model is made in memory, by rule, at its real width (kdtree synth) and cut for the ranks.
    Alone, rank 0 computes with its part and sums nothing; what the ranks add to that is set
    against the sums over ranks of the same size, timed in a row, times their number in a pass.

    \b
    Examples:
      kdtree bench rank --tp 8 --json rank.json
      kdtree bench rank --device cuda:0,cuda:0 --layers 2
      kdtree bench rank --like tiny --device cpu --rows 1,8
    """
    from kdtree_engine import _core
    from kdtree_engine.locations import find_nccl

    common.check_writable("--json", json_file)
    numbers = parse_rows(rows)
    try:
        _core.synth_checkpoint(like, layers=layers)
    except ValueError as error:
        raise common.OptionError(f"--{error}") from None
    if nccl := find_nccl():
        _core.set_nccl_library(str(nccl))
    try:
        result = _core.bench_rank(
            f"synth:{like},layers={layers}",
            device=device,
            tensor_parallel_size=tensor_parallel_size,
            rows=numbers,
            context=context,
        )
    except ValueError as error:
        if str(error).startswith("context is "):
            raise common.OptionError(f"--{error}") from None
        raise
    except RuntimeError as error:
        if _NO_GPU.match(str(error)):
            raise RuntimeError(f"{error}{_ON_THE_CPU}") from None
        raise
    records = with_sums(result.pop("times"), result["num_all_reduces"])
    size, sums = tensor_parallel_size, result["num_all_reduces"]
    model = f"{like}, {layers} layer{'s' * (layers > 1)}"
    title = f"{model}, {size} ranks on {device}, context {context}; microseconds"
    table = Table(title=title)
    heads = ("rows", "one alone", f"{size} ranks", "added", f"{sums} sums", "one sum")
    keys = ("alone_us", "ranks_us", "added_us", "all_reduces_us", "all_reduce_us")
    for head in heads:
        table.add_column(head, justify="right")
    for record in records:
        table.add_row(str(record["rows"]), *(f"{record[key]:.1f}" for key in keys))
    console = common.stdout_console()
    common.print_table(table, console)
    console.print(
        f"one alone: rank 0's part of the weights, summing nothing; {size} ranks: the whole pass; "
        f"added: what the ranks add to one alone; {sums} sums: as many as a pass has, from one sum "
        "over ranks timed in a row"
    )
    print(f"sums over ranks: {result['communication']}", file=sys.stderr)
    if json_file is not None:
        asked = {"like": like, "layers": layers, "tensor_parallel_size": size}
        asked |= {"device": device, "context": context}
        json_file.write_text(json.dumps({**asked, **result, "rows": records}, indent=1) + "\n")
