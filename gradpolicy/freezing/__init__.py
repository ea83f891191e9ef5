"""Freeze policies in time: masks at each step, and what the backward pass may leave out."""

from gradpolicy.freezing.freezer import Freezer

__all__ = ["Freezer"]
