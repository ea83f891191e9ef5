"""The autograd Functions that put a rule into the graph.

They trace under ``torch.compile`` and work under ``torch.func``. Forward-mode derivatives
(``torch.func.jvp``, ``jacfwd``) are refused: a rule says what becomes of a gradient that flows back. It need
not be linear in that gradient, and then no derivative along a direction belongs to it.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._functorch.utils import unwrap_dead_wrappers
from torch.autograd import Function, forward_ad

from gradpolicy.errors import PolicyError
from gradpolicy.flow.bound_rule import BoundRule
from gradpolicy.flow.containers import rebuilt_sequence
from gradpolicy.flow.tracing import in_functorch, in_transform, is_compiling, skip_alone


class ReplaceGradient(Function):
    """Give values that were computed without a graph the gradient of a rule."""

    generate_vmap_rule = True

    @staticmethod
    def forward(bound_rule: BoundRule, count: int, *tensors: Tensor) -> Any:
        """Take the rule, the number of values, the values, then the inputs.

        Returns:
            The values.
        """
        # Detached, not as they are: autograd would make views of them, which forbid in-place operations.
        if count == 1:
            return tensors[0].detach()
        return tuple(tensor.detach() for tensor in tensors[:count])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        """Keep what the rule reads. Shapes come from the gradient if that is enough."""
        bound_rule, count, *tensors = inputs
        outputs = output if isinstance(output, tuple) else (output,)
        given = tensors[count:]
        reads_inputs = count > 1 or "inputs" in bound_rule.reads
        reads_output = count > 1 or "output" in bound_rule.reads
        kept = [
            reads_inputs or tensor.shape != outputs[0].shape or not tensor.is_floating_point()
            for tensor in given
        ]
        ctx.bound_rule, ctx.count = bound_rule, count
        ctx.kept, ctx.reads_output = kept, reads_output
        ctx.dtypes = [tensor.dtype for tensor in given]
        saved = [tensor for tensor, keep in zip(given, kept, strict=True) if keep]
        ctx.save_for_backward(*saved, *(outputs if reads_output else ()))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple:
        """Call the rule."""
        saved = list(ctx.saved_tensors)
        inputs = []
        for keep, dtype in zip(ctx.kept, ctx.dtypes, strict=True):
            inputs.append(saved.pop(0) if keep else grads[0].to(dtype))
        outputs = tuple(saved) if ctx.reads_output else grads
        grad, output = (grads[0], outputs[0]) if ctx.count == 1 else (grads, outputs)
        wanted = ctx.needs_input_grad[2 + ctx.count :]
        gradients = ctx.bound_rule.gradients(grad, tuple(inputs), output, wanted)
        return (None, None, *[None] * ctx.count, *gradients)


class ChangeOwnGradients(Function):
    """Change the gradients that an operation gives its inputs: a node between the inputs and the operation.

    All gradients arrive together, so that a rule may use all of them.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(bound_rule: BoundRule, outputs: list, places: tuple, *tensors: Tensor) -> Any:
        """Take the rule, where the outputs arrive, which inputs change, the inputs.

        Returns:
            Those inputs that need a gradient; one by itself.
        """
        changed = [tensors[place].detach() for place in places]
        return changed[0] if len(changed) == 1 else tuple(changed)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        """Keep the inputs if the rule reads them, otherwise their shapes."""
        ctx.bound_rule, ctx.outputs, ctx.places, *tensors = inputs
        ctx.reads_inputs = "inputs" in ctx.bound_rule.reads
        ctx.set_materialize_grads(False)
        ctx.like = [(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors]
        if ctx.reads_inputs:
            ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple:
        """Call the rule."""
        own: list[Tensor | None] = [None] * len(ctx.like)
        for place, grad in zip(ctx.places, grads, strict=True):
            own[place] = grad
        inputs = ctx.saved_tensors
        if not ctx.reads_inputs:
            inputs = [
                torch.zeros((), dtype=dtype, device=device).expand(shape) if grad is None else grad
                for grad, (shape, dtype, device) in zip(own, ctx.like, strict=True)
            ]
        output = None
        if ctx.outputs:
            output, version = ctx.outputs
            if output._version != version or torch.is_grad_enabled():
                raise PolicyError(
                    f"rule {ctx.bound_rule.rule.name!r} at {ctx.bound_rule.location} reads the operation's "
                    "output, which must not be changed in place and has no second derivatives "
                    "(create_graph=True); compute what it needs from the inputs"
                )
        wanted = [grad is not None for grad in own]
        gradients = ctx.bound_rule.gradients(tuple(own), tuple(inputs), output, wanted)
        return (None, None, None, *gradients)


class AddPath(Function):
    """Give values that have a gradient of their own, or none, another path for it: ``slope · grad``.

    There 0 · infinity is 0. The values pass their own gradient on as it is.
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
        """Pass the gradient to both."""
        gradient = grad
        if ctx.has_slope:
            (slope,) = ctx.saved_tensors
            gradient = torch.where(grad == 0, torch.zeros_like(grad), grad * slope)
        return grad, gradient.to(ctx.dtype), None


class AdoptHistory(Function):
    """Give a tensor that was written to through an alias the history of the alias.

    A module that works in place on its input (``nn.ReLU(inplace=True)``) gets an alias of it. Code that
    uses the input afterwards sees the new values. With this it gets their gradient too.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, alias: Tensor) -> Tensor:
        """Return the tensor, whose values are the alias's already."""
        ctx.mark_dirty(tensor)
        return tensor

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        """Pass the gradient to the alias."""
        return None, grad


def is_differentiable(value: Any) -> bool:
    """Return True if a value is a tensor that can have a gradient."""
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


