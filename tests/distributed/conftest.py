"""Processes joined by a process group."""

from pool_fixtures import pair, pools

__all__ = ["pair", "pools"]
