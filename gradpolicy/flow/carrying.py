"""How the gradient path of a discrete tensor follows what is computed from the tensor.

Each table below names the operations of one kind. An operation in none of them cannot carry the gradient. If
its result is floating-point, a warning says so; if not, the warning comes when that becomes floating-point.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gradpolicy.flow.autograd_functions import run_function
from gradpolicy.flow.containers import tensors_in
from gradpolicy.flow.gradient_path import GradientPath, JoinPath, is_discrete, path_of, set_path
from gradpolicy.flow.operation_tables import Function
from gradpolicy.flow.operations import name_of, resolve_operation, spelling_of

# Makes a call by the rules that are on it: (function, arguments, keyword arguments).
Call = Callable[[Function, tuple, Mapping[str, Any]], Any]
# Makes a call and lets the paths of its arguments follow; NotImplemented if it cannot carry them.
Carrier = Callable[[Call, Function, tuple, Mapping[str, Any]], Any]

# Entries change their place.
MOVES = (
    *("view", "view_as", "reshape", "reshape_as", "flatten", "unflatten", "ravel", "squeeze", "unsqueeze"),
    *("permute", "transpose", "t", "swapaxes", "swapdims", "movedim", "moveaxis", "adjoint"),
    *("expand", "expand_as", "broadcast_to", "repeat", "tile", "repeat_interleave", "flip", "roll"),
    *("getitem", "select", "narrow", "index_select", "gather", "take_along_dim", "masked_select"),
    *("chunk", "split", "unbind", "tensor_split", "clone", "contiguous", "positive"),
)
TRANSPOSITIONS = tuple(getattr(Tensor, name).__get__ for name in ("T", "mT", "H", "mH"))
# Linear functions of the entries.
SUMS = ("sum", "mean", "cumsum", "neg", "tril", "triu", "diagonal", "pad")
# Another dtype, or another device.
CASTS = (
    *("float", "double", "half", "bfloat16", "to", "type", "type_as", "as_tensor", "asarray", "cpu", "cuda"),
    *("bool", "byte", "char", "short", "int", "long"),
)
NEGATIONS = ("logical_not", "bitwise_not", "invert")
_ADDITION: tuple[Callable, ...] = (lambda a, b: 1, lambda a, b: 1)
# With the derivatives in the first and in the second operand, which hold where the result is discrete.
OPERATORS: dict[tuple[str, ...], tuple[Callable, ...]] = {
    ("mul", "logical_and", "bitwise_and", "and"): (lambda a, b: b, lambda a, b: a),
    ("logical_or", "bitwise_or", "or"): (lambda a, b: 1 - b, lambda a, b: 1 - a),
    ("logical_xor", "bitwise_xor", "xor"): (lambda a, b: 1 - 2 * b, lambda a, b: 1 - 2 * a),
    ("add",): _ADDITION,
    ("sub",): (lambda a, b: 1, lambda a, b: -1),
    # After sub, of which a reflected call is a spelling too.
    ("rsub",): (lambda a, b: -1, lambda a, b: 1),
    # Its result is never discrete.
    ("div",): (),
}
JOINS = ("cat", "concat", "concatenate", "stack", "hstack", "vstack")
CHOICES = ("where", "masked_fill")
# Write one operand's values into floats in place; with the operand's position.
COPIES: dict[Function, int] = {Tensor.copy_: 1, Tensor.__setitem__: 2}

# These take an index as what it is: which entries of another tensor are meant.
SELECTIONS = (
    *("getitem", "gather", "take", "take_along_dim", "index_select", "index_add", "index_copy", "index_fill"),
    *("index_put", "scatter", "scatter_add", "scatter_reduce", "embedding", "masked_select"),
)
# These use only the shape, dtype or device of a tensor, or cut the graph on purpose.
WITHOUT_VALUES = ("detach", "zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like")


def paths_in(args: Sequence, kwargs: Mapping[str, Any]) -> list[GradientPath]:
    """The gradient paths of a call's arguments, and of the tensors in its lists."""
    found = []
    for value in (*args, *kwargs.values()) if kwargs else args:
        for tensor in value if isinstance(value, list | tuple) else (value,):
            path = path_of(tensor)
            if path is not None:
                found.append(path)
    return found


