"""Gradients of active rows only."""

from __future__ import annotations

import copy
import itertools
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gradpolicy.tensors.row_gradient import ActiveRows, RowGradient
from gradpolicy.tensors.sharding import is_sharded


class RowLeaf(NamedTuple):
    """The active rows of a parameter, and the leaf of the graph that gets their gradient."""

    rows: ActiveRows
    tensor: Tensor

    @classmethod
    def of(cls, parameter: Tensor, rows: ActiveRows) -> RowLeaf:
        """Return a leaf that passes its gradient to a parameter."""
        # The leaf's values are never read, so it is an expanded scalar.
        tensor = torch.zeros((), dtype=parameter.dtype, device=parameter.device)
        tensor = tensor.expand(rows.shape(parameter.shape)).requires_grad_()
        tensor.register_post_accumulate_grad_hook(_Handover(weakref.ref(parameter), rows))
        return cls(rows, tensor)

    def fits(self, parameter: Tensor) -> bool:
        """Return True if the parameter has the dtype and device of the leaf."""
        leaf = self.tensor
        return parameter.requires_grad and (leaf.dtype, leaf.device) == (parameter.dtype, parameter.device)

    def part(self, dim: int, start: int, size: int) -> RowLeaf:
        """Return the rows and the leaf of a part of the parameter."""
        positions, dim_of_rows = self.rows
        if dim == dim_of_rows:
            bounds = positions.new_tensor([start, start + size])
            start, stop = torch.searchsorted(positions, bounds).tolist()
            positions, size = positions[start:stop] - bounds[0], stop - start
        return RowLeaf(ActiveRows(positions, dim_of_rows), self.tensor.narrow(dim, start, size))


class _Handover:
    """Accumulates the gradient of the leaf in the parameter, with its hooks, as autograd would."""

    def __init__(self, parameter: weakref.ref[Tensor], rows: ActiveRows) -> None:
        self.parameter, self.rows = parameter, rows

    @torch.no_grad()
    def __call__(self, leaf: Tensor) -> None:
        parameter, values, leaf.grad = self.parameter(), leaf.grad, None
        if parameter is None or values is None:
            return
        gradient: Tensor = RowGradient(values, *self.rows, parameter.shape)
        before, after = _hooks_of(parameter)
        for hook in before:
            changed = hook(gradient)
            gradient = gradient if changed is None else changed
        former = parameter.grad
        if former is None:
            parameter.grad = gradient
        elif isinstance(former, RowGradient) and not former.holds(self.rows):
            # It is of an earlier update, and was not set to None.
            parameter.grad = gradient.add_(former)
        else:
            former.add_(gradient)
        for hook in after:
            hook(parameter)


def takes_rows(hook: Callable[[Tensor], Tensor | None]) -> Callable[[Tensor], Tensor | None]:
    """Mark a hook that accepts the gradient of active rows only.

    If a parameter has any other hook, its whole gradient is computed.
    """
    marked = partial(hook)
    marked.takes_rows = True  # type: ignore[attr-defined]
    return marked


def _hooks_of(parameter: Tensor) -> tuple[list[Any], list[Any]]:
    """Return the hooks before and after the accumulation of gradients."""
    both = parameter._backward_hooks, parameter._post_accumulate_grad_hooks
    before, after = (list((hooks or {}).values()) for hooks in both)
    return before, after


class RowParameter(nn.Parameter):
    """A parameter of which only some rows get a gradient.

    The class of a plain parameter is changed to this one in place, and back. In the backward pass of
    ``linear``, convolutions, ``embedding``, ``addmm`` and the projections of attention only the gradient of
    the active rows is computed. For other functions, and for single entries instead of rows, the whole
    gradient is computed and the rows are selected.
    """

    row_leaf: Any = None

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function with the leaf of the rows in place of the parameter in the graph."""
        kwargs = kwargs or {}
        plain = super().__torch_function__
        if torch.compiler.is_compiling() or not torch.is_grad_enabled() or not _is_differentiable(function):
            return plain(function, types, args, kwargs)
        used = [each for each in _parameters_in(args, kwargs) if each._takes_rows()]
        if not used:
            return plain(function, types, args, kwargs)
        if any(each.row_leaf.rows.dim is not None for each in used):
            if function is F.multi_head_attention_forward:
                return _seen_inside(function)(*args, **kwargs)
            parts = _parts(function, *args, **kwargs) if function in _SPLITS else None
            if parts is not None:
                return parts
            call = _CALLS[function](*args, **kwargs) if function in _CALLS else None
            if call is not None and len(used) == 1 and call.weight is used[0]:
                with torch._C.DisableTorchFunctionSubclass():
                    return _OfRows.apply(call.weight.row_leaf.tensor, call, call.inputs, call.bias)
        return plain(function, types, *_substituted(args, kwargs, used))

    def _takes_rows(self) -> bool:
        """Return True if only the gradient of rows is computed."""
        hooks, leaf = itertools.chain(*_hooks_of(self)), self.row_leaf
        return leaf is not None and leaf.fits(self) and all(hasattr(hook, "takes_rows") for hook in hooks)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """Return a plain parameter."""
        memo[id(self)] = copied = copy.deepcopy(self._plain(), memo)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as a plain parameter."""
        return self._plain().__reduce_ex__(protocol)

    def _plain(self) -> nn.Parameter:
        return nn.Parameter(self.detach(), self.requires_grad)


