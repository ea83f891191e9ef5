"""Which torch functions are one operation: names, aliases, and every spelling of each."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gradpolicy.errors import PolicyError, nearest, shown, unknown

Function = Callable[..., Any]
Decision = Callable[[Function, tuple, Mapping[str, Any]], bool]

# Where the spellings of an operation are looked for.
_NAMESPACES = (torch, F, torch.special, torch.linalg, torch.fft, torch._C._nn)

# Operations that torch knows under several names; the first is the name used in reports.
_SYNONYMS: dict[str, tuple[str, ...]] = {
    "abs": ("abs", "absolute"),
    "acos": ("acos", "arccos"),
    "add": ("add",),
    "argmax_one_hot": ("argmax", "one_hot"),
    "asin": ("asin", "arcsin"),
    "atan": ("atan", "arctan"),
    "clamp": ("clamp", "clip", "clamp_min", "clamp_max"),
    "div": ("div", "divide", "true_divide", "truediv"),
    "eq": ("eq",),
    "floor_divide": ("floor_divide", "floordiv", "div", "divide"),
    "ge": ("ge", "greater_equal"),
    "gt": ("gt", "greater"),
    "hardtanh": ("hardtanh",),
    "le": ("le", "less_equal"),
    "lt": ("lt", "less"),
    "matmul": ("matmul",),
    "max_pool": (
        "max_pool1d",
        "max_pool2d",
        "max_pool3d",
        "max_pool1d_with_indices",
        "max_pool2d_with_indices",
        "max_pool3d_with_indices",
    ),
    "mul": ("mul", "multiply"),
    "ne": ("ne", "not_equal"),
    "neg": ("neg", "negative"),
    "relu6": ("relu6", "hardtanh"),
    "sigmoid": ("sigmoid", "expit"),
    "sub": ("sub", "subtract"),
    "trunc": ("trunc", "fix"),
}

# Operations that share a function with another one, which then goes by the other's name.
_SHARING = ("floor_divide", "relu6")

# Operations with one name of their own that the documentation lists; any other torch function works too.
_LISTED = (
    "bernoulli",
    "ceil",
    "floor",
    "gelu",
    "heaviside",
    "leaky_relu",
    "relu",
    "round",
    "sign",
    "silu",
    "softmax",
    "tanh",
    "where",
)

_ALSO_CALLED = {
    "argmax": "argmax_one_hot",
    "argmax_to_one_hot": "argmax_one_hot",
    "one_hot": "argmax_one_hot",
    **{
        synonym: name
        for name, synonyms in _SYNONYMS.items()
        for synonym in synonyms
        if synonym not in _SYNONYMS and name not in _SHARING
    },
    "floordiv": "floor_divide",
}

_SIGNS = {
    "+": "add",
    "-": "sub",
    "*": "mul",
    "/": "div",
    "//": "floor_divide",
    "@": "matmul",
    "**": "pow",
    "%": "remainder",
    "==": "eq",
    "!=": "ne",
    "<": "lt",
    "<=": "le",
    ">": "gt",
    ">=": "ge",
}


@dataclass(frozen=True)
class Operation:
    """A torch operation, whatever its spelling.

    Args:
        name: The name that reports and errors use.
        functions: Every callable under which a call of it arrives at a ``TorchFunctionMode``.
        functional: The out-of-place function.
        spellings: What each of the functions is like.
    """

    name: str
    functions: tuple[Function, ...]
    functional: Function
    spellings: "Mapping[Function, Spelling]" = field(compare=False)

    @property
    def decides(self) -> "Decision | None":
        """Whether a call of one of the functions is this operation; None where every one is."""
        return _DECIDED_BY_ARGUMENTS.get(self.name)

    def __reduce__(self) -> tuple:
        # Some torch functions cannot be pickled, names can.
        return (resolve_operation, (self.name if is_operation(self.name) else self.functional,))


def operation_names() -> list[str]:
    """Lists the operations that have alias sets, by the names that reports use."""
    return sorted({*_SYNONYMS, *_LISTED})


def is_operation(specification: object) -> bool:
    """Whether a name or object means a torch operation."""
    if isinstance(specification, str):
        return bool(_spellings(_canonical(specification)))
    return callable(specification) and _named_after(specification) is not None


def resolve_operation(specification: str | Function) -> Operation:
    """Finds the operation that a name or a torch function means.

    Args:
        specification: A name such as ``"relu"``, ``"floor_divide"`` or ``"argmax-to-one-hot"``, or any
            spelling as an object: ``torch.relu``, ``torch.nn.functional.relu``, ``torch.Tensor.relu_``.
            A callable that is not torch's own, but that calls ``torch.overrides.handle_torch_function``,
            stands for itself.

    Raises:
        PolicyError: If there is no such operation.

    Example:
        >>> resolve_operation("round") == resolve_operation(torch.Tensor.round_)
        True
    """
    if isinstance(specification, str):
        return _operation_named(_canonical(specification), specification)
    # An operation of torch.library is met as the overload that it calls.
    specification = getattr(specification, "_opoverload", specification)
    name = _named_after(specification) if callable(specification) else None
    if name is not None:
        return _operation_named(name, name)
    if not _arrives_at_modes(specification):
        raise PolicyError(
            f"an operation is a name or a torch function, got {shown(specification)}; a call of that never "
            f"arrives where rules are put; {_nearest_operation(specification)}"
        )
    packet: Any = getattr(specification, "overloadpacket", specification)
    functions = _with_overloads(packet) if hasattr(packet, "overloads") else [packet]
    name = getattr(packet, "__name__", repr(packet))
    return Operation(name, tuple(functions), specification, {f: spelling_of(f) for f in functions})


def _arrives_at_modes(specification: Any) -> bool:
    """Whether calls of what is no function of torch are seen all the same."""
    if isinstance(specification, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        return True
    code = getattr(inspect.unwrap(specification) if callable(specification) else None, "__code__", None)
    return code is not None and "handle_torch_function" in code.co_names


def _nearest_operation(specification: object) -> str:
    kind = specification if isinstance(specification, type) else type(specification)
    name = getattr(specification, "__name__", kind.__name__)
    return nearest(name, {*operation_names(), *_torch_names()})


def name_of(function: Function) -> str:
    """The name of the operation that a torch function is a spelling of, for messages."""
    return _named_after(function) or str(getattr(function, "__name__", function))


@dataclass(frozen=True)
class Spelling:
    """What one function among an operation's is like.

    Args:
        name: Its own name, without the marks of an operator.
        writes: Whether it always writes its result into its first argument.
        inplace_at: The position of its argument ``inplace``, if it has one.
        second_first: Whether it is a method of what the operation takes second (``a.where(condition, b)``).
        samples: Whether it draws bits: where a probability is given, what it is called on is no input.
    """

    name: str
    writes: bool
    inplace_at: int | None
    second_first: bool
    samples: bool = False

    def is_in_place(self, args: tuple, kwargs: Mapping[str, Any]) -> bool:
        """Whether a call writes its result into its first argument."""
        if self.inplace_at is None:
            return self.writes
        if "inplace" in kwargs:
            return bool(kwargs["inplace"])
        return len(args) > self.inplace_at and bool(args[self.inplace_at])

    def inputs(self, args: tuple, kwargs: Mapping[str, Any]) -> list[Tensor]:
        """The tensors of a call in the operation's own order, also those within lists."""
        if self.samples and (len(args) > 1 or "p" in kwargs or self.writes):
            args, kwargs = args[1:2], {key: kwargs[key] for key in kwargs if key == "p"}
        if self.second_first:
            args = (*args[1:2], args[0], *args[2:])
        if "condition" in kwargs:
            order = ("condition", "input", "self", "other")
            kwargs = {key: kwargs[key] for key in order if key in kwargs}
        found: list[Tensor] = []
        for value in (*args, *kwargs.values()):
            if isinstance(value, Tensor):
                found.append(value)
            elif isinstance(value, list | tuple):
                found.extend(item for item in value if isinstance(item, Tensor))
        return found


