"""Where models and libraries are."""

import importlib.util
import os
from pathlib import Path


def default_model() -> Path:
    """The folder of the model used when none is named: $KDTREE_MODEL, else the bundled one."""
    named = os.environ.get("KDTREE_MODEL")
    return Path(named) if named else Path(__file__).parent / "models" / "k2-nano"


def find_drafter(model: Path, named: str | os.PathLike[str] | None) -> Path | None:
    """The drafter's folder: the one named, else `drafter` inside the model's folder, if there."""
    if named is not None:
        return Path(named)
    inside = model / "drafter"
    return inside if inside.is_dir() else None


def find_nccl() -> Path | None:
    """NCCL's library in the package nvidia-nccl-cu12 or -cu13, if one is installed."""
    try:
        spec = importlib.util.find_spec("nvidia.nccl")
    except ModuleNotFoundError:
        return None
    folders = spec.submodule_search_locations if spec else None
    found = (Path(folder) / "lib" / "libnccl.so.2" for folder in folders or ())
    return next((path for path in found if path.is_file()), None)
