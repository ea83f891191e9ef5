"""The mask sources by the names that people use: ``gp.masks.Random``, ``gp.masks.Layerwise`` and so on."""

from gradpolicy.freeze.block_cyclic import BlockCyclic
from gradpolicy.freeze.fixed import Fixed
from gradpolicy.freeze.function import Function, as_source
from gradpolicy.freeze.gradual import Gradual
from gradpolicy.freeze.layerwise import Layerwise
from gradpolicy.freeze.progressive import Progressive
from gradpolicy.freeze.prune_and_grow import PruneAndGrow
from gradpolicy.freeze.random import Random
from gradpolicy.freeze.recipe import RandomMask
from gradpolicy.freeze.rows import Rows
from gradpolicy.freeze.schedule import Constant, Cosine, Cubic, Linear
from gradpolicy.freeze.source import MaskSource
from gradpolicy.freeze.stable import Stable
from gradpolicy.freeze.topk import TopK

__all__ = [
    "BlockCyclic",
    "Constant",
    "Cosine",
    "Cubic",
    "Fixed",
    "Function",
    "Gradual",
    "Layerwise",
    "Linear",
    "MaskSource",
    "Progressive",
    "PruneAndGrow",
    "Random",
    "RandomMask",
    "Rows",
    "Stable",
    "TopK",
    "as_source",
]
