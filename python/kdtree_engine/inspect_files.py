"""`kdtree inspect`: what a checkpoint folder or a KDTR file holds, and what is wrong with it."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kdtree_engine import kdtr
from kdtree_engine.cli_common import print_table, stdout_console, with_option_names
from kdtree_engine.inspect_plan import print_plan, size_text


def inspect_path(
    path: Path,
    as_json: bool,
    *,
    verify: bool = False,
    plan: Mapping[str, Any] | None = None,
    drafter: Path | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> bool:
    """Prints what is at `path`; whether it is free of faults.

    Of a folder: `verify` compares a pre-sharded cache with its checksums, `plan` has options of
    `_core.plan_memory`, and `drafter` is the drafter's folder, by default `drafter` inside.
    `progress` gets the bytes that were verified, and all. Raises ValueError or OSError for what is
    neither a checkpoint folder nor a KDTR file, and ValueError for a bad option.
    """
    console = stdout_console()
    if path.is_dir():
        return _inspect_folder(path, as_json, console, verify, plan, drafter, progress)
    if path.exists() and (verify or plan is not None or drafter is not None):
        raise ValueError(f"{path} is no folder: only a checkpoint's has ranks, memory or a drafter")
    if path.suffix == ".safetensors":
        raise ValueError(f"{path} is a part of a checkpoint: give its folder, {path.parent}")
    if path.exists() and not path.is_file():  # a pipe would wait for its writer
        raise ValueError(f"{path} is neither a folder nor a file")
    with open(path, "rb") as file:
        magic = file.read(4)
    if magic != b"KDTR":
        raise ValueError(
            f"{path} is not a KDTR file (it starts with {magic!r}): give one, or the folder of a "
            "checkpoint"
        )
    entries = kdtr.read_table(path)
    faults = []
    try:
        kdtr.read(path)  # compares the checksums
    except kdtr.KdtrError as error:
        faults.append(str(error))
    rows = [
        {"name": e.name, "dtype": e.dtype, "shape": list(e.shape), "offset": e.offset,
         "bytes": e.bytes, "xxh64": f"{e.xxh64:016x}"}
        for e in entries
    ]  # fmt: skip
    if as_json:
        print(json.dumps({"arrays": rows, "bytes": path.stat().st_size, "faults": faults}))
        return not faults
    _print_whole(f"{path}, {path.stat().st_size:,} bytes", console)
    table = Table()
    for column in ("name", "dtype", "shape", "offset", "bytes", "xxh64"):
        table.add_column(column, justify="right" if column in ("offset", "bytes") else "left")
    for row in rows:
        table.add_row(*(Text(_cell(value)) for value in row.values()))
    print_table(table, console)
    _print_faults(faults, console)
    return not faults


def _inspect_folder(
    folder: Path,
    as_json: bool,
    console: Console,
    verify: bool,
    plan: Mapping[str, Any] | None,
    drafter: Path | None,
    progress: Callable[[int, int], None] | None,
) -> bool:
    from kdtree_engine import _core

    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} is not a checkpoint folder: it has no config.json")
    reports: dict[str, Any] = {"model": _core.inspect_checkpoint(str(folder))}
    if drafter is None and (folder / "drafter").is_dir():
        drafter = folder / "drafter"
    if drafter is not None:
        try:
            reports["drafter"] = _core.inspect_checkpoint(str(drafter))
        except RuntimeError as error:  # no readable config.json: what keeps the model from loading
            reports["drafter"] = {"faults": [str(error)]}
    if verify:
        # A cache may have a checkpoint for a drafter.
        places = {"model": folder}
        if drafter is not None and "cache" in reports["drafter"]:
            places["drafter"] = drafter
        sizes = [sum(reports[part].get("cache", {}).get("rank_bytes", [])) for part in places]
        for at, (part, place) in enumerate(places.items()):
            told = progress and _of_all(progress, sum(sizes[:at]), sum(sizes[at + 1 :]))
            reports[part] = _core.inspect_checkpoint(str(place), verify=True, progress=told)
    faults = [f"{part}: {fault}" for part, r in reports.items() for fault in r.get("faults", [])]
    planned: dict[str, Any] | None = None
    if plan is not None and reports["model"].get("kind") == "drafter":
        raise ValueError(f"{folder} is a drafter's folder: a plan needs a model's")
    if plan is not None:
        try:
            planned = _core.plan_memory(str(folder), str(drafter) if drafter else None, **plan)
            faults += [f"plan: {with_option_names(fault)}" for fault in planned["faults"]]
        except RuntimeError as error:
            if not any(str(error) in fault for fault in faults):
                faults.append(f"plan: {error}")
    if as_json:
        extra = {} if plan is None else {"plan": planned}
        print(json.dumps({**reports, **extra, "faults": faults}))
        return not faults
    for part, report in reports.items():
        title = f"{part}: {drafter if part == 'drafter' else folder}"
        if plan is not None and "total_bytes" in report:  # who asks for a plan wants to see that
            size = f"{report['num_tensors']:,} tensors, {size_text(report['total_bytes'])}"
            _print_whole(f"{title}: {size}", console)
            continue
        _print_whole(title, console)
        table = Table(show_header=False)
        table.add_column("field")
        table.add_column("value")
        _add_rows(table, "", {k: v for k, v in report.items() if k != "faults"})
        print_table(table, console)
    if planned is not None:
        print_plan(planned, console)
    _print_faults(faults, console)
    return not faults


def _of_all(
    progress: Callable[[int, int], None], before: int, after: int
) -> Callable[[int, int], None]:
    """The progress of a part, for a `progress` of this many bytes before and after it too."""
    return lambda done, total: progress(before + done, before + total + after)


def _add_rows(table: Table, prefix: str, value: Mapping[str, Any]) -> None:
    for key, item in value.items():
        if isinstance(item, Mapping):
            _add_rows(table, f"{prefix}{key}.", item)
        else:
            table.add_row(Text(f"{prefix}{key}"), Text(_cell(item)))


def _print_whole(line: str, console: Console) -> None:
    """A line with a path, which could not be copied from the screen in two pieces."""
    console.print(Text(line), soft_wrap=True)


def _cell(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "-"}[value]
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, list) and not any(isinstance(v, dict | list) for v in value):
        return "[" + ", ".join(str(v) for v in value) + "]"
    return str(value)


def _print_faults(faults: list[str], console: Console) -> None:
    for fault in faults:
        console.print(Text(f"fault: {fault}", style="red"))
    if not faults:
        console.print(Text("no faults found", style="green"))
