"""Computes the gradients of active rows alone."""

from __future__ import annotations

import copy
import itertools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradpolicy.tensors.row_gradient import RowGradient


class ActiveRows:
    """The rows of a parameter that train, and the leaf of the graph that takes their gradient.

    Args:
        parameter: The parameter.
        index: The positions of the rows (int64, 1-D, ascending).
        dim: The dimension that they are rows of.
    """

    def __init__(self, parameter: Tensor, index: Tensor, dim: int) -> None:
        self.index, self.dim = index, dim
        shape = list(parameter.shape)
        shape[dim] = len(index)
        # The leaf's values are never read, so they take no memory.
        self.leaf = torch.zeros((), dtype=parameter.dtype, device=parameter.device).expand(shape)
        self.leaf.requires_grad_()
        self.leaf.register_post_accumulate_grad_hook(_Handover(weakref.ref(parameter), index, dim))

    def fits(self, parameter: Tensor) -> bool:
        """Return True if the parameter still is of the type and on the device that the leaf was made for."""
        leaf = self.leaf
        return parameter.requires_grad and (leaf.dtype, leaf.device) == (parameter.dtype, parameter.device)

    def select(self, gradient: Tensor) -> Tensor:
        """Return the rows of a whole gradient."""
        return gradient.index_select(self.dim, self.index)


class _Handover:
    """Hands the gradient of the leaf on to the parameter, as autograd would."""

    def __init__(self, parameter: weakref.ref[Tensor], index: Tensor, dim: int) -> None:
        self.parameter, self.index, self.dim = parameter, index, dim

    @torch.no_grad()
    def __call__(self, leaf: Tensor) -> None:
        parameter, values, leaf.grad = self.parameter(), leaf.grad, None
        if parameter is None or values is None:
            return
        gradient: Tensor = RowGradient(values, self.index, self.dim, parameter.shape)
        before, after = _hooks_of(parameter)
        for hook in before:
            changed = hook(gradient)
            gradient = gradient if changed is None else changed
        if parameter.grad is None:
            parameter.grad = gradient
        else:
            parameter.grad.add_(gradient)
        for hook in after:
            hook(parameter)


def takes_rows(hook: Callable[[Tensor], Tensor | None]) -> Callable[[Tensor], Tensor | None]:
    """Return a hook for a parameter that may get the gradient of active rows alone.

    Any other hook on a parameter gets the whole gradient, which is computed for it.
    """
    marked = partial(hook)
    marked.takes_rows = True  # type: ignore[attr-defined]
    return marked


def _hooks_of(parameter: Tensor) -> tuple[list[Any], list[Any]]:
    """Return the hooks that run before a gradient is accumulated, and those that run after."""
    both = parameter._backward_hooks, parameter._post_accumulate_grad_hooks
    before, after = (list((hooks or {}).values()) for hooks in both)
    return before, after


class RowParameter(nn.Parameter):
    """A parameter of which only some rows get a gradient.

    A plain parameter becomes one in place, by its class, and plain again. Where a function with gradients
    uses it, its product with the gradient of the output is computed for the active rows alone: for
    `linear`, convolutions, `embedding` and `addmm`. Any other function has a whole gradient, of which the
    rows are kept.
    """

    active_rows: Any = None

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function with the rows' leaf in the parameter's place in the graph."""
        kwargs = kwargs or {}
        plain = super().__torch_function__
        if torch.compiler.is_compiling() or not torch.is_grad_enabled() or not _is_differentiable(function):
            return plain(function, types, args, kwargs)
        used = [each for each in _parameters_in(args, kwargs) if each._takes_rows()]
        if not used:
            return plain(function, types, args, kwargs)
        call = _CALLS[function](*args, **kwargs) if function in _CALLS else None
        if call is not None and len(used) == 1 and call.weight is used[0]:
            with torch._C.DisableTorchFunctionSubclass():
                return _OfRows.apply(call.rows.leaf, call, call.inputs, call.bias)
        return plain(function, types, *_substituted(args, kwargs, used))

    def _takes_rows(self) -> bool:
        """Return True if its gradient is to be of rows."""
        hooks = itertools.chain(*_hooks_of(self))
        rows = self.active_rows
        return rows is not None and rows.fits(self) and all(hasattr(hook, "takes_rows") for hook in hooks)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """Return a plain parameter."""
        memo[id(self)] = copied = copy.deepcopy(self._plain(), memo)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as a plain parameter."""
        return self._plain().__reduce_ex__(protocol)

    def _plain(self) -> nn.Parameter:
        return nn.Parameter(self.detach(), self.requires_grad)


