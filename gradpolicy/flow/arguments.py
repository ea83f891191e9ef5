"""Arguments of operations and of modules' forwards, by parameter name."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.fx.operator_schemas import get_signature_for_torch_op, type_matches

from gradpolicy.errors import PolicyError, unknown
from gradpolicy.flow.tracing import runs_while_tracing

# A parameter, the position or keyword of its argument (None if not given), and its default.
Source = tuple[str, int | str | None, Any]

# Names of parameters in torch's documentation, by their names in schemas or NumPy.
_ALSO_CALLED = {"axis": "dim", "keepdims": "keepdim", "self": "input", "A": "input"}


def arguments_of(function: Callable[..., Any], name: str, args: tuple, kwargs: Mapping) -> dict[str, Any]:
    """Return the arguments of a call by parameter name, including defaults.

    Args:
        function: The function called.
        name: The operation's name. Parameters of the operation that this function lacks (``clamp_min`` has no
            ``max``) are included with their defaults.
        args: The positional arguments.
        kwargs: The keyword arguments.
    """
    sources = _sources_in_call(function, name, args, kwargs)
    given: dict[int | str | None, Any] = {**dict(enumerate(args)), **kwargs}
    return {parameter: given.get(place, default) for parameter, place, default in sources}


def in_order_of_parameters(
    function: Callable[..., Any], name: str, args: tuple, kwargs: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Return the keyword arguments of a call with tensors in the order of the function's parameters."""
    if len(kwargs) < 2 or sum([isinstance(value, Tensor) for value in kwargs.values()]) < 2:
        return kwargs
    sources = _sources_in_call(function, name, args, kwargs)
    ordered = [position for _, position, _ in sources if isinstance(position, str)]
    return {key: kwargs[key] for key in (*ordered, *kwargs)}


def _sources_in_call(
    function: Callable[..., Any], name: str, args: tuple, kwargs: Mapping
) -> tuple[Source, ...]:
    """Return the source of each parameter's argument."""
    named = tuple([(key, _type_of(value)) for key, value in kwargs.items()])
    return _sources(function, name, tuple([_type_of(value) for value in args]), named)


def _type_of(value: Any) -> Any:
    """Return the type of an argument; of a list a tuple of types."""
    if isinstance(value, Tensor):
        return Tensor
    return tuple([_type_of(item) for item in value]) if isinstance(value, list | tuple) else type(value)


@runs_while_tracing
def _sources(*call: Any) -> tuple[Source, ...]:
    # The compiler does not run cached functions themselves.
    return _sources_of_types(*call)


@lru_cache(maxsize=1024)
def _sources_of_types(
    function: Callable[..., Any], name: str, args: tuple, kwargs: tuple[tuple[str, Any], ...]
) -> tuple[Source, ...]:
    keys = {_ALSO_CALLED.get(key, key): key for key, _ in kwargs}
    values = {_ALSO_CALLED.get(key, key): value for key, value in kwargs}
    own_name = getattr(function, "__name__", name).partition(".")[0]
    is_operator = own_name.startswith("__")
    positions = list(range(len(args)))
    if own_name.startswith("__r") and len(args) == 2:
        # 2 - x calls x.__rsub__(2).
        args, positions = args[::-1], positions[::-1]
    # Operators written in Python name their operands self and other, whatever their names in the operation.
    signature = None if is_operator else _signature_in_python(function)
    if signature is None:
        signature = _fitting_schema(name if is_operator else own_name.strip("_"), args, values)
    if signature is None:
        named = ["input", "other"] if len(args) == 2 else ["input", *map(str, range(1, len(args)))]
        return (*zip(named, positions, args, strict=False), *((key, keys[key], None) for key in keys))
    given = signature.bind(*positions, **keys).arguments
    sources = [
        (key, given.get(key), None if one.default is one.empty else one.default)
        for key, one in signature.parameters.items()
        if not key.startswith("_") and key != "out"
    ]
    for schema in _schemas(name)[:1]:
        if {key for key, *_ in sources} <= schema.parameters.keys():
            missing = [one for key, one in schema.parameters.items() if key not in signature.parameters]
            sources += [(one.name, None, one.default) for one in missing if one.default is not one.empty]
    return tuple(sources)


def signatures_of(name: str, function: Callable[..., Any]) -> list[inspect.Signature]:
    """Return the signatures of an operation, one an overload."""
    return [one for one in (*_schemas(name), _signature_in_python(function)) if one is not None]


