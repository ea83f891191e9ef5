"""The mask sources, such as ``gp.masks.Random`` and ``gp.masks.Layerwise``."""

from gradpolicy.masks.base import MaskSource as MaskSource
from gradpolicy.masks.fixed import Fixed as Fixed
from gradpolicy.masks.fixed import Function as Function
from gradpolicy.masks.fixed import Zeros as Zeros
from gradpolicy.masks.fixed import as_source as as_source
from gradpolicy.masks.layer_sources import BlockCyclic as BlockCyclic
from gradpolicy.masks.layer_sources import Gradual as Gradual
from gradpolicy.masks.layer_sources import Layerwise as Layerwise
from gradpolicy.masks.phases import Phases as Phases
from gradpolicy.masks.prune_and_grow import PruneAndGrow as PruneAndGrow
from gradpolicy.masks.random import Random as Random
from gradpolicy.masks.rows import Rows as Rows
from gradpolicy.masks.topk import TopK as TopK
from gradpolicy.schedules import Constant as Constant
from gradpolicy.schedules import Cosine as Cosine
from gradpolicy.schedules import Cubic as Cubic
from gradpolicy.schedules import Linear as Linear
from gradpolicy.tensors.seeded import RandomMask as RandomMask

SOURCES: dict[str, type[MaskSource]] = {
    name: value
    for name, value in sorted(vars().items())
    if isinstance(value, type) and issubclass(value, MaskSource) and value is not MaskSource
}
"""All mask sources by name, for tests and documentation."""
