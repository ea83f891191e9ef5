"""The mask sources by the names that people use: ``gp.masks.Random``, ``gp.masks.Layerwise`` and so on."""

from gradpolicy.masks.base import MaskSource
from gradpolicy.masks.block_cyclic import BlockCyclic
from gradpolicy.masks.fixed import Fixed
from gradpolicy.masks.function import Function, as_source
from gradpolicy.masks.gradual import Gradual
from gradpolicy.masks.layerwise import Layerwise
from gradpolicy.masks.progressive import Progressive
from gradpolicy.masks.prune_and_grow import PruneAndGrow
from gradpolicy.masks.random import Random
from gradpolicy.masks.rows import Rows
from gradpolicy.masks.stable import Stable
from gradpolicy.masks.topk import TopK
from gradpolicy.schedules import Constant, Cosine, Cubic, Linear
from gradpolicy.tensors.seeded_mask import RandomMask

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