def carry(
    call: Call, function: Function, args: tuple, kwargs: Mapping[str, Any], paths: list[GradientPath]
) -> Any:
    """Makes a call with a discrete argument that has a path, and lets the path follow.

    Args:
        call: Makes a call by the rules that are on it.
        function: The torch function.
        args: Its arguments.
        kwargs: Its keyword arguments.
        paths: The paths of the arguments.
    """
    if not torch.is_grad_enabled():
        return call(function, args, kwargs)
    carrier = _CARRIERS.get(function)
    if carrier is not None and all(path.tensor is not None for path in paths):
        if kwargs:
            args, kwargs = _by_position(function, args, kwargs)
        writes_to_path = function in _WRITES and path_of(args[0]) is not None
        result = NotImplemented if writes_to_path else carrier(call, function, args, kwargs)
        if result is not NotImplemented:
            return result
    result = call(function, args, kwargs)
    if function not in _WITHOUT_VALUES:
        with torch._C.DisableTorchFunction():
            changed = args[:1] if function is Tensor.__setitem__ else ()
            _lose(paths, function, result, changed)
    return result


def _by_position(
    function: Function, args: tuple, kwargs: Mapping[str, Any]
) -> tuple[tuple, Mapping[str, Any]]:
    """A call with those of its operands by position that were given by name."""
    named = [name for name in _OPERANDS.get(function, ("input",)) if name in kwargs]
    others = {key: value for key, value in kwargs.items() if key not in named}
    return (*args, *[kwargs[name] for name in named]), others


def _lose(paths: list[GradientPath], function: Function, result: Any, changed: tuple = ()) -> None:
    """Says that what has become floating-point has no gradient from here, and marks what is discrete."""
    # The compiler does not know the names of functions.
    name = "a function" if torch.compiler.is_compiling() else repr(name_of(function))
    # What an index points at has its own gradient. A value that is written is one of numbers.
    selects = function in _SELECTIONS and all(path.is_index for path in paths)
    for tensor in tensors_in((result, changed)):
        if is_discrete(tensor):
            set_path(tensor, paths[0].lost(name))
        elif not selects:
            for path in paths:
                path.note_lost(name)


def _follow(result: Any, tensor: Any, paths: Iterable[GradientPath], slope: Tensor | None = None) -> Any:
    """Gives a result, or each of several, its path; joins them where the result is floating-point."""
    if isinstance(result, tuple | list):
        return type(result)(_follow(one, path, paths) for one, path in zip(result, tensor, strict=True))
    origins = tuple(dict.fromkeys(origin for path in paths for origin in path.origins))
    is_index = any(path.is_index for path in paths)
    if is_discrete(result):
        if slope is not None:
            tensor = tensor * slope
        return set_path(result, GradientPath(tensor, origins, is_index=is_index))
    for path in paths:
        path.note_carried()
    return run_function(JoinPath, result, tensor, slope)


def _move(call: Call, function: Function, args: tuple, kwargs: Mapping[str, Any]) -> Any:
    moved, *others = args or (None,)
    path = path_of(moved)
    if path is None or paths_in(others, kwargs):
        return NotImplemented
    with torch._C.DisableTorchFunction():
        result = function(*args, **kwargs)
        if torch.compiler.is_compiling() and not isinstance(result, Tensor):
            # The compiler cannot keep a path with one of several results.
            path.note_lost("a function with several results")
            return result
        if path.is_index:
            # An index's path has one more dimension, so that it is gathered entry by entry.
            places = torch.arange(moved.numel(), device=moved.device).view(moved.shape)
            rows = path.tensor.reshape(moved.numel(), -1)
            places = function(places, *others, **kwargs)
            tensor = rows[places] if isinstance(places, Tensor) else [rows[place] for place in places]
        else:
            tensor = function(path.tensor, *others, **kwargs)
        return _follow(result, tensor, [path])


def _sum(call: Call, function: Function, args: tuple, kwargs: Mapping[str, Any]) -> Any:
    path = path_of(args[0]) if args else None
    if path is None or path.is_index or paths_in(args[1:], kwargs):
        return NotImplemented
    with torch._C.DisableTorchFunction():
        result = function(*args, **kwargs)
        kwargs = {key: value for key, value in kwargs.items() if key != "dtype"}
        return _follow(result, function(path.tensor, *args[1:], **kwargs), [path])