def set_rows(parameter: Tensor, rows: ActiveRows) -> None:
    """Compute only the gradient of these rows."""
    leaf = getattr(parameter, "row_leaf", None)
    if is_sharded(parameter):
        parameter.active_rows = rows  # type: ignore[attr-defined]
    elif leaf is None or not leaf.rows.is_same(rows):
        parameter.__class__ = RowParameter
        parameter.row_leaf = RowLeaf.of(parameter, rows)  # type: ignore[attr-defined]


def set_whole(parameter: Tensor) -> None:
    """Compute the whole gradient."""
    release_rows(parameter)
    if isinstance(parameter.grad, RowGradient):
        # One that is not set to None would lose the other rows of the gradient that is added to it.
        parameter.grad = parameter.grad.dense()


def release_rows(parameter: Tensor) -> None:
    """Make a parameter a plain one again; its gradient stays as small as it is."""
    parameter.__dict__.pop("active_rows", None)
    unsharded = parameter.__dict__.pop("unsharded", None)
    if unsharded is not None:
        release_rows(unsharded)
    if isinstance(parameter, RowParameter):
        parameter.__dict__.pop("row_leaf", None)
        parameter.__class__ = nn.Parameter  # type: ignore[assignment]


def has_row_gradient(parameter: Tensor) -> bool:
    """Return True if only the gradient of some rows is computed."""
    by_class = isinstance(parameter, RowParameter) and parameter._takes_rows()
    return by_class or hasattr(parameter, "active_rows")


def rows_of(parameter: Tensor) -> ActiveRows:
    """Return the rows whose gradient is computed."""
    return parameter.row_leaf.rows  # type: ignore[attr-defined]


def follow_shards(model: nn.Module) -> list[RemovableHandle]:
    """Compute only the gradients of active rows also under FSDP2, where parameters are sharded.

    While a module runs, FSDP2 replaces its parameters by unsharded ones, the same tensors each time. Their
    gradients are reduced and stored as whole gradients.

    Returns:
        The handles of the hooks.
    """
    handles = []
    for module in model.modules():
        sharded = {name: p for name, p in module.named_parameters(recurse=False) if is_sharded(p)}
        if sharded:
            handles.append(module.register_forward_pre_hook(partial(_follow_shards, sharded)))
    return handles


def _follow_shards(sharded: Mapping[str, Tensor], module: nn.Module, _: Any) -> None:
    if torch.compiler.is_compiling():
        return
    for name, parameter in sharded.items():
        whole, rows = module._parameters[name], getattr(parameter, "active_rows", None)
        if rows is not None and whole is not None and not is_sharded(whole):
            parameter.unsharded = whole  # type: ignore[attr-defined]
            set_rows(whole, rows)


# ---- functions that use a parameter


_ARITHMETIC = {
    f"__{prefix}{name}__"
    for prefix in ("", "r")
    for name in ("add", "sub", "mul", "truediv", "div", "pow", "matmul")
} | {"__getitem__", "__neg__", "__abs__"}
_VIEWS = {getattr(Tensor, name).__get__ for name in ("T", "mT", "H", "mH", "real", "imag")}
_OF_THE_LEAF = {"register_hook", "register_post_accumulate_grad_hook", "retain_grad", "backward", "detach"}
_QUESTIONS = {
    "dim",
    "size",
    "stride",
    "numel",
    "element_size",
    "data_ptr",
    "untyped_storage",
    "storage_offset",
}


def _is_differentiable(function: Any) -> bool:
    """Return True if the result of a function may have a gradient."""
    name = getattr(function, "__name__", "")
    if name.startswith("__"):
        return name in _ARITHMETIC or function in _VIEWS
    return not (name.endswith("_") or name.startswith(("is_", "_is_")) or name in _OF_THE_LEAF | _QUESTIONS)


