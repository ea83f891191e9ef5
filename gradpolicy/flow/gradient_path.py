"""The path of a gradient back from a discrete tensor to its operation.

A bool or integer tensor can have no gradient. If a rule is on the operation that made it, a *gradient path*
is kept with the tensor: a floating-point tensor of the same shape that has the rule as its gradient, and
whose values nobody reads. :mod:`gradpolicy.flow.carrying` makes the later steps on the tensor and on its
path alike, and joins the two where the values become floating-point.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from gradpolicy.flow.autograd_functions import replace_gradient
from gradpolicy.flow.bound_rule import BoundRule
from gradpolicy.flow.rule_state import RuleState
from gradpolicy.flow.tracing import in_transform

# The quicker of two questions, asked at every call.
_is_traced = torch.compiler.is_dynamo_compiling
_NAME = "_gradpolicy_path"

# Whether any result has a path yet. Until then no call needs to look for one.
_any_path = [False]


@dataclass(eq=False)
class Origin:
    """One call of an operation whose discrete result has a path.

    Args:
        state: The rule on the operation.
        operation: Its name.
        is_counted: Whether the call is counted: once its result has become floating-point.
    """

    state: RuleState
    operation: str
    is_counted: bool = False


class GradientPath:
    """The way back from a discrete tensor.

    Args:
        tensor: In the discrete tensor's shape and floating-point, with the gradient; its values mean nothing.
            For an index into categories: one more dimension, as the index's one-hot code has. None if a
            function on the way could not carry the gradient.
        origins: The calls that it comes from.
        is_index: Whether the discrete tensor is an index into categories or entries.
        lost_in: The function that could not carry the gradient.
    """

    def __init__(
        self,
        tensor: Tensor | None,
        origins: tuple[Origin, ...],
        *,
        is_index: bool = False,
        lost_in: str = "",
    ) -> None:
        # Typed loosely: what carries a path asks once for the whole call whether it is lost.
        self.tensor: Any = tensor
        self.origins = origins
        self.is_index = is_index
        self.lost_in = lost_in
        self.version = 0

    def __reduce__(self) -> tuple:
        # A copy or a file of the discrete tensor has no path; nothing must hinder either.
        return (OrderedDict, ())

    def lost(self, function: str) -> "GradientPath":
        """Return the path after a function that cannot carry the gradient."""
        return GradientPath(None, self.origins, is_index=self.is_index, lost_in=self.lost_in or function)

    def note_lost(self, function: str) -> None:
        """Warn once that the gradient is lost, and in which function."""
        for origin in self.origins:
            origin.state.note_lost(origin.operation, self.lost_in or function, self.is_index)

    def note_carried(self) -> None:
        """Count the operations whose result has become floating-point."""
        for origin in self.origins:
            if not origin.is_counted:
                origin.is_counted = True
                origin.state.note("matched", origin.operation)


class JoinPath(Function):
    """Gives floating-point values that were computed from a discrete tensor the gradient of its path.

    ``grad_path = slope · grad`` with 0 · infinity = 0; the values pass their own gradient on as it is.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(values: Tensor, path: Tensor, slope: Tensor | None) -> Tensor:
        """Return the values."""
        return values.detach()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        """Keep the slope."""
        _, path, slope = inputs
        ctx.dtype, ctx.has_slope = path.dtype, slope is not None
        if slope is not None:
            ctx.save_for_backward(slope)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        """Give the path its gradient."""
        gradient = grad
        if ctx.has_slope:
            (slope,) = ctx.saved_tensors
            gradient = torch.where(grad == 0, torch.zeros_like(grad), grad * slope)
        return grad, gradient.to(ctx.dtype), None


def is_discrete(value: Any) -> bool:
    """Return True for a bool or integer tensor."""
    return isinstance(value, Tensor) and not (value.is_floating_point() or value.is_complex())


def has_paths() -> bool:
    """Return True if a call may have an argument with a path; always in compiled code, where that is free."""
    return _is_traced() or _any_path[0]


def start_path(
    bound_rule: BoundRule,
    operation: str,
    result: Tensor,
    inputs: Sequence[Tensor],
    module: str | None,
    *,
    classes: int | None = None,
) -> Tensor:
    """Give the discrete result of an operation a path whose gradient is the rule's.

    Args:
        bound_rule: The rule.
        operation: The operation's name.
        result: What it returned.
        inputs: Its inputs.
        module: The module in whose forward it ran, for messages.
        classes: If the result is an index into categories: how many there are. The rule gets one-hot codes.

    Returns:
        The result itself.
    """
    dtype = next((tensor.dtype for tensor in inputs if tensor.is_floating_point()), torch.get_default_dtype())
    if "output" not in bound_rule.reads and not in_transform():
        shape = result.shape if classes is None else (*result.shape, classes)
        values = torch.zeros((), dtype=dtype, device=result.device).expand(shape)
    elif classes is None:
        values = result.to(dtype)
    else:
        values = torch.nn.functional.one_hot(result, classes).to(dtype)
    path = replace_gradient(bound_rule, values, inputs, module)
    bound_rule.state.note("discrete", operation)
    origin = Origin(bound_rule.state, operation)
    return set_path(result, GradientPath(path, (origin,), is_index=classes is not None))


def set_path(tensor: Tensor, path: GradientPath) -> Tensor:
    """Keep a path with a discrete tensor, and return the tensor."""
    if not _is_traced():
        _any_path[0] = True
        path.version = tensor._version
    setattr(tensor, _NAME, path)
    return tensor


def path_of(value: Any) -> GradientPath | None:
    """Return the path of a discrete tensor, lost if that was changed in place; None for anything else."""
    if not isinstance(value, Tensor):
        return None
    if _is_traced():
        # A guard on every tensor would cost time at each call of the compiled code.
        return getattr(value, _NAME, None) or None if is_discrete(value) else None
    path: GradientPath | None = getattr(value, _NAME, None) or None
    if path is not None:
        with torch._C.DisableTorchFunction():
            if path.version != value._version:
                return path.lost("a change in place")
    return path
