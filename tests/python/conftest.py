"""Makes the modules of scripts/ importable: tests use the tiny models and the test data's makers."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