def spelling_of(function: Function) -> Spelling:
    """Describes a function by its name and signature."""
    name = getattr(function, "__name__", "").partition(".")[0]
    operator = name.startswith("__")
    in_place_operator = operator and name.startswith("__i") and name.removeprefix("__i") in _OPERATOR_STEMS
    return Spelling(
        name=name.strip("_"),
        writes=in_place_operator or (name.endswith("_") and not operator),
        inplace_at=_place_of_inplace(function),
        second_first=function is Tensor.where,
        samples=name.strip("_") == "bernoulli",
    )


_OPERATORS = "add and div floordiv lshift matmul mod mul or pow rshift sub truediv xor"
_OPERATOR_STEMS = frozenset(f"{stem}__" for stem in _OPERATORS.split(" "))


def _canonical(name: str) -> str:
    if name in _SIGNS:
        return _SIGNS[name]
    stem = name.replace("-", "_").rpartition(".")[2]
    if len(stem) > 1 and stem.endswith("_") and not stem.endswith("__"):
        stem = stem[:-1]
    return _ALSO_CALLED.get(stem, stem)


@cache
def _operation_named(name: str, written: str) -> Operation:
    functions = _spellings(name)
    if not functions:
        raise unknown("operation", written, {*operation_names(), *_torch_names()})
    stem = _SYNONYMS.get(name, (name,))[0]
    places = (*_NAMESPACES, Tensor)
    functional = next((found for place in places if (found := _function(place, stem))), None)
    spellings = {function: spelling_of(function) for function in functions}
    return Operation(name, tuple(functions), functional or next(iter(functions)), spellings)


