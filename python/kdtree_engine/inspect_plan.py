"""What a checkpoint will need of each rank's memory, as `kdtree inspect --tp` prints it."""

import re
from fractions import Fraction
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kdtree_engine.cli_common import print_table

_UNITS = {"b": 1}
_UNITS |= {f"{p}b": 1000**i for i, p in enumerate("kmgtp", 1)}
_UNITS |= {unit: 1024**i for i, p in enumerate("kmgtp", 1) for unit in (p, f"{p}i", f"{p}ib")}
_UNITS[""] = _UNITS["gib"]
_LARGEST = 1 << 50


def parse_size(option: str, text: str) -> int:
    """Bytes of a size such as "96GiB", "80 GB" (10^9 bytes each) or "96" (GiB).

    Raises ValueError naming the option.
    """
    match = re.fullmatch(r"\s*([0-9]{1,30}(?:\.[0-9]{1,30})?)\s*([A-Za-z]*)\s*", text)
    unit = _UNITS.get(match[2].lower()) if match else None
    if match and unit:
        size = Fraction(match[1]) * unit
        if size <= _LARGEST and round(size) > 0:
            return round(size)
    raise ValueError(
        f"{option} is {text!r}, want a size such as 96GiB, 80GB or 96 (GiB), at most 1 PiB"
    )


def print_plan(plan: dict[str, Any], console: Console) -> None:
    """Prints what `_core.plan_memory` found, but for its faults; the verdict comes last."""
    ranks = plan["tensor_parallel_size"]
    title = f"each of {ranks} ranks" if ranks > 1 else "one rank"
    if plan["expert_parallel"]:
        title += ", whole experts each"
    table = Table(title=Text(f"plan: {title}"), title_justify="left", show_header=False)
    table.add_column("part")
    for _ in range(2):
        table.add_column("size", justify="right")
    if not plan["weights"]:
        console.print(Text(f"the model cannot be cut for {ranks} ranks", style="red"))
        return
    for part, size in sorted(plan["weights_by_part"].items(), key=lambda item: -item[1]):
        table.add_row(part, f"{size:,}", size_text(size))
    table.add_section()
    for name in ("weights", "workspace", "overhead"):
        table.add_row(name, f"{plan[name]:,}", size_text(plan[name]))
    table.add_section()
    per_token = plan["kv_bytes_per_token"] + plan["draft_kv_bytes_per_token"]
    table.add_row("cache, a token", f"{per_token:,}", size_text(per_token))
    if plan["draft_kv_bytes_per_token"]:
        table.add_row("  of it the drafter's", f"{plan['draft_kv_bytes_per_token']:,}", "")
    cache = plan["cache_tokens"] * per_token
    table.add_row(f"cache, {_sequences(plan)}", f"{cache:,}", size_text(cache))
    if plan["gpu_memory"]:
        table.add_section()
        table.add_row("memory", f"{plan['gpu_memory']:,}", size_text(plan["gpu_memory"]))
        table.add_row("cache tokens that fit", f"{plan['kv_tokens_fit']:,}", "")
        table.add_row(
            f"sequences of {plan['max_model_len']:,} that fit", f"{plan['sequences_fit']:,}", ""
        )
    print_table(table, console)
    console.print(_verdict(plan, per_token))


def _verdict(plan: dict[str, Any], per_token: int) -> Text:
    """Whether all fits, in a line or two."""
    fixed = plan["weights"] + plan["workspace"] + plan["overhead"]
    cache = plan["cache_tokens"] * per_token
    each = f"{size_text(fixed + cache)} a rank, {size_text(cache)} of it for the cache"
    asked = _sequences(plan, " tokens")
    if not plan["gpu_memory"]:
        return Text(f"needs {each} of {asked}; --gpu-memory SIZE tells whether that fits")
    fits = plan["cache_tokens"] <= plan["kv_tokens_fit"]
    verdict = "does not fit" if not fits else "fits"
    if fits and plan["faults"]:
        verdict += ", but for the faults below"
    return Text(
        f"{verdict}: needs {each}, has {size_text(plan['gpu_memory'])}; "
        f"{plan['kv_tokens_fit']:,} cache tokens fit, {asked} take {plan['cache_tokens']:,}",
        style="green" if verdict == "fits" else "red",
    )


def _sequences(plan: dict[str, Any], tokens: str = "") -> str:
    """Those of `max_num_seqs`, and the one in which step costs and logits are computed."""
    count = f"{plan['max_num_seqs']} sequence{'s' * (plan['max_num_seqs'] > 1)}"
    return f"{count} of {plan['max_model_len']:,}{tokens} and a spare one"


def size_text(size: int) -> str:
    """A number of bytes in the largest unit of which there is one."""
    for unit, bits in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if size >= 1 << bits:
            return f"{size / (1 << bits):.2f} {unit}"
    return f"{size} B"
