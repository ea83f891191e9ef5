"""The base class of scores, and users' functions as scores."""

import inspect
from collections.abc import Callable, Mapping

from torch import Tensor

from gradpolicy.errors import PolicyError, shown, unknown
from gradpolicy.imports import import_by_name

INPUTS = ("weight", "initial", "gradient", "product", "second_moment", "activation_norm")
"""The valid names of a score's arguments."""
GATHERED = ("gradient", "product", "second_moment", "activation_norm")
"""The inputs that are summed over training steps."""


class Score:
    """Base class of scores of the entries of parameters, with a formula in :meth:`__call__`.

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
        by_rows: True if the scores of a row depend only on the inputs of this row, which saves memory.
        asks: The names of the inputs.

    Raises:
        PolicyError: For an input of another name.

    Example:
        >>> import torch
        >>> class Saliency(Score):
        ...     def __call__(self, weight, gradient):
        ...         return (weight * gradient).abs()
        >>> Saliency().asks
        ('weight', 'gradient')
    """

    by_rows = False

    def __init__(self) -> None:
        self.asks = _asked(type(self).__name__, self.__call__)

    def __call__(self, *inputs: Tensor, **named: Tensor) -> Tensor:
        """Return the scores, of the weight's shape."""
        raise TypeError(f"{type(self).__name__} must define __call__ with the inputs that it asks for")

    def __repr__(self) -> str:
        return type(self).__name__


class FunctionScore(Score):
    """A user's function as a score.

    Args:
        function: A function of inputs of :class:`Score` by name that returns the scores of a tensor.
    """

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function
        self.asks = _asked(getattr(function, "__name__", "function"), function)

    def __call__(self, **inputs: Tensor) -> Tensor:  # type: ignore[override]
        """Return the result of the function."""
        return self.function(**inputs)

    def __repr__(self) -> str:
        return getattr(self.function, "__name__", "function")


def as_score(key: str, by: object, named: Mapping[str, type[Score]]) -> Score:
    """Return the score for a name, a dotted path, a class or a function.

    Args:
        key: The name of the argument, for errors.
        by: The name, path, class, function or score.
        named: The scores by name.

    Raises:
        PolicyError: If it is of another type, or an input of the score does not exist.
    """
    if isinstance(by, str) and by in named:
        return named[by]()
    if isinstance(by, str):
        if "." not in by:
            raise unknown("value", by, named, key=key)
        by = import_by_name(by)
    if isinstance(by, type) and issubclass(by, Score):
        return by()
    if isinstance(by, Score):
        return by
    if not callable(by):
        raise PolicyError(f"{key}: must be a name, a function or a Score, got {shown(by)}")
    return FunctionScore(by)


def _asked(name: str, function: Callable[..., Tensor]) -> tuple[str, ...]:
    """Return the names of a function's arguments, which must be names of inputs."""
    parameters = inspect.signature(function).parameters.values()
    asked = tuple(
        each.name for each in parameters if each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)
    )
    for each in asked:
        if each not in INPUTS:
            raise unknown("input", each, INPUTS, key=f"score {name}")
    return asked
