"""``apply``: any function with a rule as its backward."""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from numbers import Number
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradpolicy.errors import PolicyError, shown, warn_user
from gradpolicy.flow.arguments import arguments_of
from gradpolicy.flow.bound_rule import BoundRule, RuleState
from gradpolicy.flow.carrying import floating_dtype, is_discrete
from gradpolicy.flow.containers import map_tensors, rebuilt_sequence, tensors_in
from gradpolicy.flow.edges import replace
from gradpolicy.flow.operations import as_rule, is_operation, name_of
from gradpolicy.flow.policy_report import ReportRow
from gradpolicy.flow.tracing import in_transform, is_compiling, runs_while_tracing
from gradpolicy.rules.registry import Rule, RuleFunction


def apply(
    rule: str | Rule | RuleFunction,
    forward: Callable[..., Any],
    *args: Any,
    numpy: bool = False,
    **kwargs: Any,
) -> Any:
    """Run any forward once, with a rule as its backward.

    The forward gets tensors without a graph, so it may call ``.numpy()`` on them. Those that need a gradient
    are copies: what it writes to them does not change the arguments. Arrays and numbers that it returns are
    copied to tensors. A single integer or boolean result is converted to the dtype of the first
    floating-point input, since otherwise it could have no gradient. In a tuple such results stay as they are.
    Tensors that the forward uses and is not given, such as the parameters of a module, get no gradient; in
    eager mode a warning names them.

    Args:
        rule: A rule's name, a rule, a function ``(grad, inputs, output)``, or an operation whose derivative
            is used. Its inputs are the tensors among the arguments, in order, including tensors in lists,
            tuples and dicts. If the forward returns a tuple of several tensors, ``output`` is a tuple of all
            of them, and ``grad`` a tuple of the gradients of the floating-point ones, if there are several.
        forward: The function.
        *args: Its arguments, tensors or not.
        numpy: True if the forward takes NumPy arrays, copies of the tensors. Tensors in bfloat16 become
            arrays in float32.
        **kwargs: Its keyword arguments.

    Returns:
        The result of the forward, as tensors.

    Raises:
        PolicyError: If the result cannot be converted to tensors, or the forward writes to a leaf that needs
            a gradient; in the backward pass, if the rule returns the wrong number, shape or type of
            gradients.

    Example:
        >>> x = torch.tensor([0.2, 1.7], requires_grad=True)
        >>> y = apply("identity", np.floor, x)
        >>> y.sum().backward()
        >>> y.detach(), x.grad
        (tensor([0., 1.]), tensor([1., 1.]))
    """
    found = replacing_rule("apply", rule, forward)
    state = RuleState(forward_name(forward), found)
    bound_rule = BoundRule(state, f"forward {state.name!r}")
    if not is_compiling():
        ReportRow.uses += 1
    inputs = tensors_in((args, kwargs))
    given_args, given_kwargs = map_tensors(Tensor.detach if numpy else _without_graph, (args, kwargs))
    # With gradients on, the results show if the forward uses tensors that need one and are no arguments.
    watches = torch.is_grad_enabled() and not in_transform()
    with torch.set_grad_enabled(watches):
        values = run_forward(forward, given_args, given_kwargs, numpy)
    pairs = zip(inputs, tensors_in((given_args, given_kwargs)), strict=True) if watches and not numpy else ()
    if any(tensor.requires_grad and tensor.is_leaf and given._version for tensor, given in pairs):
        raise PolicyError(
            f"apply: forward {state.name!r} writes in place to a leaf that needs a gradient; write to a clone"
        )
    if watches and any(tensor.requires_grad for tensor in tensors_in(values)):
        warn_user(
            f"apply: forward {state.name!r} uses a tensor that needs a gradient and is not among its "
            "arguments: it gets none; pass it as an argument, or detach it if none is meant"
        )
    values = map_tensors(torch.Tensor.detach, values)
    if is_discrete(values):
        values = values.to(floating_dtype(inputs))
    if state.rule.takes_call:
        name = call_name(forward)
        arguments = arguments_of(forward, name, *map_tensors(Tensor.detach, (args, kwargs)))
        bound_rule = bound_rule.for_call(name, arguments)
    return replace(bound_rule, values, inputs, with_discrete=True)


