"""Processes joined by a process group."""

from deepspeed_ranks import gpu, ranks
from pool_fixtures import pair

__all__ = ["gpu", "pair", "ranks"]
