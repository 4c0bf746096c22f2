"""`kdtree bench ops`: the CUDA ops at the sizes of Kimi K2.6, against what the card reaches."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from kdtree_engine import cli_common as common

_CEILING = "ceiling: "


def ceilings_of(records: list[dict[str, Any]]) -> tuple[float, float]:
    """(GB/s, TFLOP/s): the best that the run's own yardsticks reached."""
    own = [r for r in records if r["op"].startswith(_CEILING)]
    gb_s = max((r["bytes"] / r["us"] / 1e3 for r in own if r["us"] > 0), default=0.0)
    tflop_s = max((r["operations"] / r["us"] / 1e6 for r in own if r["us"] > 0), default=0.0)
    return gb_s, tflop_s


def with_shares(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The records with rates, and the larger share of the two ceilings: what bounds the op."""
    gb_s, tflop_s = ceilings_of(records)
    result = []
    for record in records:
        rates = {
            "gb_s": record["bytes"] / record["us"] / 1e3,
            "tflop_s": record["operations"] / record["us"] / 1e6,
        }
        shares = {
            "memory": rates["gb_s"] / gb_s if gb_s else 0.0,
            "mma.sync": rates["tflop_s"] / tflop_s if tflop_s else 0.0,
        }
        bound = max(shares, key=lambda name: shares[name])
        result.append({**record, **rates, "bound": bound, "share": shares[bound]})
    return result


@common.errors_in_one_line
def bench_ops(
    device: Annotated[str, typer.Option(help="cuda or cuda:N.")] = "cuda",
    only: Annotated[
        str,
        typer.Option(
            help="moe_experts, mla_attention, choice, rows or linear.  [default: all]",
            show_default=False,
        ),
    ] = "",
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Also write the results here.")
    ] = None,
) -> None:
    """Time each op of the CUDA back end at the sizes of Kimi K2.6 on one of eight ranks.

    Calls are recorded into a graph and replayed with inputs that rotate; the share is that of the
    ceiling, measured in the same run, that bounds the op. Takes about a minute and 4 GB.

    \b
    Examples:
      kdtree bench ops
      kdtree bench ops --device cuda:1 --json ops.json
    """
    from kdtree_engine import _core

    common.check_writable("--json", json_file)
    records = with_shares(_core.bench_ops(device, only))
    table = Table(title=f"ops on {device}")
    table.add_column("op", no_wrap=True)
    table.add_column("size")
    for name in ("us", "GB/s", "TFLOP/s", "share"):
        table.add_column(name, justify="right")
    for r in records:
        share = "" if r["op"].startswith(_CEILING) or not r["share"] else f"{r['share']:.0%}"
        rates = [f"{r[key]:.0f}" if r[key] else "" for key in ("gb_s", "tflop_s")]
        share += f" {r['bound']}" if share else ""
        table.add_row(r["op"], r["shape"], f"{r['us']:.1f}", *rates, share)
    common.print_table(table)
    if json_file is not None:
        json_file.write_text(json.dumps({"device": device, "ops": records}, indent=1) + "\n")
