"""Freeze policies during training: the masks of each step, and gradients that are not computed."""

from gradpolicy.freezing.freezer import Freezer

__all__ = ["Freezer"]
