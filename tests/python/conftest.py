"""Makes the modules of scripts/ importable: the makers of tiny models and of test data."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
