"""What is done to entries in memory: one interface, two makers of it, one place that chooses."""

from gradpolicy.optim.kernels.interface import EntryUpdate, Kernels
from gradpolicy.optim.kernels.select import select

__all__ = ["EntryUpdate", "Kernels", "select"]
