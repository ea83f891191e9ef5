"""Gradient paths of bool and integer tensors, and the functions that propagate them.

A bool or integer tensor cannot have a gradient. If it is the result of an operation with a rule, it gets a
*gradient path*: a floating-point tensor with the same values, whose gradient is the rule's. Casts, views,
indexing, ``not``, ``1 - x``, ``x + 1``, products, ``where``, ``one_hot`` and ``scatter`` carry it: they
compute the path of their result from the path of their argument, and attach the path's gradient where the
result is floating-point. All other functions lose it, with a warning if their result is floating-point.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Number
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from gradpolicy.flow.bound_rule import BoundRule, RuleState
from gradpolicy.flow.containers import tensors_in, tensors_of_call
from gradpolicy.flow.edges import join, replace
from gradpolicy.flow.operations import name_of, resolve_operation, writes
from gradpolicy.flow.policy_report import Outcome
from gradpolicy.flow.tracing import Function, is_traced, without_modes
from gradpolicy.rules.routing import is_differentiable

_NAME = "_gradpolicy_path"


@dataclass(eq=False)
class Origin:
    """A call of an operation whose discrete result has a path.

    Args:
        state: The rule on the operation.
        operation: The operation's name.
        is_counted: True if the call was counted, which happens when its result becomes floating-point.
    """

    state: RuleState
    operation: str
    is_counted: bool = False


@dataclass(eq=False)
class GradientPath:
    """The gradient path of a discrete tensor.

    Args:
        tensor: A floating-point tensor with the discrete tensor's values, which has the gradient. If the
            discrete tensor is an index into categories, it is the one-hot code of the index. None if the
            gradient was lost.
        origins: The calls whose results the tensor depends on.
        is_index: True if the discrete tensor is an index into categories or entries.
        lost_in: The function that lost the gradient.
        version: The version of the discrete tensor, which an in-place change would increase.
    """

    # Any, since `carry` checks that the tensors are not None before it calls a carrier.
    tensor: Any
    origins: tuple[Origin, ...]
    is_index: bool = False
    lost_in: str = ""
    version: int = 0

    # True once eager code has made a path; until then calls need not search their arguments for one.
    exists: ClassVar[bool] = False

    def __reduce__(self) -> tuple:
        # Paths are neither copied nor saved with their tensor.
        return (OrderedDict, ())

    def lost(self, function: str) -> "GradientPath":
        """Return the path after a function that loses the gradient."""
        return GradientPath(None, self.origins, is_index=self.is_index, lost_in=self.lost_in or function)

    def note_lost(self, function: str) -> None:
        """Warn once that a function lost the gradient."""
        for origin in self.origins:
            state, where = origin.state, self.lost_in or function
            state.row.note_lost(state.prefix, origin.operation, where, self.is_index)

    def note_carried(self) -> None:
        """Count the operations whose results have become floating-point."""
        for origin in self.origins:
            if not origin.is_counted:
                origin.is_counted = True
                origin.state.note(origin.operation, Outcome.ACTED)


def is_discrete(value: Any) -> bool:
    """Return True for a bool or integer tensor."""
    return isinstance(value, Tensor) and not is_differentiable(value)


def floating_dtype(inputs: Sequence[Tensor]) -> torch.dtype:
    """Return the dtype of the first floating-point tensor, or torch's default."""
    return next((tensor.dtype for tensor in inputs if tensor.is_floating_point()), torch.get_default_dtype())


def start_path(
    bound_rule: BoundRule,
    operation: str,
    result: Tensor,
    inputs: Sequence[Tensor],
    classes: int | None = None,
) -> Tensor:
    """Attach a path with the gradient of a rule to the discrete result of an operation.

    Args:
        bound_rule: The rule.
        operation: The operation's name.
        result: The result.
        inputs: The operation's inputs.
        classes: The number of categories, if the result is an index into categories. The rule then gets its
            one-hot code as the output.

    Returns:
        The result.
    """
    values = result if classes is None else F.one_hot(result, classes)
    path = replace(bound_rule, values.to(floating_dtype(inputs)), inputs)
    origin = Origin(bound_rule.state, operation)
    return set_path(result, GradientPath(path, (origin,), is_index=classes is not None))


