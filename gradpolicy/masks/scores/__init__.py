"""The scores of :class:`~gradpolicy.masks.TopK`, one per file."""

from gradpolicy.masks.scores.fisher import Fisher as Fisher
from gradpolicy.masks.scores.fisher import FisherBySample as FisherBySample
from gradpolicy.masks.scores.gradient import Gradient as Gradient
from gradpolicy.masks.scores.lift import LIFT as LIFT
from gradpolicy.masks.scores.magnitude import Magnitude as Magnitude
from gradpolicy.masks.scores.movement import Movement as Movement
from gradpolicy.masks.scores.salun import SalUn as SalUn
from gradpolicy.masks.scores.score import Score as Score
from gradpolicy.masks.scores.snip import SNIP as SNIP
from gradpolicy.masks.scores.wanda import Wanda as Wanda
from gradpolicy.masks.scores.weight_change import Change as Change

SCORES: dict[str, type[Score]] = {
    "gradient": Gradient,
    "magnitude": Magnitude,
    "weight": Magnitude,
    "fisher": Fisher,
    "fisher_by_sample": FisherBySample,
    "movement": Movement,
    "change": Change,
    "snip": SNIP,
    "wanda": Wanda,
    "lift": LIFT,
    "salun": SalUn,
}
"""All scores by their names for ``by``. Scores with a loader are passed as objects."""
