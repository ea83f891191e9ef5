"""Masks, the sources they come from, and the engine that hands them to the optimizer."""

from gradpolicy.freeze.bound import FreezeRow
from gradpolicy.freeze.freezer import Freezer
from gradpolicy.freeze.function import as_source
from gradpolicy.freeze.mask import Mask
from gradpolicy.freeze.recipe import RandomMask, recipe_from_state
from gradpolicy.freeze.source import MaskSource

__all__ = ["FreezeRow", "Freezer", "Mask", "MaskSource", "RandomMask", "as_source", "recipe_from_state"]
