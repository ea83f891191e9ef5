"""Torch operations, each with all functions and names that call it."""

import inspect
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from functools import cache
from operator import attrgetter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gradpolicy.errors import PolicyError, nearest, shown
from gradpolicy.flow.arguments import returns_tensors, signatures_of
from gradpolicy.flow.containers import tensors_of_call
from gradpolicy.flow.tracing import Function
from gradpolicy.imports import import_by_name
from gradpolicy.rules.derivative import Derivative
from gradpolicy.rules.registry import Rule, RuleFunction, get_rule, rule_names, unknown_rule

# The namespaces that are searched for an operation, besides torch.Tensor and torch.ops.aten.
NAMESPACES = (torch, F, torch.special, torch.linalg, torch.fft)

# Casts without a gradient, which `to`, `type` and `type_as` do too.
_CASTING = ("bool", "byte", "char", "int", "long", "short")
CASTS = {name: getattr(torch.empty(0, device="cpu"), name)().dtype for name in _CASTING}

# Other names of operations in torch. The keys are the names in reports.
SYNONYMS: dict[str, tuple[str, ...]] = {
    "abs": ("absolute",),
    "acos": ("arccos",),
    "argmax_one_hot": ("argmax",),
    "argmin_one_hot": ("argmin",),
    "asin": ("arcsin",),
    "atan": ("arctan",),
    "categorical": ("multinomial",),
    "clamp": ("clip", "clamp_min", "clamp_max"),
    "div": ("divide", "true_divide", "truediv"),
    "floor_divide": ("floordiv",),
    "ge": ("greater_equal",),
    "gt": ("greater",),
    "le": ("less_equal",),
    "lt": ("less",),
    "max_pool": (
        *("max_pool1d", "max_pool2d", "max_pool3d"),
        *("max_pool1d_with_indices", "max_pool2d_with_indices", "max_pool3d_with_indices"),
    ),
    "mul": ("multiply",),
    "ne": ("not_equal",),
    "neg": ("negative",),
    "sigmoid": ("expit",),
    "sub": ("subtract",),
    "trunc": ("fix",),
}

# Functions of other operations, after which they are named, that some arguments make this operation.
SHARING: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(CASTS, ("to", "type", "type_as")),
    "floor_divide": ("div", "divide"),
    "maximum": ("max",),
    "minimum": ("min",),
    "relu": ("clamp", "clip", "clamp_min", "threshold"),
    "relu6": ("hardtanh", "clamp", "clip"),
    "rsqrt": ("pow",),
    "sqrt": ("pow",),
}

# Other operations that the documentation lists. All other torch functions work too.
LISTED = (
    *("add", "bernoulli", "ceil", "eq", "floor", "gelu", "hardtanh", "heaviside", "leaky_relu"),
    *("matmul", "max", "min", "round", "sign", "silu", "softmax", "tanh", "to", "type", "type_as"),
    *("threshold", "where"),
)

ALSO_CALLED = {
    "argmax_to_one_hot": "argmax_one_hot",
    "one_hot": "argmax_one_hot",
    **{synonym: name for name, synonyms in SYNONYMS.items() for synonym in synonyms},
}

# The beginnings of dotted names of torch's operations.
_OF_TORCH = ("torch.", "nn.", "F.", "Tensor.")
# An operator of torch.ops, and one of its overloads.
_OPERATORS = (type(torch.ops.aten.relu), type(torch.ops.aten.relu.default))

# Returns True if a call with these arguments is the operation.
Decision = Callable[[Function, tuple, Mapping[str, Any]], bool]


