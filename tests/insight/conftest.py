"""Processes joined by a process group."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))

from pool_fixtures import pair

__all__ = ["pair"]