def _cast(call: Call, function: Function, args: tuple, kwargs: Mapping[str, Any]) -> Any:
    path = path_of(args[0]) if args else None
    with torch._C.DisableTorchFunction():
        if path is not None and torch.compiler.is_compiling():
            # Without its path: a backend may run the graph in eager mode, which must not carry it once more.
            result = function(args[0].detach(), *args[1:], **kwargs)
        else:
            result = function(*args, **kwargs)
        if path is None or result is args[0] or not isinstance(result, Tensor):
            # Another argument only gave the dtype, nothing was to do, or the result is a Python number.
            return result
        loses_values = result.dtype == torch.bool and args[0].dtype != torch.bool
        if loses_values or (path.is_index and not is_discrete(result)):
            _lose([path], function, result)
            return result
        return _follow(result, path.tensor.to(result.device), [path])


def _negate(call: Call, function: Function, args: tuple, kwargs: Mapping[str, Any]) -> Any:
    path = path_of(args[0]) if args else None
    if path is None or args[0].dtype != torch.bool:
        return NotImplemented
    with torch._C.DisableTorchFunction():
        return _follow(function(*args, **kwargs), -path.tensor, [path])


def _operate(slopes: tuple[Callable, ...]) -> Carrier:
    """Carries the operators of two operands, given their derivatives."""

    def operate(call: Call, function: Function, args: tuple, kwargs: Mapping[str, Any]) -> Any:
        paths = [path_of(operand) for operand in args]
        if len(args) != 2 or any(path is not None and path.is_index for path in paths):
            return NotImplemented
        if kwargs and not (slopes and kwargs.keys() == {"alpha"}):
            return NotImplemented
        with torch._C.DisableTorchFunction():
            dtype = _dtype_of_operation(function, *args)
            if dtype.is_floating_point:
                operands = tuple(_in_floating_point(operand, dtype) for operand in args)
            elif function in _WRITES or dtype.is_complex or kwargs:
                return NotImplemented
            else:
                return _follow_operands(function(*args), slopes, args, paths)
        return call(function, operands, kwargs)

    return operate


def _follow_operands(result: Tensor, slopes: tuple[Callable, ...], operands: tuple, paths: list) -> Any:
    """Gives a discrete result of two operands its path, by the product rule."""
    if result.dtype == torch.bool:
        # A sum of bits is their or, and whether an integer is not 0 is a step.
        are_bits = all(getattr(operand, "dtype", torch.bool) == torch.bool for operand in operands)
        if slopes is _ADDITION or not are_bits:
            return NotImplemented
    given = [path for path in paths if path is not None]
    dtype = given[0].tensor.dtype
    values = [operand.to(dtype) if isinstance(operand, Tensor) else operand for operand in operands]
    tensor = sum(
        path.tensor * slope(*values) for path, slope in zip(paths, slopes, strict=True) if path is not None
    )
    return _follow(result, tensor.expand(result.shape), given)


def _copy(call: Call, function: Function, args: tuple, kwargs: Mapping[str, Any]) -> Any:
    """Carries what is written into floats in place: ``x.copy_(mask)``, ``x[…] = mask``."""
    place = COPIES[function]
    others = [*args[:place], *args[place + 1 :]]
    if len(args) <= place or not args[0].is_floating_point() or paths_in(others, kwargs):
        return NotImplemented
    with torch._C.DisableTorchFunction():
        value = _in_floating_point(args[place], args[0].dtype)
    return call(function, (*args[:place], value, *args[place + 1 :]), kwargs)


def _dtype_of_operation(function: Function, first: Any, second: Any) -> torch.dtype:
    if function in _WRITES:
        return first.dtype
    if torch.compiler.is_compiling():
        # It cannot trace result_type; and what is not used, it leaves out.
        return function(first, second).dtype
    dtype = torch.result_type(first, second)
    return torch.get_default_dtype() if function in _DIVISIONS and not dtype.is_floating_point else dtype


def _in_floating_point(operand: Any, dtype: torch.dtype) -> Any:
    """An operand's values with the gradient of its path, if it has one."""
    path = path_of(operand)
    if path is None:
        return operand
    path.note_carried()
    return run_function(JoinPath, operand.detach().to(dtype), path.tensor, None)


def _join(call: Call, function: Function, args: tuple, kwargs: Mapping[str, Any]) -> Any:
    if not args or not isinstance(args[0], list | tuple):
        return NotImplemented
    paths = paths_in(args[0], {})
    if any(path.is_index for path in paths):
        return NotImplemented
    dtype = paths[0].tensor.dtype
    with torch._C.DisableTorchFunction():
        parts = [_path_or_zeros(tensor, dtype) for tensor in args[0]]
        return _follow(function(*args, **kwargs), function(parts, *args[1:], **kwargs), paths)