def set_path(tensor: Tensor, path: GradientPath) -> Tensor:
    """Attach a path to a discrete tensor, and return the tensor."""
    if not is_traced():
        GradientPath.exists = True
        path.version = tensor._version
    setattr(tensor, _NAME, path)
    return tensor


def path_of(value: Any) -> GradientPath | None:
    """Return the path of a discrete tensor, lost after an in-place change; None for other values."""
    # In compiled code, guards on floating-point tensors would slow down every call.
    if not isinstance(value, Tensor) or (is_traced() and not is_discrete(value)):
        return None
    path: GradientPath | None = getattr(value, _NAME, None) or None
    if path is None or is_traced():
        return path
    with without_modes():
        return path if path.version == value._version else path.lost("a change in place")


# Calls a function, by a rule if there is one: (function, arguments, keyword arguments).
Call = Callable[[Function, tuple, Mapping[str, Any]], Any]
# Calls a function and propagates the paths of its arguments; NotImplemented if it cannot.
Carrier = Callable[[Call, Function, tuple, Mapping[str, Any]], Any]
# Returns the path of the result of a function of one tensor, for the tensor's path, the tensor, the result
# and the function; None if the gradient is lost.
Formula = Callable[[GradientPath, Tensor, Tensor, Function], Any]

# Views and indexing.
MOVES = (
    *("view", "view_as", "reshape", "reshape_as", "flatten", "unflatten", "ravel", "squeeze", "unsqueeze"),
    *("permute", "transpose", "t", "swapaxes", "swapdims", "movedim", "moveaxis", "adjoint"),
    *("expand", "expand_as", "broadcast_to", "flip", "getitem", "select", "narrow", "index_select"),
    *("gather", "take_along_dim", "masked_select", "clone", "contiguous"),
)
TRANSPOSITIONS = tuple(getattr(Tensor, name).__get__ for name in ("T", "mT", "H", "mH"))
# Conversions of dtype or device.
CASTS = (
    *("float", "double", "half", "bfloat16", "to", "type", "type_as", "as_tensor", "asarray", "cpu", "cuda"),
    *("bool", "byte", "char", "short", "int", "long"),
)
NEGATIONS = ("logical_not", "bitwise_not", "invert")
# Functions that select entries of another tensor by index.
SELECTIONS = (
    *("getitem", "gather", "take", "take_along_dim", "index_select", "index_add", "index_copy", "index_fill"),
    *("index_put", "scatter", "scatter_add", "scatter_reduce", "embedding", "masked_select"),
)
# Functions that use only the shape, dtype or device of a tensor, or detach it.
WITHOUT_VALUES = ("detach", "zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like")


def paths_in(args: tuple, kwargs: Mapping[str, Any]) -> list[GradientPath]:
    """Return the gradient paths of a call's arguments, and of the tensors in its lists."""
    found = [path_of(tensor) for tensor in tensors_of_call(args, kwargs)]
    return [path for path in found if path is not None]


def carry(
    call: Call, function: Function, args: tuple, kwargs: Mapping[str, Any], paths: list[GradientPath]
) -> Any:
    """Call a function with discrete arguments that have paths, and propagate the paths to the result.

    Args:
        call: Calls a function, by a rule if there is one.
        function: The torch function.
        args: Its arguments.
        kwargs: Its keyword arguments.
        paths: The paths of the arguments.
    """
    if not torch.is_grad_enabled():
        return call(function, args, kwargs)
    carrier = _CARRIERS.get(function)
    is_complex = any(
        each.is_complex() if isinstance(each, Tensor) else isinstance(each, complex) for each in args
    )
    if carrier is not None and not is_complex and all(path.tensor is not None for path in paths):
        result = carrier(call, function, args, kwargs)
        if result is not NotImplemented:
            return result
    result = call(function, args, kwargs)
    if function not in _WITHOUT_VALUES:
        with without_modes():
            changed = args[:1] if function is Tensor.__setitem__ else ()
            _lose(paths, function, result, changed)
    return result


