"""A rule for any forward: NumPy code, a library's function, a physical simulation."""

from collections.abc import Callable
from dataclasses import replace
from numbers import Number
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from gradpolicy.errors import PolicyError, shown
from gradpolicy.flow.autograd_functions import replace_gradient
from gradpolicy.flow.bound_rule import BoundRule, RuleState
from gradpolicy.flow.containers import map_tensors, tensors_in
from gradpolicy.flow.operation_rule import as_floating_point
from gradpolicy.flow.operations import as_rule
from gradpolicy.rules.registry import Rule, RuleFunction


def apply(rule: str | Rule | RuleFunction, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Runs any forward, with a rule as its backward.

    The forward gets its tensors detached and runs without a graph, so it may call ``.numpy()`` on them.
    NumPy's own functions get arrays; so does a forward that fails with tensors for lack of a method. Arrays
    and numbers that it returns become tensors. A single integer or boolean result is converted to the dtype
    of the first floating-point input, since otherwise it could have no gradient. In a tuple such results stay
    as they are.

    Args:
        rule: What replaces the gradient: a rule's name, a rule, a function ``(grad, inputs, output)``,
            or an operation whose derivative is used. Its inputs are the tensors among the arguments, in
            order, including those in lists, tuples and dicts. If the forward returns several floating-point
            results, ``grad`` and ``output`` are tuples.
        forward: The function.
        *args: Its arguments, tensors or not.
        **kwargs: Its keyword arguments.

    Returns:
        What the forward returned, as tensors.

    Raises:
        PolicyError: If the forward returns what cannot be a tensor; in the backward pass, if the rule returns
            the wrong number, shape or kind of gradients.

    Example:
        >>> x = torch.tensor([0.2, 1.7], requires_grad=True)
        >>> y = apply("identity", np.floor, x)
        >>> y.sum().backward()
        >>> y.detach(), x.grad
        (tensor([0., 1.]), tensor([1., 1.]))
    """
    name = getattr(forward, "__name__", type(forward).__name__)
    if not callable(forward):
        raise PolicyError(f"apply: the forward must be a function, got {shown(forward)}")
    # The forward has no gradient of its own that a filter could act before.
    state = RuleState(name, replace(as_rule(rule), gradient_filter=None), is_reported=False)
    bound_rule = BoundRule(state, f"forward {name!r}")
    state.count(name)
    inputs = tensors_in((args, kwargs))
    with torch.no_grad():
        plain_args, plain_kwargs = map_tensors(torch.Tensor.detach, (args, kwargs))
        values = _as_tensors(_run(forward, plain_args, plain_kwargs), name, inputs)
    return replace_gradient(bound_rule, as_floating_point(values, inputs), inputs)


def _run(forward: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
    if torch.compiler.is_compiling():
        return forward(*args, **kwargs)
    if not _is_numpy(forward):
        try:
            return forward(*args, **kwargs)
        except (AttributeError, TypeError) as error:
            # Code written for arrays (x.astype, x.copy) fails so with tensors.
            failure = error
        try:
            return _run_on_arrays(forward, args, kwargs)
        except (AttributeError, TypeError):
            raise failure from None
    return _run_on_arrays(forward, args, kwargs)


def _run_on_arrays(forward: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
    array_args, array_kwargs = map_tensors(lambda tensor: cast(Any, tensor.numpy(force=True)), (args, kwargs))
    return forward(*array_args, **array_kwargs)


def _is_numpy(forward: Callable[..., Any]) -> bool:
    module = getattr(forward, "__module__", None) or ""
    return isinstance(forward, np.ufunc) or module.partition(".")[0] == "numpy"


def _as_tensors(values: Any, name: str, inputs: list[Tensor]) -> Any:
    device = inputs[0].device if inputs else None
    if isinstance(values, Tensor):
        return values
    if isinstance(values, np.ndarray | np.generic | Number):
        return torch.as_tensor(values, device=device)
    if isinstance(values, tuple | list):
        return type(values)(_as_tensors(value, name, inputs) for value in values)
    raise PolicyError(
        f"forward {shown(name)} returned {type(values).__name__}; it must return tensors or arrays"
    )
