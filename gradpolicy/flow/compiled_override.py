"""Makes a ``gradient_override`` in compiled code: once, while ``torch.compile`` traces, by plain Python.

The compiler follows and guards what it can reach from a module's globals. So what was made is kept here under
a name, by which the traced code finds it.
"""

import functools
import itertools
import types
from collections.abc import Callable
from typing import Any

from gradpolicy.errors import PolicyError
from gradpolicy.flow.bound_rule import runs_while_tracing
from gradpolicy.rules.registry import Rule

MADE = types.SimpleNamespace()
_NUMBERS = itertools.count()

_PLAIN = (bool, int, float, str, type(None))
_CONSTANTS = (
    str,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    functools.partial,
)


@runs_while_tracing
def make_once(maker: Callable[[Any], Any], constants: Any) -> str:
    """Makes an object from constants while the compiler traces.

    Returns:
        The name of the object in :data:`MADE`, or the text of the ``PolicyError`` that was raised instead.
    """
    try:
        made = maker(constants)
    except PolicyError as error:
        return str(error)
    name = f"made_{next(_NUMBERS)}"
    setattr(MADE, name, made)
    return name


def constants_of(value: Any) -> tuple:
    """A rule, a name or a function as constants, which the compiler can pass to :func:`make_once`.

    Raises:
        PolicyError: For a tensor among a rule's parameters, or a callable object.
    """
    if isinstance(value, Rule):
        from torch.fx.experimental.symbolic_shapes import guard_scalar

        parameters = []
        for key, number in value.parameters.items():
            if not isinstance(number, _PLAIN):
                raise PolicyError(
                    f"rule {value.name!r}: parameter {key!r} is no plain number, and a gradient_override "
                    "that is made within compiled code takes no other; make it outside of the compiled code"
                )
            # A number that changes from call to call is symbolic: compiled anew for each value.
            parameters.append((key, guard_scalar(number) if isinstance(number, int | float) else number))
        rest = (value.gradient_filter, value.reads, value.own, value.each)
        return ("rule", value.name, value.function, tuple(parameters), rest)
    if isinstance(value, _CONSTANTS):
        return ("constant", value)
    raise PolicyError(
        "a gradient_override that is made within compiled code takes names, rules and functions; make it "
        "outside of the compiled code"
    )


def from_constants(constants: tuple) -> Any:
    """Undoes :func:`constants_of`."""
    if constants[0] == "constant":
        return constants[1]
    _, name, function, parameters, rest = constants
    return Rule(name, function, dict(parameters), *rest)
