"""The inputs of scores, and users' functions as scores."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from gradpolicy.errors import PolicyError, shown, unknown
from gradpolicy.imports import import_by_name
from gradpolicy.masks.scores import formulas

INPUTS = ("weight", "initial", "gradient", "product", "second_moment", "activation_norm")
"""The valid names of a score's arguments."""
GATHERED = ("gradient", "product", "second_moment", "activation_norm")
"""The inputs that are summed over training steps."""


@dataclass(frozen=True)
class Score:
    """The scores of the entries of a parameter, as a function of inputs.

    Its inputs are determined by the names of the arguments. All but the last have the parameter's shape:

    ===================  ===================================================================================
    ``weight``           the weight ``w``
    ``initial``          the weight at the start of training
    ``gradient``         ``Σ g``
    ``product``          ``Σ w · g``
    ``second_moment``    ``Σ g²``
    ``activation_norm``  ``‖xⱼ‖₂`` of each input feature ``j`` of a ``Linear`` or ``Conv``, over all samples
                         and positions; it broadcasts to the weight
    ===================  ===================================================================================

    The sums are over training steps before a choice.

    Attributes:
        name: The name in reports.
        formula: The function, which returns the scores in the weight's shape.
        asks: The names of its inputs.
        by_rows: True if the scores of a row depend on the inputs of this row alone, which saves memory.
    """

    name: str
    formula: Callable[..., Tensor]
    asks: tuple[str, ...]
    by_rows: bool


def as_score(key: str, by: object, named: Mapping[str, Callable[..., Tensor]]) -> Score:
    """Return the score for a name, a dotted path or a function.

    Args:
        key: The name of the argument, for errors.
        by: The name, path or function.
        named: The functions by name.

    Raises:
        PolicyError: If it is of another type, or an input of the score does not exist.
    """
    if isinstance(by, str) and by not in named and "." not in by:
        raise unknown("value", by, named, key=key)
    formula = (named[by] if by in named else import_by_name(by)) if isinstance(by, str) else by
    if isinstance(formula, type) or not callable(formula):
        raise PolicyError(f"{key}: expected a name or a function, got {shown(formula)}")
    name = by if isinstance(by, str) else getattr(by, "__name__", repr(by))
    asks = tuple(
        each.name
        for each in inspect.signature(formula).parameters.values()
        if each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)
    )
    for each in asks:
        if each not in INPUTS:
            raise unknown("input", each, INPUTS, key=f"score {name}")
    return Score(name, formula, asks, getattr(formula, "__module__", None) == formulas.__name__)