def set_rows(parameter: Tensor, index: Tensor, dim: int) -> None:
    """Compute the gradient of these rows alone from now on."""
    rows = getattr(parameter, "active_rows", None)
    if rows is None or rows.dim != dim or not torch.equal(rows.index, index):
        parameter.__class__ = RowParameter
        parameter.active_rows = ActiveRows(parameter, index, dim)  # type: ignore[attr-defined]


def set_whole(parameter: Tensor) -> None:
    """Compute the whole gradient again."""
    if isinstance(parameter, RowParameter):
        parameter.__dict__.pop("active_rows", None)
        parameter.__class__ = nn.Parameter  # type: ignore[assignment]


def has_row_gradient(parameter: Tensor) -> bool:
    """Return True if the gradient of some rows alone is computed."""
    return isinstance(parameter, RowParameter) and parameter._takes_rows()


def rows_of(parameter: Tensor) -> tuple[Tensor, int]:
    """Return the positions and the dimension of the rows whose gradient alone is computed."""
    rows: ActiveRows = parameter.active_rows  # type: ignore[attr-defined]
    return rows.index, rows.dim


# ---- which functions use a parameter


_ARITHMETIC = {
    f"__{prefix}{name}__"
    for prefix in ("", "r")
    for name in ("add", "sub", "mul", "truediv", "div", "pow", "matmul")
} | {"__getitem__", "__neg__", "__abs__"}
_VIEWS = {getattr(Tensor, name).__get__ for name in ("T", "mT", "H", "mH", "real", "imag")}
_OF_THE_LEAF = {"register_hook", "register_post_accumulate_grad_hook", "retain_grad", "backward", "detach"}


def _is_differentiable(function: Any) -> bool:
    """Return True if a function may give a result that a gradient flows back from."""
    name = getattr(function, "__name__", "")
    if name.startswith("__"):
        return name in _ARITHMETIC or function in _VIEWS
    return not name.endswith("_") and name not in _OF_THE_LEAF


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
    return _Whole.apply(parameter.active_rows.leaf, parameter.detach(), parameter.active_rows)


class _Whole(torch.autograd.Function):
    """Stands for a parameter in the graph, and keeps the active rows of its whole gradient."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, whole: Tensor, rows: ActiveRows) -> Tensor:
        ctx.rows = rows
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.rows.select(gradient), None, None


# ---- functions of which the gradient of rows costs less


class _OfRows(torch.autograd.Function):
    """A call in the graph that has the leaf of the active rows in the parameter's place."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, call: _Call, inputs: Tensor, bias: Tensor | None) -> Tensor:
        ctx.call = call
        ctx.save_for_backward(inputs)
        # A view would forbid functions in place; `data` is none.
        return call.run().data

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (inputs,), call = ctx.saved_tensors, ctx.call
        of_leaf, _, of_inputs, of_bias = ctx.needs_input_grad
        # A second derivative goes through the parameter too.
        weight = _whole(call.weight) if torch.is_grad_enabled() else call.weight.detach()
        return (
            call.row_gradient(gradient, inputs).to(weight.dtype) if of_leaf else None,
            None,
            call.input_gradient(gradient, inputs, weight.to(gradient.dtype)) if of_inputs else None,
            call.bias_gradient(gradient) if of_bias else None,
        )


@dataclass
class _Call:
    """A call of a function with a parameter of which some rows are active."""

    inputs: Tensor
    weight: Any
    bias: Any = None

    def run(self) -> Tensor:
        """Return the output."""
        raise RuntimeError("each function has its own")

    @property
    def rows(self) -> ActiveRows:
        """The active rows of the parameter."""
        return self.weight.active_rows


