"""Freeze policies over time: masks at each step, and what the backward pass skips."""

from gradpolicy.freezing.freezer import Freezer

__all__ = ["Freezer"]
