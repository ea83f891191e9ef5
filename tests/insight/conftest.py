"""Processes joined by a process group, and the programs beside the tests."""

from pool_fixtures import pair

__all__ = ["pair"]
