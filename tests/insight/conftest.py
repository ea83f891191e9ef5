"""Processes joined by a process group, and the programs beside the tests."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))
sys.path.insert(0, str(Path(__file__).parent))

from pool_fixtures import pair

__all__ = ["pair"]
