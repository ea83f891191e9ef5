"""Optimizers that update only active entries."""

from gradpolicy.optim.masked import MaskedOptimizer

__all__ = ["MaskedOptimizer"]
