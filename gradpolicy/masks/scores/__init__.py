"""The scores of :class:`~gradpolicy.masks.TopK`."""

from gradpolicy.masks.scores.formulas import SNIP as SNIP
from gradpolicy.masks.scores.formulas import Change as Change
from gradpolicy.masks.scores.formulas import Fisher as Fisher
from gradpolicy.masks.scores.formulas import Gradient as Gradient
from gradpolicy.masks.scores.formulas import Magnitude as Magnitude
from gradpolicy.masks.scores.formulas import Movement as Movement
from gradpolicy.masks.scores.formulas import Wanda as Wanda
from gradpolicy.masks.scores.lift import LIFT as LIFT
from gradpolicy.masks.scores.score import Score as Score

SCORES: dict[str, type[Score]] = {
    "gradient": Gradient,
    "magnitude": Magnitude,
    "weight": Magnitude,
    "fisher": Fisher,
    "movement": Movement,
    "change": Change,
    "snip": SNIP,
    "wanda": Wanda,
    "lift": LIFT,
}
"""All scores by their names for ``by``."""