@dataclass(frozen=True)
class Operation:
    """A torch operation with all of its spellings.

    Args:
        name: The name in reports and errors.
        functional: The out-of-place function.
        functions: The functions that a ``TorchFunctionMode`` gets for calls of the operation.
    """

    name: str
    functional: Function
    functions: tuple[Function, ...] = field(compare=False, repr=False)
    # Those that write. Compiled code cannot read the names of functions.
    writing: frozenset[Function] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "writing", frozenset(filter(writes, self.functions)))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the out-of-place function."""
        return self.functional(*args, **kwargs)

    def is_in_place(self, function: Function, kwargs: Mapping[str, Any]) -> bool:
        """Return True if a call modifies its first argument in place."""
        return function in self.writing or bool(kwargs.get("inplace"))

    def inputs(self, function: Function, args: tuple, kwargs: Mapping[str, Any]) -> list[Tensor]:
        """Return the tensors of a call, including tensors in lists, in the order of the operation's inputs.

        Args:
            function: One of the functions.
            args: The positional arguments.
            kwargs: The keyword arguments, in the order of the function's parameters.
        """
        if self.name == "bernoulli" and (len(args) > 1 or "p" in kwargs or function in self.writing):
            # The first argument is no input if a probability is passed.
            args, kwargs = args[1:2], {key: kwargs[key] for key in kwargs if key == "p"}
        if function is Tensor.where:
            condition = args[1:2] or (kwargs["condition"],)
            args = (*condition, args[0], *args[2:])
            kwargs = {key: kwargs[key] for key in kwargs if key != "condition"}
        return tensors_of_call(args, kwargs)

    def __reduce__(self) -> tuple:
        # Some torch functions cannot be pickled, but names can.
        return (
            resolve_operation,
            (self.name if is_operation(self.name) else f"torch.ops.{self.functional}",),
        )


def operation_names() -> list[str]:
    """Return the names of operations that have synonyms or are listed in the documentation."""
    return sorted({*SYNONYMS, *SHARING, *LISTED})


def is_operation(specification: object) -> bool:
    """Return True if a name or function denotes a torch operation."""
    if isinstance(specification, str):
        return bool(_spellings(_canonical(specification)))
    return callable(specification) and _operation_name(specification) is not None


def resolve_operation(specification: str | Function) -> Operation:
    """Return the operation for a name or a torch function.

    Args:
        specification: A name such as ``"relu"``, ``"floor_divide"`` or ``"argmax-to-one-hot"``, or any
            function: ``torch.relu``, ``torch.nn.functional.relu``, ``torch.Tensor.relu_``. An operator of
            ``torch.library`` is also an operation, by its name too: ``"namespace::name"``.

    Raises:
        PolicyError: If there is no such operation.

    Example:
        >>> resolve_operation("round") == resolve_operation(torch.Tensor.round_)
        True
    """
    if isinstance(specification, str):
        if "::" in specification or specification.startswith("torch.ops."):
            path = specification.removeprefix("torch.ops.").replace("::", ".")
            try:
                return resolve_operation(attrgetter(path)(torch.ops))
            except AttributeError as error:
                hint = "import the library that registers it before"
                raise PolicyError(f"unknown operation {shown(specification)}; {hint}") from error
        if "." in specification and not specification.startswith(_OF_TORCH):
            return resolve_operation(import_by_name(specification))
        return _operation_named(_canonical(specification), specification)
    # Modes get the overload of a function of torch.library.
    specification = getattr(specification, "_opoverload", specification)
    name = _operation_name(specification) if callable(specification) else None
    if name is not None:
        return _operation_named(name, name)
    if not isinstance(specification, _OPERATORS):
        written = getattr(specification, "__name__", type(specification).__name__)
        raise PolicyError(
            f"an operation is a name or a torch function, got {shown(specification)}; a call of that never "
            f"arrives where rules are put; {nearest(written, _names())}"
        )
    packet: Any = getattr(specification, "overloadpacket", specification)
    return Operation(packet.__name__, specification, tuple(_with_overloads(packet)))


def name_of(function: Function) -> str:
    """Return the name of a torch function's operation, for messages."""
    return _operation_name(function) or str(getattr(function, "__name__", function))


def name_of_call(function: Function, args: tuple, kwargs: Mapping[str, Any]) -> str:
    """Return the name of the operation that a call of a function in ``SHARED`` is, for messages."""
    found = (name for name in SHARED[function] if DECIDED_BY_ARGUMENTS[name](function, args, kwargs))
    return next(found, name_of(function))


def takes_rule(name: str) -> bool:
    """Return True if a name is that of an operation from tensors to tensors."""
    return name in operation_names() or hasattr(F, name) or returns_tensors(name)


def as_rule(specification: str | Rule | RuleFunction | Function) -> Rule:
    """Return the rule for a name, a rule, a function, or another operation; see :func:`find_rule`.

    Raises:
        PolicyError: If there is no such rule, or one of its parameters has no value.
    """
    rule = find_rule(specification)
    missing = rule.missing_parameters()
    if missing:
        raise PolicyError(
            f"rule {rule.name!r} needs a value for {', '.join(missing)}: "
            f"get_rule({rule.name!r}, {missing[0]}=…)"
        )
    return rule


