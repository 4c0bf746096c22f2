"""`kdtree shard`: makes a pre-sharded cache of a checkpoint."""

import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from kdtree_engine import cli_common as common
from kdtree_engine.cli_load import bytes_bar


@common.errors_in_one_line
def shard(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="Checkpoint folder.")],
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder to write, empty or not there.")
    ] = None,
    tensor_parallel_size: common.TensorParallelSize = 1,
    expert_parallel: common.ExpertParallel = False,
    draft_model: common.DraftModel = None,
    device: Annotated[
        str,
        typer.Option(
            help="Whose layout the weights get: auto (a GPU if there is one and no --num-threads, "
            "else the CPU), cpu, cuda or cuda:N. One GPU does it for all ranks."
        ),
    ] = "auto",
    num_threads: common.NumThreads = 0,
) -> None:
    """Write a checkpoint's weights as each rank holds them in memory, so that later starts neither
    cut nor pack them.

    The folder can be given as --model, with the same --tp and --expert-parallel and a device of the
    same kind; each rank then reads one file from its beginning to its end. It needs as much room
    as the checkpoint, and does not need the checkpoint any more. While that is there and has
    changed, the cache is refused. When writing fails or is interrupted, nothing is left.

    \b
    Examples:
      kdtree shard ~/models/Kimi-K2.6 --tp 8 --out ~/models/Kimi-K2.6-tp8
      kdtree generate --model ~/models/Kimi-K2.6-tp8 --tp 8 "def fibonacci(n):"
      kdtree inspect ~/models/Kimi-K2.6-tp8 --verify
    """
    from kdtree_engine import _core
    from kdtree_engine.locations import find_drafter

    if out is None:
        raise common.OptionError("--out is missing: name the folder to write")
    common.check_checkpoint("MODEL", model)
    if (model / "kdtree_shards.json").exists():
        raise common.OptionError(f"MODEL is {model}, which is a pre-sharded cache already")
    if draft_model is not None:
        common.check_checkpoint("--draft-model", draft_model)
    if num_threads and device == "auto":
        device = "cpu"
    if num_threads and device.startswith("cuda"):
        raise common.OptionError(
            f"--num-threads is {num_threads}; device {device!r} has no use for it"
        )
    drafter = find_drafter(model, draft_model)
    started = time.monotonic()
    with bytes_bar("writing", out.name) as progress:
        made: dict[str, Any] = _core.shard_checkpoint(
            str(model),
            str(out),
            str(drafter) if drafter else None,
            device=device,
            num_threads=num_threads,
            tensor_parallel_size=tensor_parallel_size,
            expert_parallel=expert_parallel,
            progress=progress,
        )
    seconds = time.monotonic() - started
    ranks = "1 rank" if tensor_parallel_size == 1 else f"{tensor_parallel_size} ranks"
    print(
        f"wrote {out}: {ranks}, layout {made['layout']}, {made['written_bytes']:,} bytes from "
        f"{made['read_bytes']:,} read, {seconds:.1f} s, "
        f"{made['written_bytes'] / seconds / 1e9:.2f} GB/s",
        file=sys.stderr,
    )
