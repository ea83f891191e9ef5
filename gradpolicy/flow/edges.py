"""The two edges that put rules into the graph: :func:`replace` and :func:`tap`.

``replace`` gives values, of an operation, a module or any function, the gradient of a rule; if the values are
the tensor itself (:func:`insert_rule`), the rule acts on the gradient that passes it. ``tap`` gives an
operation its inputs with the rule on what the operation's own backward returns for them.

They work under ``torch.compile`` and ``torch.func``, but not under forward-mode differentiation
(``torch.func.jvp``, ``jacfwd``), which torch refuses: a rule maps the gradient of the output to the gradient
of the input, and unless this map is linear, it has no transpose that forward mode could use.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function, forward_ad

from gradpolicy.errors import PolicyError
from gradpolicy.flow.bound_rule import BoundRule, RuleState
from gradpolicy.flow.containers import map_tensors, rebuilt_sequence
from gradpolicy.flow.tracing import in_functorch, in_transform, is_compiling, skip_alone
from gradpolicy.rules.registry import Rule
from gradpolicy.rules.routing import is_differentiable


def _saved(ctx: Any) -> list[Tensor]:
    """Return the tensors that were saved for the rule.

    Raises:
        PolicyError: If one of them was changed in place since.
    """
    try:
        return list(ctx.saved_tensors)
    except RuntimeError as error:
        if "inplace operation" not in str(error):
            raise
        raise ctx.bound_rule.error(
            "reads a tensor that was changed in place after the forward pass used it; change a clone of it"
        ) from None


class Replaced(Function):
    """Attaches the gradient of a rule to values that were computed without a graph."""

    generate_vmap_rule = True

    @staticmethod
    def forward(bound_rule: BoundRule, indices: Sequence[int], start: int, *tensors: Tensor) -> Any:
        """Return the values.

        Args:
            bound_rule: The rule.
            indices: The indices of the values among the tensors.
            start: The index of the first input. All tensors from it on are inputs; they may be values, too.
            *tensors: The values, and the inputs from which they were computed.
        """
        # If an input were returned, autograd would make it a view, which forbids in-place operations.
        if len(indices) == 1:
            return tensors[indices[0]].detach()
        return tuple([tensors[index].detach() for index in indices])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        """Save the tensors that the rule reads; of other inputs the shapes."""
        rule, ctx.indices, ctx.start, *tensors = inputs
        ctx.bound_rule, given = rule, tensors[ctx.start :]
        outputs = output if isinstance(output, tuple) else (output,)
        ctx.reads_inputs = "inputs" in rule.reads
        # The output of a tapped operation does not exist yet.
        ctx.reads_output = "output" in rule.reads and not rule.rule.own
        ctx.set_materialize_grads(not rule.rule.own)
        ctx.floating = [is_differentiable(value) for value in outputs]
        ctx.like = [(tensor.shape, tensor.dtype, tensor.device) for tensor in given]
        ctx.save_for_backward(*(given if ctx.reads_inputs else ()), *(outputs if ctx.reads_output else ()))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple:
        """Call the rule."""
        saved = _saved(ctx)
        wanted = ctx.needs_input_grad[3 + ctx.start :]
        grads = tuple(grad for grad, is_floating in zip(grads, ctx.floating, strict=True) if is_floating)
        inputs = [saved.pop(0) if ctx.reads_inputs else _stand_in(grads[0], *each) for each in ctx.like]
        if ctx.bound_rule.rule.own:
            # The values are inputs of the operation: what comes for them are its own gradients.
            own = dict(zip(ctx.indices, grads, strict=True))
            grad: Any = tuple([own.get(index) for index in range(len(inputs))])
            output, wanted = ctx.bound_rule.result(), [each is not None for each in grad]
        else:
            outputs = tuple(saved) if ctx.reads_output else grads
            grad = grads[0] if len(grads) == 1 else grads
            output = outputs[0] if len(ctx.floating) == 1 else outputs
        gradients = ctx.bound_rule.gradients(grad, tuple(inputs), output, wanted)
        return (None, None, None, *[None] * ctx.start, *gradients)


def _stand_in(grad: Tensor | None, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor in place of an input that the rule does not read."""
    if grad is not None and grad.shape == shape:
        return grad.to(dtype)
    return torch.zeros((), dtype=dtype, device=device).expand(shape)


class AdoptHistory(Function):
    """Gives a tensor the autograd history of an alias through which it was modified in place.

    A module that modifies its input in place (``nn.ReLU(inplace=True)``) gets an alias of the input. Code
    that uses the input afterwards sees the new values, and so needs their gradient.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, alias: Tensor) -> Tensor:
        """Return the tensor, which shares the alias's values."""
        ctx.mark_dirty(tensor)
        return tensor

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        """Pass the gradient to the alias."""
        return None, grad


@skip_alone
def may_have_gradient(tensor: Tensor) -> bool:
    """Return True if a gradient may reach a tensor; under transforms ``requires_grad`` does not say."""
    if tensor.requires_grad:
        return True
    in_eager_transform = in_functorch() or (not is_compiling() and forward_ad._current_level >= 0)
    return in_eager_transform and is_differentiable(tensor)