def find_rule(specification: str | Rule | RuleFunction | Function) -> Rule:
    """Return the rule for a name, a rule, a function, or another operation, whose derivative is used.

    A name that is both a rule and an operation denotes the rule; ``"torch.tanh"`` denotes the operation.

    Raises:
        PolicyError: If there is no such rule.
    """
    if isinstance(specification, str):
        is_of_torch = specification.startswith("torch.")
        is_rule = specification in rule_names() or ("." in specification and not is_of_torch)
        if not (is_rule or is_of_torch or is_operation(specification)):
            raise unknown_rule(specification, operation_names())
    else:
        is_rule = isinstance(specification, Rule) or not is_operation(specification)
    return get_rule(specification) if is_rule else derivative_of(resolve_operation(specification))


@cache
def derivative_of(operation: Operation) -> Rule:
    """Return the rule that computes an operation's derivative at the same inputs."""
    signatures = signatures_of(operation.name, operation.functional)
    settings = sorted({name for one in signatures for name in one.parameters} - {"input", "out"})
    function = Derivative(operation, f"operation {operation.name!r}", signatures, settings)
    return Rule(f"derivative of {operation.name}", function, reads=("inputs",))


def writes(function: Function) -> bool:
    """Return True if a function modifies its first argument in place, whatever its keyword arguments."""
    name = getattr(function, "__name__", "").partition(".")[0]
    if name.startswith("__"):
        # Of the operators that begin with i, __iadd__ has an __add__, and __invert__ has no __nvert__.
        return name.startswith("__i") and hasattr(Tensor, f"__{name[3:]}")
    return name.endswith("_")


def _canonical(name: str) -> str:
    stem = name.replace("-", "_").rpartition(".")[2]
    if len(stem) > 1 and stem.endswith("_") and not stem.endswith("__"):
        stem = stem[:-1]
    return ALSO_CALLED.get(stem, stem)


@cache
def _operation_named(name: str, written: str) -> Operation:
    functions = _spellings(name)
    if not functions:
        raise PolicyError(f"unknown operation {shown(written)}; {nearest(name, _names())}")
    stems, namespaces = (name, *SYNONYMS.get(name, ())[:1]), (*NAMESPACES, Tensor)
    named = (f for stem in stems for namespace in namespaces if (f := _function(namespace, stem)))
    return Operation(name, next(named, next(iter(functions))), tuple(functions))


@cache
def _spellings(name: str) -> frozenset[Function]:
    found: set[Function] = set()
    for stem in (name, *SYNONYMS.get(name, ()), *SHARING.get(name, ())):
        for namespace in NAMESPACES:
            found.update(f for form in (stem, f"{stem}_") if (f := _function(namespace, form)))
        # Exported graphs call the overloads.
        packets = [getattr(torch.ops.aten, form, None) for form in (stem, f"{stem}_")]
        found.update(*(_with_overloads(packet) for packet in packets if hasattr(packet, "overloads")))
        forms = (stem, f"{stem}_", *(f"__{prefix}{stem}__" for prefix in ("", "r", "i")))
        found.update(f for form in forms if (f := _function(Tensor, form)))
    return frozenset(found)


def _function(namespace: Any, name: str) -> Function | None:
    """Return a function of a namespace; None for a class, a property, or a method of ``object``."""
    if name.startswith("__") and name in _OBJECT_METHODS:
        return None
    found = getattr(namespace, name, None)
    return None if not callable(found) or isinstance(found, type) or inspect.ismodule(found) else found


def _with_overloads(packet: Any) -> list[Function]:
    """Return an operator of ``torch.ops`` and its overloads, without those with an argument ``out``."""
    return [packet, *(getattr(packet, form) for form in packet.overloads() if "out" not in form)]


_OBJECT_METHODS = frozenset(dir(object)) - {"__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__"}


def _operation_name(function: Function) -> str | None:
    """Return the name of a function's operation; None for a function outside of torch."""
    return _find_operation_name(function) if isinstance(function, Hashable) else None


@cache
def _find_operation_name(function: Function) -> str | None:
    names = [name for name in (*LISTED, *SYNONYMS) if name not in SHARING]
    # A function that is not listed is found by its own name.
    stem = getattr(function, "__name__", "").partition(".")[0]
    stem = stem.removeprefix("special_").removeprefix("linalg_").removeprefix("fft_")
    own = [_canonical(name) for name in (stem, stem.strip("_"), stem.strip("_")[1:]) if name]
    return next((name for name in (*names, *SHARING, *own) if function in _spellings(name)), None)


