"""Optimizers that update only active entries."""

from gradpolicy.optim.masked_optimizer import MaskedOptimizer
from gradpolicy.optim.optimizers import Optimizers
from gradpolicy.optim.update_rules import UpdateRule, update_rule

__all__ = ["MaskedOptimizer", "Optimizers", "UpdateRule", "update_rule"]
