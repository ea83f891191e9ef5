"""Processes joined by a process group."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from pool_fixtures import pair, pools

__all__ = ["pair", "pools"]
