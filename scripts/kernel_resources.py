"""Registers, spills and static shared memory of every kernel, from the CUDA compiler's report.

    cmake --build BUILD --target kdt_cuda 2>&1 | tee LOG
    python scripts/kernel_resources.py LOG [--update]

Prints a table and compares it with cuda/kernel_resources.tsv. Ends with status 1 when a kernel
spills, uses local memory or static shared memory, needs more registers than the file says, or is
not in it; --update writes the file instead. Dynamic shared memory is no part of the report:
cuda/launch.cuh refuses more than a block of every supported chip has, and so do assertions beside
the kernels.
"""

import argparse
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

RECORD = Path(__file__).parent.parent / "cuda" / "kernel_resources.tsv"
HEADER = "# kernel\tchip\tregisters\n"
# The compiler's own choices move by a few registers with its version.
SLACK = 8


class Kernel(NamedTuple):
    name: str
    chip: str


class Use(NamedTuple):
    registers: int
    spilled: int
    stack: int
    shared: int


def demangle(names: set[str]) -> dict[str, str]:
    """Short names: without namespaces, parameters and the hash of the unnamed namespace."""
    ordered = sorted(names)
    shown = subprocess.run(
        ["c++filt", "-p"], input="\n".join(ordered), capture_output=True, text=True, check=True
    ).stdout.splitlines()
    short = (re.sub(r"\b(?:void |kdt::cuda::|\(anonymous namespace\)::)", "", s) for s in shown)
    return dict(
        zip(ordered, (s.replace("(anonymous namespace)::", "") for s in short), strict=True)
    )


def parse(log: str) -> dict[Kernel, Use]:
    found: dict[tuple[str, str], list[int]] = {}
    current: tuple[str, str] | None = None
    for line in log.splitlines():
        if m := re.search(r"Compiling entry function '(\S+)' for '(sm_\w+)'", line):
            current = (m[1], m[2])
            found[current] = [0, 0, 0, 0]
        elif current and (
            m := re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores", line)
        ):
            found[current][2], found[current][1] = int(m[1]), int(m[2])
        elif current and (m := re.search(r"Used (\d+) registers", line)):
            found[current][0] = int(m[1])
            if shared := re.search(r"(\d+) bytes smem", line):
                found[current][3] = int(shared[1])
            current = None
    names = demangle({name for name, _ in found})
    return {Kernel(names[name], chip): Use(*use) for (name, chip), use in found.items()}


def read_record() -> dict[Kernel, int]:
    if not RECORD.exists():
        return {}
    rows = (line.split("\t") for line in RECORD.read_text().splitlines() if line[:1] != "#")
    return {Kernel(name, chip): int(registers) for name, chip, registers in rows}


def faults(kernels: dict[Kernel, Use], record: dict[Kernel, int]) -> list[str]:
    found = []
    for kernel, use in sorted(kernels.items()):
        where = f"{kernel.name} on {kernel.chip}"
        if use.spilled or use.stack:
            found.append(f"{where} spills {use.spilled} bytes, local memory {use.stack} bytes")
        if use.shared:
            found.append(f"{where} has {use.shared} bytes of static shared memory")
        if kernel not in record:
            found.append(f"{where} is not in {RECORD.name}: run with --update")
        elif use.registers > record[kernel] + SLACK:
            found.append(f"{where} needs {use.registers} registers, {record[kernel]} before")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("log", type=Path, help="the output of the build")
    parser.add_argument("--update", action="store_true", help="write cuda/kernel_resources.tsv")
    arguments = parser.parse_args()
    kernels = parse(arguments.log.read_text(errors="replace"))
    if not kernels:
        print(
            f"{arguments.log}: no report of a kernel; was everything up to date?", file=sys.stderr
        )
        return 1
    chips = sorted({kernel.chip for kernel in kernels})
    print(f"{'registers':60} " + " ".join(f"{chip:>8}" for chip in chips))
    for name in sorted({kernel.name for kernel in kernels}):
        uses = (kernels.get(Kernel(name, chip)) for chip in chips)
        print(f"{name[:60]:60} " + " ".join(f"{u.registers if u else '-':>8}" for u in uses))
    if arguments.update:
        rows = (f"{k.name}\t{k.chip}\t{u.registers}\n" for k, u in sorted(kernels.items()))
        RECORD.write_text(HEADER + "".join(rows))
        return 0
    found = faults(kernels, read_record())
    print("\n".join(found) or f"{len(kernels)} kernels, none spills", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
