"""The papers' tables and figures, run again: `python -m reproduce --help`."""

import sys
from pathlib import Path

# Where configs/ is, and the benchmarks' modules, of which none is installed.
_ROOT = Path(__file__).parents[1]
sys.path += [path for path in (str(_ROOT), str(_ROOT / "benchmarks")) if path not in sys.path]