def run_function(function: type[Function], *args: Any) -> Any:
    """Call an autograd Function with all of its arguments.

    ``Function.apply`` spends most of its time on the defaults in the signature of ``forward``.
    """
    if is_compiling():
        # The compiler accepts each tensor only once, and gives views of inputs no gradient. A copy is free.
        args = tuple([arg.clone() if isinstance(arg, Tensor) else arg for arg in args])
    if in_transform():
        return function.apply(*args)
    return super(Function, function).apply(*args)  # type: ignore[misc]


def replace(
    bound_rule: BoundRule, values: Any, inputs: Sequence[Tensor], *, with_discrete: bool = False
) -> Any:
    """Attach the gradient of a rule to a value, or to the floating-point values of a tuple.

    Args:
        bound_rule: The rule.
        values: A tensor, or a tuple of tensors and other objects; computed without a graph.
        inputs: The tensors from which the values were computed.
        with_discrete: True if the rule gets the integer and boolean values of a tuple, too.

    Raises:
        PolicyError: If the values are of another type, or ``torch.compile`` traces a transform of
            ``torch.func``.
    """
    _check_transforms(bound_rule)
    bound_rule = bound_rule.with_current_numbers()
    if is_compiling() and not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)):
        # Without gradients there is nothing to do, and the compiler mishandles Functions of several tensors.
        return values
    if isinstance(values, Tensor):
        return run_function(Replaced, bound_rule, (0,), 1, values, *inputs)
    if not isinstance(values, tuple | list):
        raise PolicyError(f"cannot put a rule on a result of type {type(values).__name__}")
    if not any(is_differentiable(value) for value in values):
        return values
    taken = torch.is_tensor if with_discrete else is_differentiable
    indices = [index for index, value in enumerate(values) if taken(value)]
    chosen, start = [values[index] for index in indices], len(indices)
    found = run_function(Replaced, bound_rule, tuple(range(start)), start, *chosen, *inputs)
    return rebuilt_sequence(values, _with_items(values, indices, found))


def tap(bound_rule: BoundRule, inputs: Sequence[Tensor], outputs: list) -> list[Tensor]:
    """Return the inputs for a call of an operation whose own gradients a rule modifies, or cuts off.

    Args:
        bound_rule: The rule.
        inputs: The original inputs.
        outputs: An empty list. If the rule reads the output, the caller adds the output and its version.

    Raises:
        PolicyError: If the rule reads the output in compiled or transformed code, where the output is not
            available to the backward pass.
    """
    if "output" in bound_rule.reads and in_transform():
        raise bound_rule.error(
            "changes the operation's own gradients (own=True) and cannot read its output in code that is "
            "compiled or transformed by torch.func: compute what it needs from the inputs, leave this part "
            "to eager mode (torch.compiler.disable), or compile without fullgraph"
        )
    if bound_rule.state.policy.detaches:
        return [tensor.detach() for tensor in inputs]
    positions = [position for position, tensor in enumerate(inputs) if may_have_gradient(tensor)]
    if not positions:
        return list(inputs)
    _check_transforms(bound_rule)
    rule = dataclasses.replace(bound_rule.with_current_numbers(), outputs=outputs)
    return _with_items(inputs, positions, run_function(Replaced, rule, tuple(positions), 0, *inputs))


def _with_items(values: Sequence[Any], indices: Sequence[int], found: Any) -> list:
    """Return values with those at some indices replaced, at one by a tensor, at several by a tuple."""
    results = list(values)
    for index, result in zip(indices, found if len(indices) > 1 else (found,), strict=True):
        results[index] = result
    return results


def insert_rule(bound_rule: BoundRule, values: Any) -> Any:
    """Insert a rule between a tensor, or each floating-point tensor of a tuple, and its autograd node."""
    return map_tensors(lambda each: replace(bound_rule, each.detach(), [each]), values, is_differentiable)


# The gradient goes to each of several inputs.
_TO_ALL = Rule("a gradient path", lambda grad, inputs, output: (grad,) * len(inputs), reads=())
_JOIN = BoundRule(RuleState(_TO_ALL.name, _TO_ALL), "a discrete result")


def join(values: Tensor, path: Tensor) -> Tensor:
    """Return values whose gradient goes to them and to a path of their shape."""
    return run_function(Replaced, _JOIN, (0,), 0, values, path)


@skip_alone
def _check_transforms(bound_rule: BoundRule) -> None:
    """Check that rules are supported under the active transforms.

    Raises:
        PolicyError: Under a transform of ``torch.func`` in compiled code.
    """
    if is_compiling() and in_functorch():
        # The compiler would ignore the rule, or fail with an unrelated error.
        raise bound_rule.error(
            "cannot be compiled under a transform of torch.func: the compiler does not take autograd "
            "Functions through them. Leave this part to eager mode (torch.compiler.disable), or compile "
            "without fullgraph"
        )
