"""Objects that are made in compiled code: once, while ``torch.compile`` traces, by plain Python.

The compiler follows what it can reach from a module's globals, and guards it. So what was made is kept here
under a name, and the traced code finds it by that.
"""

import functools
import itertools
import types
from collections.abc import Callable
from typing import Any

from gradpolicy.errors import PolicyError
from gradpolicy.rules.registry import Rule

MADE = types.SimpleNamespace()
_NUMBERS = itertools.count()

_PLAIN = (bool, int, float, str, type(None))
_BY_ITSELF = (
    str,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    functools.partial,
)


def make_once(maker: Callable[[Any], Any], parts: Any) -> str:
    """Makes an object of constants while the compiler traces.

    Returns:
        The name of the object in :data:`MADE`; or the text of the ``PolicyError`` that there was instead.
    """
    try:
        made = maker(parts)
    except PolicyError as error:
        return str(error)
    name = f"made_{next(_NUMBERS)}"
    setattr(MADE, name, made)
    return name


# What torch.compiler.assume_constant_result does, without its import of the whole compiler.
make_once.__dict__["_dynamo_marked_constant"] = True


def parts_of(value: Any) -> tuple:
    """A rule, a name or a function as constants, which the compiler can hand over.

    Raises:
        PolicyError: For what it cannot: a tensor among a rule's parameters, or a callable object.
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
        return ("rule", value.name, value.function, tuple(parameters), value.gradient_filter, value.reads)
    if isinstance(value, _BY_ITSELF):
        return ("as it is", value)
    raise PolicyError(
        "a gradient_override that is made within compiled code takes names, rules and functions; make it "
        "outside of the compiled code"
    )


def whole(parts: tuple) -> Any:
    """The rule, name or function again."""
    if parts[0] == "as it is":
        return parts[1]
    _, name, function, parameters, gradient_filter, reads = parts
    return Rule(name, function, dict(parameters), gradient_filter, reads)
