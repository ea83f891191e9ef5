"""A score: the inputs that it may ask for, and functions and classes as scores."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from gradpolicy.errors import PolicyError, shown, unknown
from gradpolicy.imports import import_by_name

INPUTS = ("weight", "initial", "gradient", "product", "second_moment", "activation_norm")
"""What a score may ask for: the names that its arguments may have."""
GATHERED = ("gradient", "product", "second_moment", "activation_norm")
"""What is summed over batches."""


class Score:
    """What each entry of a parameter is worth; a subclass is a formula in :meth:`__call__`.

    It asks for its inputs by the names of the arguments. All have the parameter's shape, but the last:

    ===================  ===================================================================================
    ``weight``           the weight ``w`` as it is
    ``initial``          the weight from the start of training
    ``gradient``         ``Σ g``
    ``product``          ``Σ w · g``
    ``second_moment``    ``Σ g²``
    ``activation_norm``  ``‖xⱼ‖₂`` of each input feature ``j`` of a ``Linear`` or ``Conv``, over all samples
                         and positions; it broadcasts to the weight
    ===================  ===================================================================================

    The sums run over the training steps before a choice, or over the batches of a loader of the score's own.

    Args:
        batches: A loader, or a list of batches, to sum over instead: in one pass before the choice, without
            an update, with all modules in ``eval`` mode. On many processes each must get the same batches.
        loss: A function ``(model, batch) -> loss`` for them, or its dotted path.

    Attributes:
        by_rows: True if a row's scores follow from that row's inputs alone, so that few are held at a time.
        by_sample: True if gradients are taken sample by sample, which needs a loader.

    Raises:
        PolicyError: If only one of batches and loss is given, sums by sample have no batches, or it can be
            read once only.

    Example:
        >>> import torch
        >>> class Saliency(Score):
        ...     def __call__(self, weight, gradient):
        ...         return (weight * gradient).abs()
        >>> Saliency().asks
        ('weight', 'gradient')
    """

    by_rows = False
    by_sample = False
    needs_batches = False

    def __init__(
        self,
        batches: Iterable[Any] | None = None,
        loss: Callable[[nn.Module, Any], Tensor] | str | None = None,
    ) -> None:
        kind = type(self).__name__
        if (batches is None) != (loss is None):
            raise PolicyError(f"{kind}: give batches and loss together, a loader and (model, batch) -> loss")
        if batches is None and (self.by_sample or self.needs_batches):
            raise PolicyError(f"{kind}: needs batches and a loss of its own")
        if isinstance(batches, Iterator):
            raise PolicyError(f"{kind}.batches: can be read once only, and a plan reads it too; give a list")
        self.batches = batches
        self.loss: Any = import_by_name(loss) if isinstance(loss, str) else loss
        self.asks = _asked(kind, self.__call__)

    def __call__(self, *inputs: Tensor, **named: Tensor) -> Tensor:
        """Return the scores, of the weight's shape."""
        raise TypeError(f"{type(self).__name__} must define __call__ with the inputs that it asks for")

    def __deepcopy__(self, memo: dict) -> "Score":
        # A score has no state, and its batches may hold all data.
        return self

    def __repr__(self) -> str:
        return type(self).__name__


class FunctionScore(Score):
    """A function of the user's as a score.

    Args:
        function: Takes inputs of :class:`Score` by name, and returns the scores of whole tensors.
    """

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function
        self.asks = _asked(getattr(function, "__name__", "function"), function)

    def __call__(self, **inputs: Tensor) -> Tensor:  # type: ignore[override]
        """Return what the function returns."""
        return self.function(**inputs)

    def __repr__(self) -> str:
        return getattr(self.function, "__name__", "function")


def as_score(key: str, by: object, named: Mapping[str, type[Score]]) -> Score:
    """Return a score by its name or dotted path, of a class, or of a function.

    Args:
        key: The argument that an error names.
        by: What was given.
        named: The scores by name.

    Raises:
        PolicyError: If it is none of these, or asks for what there is not.
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
    """Return the names of a function's arguments; each must be an input."""
    parameters = inspect.signature(function).parameters.values()
    asked = tuple(
        each.name for each in parameters if each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)
    )
    for each in asked:
        if each not in INPUTS:
            raise unknown("input", each, INPUTS, key=f"score {name}")
    return asked