def _lose(paths: list[GradientPath], function: Function, result: Any, changed: tuple = ()) -> None:
    """Mark the paths of discrete results as lost, and warn of floating-point results without the gradient."""
    # The name of a function is not available in compiled code.
    name = "a function" if torch.compiler.is_compiling() else repr(name_of(function))
    # Entries selected by an index have a gradient of their own.
    selects = function in _SELECTIONS and all(path.is_index for path in paths)
    for tensor in tensors_in((result, changed)):
        # The compiler cannot attach a path to one of several results.
        if is_discrete(tensor) and (isinstance(result, Tensor) or not torch.compiler.is_compiling()):
            set_path(tensor, paths[0].lost(name))
        elif not selects:
            for path in paths:
                path.note_lost(name)


def _follow(result: Any, tensor: Any, paths: Iterable[GradientPath]) -> Any:
    """Attach a path to a discrete result, or the path's gradient to a floating-point result."""
    if is_discrete(result):
        origins = tuple(dict.fromkeys(origin for path in paths for origin in path.origins))
        # The code of an index has one more dimension.
        return set_path(result, GradientPath(tensor, origins, is_index=tensor.dim() > result.dim()))
    for path in paths:
        path.note_carried()
    return join(result, tensor)


def _of_one(formula: Formula) -> Carrier:
    """Return a carrier for functions of one discrete tensor; of others, a cast takes only the dtype."""

    def carrier(call: Call, function: Function, args: tuple, kwargs: Mapping[str, Any]) -> Any:
        path, is_cast = path_of(args[0]) if args else None, formula is _cast
        if path is None or (paths_in(args[1:], kwargs) and not is_cast):
            return function(*args, **kwargs) if is_cast else NotImplemented
        with without_modes():
            # Detached, since a backend that runs the graph in eager mode would propagate the path again.
            given = args[0].detach() if torch.compiler.is_compiling() else args[0]
            result = function(given, *args[1:], **kwargs)
            if not isinstance(result, Tensor):
                return result
            tensor = formula(path, args[0], result, lambda each: function(each, *args[1:], **kwargs))
            return NotImplemented if tensor is None else _follow(result, tensor, [path])

    return carrier


def _move(path: GradientPath, given: Tensor, result: Tensor, function: Function) -> Any:
    if not path.is_index:
        return function(path.tensor)
    # The path of an index has one more dimension, so the view does not apply to it directly.
    positions = function(torch.arange(given.numel(), device=given.device).view(given.shape))
    rows = path.tensor.reshape(given.numel(), -1).index_select(0, positions.reshape(-1))
    return rows.reshape(*positions.shape, rows.shape[-1])


def _cast(path: GradientPath, given: Tensor, result: Tensor, function: Function) -> Any:
    loses_values = result.dtype == torch.bool and given.dtype != torch.bool
    is_number = path.is_index and not is_discrete(result)
    return None if loses_values or is_number else path.tensor.to(result.device)


def _negate(path: GradientPath, given: Tensor, result: Tensor, function: Function) -> Any:
    return 1 - path.tensor if given.dtype == torch.bool else None


def _one_hot(path: GradientPath, given: Tensor, result: Tensor, function: Function) -> Any:
    classes = result.shape[-1]
    if path.is_index:
        return F.pad(path.tensor, (0, classes - path.tensor.shape[-1]))
    # The one-hot code of a bit is (1 − bit, bit).
    return torch.stack([1 - path.tensor, path.tensor], -1) if classes == 2 else None


def _shift(call: Call, function: Function, args: tuple, kwargs: Mapping[str, Any]) -> Any:
    """Propagate the path through ``x + 1``, ``x - 1`` and ``1 - x``; a sum of tensors loses it."""
    has_number = any(isinstance(operand, Number) for operand in args)
    return _multiply(call, function, args, kwargs) if has_number else NotImplemented


