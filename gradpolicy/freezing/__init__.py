"""The engine of freeze policies: asks mask sources, combines their masks, hands them to the optimizers."""

from gradpolicy.freezing.freeze_report import FreezeReport, FreezeRow
from gradpolicy.freezing.freezer import Freezer

__all__ = ["FreezeReport", "FreezeRow", "Freezer"]
