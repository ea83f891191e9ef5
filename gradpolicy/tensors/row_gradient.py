"""A gradient that holds only some rows, columns or entries of a parameter."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

_aten = torch.ops.aten
# Entrywise functions that map 0 to 0, if each other argument is one number.
_ENTRYWISE = {
    _aten.mul.Tensor,
    _aten.mul.Scalar,
    _aten.mul_.Tensor,
    _aten.mul_.Scalar,
    _aten.div.Tensor,
    _aten.div.Scalar,
    _aten.div_.Tensor,
    _aten.div_.Scalar,
    _aten.neg.default,
    _aten.abs.default,
    _aten.zero_.default,
    _aten.clone.default,
    _aten.detach.default,
    _aten._to_copy.default,
    _aten.zeros_like.default,
}


class ActiveRows(NamedTuple):
    """Some rows, columns or entries of a tensor.

    Attributes:
        positions: Their indices (int64, 1-D, ascending).
        dim: The dimension that they index: 0 for rows, 1 for columns; None for entries of the flat tensor
            (int32 is allowed).
    """

    positions: Tensor
    dim: int | None

    @classmethod
    def of_mask(cls, mask: Tensor) -> ActiveRows | None:
        """Return the active rows or columns of a mask; None for a mask of another form."""
        dims = [dim for dim, size in enumerate(mask.shape) if size > 1]
        if len(dims) != 1 or dims[0] > 1 or mask.dim() < 2:
            return None
        return cls(mask.flatten().nonzero().flatten(), dims[0])

    @classmethod
    def of_slices(cls, mask: Tensor, dims: Iterable[int]) -> ActiveRows | None:
        """Return the active slices along one of some dimensions; None for a mask that cuts such slices."""
        for dim in dims:
            flags = mask[tuple(slice(None) if each == dim else slice(1) for each in range(mask.dim()))]
            if torch.equal(flags.expand_as(mask), mask):
                return cls(flags.flatten().nonzero().flatten(), dim)
        return None

    def is_same(self, other: ActiveRows) -> bool:
        """Return True if both are the same rows."""
        if self.positions is other.positions or self.dim != other.dim:
            return self.dim == other.dim
        return torch.equal(self.positions, other.positions)

    def select(self, whole: Tensor) -> Tensor:
        """Return these rows or columns of a tensor, or these entries (1-D)."""
        rows, dim = (whole.reshape(-1), 0) if self.dim is None else (whole, self.dim)
        return rows.index_select(dim, self.positions)

    def shape(self, whole: torch.Size) -> list[int]:
        """Return the shape of the result of `select`."""
        size = len(self.positions)
        return [size] if self.dim is None else [*whole[: self.dim], size, *whole[self.dim + 1 :]]


class RowGradient(Tensor):
    """A parameter's gradient that stores only some rows or entries; the others are 0.

    It is used as ``p.grad`` and has the parameter's shape, so that clipping, unscaling, norms and logging
    work with it. Scaling and norms are computed on the stored rows only. Other functions get a dense copy;
    values that they write to frozen rows are lost.

    Args:
        held: The gradient of the rows, in their order.
        positions, dim: The rows, see :class:`ActiveRows`.
        shape: The parameter's shape.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(3, 2))
        >>> weight.grad = RowGradient(torch.ones(1, 2), torch.tensor([2]), 0, weight.shape)
        >>> torch.nn.utils.clip_grad_norm_([weight], 1.0)
        tensor(1.4142)
        >>> weight.grad.dense()
        tensor([[0.0000, 0.0000],
                [0.0000, 0.0000],
                [0.7071, 0.7071]])
    """

    held: Tensor
    rows: ActiveRows

    @staticmethod
    def __new__(cls, held: Tensor, positions: Tensor, dim: int | None, shape: torch.Size) -> RowGradient:
        """Create a tensor of the parameter's shape that has no memory of its own."""
        strides = torch.empty(shape, device="meta").stride()
        made = torch.Tensor._make_wrapper_subclass(
            cls, shape, strides=strides, dtype=held.dtype, device=held.device
        )
        made.held, made.rows = held, ActiveRows(positions, dim)
        return made

    def dense(self) -> Tensor:
        """Return the gradient as a plain tensor, with zeros in the rows that are not held."""
        (positions, dim), whole = self.rows, self.held.new_zeros(self.shape)
        (whole.view(-1) if dim is None else whole).index_copy_(dim or 0, positions.long(), self.held)
        return whole

    def holds(self, rows: ActiveRows | None) -> bool:
        """Return True if the gradient holds exactly these rows."""
        return rows is not None and rows.is_same(self.rows)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"RowGradient({self.held.numel()} of {self.numel()} entries, shape={tuple(self.shape)})"

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run a function on the held rows if that gives the same result, else on a dense copy."""
        kwargs = kwargs or {}
        first, *others = args
        if function is _aten._amp_foreach_non_finite_check_and_unscale_.default:
            return function(tree_map_only(cls, lambda own: own.held, first), *others)
        if isinstance(first, cls):
            if function in _ENTRYWISE and all(_is_number(each) for each in others):
                return first._with(function(first.held, *others, **kwargs))
            if function is _aten.linalg_vector_norm.default and _is_plain_norm(others, kwargs):
                return function(first.held, *others, **kwargs)
            if function is _aten.add_.Tensor:
                # Autograd may add a whole gradient, of which frozen rows are not needed.
                first.held.add_(first._rows_of(others[0]), **kwargs)
                return first
        return cls._run_dense(function, args, kwargs)

    @classmethod
    def _run_dense(cls, function: Any, args: Any, kwargs: Any) -> Any:
        dense: dict[int, Tensor] = {}

        def of(own: RowGradient) -> Tensor:
            return dense.setdefault(id(own), own.dense())

        result = function(*tree_map_only(cls, of, args), **tree_map_only(cls, of, kwargs))
        if function._schema.is_mutable:
            tree_map_only(cls, lambda own: own.held.copy_(own._rows_of(dense[id(own)])), (args, kwargs))
            written = {id(each): own for own in _gradients_in((args, kwargs)) for each in [dense[id(own)]]}
            return tree_map_only(Tensor, lambda each: written.get(id(each), each), result)
        return result

    def _with(self, values: Tensor) -> RowGradient:
        return self if values is self.held else RowGradient(values, *self.rows, self.shape)

    def _rows_of(self, other: Tensor) -> Tensor:
        if isinstance(other, RowGradient):
            if other.holds(self.rows):
                return other.held
            other = other.dense()
        return self.rows.select(other.expand(self.shape))


def whole_gradient(gradient: Tensor) -> Tensor:
    """Return a gradient as a plain tensor of the parameter's shape."""
    return gradient.dense() if isinstance(gradient, RowGradient) else gradient


def _gradients_in(tree: Any) -> list[RowGradient]:
    found: list[RowGradient] = []
    tree_map_only(RowGradient, found.append, tree)
    return found


def _is_number(value: Any) -> bool:
    return not isinstance(value, Tensor) or (value.numel() == 1 and value.dim() == 0)


def _is_plain_norm(arguments: list[Any], named: dict[str, Any]) -> bool:
    """Return True if the norm is over all entries and zeros do not change it."""
    order = arguments[0] if arguments else named.get("ord", 2)
    return order > 0 and len(arguments) < 2 and named.get("dim") is None and not named.get("keepdim")
