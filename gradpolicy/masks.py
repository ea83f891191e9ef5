"""The mask sources by the names that people use: ``gp.masks.Random``, ``gp.masks.Layerwise`` and so on."""

from gradpolicy.freeze.fixed import Fixed
from gradpolicy.freeze.function import Function, as_source
from gradpolicy.freeze.layerwise import Layerwise
from gradpolicy.freeze.random import Random
from gradpolicy.freeze.recipe import RandomMask
from gradpolicy.freeze.schedule import Constant, Cosine, Cubic, Linear
from gradpolicy.freeze.source import MaskSource

__all__ = [
    "Constant",
    "Cosine",
    "Cubic",
    "Fixed",
    "Function",
    "Layerwise",
    "Linear",
    "MaskSource",
    "Random",
    "RandomMask",
    "as_source",
]
