"""Users' functions, and other forms of masks, as mask sources."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from gradpolicy.checks import check_call
from gradpolicy.errors import PolicyError, shown
from gradpolicy.masks.base import MaskSource
from gradpolicy.masks.fixed import Fixed
from gradpolicy.tensors.mask import Mask

MaskFunction = Callable[[str, Tensor, int], Mask]


class Function(MaskSource):
    """A function ``(name, parameter, step) -> mask`` as a mask source.

    The function must return the same mask on every rank, so it must not depend on the rank's data.

    Args:
        function: The function. Its ``step`` is the count of the last change of masks.
        **timetable: ``every``, ``unit``, ``start``, ``stop``, ``seed``: see :class:`MaskSource`.

    Raises:
        PolicyError: If it is not such a function.

    Example:
        >>> import torch
        >>> first_row = Function(lambda name, parameter, step: torch.arange(len(parameter))[:, None] == 0)
        >>> first_row.setup({"weight": torch.zeros(3, 2)}, seed=0)
        >>> first_row.masks(step=0, epoch=0)["weight"].flatten().tolist()
        [True, False, False]
    """

    def __init__(self, function: MaskFunction, **timetable: Any) -> None:
        super().__init__(**timetable)
        if not callable(function):
            raise PolicyError(
                f"Function: expected a function (name, parameter, step) -> mask, got {shown(function)}"
            )
        check_call(f"Function: {_name(function)}", function, "name", None, 0, takes="(name, parameter, step)")
        self.function = function

    def masks(self, step: int, epoch: int) -> Mapping[str, Mask]:
        """Return the function's mask for each parameter."""
        changed = self.timetable.begins(self.period(step, epoch))
        return {name: self.function(name, parameter, changed) for name, parameter in self.parameters.items()}

    def describe(self) -> dict[str, Any]:
        """Return the function's name."""
        return {"function": _name(self.function)}


def as_source(value: object) -> MaskSource:
    """Convert an object to a mask source.

    Args:
        value: A mask source; a function ``(name, parameter, step) -> mask``; or an argument of
            :class:`Fixed`: a mask tensor, a dict of masks, globs, True or False, or a safetensors file.

    Raises:
        PolicyError: For other objects.
    """
    if isinstance(value, MaskSource):
        return value
    if isinstance(value, bool | str | Path | Tensor | Mapping | list | tuple):
        return Fixed(value)
    if callable(value) and not isinstance(value, type):
        return Function(value)
    raise PolicyError(
        "Freeze.mask: expected a mask source, a function (name, parameter, step) -> mask, a mask tensor or a "
        f"dict of masks, got {shown(value)}"
    )


def _name(function: Callable) -> str:
    """Return the name of a function or partial."""
    own = getattr(function, "func", function)
    return getattr(own, "__qualname__", type(own).__name__)
