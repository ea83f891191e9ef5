"""Users' functions and objects as mask sources."""

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from gradpolicy.checks import check_call
from gradpolicy.errors import PolicyError, shown
from gradpolicy.masks.base import MaskSource
from gradpolicy.masks.fixed import Fixed
from gradpolicy.tensors.mask import Mask

MaskFunction = Callable[[str, Tensor, int], Mask]
# The optional methods of an object without the base class, besides setup.
_OPTIONAL = (
    *("due", "overdue", "observe", "observe_more", "wants_gradients", "gradient_names"),
    *("gradient_scale", "learning_rate_scale", "settings", "apply", "state_dict", "load_state_dict"),
    *("release", "report", "is_finished", "finish"),
)


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
                f"Function: must be a function (name, parameter, step) -> mask, got {shown(function)}"
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


class Adapted(MaskSource):
    """An object with a method ``masks`` as a mask source. Its other methods of a source are used too.

    Args:
        source: The object. Its ``masks`` takes ``(step, epoch)`` or ``(step)``. If it has a method
            ``observe``, it gets gradients, unless its ``needs_gradients`` is False.

    Raises:
        PolicyError: If a method takes other arguments, or there is only one of ``state_dict`` and
            ``load_state_dict``; when ``masks`` is called, if the result is not a dict.
    """

    def __init__(self, source: Any) -> None:
        super().__init__()
        self.source, kind = source, type(source).__name__
        self._takes_epoch = len(inspect.signature(source.masks).parameters) > 1
        check_call(
            f"{kind}.masks", source.masks, *[0, 0][: 1 + self._takes_epoch], takes="(step, epoch) or (step)"
        )
        if callable(getattr(source, "setup", None)):
            check_call(f"{kind}.setup", source.setup, {}, seed=0, takes="(parameters, *, seed)")
        for name in _OPTIONAL:
            own = getattr(source, name, None)
            # `nn.Module.apply` is not the method of a source.
            if callable(own) and getattr(type(source), name, None) is not nn.Module.apply:
                _, *arguments = inspect.signature(getattr(MaskSource, name)).parameters
                check_call(f"{kind}.{name}", own, *arguments, takes=f"({', '.join(arguments)})")
                setattr(self, name, own)
        if ("state_dict" in vars(self)) != ("load_state_dict" in vars(self)):
            raise PolicyError(f"{kind}: must have both state_dict and load_state_dict, or neither")

    @property
    def original(self) -> object:
        """The object."""
        return self.source

    @property
    def needs_gradients(self) -> bool:  # type: ignore[override]
        """True if the object needs gradients."""
        return bool(getattr(self.source, "needs_gradients", "observe" in vars(self)))

    @property
    def repeats_masks(self) -> bool:  # type: ignore[override]
        """The attribute of the object."""
        return bool(getattr(self.source, "repeats_masks", False))

    @property
    def reads_weights(self) -> bool:  # type: ignore[override]
        """The attribute of the object."""
        return bool(getattr(self.source, "reads_weights", True))

    def prepare(self) -> None:
        """Set the object up."""
        if callable(getattr(self.source, "setup", None)):
            self.source.setup(self.parameters, seed=self.seed)

    def period(self, step: int, epoch: int) -> int:
        """Return 0 if the object has its own method ``due``."""
        return 0 if "due" in vars(self) else super().period(step, epoch)

    def masks(self, step: int, epoch: int) -> Mapping[str, Mask]:
        """Return the object's masks."""
        given = self.source.masks(step, epoch) if self._takes_epoch else self.source.masks(step)
        if not isinstance(given, Mapping):
            raise PolicyError(
                f"{type(self.source).__name__}.masks: must give masks by parameter name, got {shown(given)}"
            )
        return given

    def describe(self) -> dict[str, Any]:
        """Return the object's class."""
        return {"source": type(self.source).__name__}


def as_source(value: object) -> MaskSource:
    """Convert an object to a mask source.

    Args:
        value: A mask source; a class or object with a method ``masks``; a function
            ``(name, parameter, step) -> mask``; or an argument of :class:`Fixed`: a mask tensor, a dict of
            masks, globs, True or False, or a safetensors file.

    Raises:
        PolicyError: For other objects.
    """
    if isinstance(value, MaskSource):
        return value
    if callable(getattr(value, "masks", None)):
        if isinstance(value, type):
            check_call(
                f"Freeze.mask: {value.__name__}", value, takes="no arguments, or be given as an object"
            )
            return as_source(value())
        return Adapted(value)
    if isinstance(value, bool | str | Path | Tensor | Mapping | list | tuple):
        return Fixed(value)
    if callable(value):
        return Function(value)
    raise PolicyError(
        "Freeze.mask: must be a mask source, a function (name, parameter, step) -> mask, a mask tensor or a "
        f"dict of masks, got {shown(value)}"
    )


def _name(function: Callable) -> str:
    """Return the name of a function or partial."""
    own = getattr(function, "func", function)
    return getattr(own, "__qualname__", type(own).__name__)