def replacing_rule(caller: str, rule: str | Rule | RuleFunction, forward: object) -> Rule:
    """Return a rule for a forward, which has no gradient of its own.

    Raises:
        PolicyError: If there is no such rule, it modifies an operation's own gradients, or the forward is no
            function.
    """
    if not callable(forward):
        raise PolicyError(f"{caller}: the forward must be a function, got {shown(forward)}")
    found = as_rule(rule)
    if found.own:
        raise PolicyError(
            f"{caller}: rule {found.name!r} changes an operation's own gradients (own=True), and a forward "
            "has none; give a rule (grad, inputs, output) that makes the gradient"
        )
    # A forward has no gradient that a filter could change: the rule's function makes it.
    return dataclasses.replace(found, gradient_filter=None)


def run_forward(forward: Callable[..., Any], args: tuple, kwargs: Mapping[str, Any], numpy: bool) -> Any:
    """Run a forward once, with tensors or with arrays; see :func:`apply`.

    Raises:
        PolicyError: If the result cannot be converted to tensors, or ``numpy`` is True under ``torch.func``
            or ``torch.compile``.
    """
    name = forward_name(forward)
    if torch.compiler.is_compiling() and not numpy:
        return _as_tensors(forward(*args, **kwargs), name, None)
    device = next((tensor.device for tensor in tensors_in((args, kwargs))), None)
    if numpy and in_transform():
        raise PolicyError(
            f"forward {shown(name)} is NumPy code, which has no arrays to work on under torch.func (grad, "
            "vmap) and torch.compile; call gp.apply outside of them, or write it for torch"
        )
    if numpy:
        to_array: Any = _as_array
        args, kwargs = map_tensors(to_array, (args, kwargs))
    try:
        values = forward(*args, **kwargs)
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        if not numpy:
            error.add_note(f"gradpolicy: the forward {shown(name)} got tensors; NumPy code needs numpy=True")
        raise
    return _as_tensors(values, name, device)


@runs_while_tracing
def call_name(forward: Callable[..., Any]) -> str:
    """Return the name of a forward's operation, or the forward's own name."""
    return name_of(forward) if is_operation(forward) else forward_name(forward)


def forward_name(forward: Callable[..., Any]) -> str:
    """Return the name of a forward, for messages."""
    return getattr(forward, "__name__", type(forward).__name__)


def _without_graph(tensor: Tensor) -> Tensor:
    """Return a tensor without its graph, a copy if it needs a gradient."""
    return tensor.detach().clone() if tensor.requires_grad else tensor.detach()


def _as_array(tensor: Tensor) -> np.ndarray:
    """Return a copy of a tensor as an array; bfloat16, which NumPy lacks, becomes float32."""
    return np.array((tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy(force=True))


def _as_tensors(values: Any, name: str, device: torch.device | None) -> Any:
    if isinstance(values, Tensor):
        return values
    if isinstance(values, tuple | list):
        return rebuilt_sequence(values, [_as_tensors(value, name, device) for value in values])
    if isinstance(values, np.ndarray | np.generic | Number):
        # Arrays of strings, dates or objects raise a TypeError, numbers that no dtype has another error.
        with contextlib.suppress(TypeError, ValueError, RuntimeError):
            if isinstance(values, np.ndarray):
                # Torch takes the native order of bytes and positive strides only.
                values = values.astype(values.dtype.newbyteorder("="), order="C")
            return torch.as_tensor(values, device=device)
    kind = f"an array of {values.dtype}" if isinstance(values, np.ndarray) else type(values).__name__
    raise PolicyError(f"forward {shown(name)} returned {kind}; it must return tensors or arrays of numbers")