@skip_alone
def may_have_gradient(tensor: Tensor) -> bool:
    """Return True if a gradient may reach a tensor; under transforms no tensor says so."""
    if not is_differentiable(tensor):
        return False
    return tensor.requires_grad or in_functorch() or (not is_compiling() and forward_ad._current_level >= 0)


def run_function(function: type[Function], *args: Any) -> Any:
    """Run an autograd Function, given all of its arguments.

    ``Function.apply`` looks up the signature of ``forward`` for defaults, which takes most of its time.
    """
    if is_compiling():
        # The compiler takes each tensor once. There a copy costs nothing.
        given: list[Any] = []
        for arg in args:
            given.append(arg.clone() if isinstance(arg, Tensor) and any(arg is one for one in given) else arg)
        args = tuple(given)
    if in_transform():
        return function.apply(*args)
    return super(Function, function).apply(*unwrap_dead_wrappers(args))  # type: ignore[misc]


def replace_gradient(bound_rule: BoundRule, values: Any, inputs: Sequence[Tensor]) -> Any:
    """Return one value, or the floating-point values of a tuple, the gradient of a rule.

    Args:
        bound_rule: The rule.
        values: A tensor, or a tuple of tensors and others; computed without a graph.
        inputs: What they were computed from.

    Raises:
        PolicyError: If the values are neither, or ``torch.compile`` traces a transform of ``torch.func``.
    """
    _check_transforms(bound_rule, inputs)
    bound_rule = bound_rule.with_current_numbers()
    if is_compiling() and not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)):
        # There is nothing to do, and the compiler would call a Function of several tensors wrongly.
        return values
    if isinstance(values, Tensor):
        return run_function(ReplaceGradient, bound_rule, 1, values, *inputs)
    if not isinstance(values, tuple | list):
        raise PolicyError(f"cannot put a rule on a result of type {type(values).__name__}")
    indices = [index for index, value in enumerate(values) if is_differentiable(value)]
    if not indices:
        return values
    floating = [values[index] for index in indices]
    found = run_function(ReplaceGradient, bound_rule, len(indices), *floating, *inputs)
    results = list(values)
    for index, result in zip(indices, found if len(indices) > 1 else (found,), strict=True):
        results[index] = result
    return rebuilt_sequence(values, results)


def change_own_gradients(bound_rule: BoundRule, inputs: Sequence[Tensor], outputs: list) -> list[Tensor]:
    """Let a rule change the gradients that an operation gives its inputs.

    Args:
        bound_rule: The rule.
        inputs: The inputs.
        outputs: Empty; what the operation gave and its version come there, if the rule reads that.

    Returns:
        The inputs that the operation is to be called with.

    Raises:
        PolicyError: In compiled or transformed code, where the backward pass cannot hand the output over.
    """
    if "output" in bound_rule.reads and in_transform():
        raise PolicyError(
            f"rule {bound_rule.rule.name!r} at {bound_rule.location} changes the operation's own gradients "
            "(own=True) and cannot read its output in code that is compiled or transformed by torch.func: "
            "compute what it needs from the inputs, leave this part to eager mode (torch.compiler.disable), "
            "or compile without fullgraph"
        )
    found = list(inputs)
    # Under torch.func a tensor does not say whether it needs a gradient.
    unknown = in_transform() and not is_compiling()
    places = [
        place
        for place, tensor in enumerate(inputs)
        if is_differentiable(tensor) and (unknown or tensor.requires_grad)
    ]
    if not places:
        return found
    _check_transforms(bound_rule, inputs)
    bound_rule = bound_rule.with_current_numbers()
    if is_compiling():
        # Of a view of an input the compiler would return one without a gradient.
        inputs = [tensor.clone() if place in places else tensor for place, tensor in enumerate(inputs)]
    changed = run_function(ChangeOwnGradients, bound_rule, outputs, tuple(places), *inputs)
    for place, tensor in zip(places, changed if len(places) > 1 else (changed,), strict=True):
        found[place] = tensor
    return found


def insert_rule(bound_rule: BoundRule, values: Any) -> Any:
    """Put a rule between a tensor, or each floating-point tensor of a tuple, and its node."""
    if isinstance(values, Tensor):
        if not is_differentiable(values):
            return values
        return replace_gradient(bound_rule, values.detach(), [values])
    return rebuilt_sequence(values, [insert_rule(bound_rule, value) for value in values])


@skip_alone
def _check_transforms(bound_rule: BoundRule, inputs: Sequence[Tensor]) -> None:
    """Refuse forward-mode derivatives, and transforms of ``torch.func`` in compiled code.

    Raises:
        PolicyError: Names the rule and where it acts.
    """
    where = f"rule {bound_rule.rule.name!r} at {bound_rule.location}"
    if is_compiling():
        if in_functorch():
            # The compiler would drop the rule, or fail without a word about it.
            raise PolicyError(
                f"{where} cannot be compiled under a transform of torch.func: the compiler does not take "
                "autograd Functions through them. Leave this part to eager mode (torch.compiler.disable), or "
                "compile without fullgraph"
            )
    elif forward_ad._current_level >= 0 and any(
        torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        or forward_ad.unpack_dual(tensor).tangent is not None
        for tensor in inputs
        if is_differentiable(tensor)
    ):
        raise PolicyError(
            f"{where} has no forward-mode derivative: "
            "it says what becomes of a gradient that flows back. Use reverse mode: torch.func.jacrev for "
            "jacfwd, torch.autograd.grad for jvp. For hessian use gradpolicy.curvature, which differentiates "
            "the gradient under the policy; jacrev(jacrev(f)) would apply the rule in both passes. Or switch "
            "the policy off"
        )
