"""One argument of a module's forward, by name or position."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from gradpolicy.errors import PolicyError, unknown

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_SEVERAL = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


@dataclass(frozen=True)
class Argument:
    """Where one argument of a forward may stand in a call.

    Args:
        name: Its name; None for one of ``*args``.
        position: Its position; None for one that is given by name only.
    """

    name: str | None
    position: int | None

    def is_at(self, slot: int | str) -> bool:
        """Whether it is the positional argument with this number, or the keyword argument of this name."""
        return slot == (self.name if isinstance(slot, str) else self.position)

    def value(self, args: tuple, kwargs: dict) -> Any:
        """Its value in a call; None if it is not given."""
        if self.position is not None and self.position < len(args):
            return args[self.position]
        return kwargs.get(self.name)


def parameters_of(forward: Callable[..., Any]) -> list[inspect.Parameter]:
    """The parameters of a bound forward; those of a ScriptModule stand in its schema."""
    # `inspect.signature` knows nothing of these, or, where another library has wrapped them, only `*args`.
    schema: Any = getattr(forward, "schema", None) if isinstance(forward, torch.ScriptMethod) else None
    if schema is None:
        return list(inspect.signature(forward).parameters.values())
    return [
        inspect.Parameter(
            argument.name,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
            default=argument.default_value if argument.has_default_value() else inspect.Parameter.empty,
        )
        for argument in schema.arguments[1:]
    ]


@dataclass(frozen=True)
class Signature:
    """The parameters of a forward, as plain values that compiled code can follow.

    Args:
        names: Their names, but those of ``*args`` and ``**kwargs``.
        positional: How many of them may be given by position.
        several: The name of ``*args``; None if there is none.
        defaults: The defaults by name.
    """

    names: tuple[str, ...]
    positional: int
    several: str | None
    defaults: Mapping[str, Any]

    @classmethod
    def of(cls, forward: Callable[..., Any]) -> "Signature":
        """The signature of a bound forward."""
        parameters = parameters_of(forward)
        several = [p.name for p in parameters if p.kind is inspect.Parameter.VAR_POSITIONAL]
        return cls(
            tuple(p.name for p in parameters if p.kind not in _SEVERAL),
            sum(p.kind in _POSITIONAL for p in parameters),
            several[0] if several else None,
            {p.name: p.default for p in parameters if p.default is not inspect.Parameter.empty},
        )

    def in_order(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Keyword arguments in the order of the parameters."""
        return {key: kwargs[key] for key in (*self.names, *kwargs) if key in kwargs}

    def by_name(self, args: tuple, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of a call by name, with the defaults of those not given; ``*args`` as a tuple."""
        named: dict[str, Any] = dict(zip(self.names[: self.positional], args, strict=False))
        if self.several is not None:
            named[self.several] = args[self.positional :]
        return {**self.defaults, **named, **kwargs}


def find_argument(forward: Callable[..., Any], wanted: int | str, owner: str) -> Argument:
    """Finds the argument of a forward that a name or position means.

    Args:
        forward: The function, bound to its module.
        wanted: The name, or the position (0 is the first).
        owner: Whose forward it is, for messages: ``"policy 'cut' at module 'criterion'"``.

    Raises:
        PolicyError: If the forward takes no such argument.
    """
    parameters = parameters_of(forward)
    kinds = {parameter.kind for parameter in parameters}
    positional = [parameter.name for parameter in parameters if parameter.kind in _POSITIONAL]
    by_name = [p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY]
    if isinstance(wanted, int):
        if wanted < len(positional):
            return Argument(positional[wanted], wanted)
        if inspect.Parameter.VAR_POSITIONAL in kinds:
            return Argument(None, wanted)
        raise PolicyError(
            f"{owner}: argument {wanted} does not exist; its forward takes {len(positional)}: "
            f"{', '.join(positional)}"
        )
    if wanted in positional:
        return Argument(wanted, positional.index(wanted))
    several = next((p for p in parameters if p.name == wanted and p.kind in _SEVERAL), None)
    if several is not None:
        key = "position" if several.kind is inspect.Parameter.VAR_POSITIONAL else "name"
        raise PolicyError(
            f"{owner}: argument {wanted!r} is {several}, which are several; give the {key} of one of them"
        )
    if wanted in by_name or inspect.Parameter.VAR_KEYWORD in kinds:
        return Argument(wanted, None)
    raise unknown("argument", wanted, [*positional, *by_name], key=owner)
