"""The engine of freeze policies: asks mask sources, combines their masks, hands them to the optimizers."""

from gradpolicy.freezing.freezer import Freezer
from gradpolicy.freezing.report import FreezeReport, FreezeRow

__all__ = ["FreezeReport", "FreezeRow", "Freezer"]