def _path_or_zeros(tensor: Tensor, dtype: torch.dtype) -> Tensor | None:
    path = path_of(tensor)
    return torch.zeros_like(tensor, dtype=dtype) if path is None else path.tensor


def _choose(call: Call, function: Function, args: tuple, kwargs: Mapping[str, Any]) -> Any:
    """Carries ``where`` and ``masked_fill``: ``y = condition · chosen + (1 − condition) · otherwise``."""
    if len(args) != 3 or kwargs or function in _WRITES:
        return NotImplemented
    order = (1, 2, 0) if function in _FILLS else (1, 0, 2) if function is Tensor.where else (0, 1, 2)
    condition, chosen, otherwise = (args[place] for place in order)
    path = path_of(condition)
    if paths_in((chosen, otherwise), {}):
        with torch._C.DisableTorchFunction():
            # The compiler cannot trace result_type; and what is not used, it leaves out.
            compiled = torch.compiler.is_compiling()
            dtype = function(*args).dtype if compiled else torch.result_type(chosen, otherwise)
            if not dtype.is_floating_point:
                return NotImplemented
            args = tuple(
                value if place == order[0] else _in_floating_point(value, dtype)
                for place, value in enumerate(args)
            )
    if path is None:
        return call(function, args, {})
    # Detached, so that an outer block does not carry the gradient once more.
    without_path = tuple(value.detach() if place == order[0] else value for place, value in enumerate(args))
    result = call(function, without_path, {})
    with torch._C.DisableTorchFunction():
        if result.is_complex():
            return NotImplemented
        like = result if result.is_floating_point() else path.tensor
        slope = _detached(chosen, like) - _detached(otherwise, like)
        return _follow(result, path.tensor.expand(result.shape), [path], slope)


def _detached(value: Any, like: Tensor) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach().to(like.dtype)
    return torch.full((), value, dtype=like.dtype, device=like.device)


def _one_hot(call: Call, function: Function, args: tuple, kwargs: Mapping[str, Any]) -> Any:
    path = path_of(args[0]) if args else None
    if path is None:
        return NotImplemented
    with torch._C.DisableTorchFunction():
        result = function(*args, **kwargs)
        classes = result.shape[-1]
        if path.is_index:
            tensor = F.pad(path.tensor, (0, classes - path.tensor.shape[-1]))
        elif classes == 2:
            # Of a bit: (1 − bit, bit).
            tensor = torch.stack([-path.tensor, path.tensor], -1)
        else:
            _lose([path], function, result)
            return result
        return _follow(result, tensor, [GradientPath(None, path.origins)])


def _functions(names: Iterable[str]) -> list[Function]:
    return [function for name in names for function in resolve_operation(name).functions]


# Looked up by function, since the compiler cannot ask a function for its name.
_WITHOUT_VALUES = frozenset(_functions(WITHOUT_VALUES))
_SELECTIONS = frozenset(_functions(SELECTIONS))
_DIVISIONS = frozenset(_functions(["div"]))
_FILLS = frozenset(_functions(["masked_fill"]))
_CARRIERS: dict[Function, Carrier] = {
    **dict.fromkeys((*_functions(MOVES), *TRANSPOSITIONS), _move),
    **dict.fromkeys(_functions(SUMS), _sum),
    **dict.fromkeys(_functions(CASTS), _cast),
    **dict.fromkeys(_functions(NEGATIONS), _negate),
    **{
        function: carrier
        for names, slopes in OPERATORS.items()
        for carrier in [_operate(slopes)]
        for function in _functions(names)
    },
    **dict.fromkeys(_functions(JOINS), _join),
    **dict.fromkeys(_functions(CHOICES), _choose),
    **dict.fromkeys(COPIES, _copy),
    F.one_hot: _one_hot,
}
# The operands of a call that may be given by name, in order; of any other only the first, "input".
_OPERANDS: dict[Function, tuple[str, ...]] = {
    **{function: ("input", "other") for names in OPERATORS for function in _functions(names)},
    **dict.fromkeys(_functions(["where"]), ("condition", "input", "other")),
    **dict.fromkeys(_FILLS, ("input", "mask", "value")),
    **dict.fromkeys(_functions(JOINS), ("tensors",)),
}
_WRITES = frozenset(function for function in _CARRIERS if spelling_of(function).writes)
