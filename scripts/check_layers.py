"""Checks the rules that keep the layers apart (docs/architecture.md) and a few words.

    python scripts/check_layers.py

Prints each fault as FILE:LINE: what is wrong, and ends with status 1 when there is one.
"""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent

# What the files of a folder may include of ours, besides their own folder.
ALLOWED = {
    "cpp/core": set(),
    "cpp/io": {"core"},
    "cpp/parallel": {"core"},
    "cpp/backend": {"core", "parallel", "device.h"},
    "cpp/cpu": {"core", "parallel", "backend"},
    "cpp/model": {"core", "io", "parallel", "backend"},
    "cpp/engine": {"core", "io", "parallel", "backend", "model"},
    "cpp/bindings": {"core", "io", "parallel", "backend", "model", "engine"},
    "cuda": {"core", "parallel", "backend", "kernels"},
    "cuda/kernels": {
        "core/dtype.h",
        "core/error.h",
        "cuda_check.h",
        "fault.cuh",
        "fault.h",
        "launch.cuh",
        "primitives.cuh",
        "sequences.cuh",
        "sequences.h",
    },
}

# word, where it may stand, why
WORDS = [
    ("cuda", r"^(?!cpp/)|^cpp/backend/factory\.cpp$", "back ends are known to the factory alone"),
    ("pybind11", r"^(?!cpp/|cuda/)|^cpp/bindings/", "only the bindings know Python"),
    ("nlohmann", r"^(?!cpp/|cuda/)|^cpp/(io|model)/\w+\.cpp$", "it is slow to compile"),
]
SOURCE = re.compile(r"\.(cpp|h|cu|cuh|py|pyi)$")
MAX_LINES = 450

# Written so that this file does not hold what it looks for.
REGISTRIES = re.compile(
    r"py" r"pi\.org|python" r"hosted|\w\.deb" r"ian\.org|npm" r"js\.|crates" r"\.io"
)
MACHINE_PATHS = re.compile(r"(?<![\w.:/*-])/(work|home|root|Users|mnt|workspace|tmp/\w+)(/|\b)")

Faults = Iterator[tuple[str, int, str]]


def project_files() -> list[str]:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return sorted(name for name in listed.splitlines() if (ROOT / name).is_file())


def read(name: str) -> list[str]:
    """The lines of a text file; none for other files."""
    content = (ROOT / name).read_bytes()
    if b"\0" in content:
        return []
    return content.decode("utf-8", errors="replace").splitlines()


def layer_faults(name: str, lines: list[str]) -> Faults:
    folder = str(Path(name).parent)
    if not name.startswith(("cpp/", "cuda/")):
        return
    if folder not in ALLOWED:
        if SOURCE.search(name):
            yield name, 1, f"folder {folder} is not in the table of scripts/check_layers.py"
        return
    for number, line in enumerate(lines, 1):
        match = re.match(r'\s*#\s*include\s*"([^"]+)"', line)
        if match is None:
            continue
        target = match[1]
        first = target.split("/")[0] if "/" in target else ""
        own = first == folder.split("/")[-1] or (folder == "cuda" and not first)
        if not own and first not in ALLOWED[folder] and target not in ALLOWED[folder]:
            yield name, number, f'{folder} must not include "{target}"'


def word_faults(name: str, lines: list[str]) -> Faults:
    for word, where, why in WORDS:
        if re.search(where, name):
            continue
        for number, line in enumerate(lines, 1):
            if word in line.lower():
                yield name, number, f"the word {word} must not stand here: {why}"


def text_faults(name: str, lines: list[str]) -> Faults:
    for number, line in enumerate(lines, 1):
        if REGISTRIES.search(line):
            yield name, number, "names the host of a package registry"
        if MACHINE_PATHS.search(line):
            yield name, number, "holds a path of one machine"
    if SOURCE.search(name) and not name.startswith("tests/") and len(lines) > MAX_LINES:
        yield name, len(lines), f"has {len(lines)} lines, at most {MAX_LINES}"


def main() -> int:
    faults = [
        fault
        for name in project_files()
        for lines in [read(name)]
        for check in (layer_faults, word_faults, text_faults)
        for fault in check(name, lines)
    ]
    for name, number, what in faults:
        print(f"{name}:{number}: {what}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
