"""Writes the tiny checkpoints that the C++ tests of the models read: make_models.py FOLDER.

Exit status 77 (skipped) where numpy or xxhash is not installed.
"""

import sys
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[3]
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "scripts")]


def main() -> int:
    missing = [name for name in ("numpy", "xxhash") if find_spec(name) is None]
    if missing:
        print("skipped: not installed:", *missing)
        return 77
    import make_tiny_model

    for name, options in make_tiny_model.PRESETS.items():
        print(make_tiny_model.make(Path(sys.argv[1]) / name, options))
    return 0


if __name__ == "__main__":
    sys.exit(main())