def _parameters_in(args: Any, kwargs: Any) -> list[RowParameter]:
    found: dict[int, RowParameter] = {}
    for each in (*args, *kwargs.values()):
        for one in each if isinstance(each, (list, tuple)) else (each,):
            if isinstance(one, RowParameter):
                found[id(one)] = one
    return list(found.values())


def _substituted(args: Any, kwargs: Any, used: list[RowParameter]) -> tuple[Any, Any]:
    instead = {id(each): _whole(each) for each in used}

    def of(value: Any) -> Any:
        if isinstance(value, (list, tuple)) and any(isinstance(one, RowParameter) for one in value):
            return type(value)(map(of, value))
        return instead.get(id(value), value)

    return tuple(map(of, args)), {name: of(value) for name, value in kwargs.items()}


def _whole(parameter: RowParameter) -> Tensor:
    return _Whole.apply(parameter.row_leaf.tensor, parameter.detach(), parameter.row_leaf.rows)


class _Whole(torch.autograd.Function):
    """Replaces a parameter in the graph, and selects the active rows of its whole gradient."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, whole: Tensor, rows: ActiveRows) -> Tensor:
        ctx.rows = rows
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.rows.select(gradient), None, None


# ---- functions that use a parameter in other functions


_SPLITS = {torch.chunk, torch.split, Tensor.chunk, Tensor.split}


def _parts(function: Any, parameter: Any, sizes: Any, dim: int = 0) -> tuple[RowParameter, ...] | None:
    """Return consecutive parts of a parameter, each with its active rows."""
    if not isinstance(parameter, RowParameter):
        return None
    leaf, start, parts = parameter.row_leaf, 0, []
    for piece in function(parameter.detach(), sizes, dim):
        parts.append(torch.Tensor._make_subclass(RowParameter, piece, True))
        parts[-1].row_leaf = leaf.part(dim % parameter.dim(), start, piece.shape[dim])
        start += piece.shape[dim]
    return tuple(parts)


def _seen_inside(function: Any) -> Any:
    """Return a Python function of torch that dispatches the functions that it calls, not itself.

    The original calls ``__torch_function__`` of the parameter's class for the whole function.
    """
    own = {**function.__globals__, "has_torch_function": lambda _: False}
    made = FunctionType(function.__code__, own, function.__name__, function.__defaults__)
    made.__kwdefaults__ = function.__kwdefaults__
    return made


# ---- functions with a cheaper gradient of rows


class _OfRows(torch.autograd.Function):
    """A call in the graph with the leaf of the active rows in place of the parameter."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, call: _Call, inputs: Tensor, bias: Tensor | None) -> Tensor:
        ctx.call = call
        ctx.save_for_backward(inputs)
        # A view would forbid in-place functions; `data` is not a view.
        return call.run(call.weight.detach()).data

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (inputs,), call = ctx.saved_tensors, ctx.call
        of_leaf, _, of_inputs, of_bias = ctx.needs_input_grad
        # The second derivative depends on the parameter too.
        weight = _whole(call.weight) if torch.is_grad_enabled() else call.weight.detach()
        dtype, own = gradient.dtype, inputs.to(gradient.dtype) if inputs.is_floating_point() else inputs
        rows = call.row_gradient(gradient, own, call.weight.row_leaf).to(weight.dtype) if of_leaf else None
        if of_inputs:
            own = call.input_gradient(gradient, own, weight.to(dtype)).to(inputs.dtype)
        bias = call.bias_gradient(gradient).to(call.bias.dtype) if of_bias else None
        return rows, None, own if of_inputs else None, bias


@dataclass
class _Call(ABC):
    """A call of a function with a parameter with active rows."""

    inputs: Tensor
    weight: Any
    bias: Any = None

    @abstractmethod
    def run(self, weight: Tensor) -> Tensor:
        """Return the output."""

    @abstractmethod
    def row_gradient(self, gradient: Tensor, inputs: Tensor, leaf: RowLeaf) -> Tensor:
        """Return the gradient of the active rows for a gradient of the output."""

    # An embedding has neither of these: its inputs are integers, and it has no bias.

    def input_gradient(self, gradient: Tensor, inputs: Tensor, weight: Tensor) -> Tensor:
        """Return the gradient of the inputs."""
        raise NotImplementedError

    def bias_gradient(self, gradient: Tensor) -> Tensor:
        """Return the gradient of the bias."""
        raise NotImplementedError