def _multiply(call: Call, function: Function, args: tuple, kwargs: Mapping[str, Any]) -> Any:
    """Propagate paths through a product: the operands of floating-point products get the gradients."""
    paths = [path_of(operand) for operand in args]
    has_index = any(path is not None and path.is_index for path in paths)
    if len(args) != 2 or kwargs or has_index or (function in _WRITES and is_discrete(args[0])):
        return NotImplemented
    with without_modes():
        pairs = list(zip(paths, args, strict=True))
        floating = [given for given in args if isinstance(given, float) or is_differentiable(given)]
        if not floating:
            values = [given if path is None else path.tensor for path, given in pairs]
            return _follow(function(*args), function(*values), [path for path in paths if path is not None])
        dtype = getattr(floating[0], "dtype", torch.get_default_dtype())
        operands = [
            given if path is None else _follow(given.detach().to(dtype), path.tensor, [path])
            for path, given in pairs
        ]
    return call(function, tuple(operands), kwargs)


def _choose(call: Call, function: Function, args: tuple, kwargs: Mapping[str, Any]) -> Any:
    """Propagate the path through ``where``: ``y = condition · chosen + (1 − condition) · otherwise``."""
    if len(args) != 3 or kwargs:
        return NotImplemented
    condition, chosen, otherwise = (args[1], args[0], args[2]) if function is Tensor.where else args
    path = path_of(condition)
    if path is None or paths_in((chosen, otherwise), {}):
        return NotImplemented
    # Detached, so that an outer block does not propagate the path again.
    result = call(function, tuple(each.detach() if each is condition else each for each in args), {})
    return _select(result, path, path.tensor, chosen, otherwise)


def _select(result: Tensor, path: GradientPath, share: Tensor, chosen: Any, otherwise: Any) -> Any:
    """Propagate a path through a selection, ``y = share · chosen + (1 − share) · otherwise``."""
    with without_modes():
        like = result if result.is_floating_point() else share
        one, other = (
            torch.as_tensor(each, dtype=like.dtype, device=like.device) for each in (chosen, otherwise)
        )
        slope = (one - other).detach().expand(result.shape)
        # Finite, so that a gradient of 0 stays 0 where a branch is infinite.
        passed = share.expand(result.shape) * slope.nan_to_num()
        values = join(result.detach().to(share.dtype), passed)
        return _follow(result, values, [path])


def _scatter(call: Call, function: Function, args: tuple, kwargs: Mapping[str, Any]) -> Any:
    """Propagate the path of an index that is scattered: ``y = code · value + (1 − code) · before``."""
    given = dict(zip(("input", "dim", "index", "value"), args, strict=False))
    given |= {"value" if key == "src" else key: value for key, value in kwargs.items()}
    target, dim, index, value = (given.pop(key, None) for key in ("input", "dim", "index", "value"))
    path = path_of(index)
    if given or path is None or not path.is_index or paths_in((target, value), {}):
        return NotImplemented
    if index.dim() and index.shape[dim] != 1:
        return NotImplemented
    with without_modes():
        code = path.tensor.transpose(dim % index.dim(), -1).squeeze(-1) if index.dim() else path.tensor
        before = target.detach().clone()
    if code.shape != target.shape:
        return NotImplemented
    # Detached, so that an outer block does not propagate the path again.
    result = call(function, (target, dim, index.detach(), value), {})
    with without_modes():
        changes = function in _WRITES and not is_discrete(result)
        found = _select(result.clone() if changes else result, path, code, value, before)
        return result.copy_(found) if changes else found


def _functions(names: Iterable[str]) -> list[Function]:
    return [function for name in names for function in resolve_operation(name).functions]


# Sets of functions, since their names are not available in compiled code.
_WITHOUT_VALUES = frozenset(_functions(WITHOUT_VALUES))
_SELECTIONS = frozenset(_functions(SELECTIONS))
_CARRIERS: dict[Function, Carrier] = {
    **dict.fromkeys((*_functions(MOVES), *TRANSPOSITIONS), _of_one(_move)),
    **dict.fromkeys(_functions(CASTS), _of_one(_cast)),
    **dict.fromkeys([each for each in _functions(NEGATIONS) if not writes(each)], _of_one(_negate)),
    **dict.fromkeys(_functions(["add", "sub", "rsub"]), _shift),
    **dict.fromkeys(_functions(["mul"]), _multiply),
    **dict.fromkeys(_functions(["where"]), _choose),
    **dict.fromkeys(_functions(["scatter"]), _scatter),
    F.one_hot: _of_one(_one_hot),
}
_WRITES = frozenset(filter(writes, _CARRIERS))
