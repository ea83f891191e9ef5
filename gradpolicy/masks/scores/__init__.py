"""The scores of :class:`~gradpolicy.masks.TopK`."""

from collections.abc import Callable

from torch import Tensor

from gradpolicy.masks.scores import formulas
from gradpolicy.masks.scores.lift import LIFT as LIFT

SCORES: dict[str, Callable[..., Tensor]] = {
    "gradient": formulas.gradient_magnitude,
    "magnitude": formulas.magnitude,
    "weight": formulas.magnitude,
    "fisher": formulas.fisher,
    "movement": formulas.movement,
    "change": formulas.change,
    "snip": formulas.snip,
    "wanda": formulas.wanda,
    "lift": LIFT(),
}
"""All scores by their names for ``by``."""