@dataclass
class _Linear(_Call):
    """``inputs @ weight.T + bias``, or ``inputs @ weight + bias`` if transposed."""

    transposed: bool = False

    def run(self, weight: Tensor) -> Tensor:
        if self.transposed:
            return torch.addmm(self.bias, self.inputs, weight)
        return F.linear(self.inputs, weight, self.bias)

    def row_gradient(self, gradient: Tensor, inputs: Tensor, leaf: RowLeaf) -> Tensor:
        left, right = _matrix(gradient), _matrix(inputs)
        left, right = (right, left) if self.transposed else (left, right)
        positions, dim = leaf.rows
        if dim == 0:
            return left.index_select(1, positions).t() @ right
        return left.t() @ right.index_select(1, positions)

    def input_gradient(self, gradient: Tensor, inputs: Tensor, weight: Tensor) -> Tensor:
        return gradient @ (weight.t() if self.transposed else weight)

    def bias_gradient(self, gradient: Tensor) -> Tensor:
        return gradient.sum_to_size(self.bias.shape)


def _addmm(bias: Tensor, inputs: Tensor, weight: Any, **scales: Any) -> _Linear | None:
    return None if scales else _Linear(inputs, weight, bias, transposed=True)


def _matrix(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


@dataclass
class _Embedding(_Call):
    """``weight[inputs]``."""

    bias: None = None
    padding: int | None = None

    def run(self, weight: Tensor) -> Tensor:
        return F.embedding(self.inputs, weight)

    def row_gradient(self, gradient: Tensor, inputs: Tensor, leaf: RowLeaf) -> Tensor:
        (positions, dim), tokens, values = leaf.rows, inputs.flatten(), _matrix(gradient)
        if dim == 0:
            places = tokens.new_full((len(self.weight),), -1)
            places[positions] = torch.arange(len(positions), device=places.device, dtype=places.dtype)
            places = places[tokens]
        else:
            places, values = tokens, values.index_select(1, positions)
        counted = places >= 0
        if self.padding is not None:
            counted &= tokens != self.padding % len(self.weight)
        return values.new_zeros(leaf.tensor.shape).index_add_(0, places[counted], values[counted])


def _embedding(
    input: Tensor,
    weight: Any,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> _Embedding | None:
    changes = max_norm is not None or scale_grad_by_freq or sparse
    return None if changes else _Embedding(input, weight, padding=padding_idx)


@dataclass
class _Convolution(_Call):
    """A convolution without groups."""

    stride: Any = 1
    padding: Any = 0
    dilation: Any = 1

    def settings(self) -> list[Any]:
        dims = self.weight.dim() - 2
        return [
            (value,) * dims if isinstance(value, int) else tuple(value)
            for value in (self.stride, self.padding, self.dilation)
        ]

    def run(self, weight: Tensor) -> Tensor:
        return torch.ops.aten.convolution(
            self.inputs, weight, self.bias, *self.settings(), False, (0,) * (weight.dim() - 2), 1
        )

    def row_gradient(self, gradient: Tensor, inputs: Tensor, leaf: RowLeaf) -> Tensor:
        positions, dim = leaf.rows
        if dim == 0:
            gradient = gradient.index_select(1, positions)
        else:
            inputs = inputs.index_select(1, positions)
        return self._backward(gradient, inputs, gradient.new_empty(leaf.tensor.shape), 1)

    def input_gradient(self, gradient: Tensor, inputs: Tensor, weight: Tensor) -> Tensor:
        return self._backward(gradient, inputs, weight, 0)

    def bias_gradient(self, gradient: Tensor) -> Tensor:
        return gradient.transpose(0, 1).flatten(1).sum(1)

    def _backward(self, gradient: Tensor, inputs: Tensor, weight: Tensor, which: int) -> Tensor:
        mask = [which == 0, which == 1, False]
        zeros = (0,) * (weight.dim() - 2)
        return torch.ops.aten.convolution_backward(
            gradient, inputs, weight, None, *self.settings(), False, zeros, 1, mask
        )[which]


def _convolution(
    input: Tensor,
    weight: Any,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> _Convolution | None:
    plain = groups == 1 and not isinstance(padding, str) and input.dim() == weight.dim()
    return _Convolution(input, weight, bias, stride, padding, dilation) if plain else None


_CALLS: dict[Any, Any] = {
    F.linear: _Linear,
    torch.addmm: _addmm,
    F.embedding: _embedding,
    F.conv1d: _convolution,
    F.conv2d: _convolution,
    F.conv3d: _convolution,
}
