"""The user's own functions and classes as mask sources."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from gradpolicy.errors import PolicyError, shown
from gradpolicy.masks.base import MaskSource
from gradpolicy.masks.fixed import Fixed
from gradpolicy.tensors.mask import Mask

MaskFunction = Callable[[str, Tensor, int], Mask]
SourceLike = (
    MaskSource
    | MaskFunction
    | Tensor
    | bool
    | str
    | Path
    | Iterable[str]
    | Mapping[str, Mask]
    | type
    | object
)
# The other methods of a source that an object may have, and what each is called with.
_METHODS: dict[str, tuple[str, ...]] = {
    "due": ("step", "epoch"),
    "overdue": ("step", "epoch"),
    "observe": ("gradients",),
    "observe_more": ("gradients",),
    "wants_gradients": ("step", "epoch"),
    "gradient_names": ("step", "epoch"),
    "gradient_scale": ("step", "epoch"),
    "learning_rate_scale": ("step", "epoch"),
    "apply": (),
    "state_dict": (),
    "load_state_dict": ("state",),
}


class Function(MaskSource):
    """A plain function ``(name, parameter, step) -> mask`` as a mask source.

    The function must give the same mask on every rank: of name, shape and step, not of a rank's own data.

    Args:
        function: The function; the step it gets is the count at which the masks changed last.
        **timetable: ``every``, ``unit``, ``start``, ``stop``, ``seed``: see :class:`MaskSource`.

    Raises:
        PolicyError: If it is no function.

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
        try:
            inspect.signature(function).bind("name", None, 0)
        except TypeError as error:
            raise PolicyError(
                f"Function: {_name(function)} must take (name, parameter, step): {error}"
            ) from error
        except ValueError:
            pass  # written in C, without a signature to look at
        self.function = function

    def masks(self, step: int, epoch: int) -> Mapping[str, Mask]:
        """What the function gives for each parameter."""
        changed = self.timetable.begins(self.period(step, epoch))
        return {name: self.function(name, parameter, changed) for name, parameter in self.parameters.items()}

    def describe(self) -> dict[str, Any]:
        """The function's name."""
        return {"function": _name(self.function)}


class Adapted(MaskSource):
    """Any object with a ``masks`` method as a mask source; other methods of a source that it has are used.

    Args:
        source: The object. Its ``masks`` takes ``(step, epoch)`` or ``(step)``. One with an ``observe`` is
            shown gradients, unless it says ``needs_gradients = False``.

    Raises:
        PolicyError: If a method of it takes other arguments, or it saves what it cannot load; when it is
            asked, if ``masks`` gives no dict.
    """

    def __init__(self, source: Any) -> None:
        super().__init__()
        self.source = source
        methods = {name: own for name in _METHODS if (own := _own_method(source, name)) is not None}
        _check_signatures(source, methods)
        self._says_when_due = "due" in methods
        self._takes_epoch = _takes(source.masks, 0, 0)
        for name, own in methods.items():
            setattr(self, name, own)
        self._read_flags()

    def prepare(self) -> None:
        """Hands the parameters on."""
        if callable(getattr(self.source, "setup", None)):
            self.source.setup(self.parameters, seed=self.seed)
        self._read_flags()

    def _read_flags(self) -> None:
        observes = _own_method(self.source, "observe") is not None
        self.needs_gradients = bool(getattr(self.source, "needs_gradients", observes))
        self.repeats_masks = bool(getattr(self.source, "repeats_masks", False))

    def period(self, step: int, epoch: int) -> int:
        """Always the same where the object says itself when its masks may change."""
        return 0 if self._says_when_due else super().period(step, epoch)

    def masks(self, step: int, epoch: int) -> Mapping[str, Mask]:
        """What the object gives."""
        given = self.source.masks(step, epoch) if self._takes_epoch else self.source.masks(step)
        if not isinstance(given, Mapping):
            raise PolicyError(
                f"{type(self.source).__name__}.masks: must give masks by parameter name, got {shown(given)}"
            )
        return given

    def describe(self) -> dict[str, Any]:
        """The object's class."""
        return {"source": type(self.source).__name__}


def as_source(value: SourceLike) -> MaskSource:
    """Makes a mask source of what stands for one.

    Args:
        value: A mask source; a class or object with a ``masks`` method; a function
            ``(name, parameter, step) -> mask``; or what :class:`Fixed` takes: a mask tensor, a dict of masks,
            globs of what trains, True or False, a safetensors file.

    Raises:
        PolicyError: For anything else.
    """
    if isinstance(value, MaskSource):
        return value
    if isinstance(value, type) and callable(getattr(value, "masks", None)):
        return as_source(_made(value))
    if callable(getattr(value, "masks", None)):
        return Adapted(value)
    if isinstance(value, bool | str | Path | Tensor | Mapping | list | tuple):
        return Fixed(value)
    if callable(value):
        return Function(value)
    raise PolicyError(
        "Freeze.mask: must be a mask source, a function (name, parameter, step) -> mask, a mask tensor or a "
        f"dict of masks, got {shown(value)}"
    )


def _made(source: type) -> Any:
    try:
        inspect.signature(source).bind()
    except TypeError as error:
        raise PolicyError(
            f"Freeze.mask: {source.__name__} cannot be made without arguments ({error}); give an object of it"
        ) from error
    return source()


def _own_method(source: Any, name: str) -> Callable | None:
    """An object's method, where it has one and means this by it."""
    own = getattr(source, name, None)
    # A module's applies a function to its children.
    inherited = name == "apply" and getattr(type(source), name, None) is nn.Module.apply
    return own if callable(own) and not inherited else None


def _check_signatures(source: Any, methods: Mapping[str, Callable]) -> None:
    kind = type(source).__name__
    if not _takes(source.masks, 0) and not _takes(source.masks, 0, 0):
        raise PolicyError(f"{kind}.masks: must take (step, epoch) or (step)")
    setup = getattr(source, "setup", None)
    if callable(setup) and not _takes(setup, {}, seed=0):
        raise PolicyError(f"{kind}.setup: must take (parameters, *, seed)")
    for name, method in methods.items():
        if not _takes(method, *_METHODS[name]):
            raise PolicyError(f"{kind}.{name}: must take ({', '.join(_METHODS[name])})")
    if ("state_dict" in methods) != ("load_state_dict" in methods):
        raise PolicyError(f"{kind}: must have both state_dict and load_state_dict, or neither")


def _takes(function: Callable, *values: Any, **named: Any) -> bool:
    try:
        inspect.signature(function).bind(*values, **named)
    except TypeError:
        return False
    except ValueError:
        pass  # written in C, without a signature to look at
    return True


def _name(function: Callable) -> str:
    """The function's own name, also where some of its arguments are given beforehand."""
    own = getattr(function, "func", function)
    return getattr(own, "__qualname__", type(own).__name__)