@cache
def _spellings(name: str) -> frozenset[Function]:
    found: set[Function] = set()
    for stem in _SYNONYMS.get(name, (name,)):
        for place in _NAMESPACES:
            found.update(f for form in (stem, f"{stem}_") if (f := _function(place, form)))
        found.update(*map(_aten_functions, (stem, f"{stem}_")))
        forms = (stem, f"{stem}_", *(f"__{prefix}{stem}__" for prefix in ("", "r", "i")))
        found.update(f for form in forms if (f := _function(Tensor, form)))
    return frozenset(found)


def _function(place: Any, name: str) -> Function | None:
    """A function or method of a namespace; no class, no property, nothing that the namespace inherits."""
    if name.startswith("__") and name in _OBJECT_METHODS:
        return None
    found = getattr(place, name, None)
    if not callable(found) or isinstance(found, type) or inspect.ismodule(found):
        return None
    try:
        hash(found)
    except TypeError:
        return None
    return found


def _aten_functions(name: str) -> list[Function]:
    """The forms of ``torch.ops.aten.name``, as exported graphs call them."""
    packet = getattr(torch.ops.aten, name, None)
    return [] if packet is None else _with_overloads(packet)


def _with_overloads(packet: Any) -> list[Function]:
    """An operation of ``torch.ops`` in all its forms, but those that write to an ``out``."""
    return [packet, *(getattr(packet, form) for form in packet.overloads() if "out" not in form)]


_OBJECT_METHODS = frozenset(dir(object)) - {"__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__"}


def _named_after(function: Function) -> str | None:
    """The operation that a function is a spelling of; None where it is none of torch's."""
    try:
        return _reverse(function)
    except TypeError:
        return None


@cache
def _reverse(function: Function) -> str | None:
    for name in (*_LISTED, *_SYNONYMS):
        if name not in _SHARING and function in _spellings(name):
            return name
    for name in _SHARING:
        if function in _spellings(name):
            return name
    stem = getattr(function, "__name__", "").partition(".")[0]
    stem = stem.removeprefix("special_").removeprefix("linalg_").removeprefix("fft_")
    for candidate in (stem, stem.strip("_"), stem.strip("_")[1:]):
        canonical = _ALSO_CALLED.get(candidate, candidate)
        if candidate and function in _spellings(canonical):
            return canonical
    return None


@cache
def _torch_names() -> frozenset[str]:
    return frozenset(
        name
        for place in (torch, F, Tensor)
        for name in dir(place)
        if name.islower() and not (name.startswith("_") or name.endswith("_")) and _function(place, name)
    )


@cache
def _place_of_inplace(function: Function) -> int | None:
    try:
        names = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return None
    return names.index("inplace") if "inplace" in names else None


def _rounds_down(function: Function, args: tuple, kwargs: Mapping[str, Any]) -> bool:
    return function in _ROUND_DOWN_ALWAYS or kwargs.get("rounding_mode") == "floor"


def _has_no_rounding(function: Function, args: tuple, kwargs: Mapping[str, Any]) -> bool:
    return kwargs.get("rounding_mode") is None


def _is_relu6(function: Function, args: tuple, kwargs: Mapping[str, Any]) -> bool:
    # torch.nn.ReLU6 calls hardtanh(x, 0, 6): by its bounds it is known.
    if function not in _HARDTANH:
        return True
    bounds = dict(zip(("min_val", "max_val"), args[1:3], strict=False))
    bounds.update({key: kwargs[key] for key in ("min_val", "max_val") if key in kwargs})
    return (bounds.get("min_val", -1.0), bounds.get("max_val", 1.0)) == (0.0, 6.0)


_ROUND_DOWN_ALWAYS = _spellings("floor_divide") - _spellings("div")
_HARDTANH = _spellings("hardtanh")
_DECIDED_BY_ARGUMENTS: dict[str, Decision] = {
    "div": _has_no_rounding,
    "floor_divide": _rounds_down,
    "hardtanh": lambda function, args, kwargs: not _is_relu6(function, args, kwargs),
    "relu6": _is_relu6,
}