@cache
def _names() -> frozenset[str]:
    """Return the names of all operations, for messages."""
    found = {name for space in (torch, F, Tensor) for name in dir(space) if _function(space, name)}
    private = ("_", "has_torch", "handle_torch")
    named = [name for name in found if name.islower() and not name.startswith(private)]
    return frozenset(operation_names()) | {name for name in named if not name.endswith("_")}


def _is(value: Any, number: Any) -> bool:
    # A tensor does not decide: its values may be on another device.
    return value is number or (isinstance(value, int | float) and value == number)


def _with(*cases: tuple[frozenset[Function], tuple[str, ...], tuple]) -> Decision:
    """Return a decision: False for a function of a case whose arguments after the first are not these."""

    def decide(function: Function, args: tuple, kwargs: Mapping[str, Any]) -> bool:
        for functions, names, wanted in cases:
            if function in functions:
                by_name = [kwargs.get(name) for name in names[max(0, len(args) - 1) :]]
                return all(_is(*pair) for pair in zip((*args[1:], *by_name), wanted, strict=False))
        return True

    return decide


def _of_two(function: Function, args: tuple, kwargs: Mapping[str, Any]) -> bool:
    # torch.max and torch.min take a second tensor, or reduce the first.
    return function in _OF_TWO or "other" in kwargs or (len(args) > 1 and isinstance(args[1], Tensor))


def _draws_independently(function: Function, args: tuple, kwargs: Mapping[str, Any]) -> bool:
    given = {**dict(zip(("input", "num_samples", "replacement"), args, strict=False)), **kwargs}
    return bool(given.get("replacement")) or given.get("num_samples") == 1


def _unless(decide: Decision) -> Decision:
    return lambda function, args, kwargs: not decide(function, args, kwargs)


def _casts_to(dtype: torch.dtype) -> Decision:
    """Return a decision: True for a method such as ``int``, and for ``to`` or ``type`` with a dtype."""

    def decide(function: Function, args: tuple, kwargs: Mapping[str, Any]) -> bool:
        if function in _CONVERSIONS:
            given = [getattr(value, "dtype", value) for value in (*args[1:], *kwargs.values())]
            return dtype in given
        return function not in _TO_NUMBERS

    return decide


_CONVERSIONS = frozenset().union(*(_spellings(name) for name in ("to", "type", "type_as")))
# int(x) and bool(x) return Python numbers.
_TO_NUMBERS = frozenset({Tensor.__bool__, Tensor.__int__, Tensor.__long__})
_OF_TWO = (_spellings("maximum") | _spellings("minimum")) - _spellings("max") - _spellings("min")
_ROUND_DOWN_ALWAYS = _spellings("floor_divide") - _spellings("div")
_ENDS = (_spellings("clamp"), ("min", "max"))
_is_relu = _with((*_ENDS, (0, None)), (_spellings("threshold"), ("threshold", "value"), (0, 0)))
# torch.nn.ReLU6 calls hardtanh(x, 0, 6).
_is_relu6 = _with((*_ENDS, (0, 6)), (_spellings("hardtanh"), ("min_val", "max_val"), (0, 6)))
# x.__rpow__(2) is 2 ** x.
_NO_POWER = (frozenset({Tensor.__rpow__}), ("base",), (None,))
# Returns True if a call of one of the operation's functions is the operation; without a row all calls are.
DECIDED_BY_ARGUMENTS: dict[str, Decision] = {
    "categorical": _draws_independently,
    "div": lambda function, args, kwargs: kwargs.get("rounding_mode") is None,
    "floor_divide": lambda function, args, kwargs: (
        function in _ROUND_DOWN_ALWAYS or kwargs.get("rounding_mode") == "floor"
    ),
    "hardtanh": _unless(_is_relu6),
    **dict.fromkeys(("max", "min"), _unless(_of_two)),
    **dict.fromkeys(("maximum", "minimum"), _of_two),
    "relu": _is_relu,
    "relu6": _is_relu6,
    "rsqrt": _with(_NO_POWER, (_spellings("pow"), ("exponent",), (-0.5,))),
    "sqrt": _with(_NO_POWER, (_spellings("pow"), ("exponent",), (0.5,))),
    **{name: _casts_to(dtype) for name, dtype in CASTS.items()},
}
# Functions that are named after another operation, each with the operations that its arguments may make it.
SHARED: dict[Function, list[str]] = {}
for _name in ("maximum", "minimum", "relu", "relu6", "rsqrt", "sqrt"):
    for _spelling in _spellings(_name) & frozenset().union(*map(_spellings, SHARING[_name])):
        SHARED.setdefault(_spelling, []).append(_name)