@dataclass
class _Linear(_Call):
    """``inputs @ weight.T + bias``."""

    def run(self) -> Tensor:
        return F.linear(self.inputs, self.weight.detach(), self.bias)

    def row_gradient(self, gradient: Tensor, inputs: Tensor) -> Tensor:
        return _product(_matrix(gradient), _matrix(inputs).to(gradient.dtype), self.rows)

    def input_gradient(self, gradient: Tensor, inputs: Tensor, weight: Tensor) -> Tensor:
        return (gradient @ weight).to(inputs.dtype)

    def bias_gradient(self, gradient: Tensor) -> Tensor:
        return _matrix(gradient).sum(0).to(self.bias.dtype)


class _AddMM(_Call):
    """``bias + inputs @ weight``."""

    def __init__(self, bias: Tensor, inputs: Tensor, weight: Any, **named: Any) -> None:
        super().__init__(inputs, None if named else weight, bias)

    def run(self) -> Tensor:
        return torch.addmm(self.bias, self.inputs, self.weight.detach())

    def row_gradient(self, gradient: Tensor, inputs: Tensor) -> Tensor:
        return _product(inputs.to(gradient.dtype), gradient, self.rows)

    def input_gradient(self, gradient: Tensor, inputs: Tensor, weight: Tensor) -> Tensor:
        return (gradient @ weight.t()).to(inputs.dtype)

    def bias_gradient(self, gradient: Tensor) -> Tensor:
        return gradient.sum_to_size(self.bias.shape).to(self.bias.dtype)


def _matrix(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


def _product(left: Tensor, right: Tensor, rows: ActiveRows) -> Tensor:
    """Return the active rows of ``left.T @ right``."""
    if rows.dim == 0:
        return left.index_select(1, rows.index).t() @ right
    return left.t() @ right.index_select(1, rows.index)


@dataclass
class _Embedding(_Call):
    """``weight[inputs]``."""

    bias: None = None
    padding: int | None = None

    def run(self) -> Tensor:
        return F.embedding(self.inputs, self.weight.detach())

    def row_gradient(self, gradient: Tensor, inputs: Tensor) -> Tensor:
        rows, tokens, values = self.rows, inputs.flatten(), _matrix(gradient)
        if rows.dim == 0:
            places = tokens.new_full((len(self.weight),), -1)
            places[rows.index] = torch.arange(len(rows.index), device=places.device, dtype=places.dtype)
            places = places[tokens]
        else:
            places, values = tokens, values.index_select(1, rows.index)
        counted = places >= 0
        if self.padding is not None:
            counted &= tokens != self.padding % len(self.weight)
        return values.new_zeros(rows.leaf.shape).index_add_(0, places[counted], values[counted])


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

    def run(self) -> Tensor:
        weight = self.weight.detach()
        return torch.ops.aten.convolution(
            self.inputs, weight, self.bias, *self.settings(), False, (0,) * (weight.dim() - 2), 1
        )

    def row_gradient(self, gradient: Tensor, inputs: Tensor) -> Tensor:
        if self.rows.dim == 0:
            gradient = gradient.index_select(1, self.rows.index)
        else:
            inputs = inputs.index_select(1, self.rows.index)
        weight = gradient.new_empty(self.rows.leaf.shape)
        return self._backward(gradient, inputs.to(gradient.dtype), weight, 1)

    def input_gradient(self, gradient: Tensor, inputs: Tensor, weight: Tensor) -> Tensor:
        return self._backward(gradient, inputs.to(gradient.dtype), weight, 0).to(inputs.dtype)

    def bias_gradient(self, gradient: Tensor) -> Tensor:
        return gradient.transpose(0, 1).flatten(1).sum(1).to(self.bias.dtype)

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
    torch.addmm: _AddMM,
    F.embedding: _embedding,
    F.conv1d: _convolution,
    F.conv2d: _convolution,
    F.conv3d: _convolution,
}
