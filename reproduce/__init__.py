"""The papers' tables and figures, run again: `python -m reproduce --help`."""

import sys
from pathlib import Path

# configs/ is not installed.
_ROOT = str(Path(__file__).parents[1])
sys.path += [_ROOT] * (_ROOT not in sys.path)
