"""One argument of a module's forward, by name or position."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

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


def find_argument(forward: Callable[..., Any], wanted: int | str, owner: str) -> Argument:
    """Finds the argument of a forward that a name or position means.

    Args:
        forward: The function, bound to its module.
        wanted: The name, or the position (0 is the first).
        owner: Whose forward it is, for messages: ``"policy 'cut' at module 'criterion'"``.

    Raises:
        PolicyError: If the forward takes no such argument.
    """
    parameters = inspect.signature(forward).parameters.values()
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