def returns_tensors(name: str) -> bool:
    """Return True if an overload of an operation takes tensors and returns one or more."""
    return any("Tensor" in str(signature.return_annotation) for signature in _schemas(name))


def _signature_in_python(function: Callable[..., Any]) -> inspect.Signature | None:
    """Return the signature of a Python function; None for other functions and for ``*args`` wrappers."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return None
    passes_on = any(one.kind in _SEVERAL for one in signature.parameters.values())
    return None if passes_on or not hasattr(inspect.unwrap(function), "__code__") else _renamed(signature)


def _renamed(signature: inspect.Signature) -> inspect.Signature:
    parameters = signature.parameters.values()
    return signature.replace(
        parameters=[one.replace(name=_ALSO_CALLED.get(one.name, one.name)) for one in parameters]
    )


def _fitting_schema(name: str, args: tuple, kwargs: dict) -> inspect.Signature | None:
    """Return the signature of the first overload that accepts these arguments."""
    for signature in _schemas(name):
        try:
            given = signature.bind(*args, **kwargs).arguments
        except TypeError:
            continue
        kinds = {key: signature.parameters[key].annotation for key in given}
        if all(type_matches(kinds[key], _as_annotation(value)) for key, value in given.items()):
            return signature
    return None


@cache
def _schemas(name: str) -> list[inspect.Signature]:
    """Return the signatures of an operation's overloads that take tensors."""
    packet: Any = getattr(torch.ops.aten, name, None)
    signatures = get_signature_for_torch_op(packet) if hasattr(packet, "overloads") else None
    return [
        _renamed(signature)
        for signature in signatures or ()
        if any("Tensor" in str(one.annotation) for one in signature.parameters.values())
    ]


def _as_annotation(kind: Any) -> Any:
    """Return the type of an argument as torch's schemas denote it."""
    return tuple[tuple(map(_as_annotation, kind))] if isinstance(kind, tuple) else kind  # type: ignore[misc]


_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_SEVERAL = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


# The positions and names at which a call may have the arguments that a policy names; empty means all.
Slots = frozenset[int | str]


class Signature:
    """The parameters of a forward, as plain values that the compiler can trace.

    Args:
        forward: The bound forward.

    Attributes:
        names: The names of the parameters, without ``*args`` and ``**kwargs``.
        positional: The number of parameters that may be passed by position.
        several: The name of ``*args``; None if there is none.
        others: The name of ``**kwargs``; None if there is none.
        defaults: The defaults by name.
    """

    def __init__(self, forward: Callable[..., Any]) -> None:
        parameters = inspect.signature(forward).parameters.values()
        by_kind = {each.kind: each.name for each in parameters}
        self.names = tuple(each.name for each in parameters if each.kind not in _SEVERAL)
        self.positional = sum(each.kind in _POSITIONAL for each in parameters)
        self.several = by_kind.get(inspect.Parameter.VAR_POSITIONAL)
        self.others = by_kind.get(inspect.Parameter.VAR_KEYWORD)
        self.defaults = {each.name: each.default for each in parameters if each.default is not each.empty}

    def in_order(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return keyword arguments in the order of the parameters."""
        return {key: kwargs[key] for key in (*self.names, *kwargs) if key in kwargs}

    def by_name(self, args: tuple, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call by name, including defaults; ``*args`` as a tuple."""
        named: dict[str, Any] = dict(zip(self.names[: self.positional], args, strict=False))
        if self.several is not None:
            named[self.several] = args[self.positional :]
        return {**self.defaults, **named, **kwargs}

    def slots(self, wanted: Iterable[int | str], owner: str) -> Slots:
        """Return the positions and names at which a call may have some arguments.

        Args:
            wanted: The names of the arguments, or their positions (0 is the first).
            owner: The policy and module, for messages: ``"policy 'cut' at module 'criterion'"``.

        Raises:
            PolicyError: If the forward has no such argument.
        """
        positional = self.names[: self.positional]
        collected = (self.several, self.others)
        found: set[int | str] = set()
        for each in wanted:
            found |= next((set(pair) for pair in enumerate(positional) if each in pair), {each})
            if isinstance(each, int) and each >= len(positional) and self.several is None:
                takes = f"its forward takes {len(positional)}: {', '.join(positional)}"
                raise PolicyError(f"{owner}: argument {each} does not exist; {takes}")
            if isinstance(each, str) and each not in self.names and (not self.others or each in collected):
                raise unknown("argument", each, self.names, key=owner)
        return frozenset(found)
