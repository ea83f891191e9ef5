"""The autograd Functions that put a rule into the graph, and the check of what a rule returns.

They trace under ``torch.compile`` and work under ``torch.func``; the eager short cut stands in ``hooks.py``.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from gradpolicy.errors import PolicyError
from gradpolicy.flow.containers import rebuilt_sequence
from gradpolicy.flow.forward_mode import RefusesForwardMode, forward_mode_at_work
from gradpolicy.flow.norms import NormMeter
from gradpolicy.rules.registry import Rule

# The code of what stands in a module's forward while policies are installed.
FORWARDS: set[CodeType] = set()


@dataclass(frozen=True)
class BackwardRule:
    """A rule at a place: what the Functions call in the backward pass.

    Args:
        rule: The rule.
        place: Where it acts, for messages: ``"operation 'relu'"``.
        sums_broadcast: Whether a gradient in the output's shape is summed to an input that was broadcast.
        meter: Measures the gradient's norm before and after, where asked to.
        scheduled: Which of the rule's numbers a schedule sets.
        policy: The name of the policy, for messages; None outside of one.
        module: In whose forward the operation ran, for messages; None where the place says it.
    """

    rule: Rule
    place: str
    sums_broadcast: bool = False
    meter: NormMeter | None = None
    scheduled: tuple[str, ...] = ()
    policy: str | None = None
    module: str | None = None

    def as_now(self) -> "BackwardRule":
        """The rule with its scheduled numbers as they are now, whatever they are when backward comes."""
        if not self.scheduled:
            return self
        rule = self.rule
        now = {key: rule.parameters[key].clone() for key in self.scheduled}
        kept = Rule(rule.name, rule.function, {**rule.parameters, **now}, rule.gradient_filter, rule.reads)
        return replace(self, rule=kept, scheduled=())

    def within(self, module: str | None) -> "BackwardRule":
        """The rule where it runs in a module; made without the price of a dataclass."""
        found = object.__new__(BackwardRule)
        found.__dict__.update(self.__dict__, module=module)
        return found

    def gradients(self, grad: Any, inputs: tuple[Tensor, ...], output: Any, wanted: Sequence[bool]) -> list:
        """The rule's gradients, one an input, checked and in each input's dtype."""
        returned = self._own(self.rule.function, grad, inputs, output)
        gradients = self._one_an_input(returned, inputs, wanted)
        checked = [
            self._checked(number, gradient, tensor, output) if needed else None
            for number, (gradient, tensor, needed) in enumerate(zip(gradients, inputs, wanted, strict=True))
        ]
        if self.meter is not None:
            self.meter.measure(grad, checked)
        return checked

    def filtered(self, grad: Tensor) -> Tensor:
        """The incoming gradient as the rule's gradient filter lets it through."""
        result = self._own(self.rule.gradient_filter, grad)
        if not isinstance(result, Tensor) or result.shape != grad.shape or result.dtype != grad.dtype:
            result = self._checked(0, result, grad, grad)
            if result is None:
                raise self._error("returned None; a gradient filter returns a tensor")
        if self.meter is not None and self.meter.on:
            self.meter.measure(grad, [result])
        return result

    def _own(self, function: Callable | None, *arguments: Any) -> Any:
        """Calls the user's function; no override may act on what it computes with.

        Raises:
            PolicyError: In place of what it raises, with the place and the shapes.
        """
        assert function is not None
        parameters = self.rule.parameters
        if torch.compiler.is_compiling():
            with torch._C.DisableTorchFunction():
                return function(*arguments, **parameters)
        try:
            if torch._C._len_torch_function_stack() == 0:
                return function(*arguments, **parameters)
            with torch._C.DisableTorchFunction():
                return function(*arguments, **parameters)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise self._failure(error, *arguments) from error

    def _one_an_input(self, returned: Any, inputs: tuple[Tensor, ...], wanted: Sequence[bool]) -> tuple:
        if isinstance(returned, list):
            returned = tuple(returned)
        if not isinstance(returned, tuple):
            first = next((number for number, tensor in enumerate(inputs) if _is_differentiable(tensor)), 0)
            if any(wanted[number] for number in range(len(inputs)) if number != first):
                raise self._error(
                    f"returned one gradient ({_kind(returned)}) for {len(inputs)} inputs {_shapes(inputs)}; "
                    "return a tuple with one for each, None where there is none"
                )
            return tuple(returned if number == first else None for number in range(len(inputs)))
        if len(returned) != len(inputs):
            raise self._error(
                f"returned {len(returned)} gradients {_shapes(returned)} "
                f"for {len(inputs)} inputs {_shapes(inputs)}"
            )
        return returned

    def _checked(self, number: int, gradient: Any, tensor: Tensor, output: Any) -> Tensor | None:
        if gradient is None:
            return None
        if not isinstance(gradient, Tensor):
            raise self._error(f"returned {_kind(gradient)} as gradient {number}; it must be a tensor")
        if not (gradient.is_floating_point() or gradient.is_complex()):
            raise self._error(f"returned gradient {number} in {gradient.dtype}; it must be floating-point")
        if gradient.is_complex() and not tensor.is_complex():
            raise self._error(f"returned a complex gradient {number} for an input in {tensor.dtype}")
        if gradient.shape != tensor.shape:
            if not (self.sums_broadcast and _was_broadcast(tensor, output, gradient)):
                raise self._error(
                    f"returned gradient {number} of shape {_shape(gradient)} "
                    f"for an input of shape {_shape(tensor)}"
                )
            gradient = gradient.sum_to_size(tensor.shape)
        return gradient if gradient.dtype == tensor.dtype else gradient.to(tensor.dtype)

    def _failure(self, error: Exception, grad: Any, inputs: Any = (), output: Any = None) -> PolicyError:
        """What to say of a rule's own failure: where it was, what it was given, what went wrong."""
        given = [f"a gradient of shape {_shape_of(grad)}"]
        given += [f"inputs of shapes {_shapes(inputs)}"] * bool(inputs)
        given += [f"an output of shape {_shape_of(output)}"] * (output is not None)
        reason = " ".join(str(error).split()).removeprefix(f"rule {self.rule.name!r}: ")
        kind = "" if isinstance(error, PolicyError) else f"{type(error).__name__}: "
        return self._error(f"failed with {', '.join(given)}: {kind}{reason}")

    def _error(self, text: str) -> PolicyError:
        policy = "" if self.policy is None else f"policy {self.policy!r}: "
        module = (
            "" if self.module is None else f" in {f'module {self.module!r}' if self.module else 'the model'}"
        )
        return PolicyError(f"{policy}rule {self.rule.name!r} at {self.place}{module}: {text}")


class ReplaceGradient(Function):
    """Gives values that were computed without a graph the gradient that a rule says."""

    generate_vmap_rule = True

    @staticmethod
    def forward(backward_rule: BackwardRule, values: int, *tensors: Tensor) -> Any:
        """Takes the number of values, the values, then the inputs; gives the values back."""
        # Detached, not as they are: autograd would make views of them, which forbid in-place operations.
        if values == 1:
            return tensors[0].detach()
        return tuple(tensor.detach() for tensor in tensors[:values])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        """Keeps what the rule reads; shapes come from the gradient where that is enough."""
        backward_rule, values, *tensors = inputs
        outputs = output if isinstance(output, tuple) else (output,)
        given = tensors[values:]
        reads_inputs = values > 1 or "inputs" in backward_rule.rule.reads
        reads_output = values > 1 or "output" in backward_rule.rule.reads
        kept = [
            reads_inputs or tensor.shape != outputs[0].shape or not tensor.is_floating_point()
            for tensor in given
        ]
        ctx.backward_rule, ctx.values, ctx.kept, ctx.reads_output = backward_rule, values, kept, reads_output
        ctx.dtypes = [tensor.dtype for tensor in given]
        saved = [tensor for tensor, keep in zip(given, kept, strict=True) if keep]
        ctx.save_for_backward(*saved, *(outputs if reads_output else ()))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple:
        """Asks the rule."""
        saved = list(ctx.saved_tensors)
        stand_in = grads[0]
        inputs = []
        for keep, dtype in zip(ctx.kept, ctx.dtypes, strict=True):
            inputs.append(saved.pop(0) if keep else stand_in.to(dtype))
        outputs = tuple(saved) if ctx.reads_output else grads
        grad, output = (grads[0], outputs[0]) if ctx.values == 1 else (grads, outputs)
        wanted = ctx.needs_input_grad[2 + ctx.values :]
        gradients = ctx.backward_rule.gradients(grad, tuple(inputs), output, wanted)
        return (None, None, *[None] * ctx.values, *gradients)


class EagerReplaceGradient(Function):
    """The same without the price of ``setup_context``, whose arguments torch binds by name at each call."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Any:
        """Gives the values back."""
        backward_rule = arguments[0]
        if backward_rule.policy is not None and backward_rule.sums_broadcast:
            arguments = (backward_rule.within(running_module()), *arguments[1:])
        output = ReplaceGradient.forward(*arguments)
        ReplaceGradient.setup_context(ctx, arguments, output)
        return output

    backward = ReplaceGradient.backward


class ForwardModeReplaceGradient(RefusesForwardMode, ReplaceGradient):
    """The same while forward-mode derivatives are taken; the compiler knows no Function with ``jvp``."""

    generate_vmap_rule = True


class FilterGradient(Function):
    """Passes a tensor on, and its gradient through a rule's gradient filter."""

    generate_vmap_rule = True

    @staticmethod
    def forward(backward_rule: BackwardRule, tensor: Tensor) -> Tensor:
        """Gives the tensor back."""
        return tensor.detach()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        """Needs no tensor."""
        ctx.backward_rule = inputs[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        """Asks the filter."""
        return None, ctx.backward_rule.filtered(grad)


class EagerFilterGradient(Function):
    """The same without the price of ``setup_context``."""

    @staticmethod
    def forward(ctx: Any, backward_rule: BackwardRule, tensor: Tensor) -> Tensor:
        """Gives the tensor back."""
        ctx.backward_rule = backward_rule
        return tensor.detach()

    backward = FilterGradient.backward


class ForwardModeFilterGradient(RefusesForwardMode, FilterGradient):
    """The same while forward-mode derivatives are taken."""

    generate_vmap_rule = True


def running_module() -> str | None:
    """The name of the innermost module whose wrapped forward runs; None outside of all."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code not in FORWARDS:
        frame = frame.f_back
    return None if frame is None else frame.f_locals["self"].name


def in_transform() -> bool:
    """Whether autograd's nodes are out of reach: under torch.compile, torch.func or forward mode."""
    return (
        torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active() or forward_mode_at_work()
    )


def replace_gradient(backward_rule: BackwardRule, values: Any, inputs: Sequence[Tensor]) -> Any:
    """Gives one value, or the floating-point ones of a tuple, the gradient that a rule says.

    Args:
        backward_rule: The rule.
        values: A tensor, or a tuple of tensors and others; computed without a graph.
        inputs: What they were computed from.
    """
    backward_rule = backward_rule.as_now()
    function: type[Function] = EagerReplaceGradient
    if in_transform():
        function = ForwardModeReplaceGradient if _refuses_forward_mode(backward_rule) else ReplaceGradient
        if torch.compiler.is_compiling() and not _want_gradient(inputs):
            # There is nothing to do, and the compiler calls a Function of any number of tensors wrongly then.
            return values
    if isinstance(values, Tensor):
        return function.apply(backward_rule, 1, values, *inputs)
    places = [number for number, value in enumerate(values) if _is_differentiable(value)]
    if not places:
        return values
    found = function.apply(backward_rule, len(places), *(values[number] for number in places), *inputs)
    results = list(values)
    for number, result in zip(places, found if len(places) > 1 else (found,), strict=True):
        results[number] = result
    return _rebuilt(values, results)


def filter_gradient(backward_rule: BackwardRule, values: Any) -> Any:
    """Puts a rule's gradient filter behind a tensor, or behind every floating-point tensor of a tuple."""
    if isinstance(values, Tensor):
        function: type[Function] = EagerFilterGradient
        if in_transform():
            function = ForwardModeFilterGradient if _refuses_forward_mode(backward_rule) else FilterGradient
        return function.apply(backward_rule.as_now(), values) if _is_differentiable(values) else values
    return _rebuilt(values, [filter_gradient(backward_rule, value) for value in values])


def _want_gradient(inputs: Sequence[Tensor]) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)


def _refuses_forward_mode(backward_rule: BackwardRule) -> bool:
    if not torch.compiler.is_compiling():
        return forward_mode_at_work()
    if torch._C._are_functorch_transforms_active():
        # The compiler would drop the rule, or fail without a word about it.
        raise PolicyError(
            f"rule {backward_rule.rule.name!r} at {backward_rule.place} cannot be compiled under a "
            "transform of torch.func: the compiler does not take autograd Functions through them. Leave this "
            "part to eager mode (torch.compiler.disable), or compile without fullgraph"
        )
    return False


def _rebuilt(like: Any, items: list) -> Any:
    if not isinstance(like, tuple | list):
        raise PolicyError(f"cannot put a rule on a result of type {type(like).__name__}")
    return rebuilt_sequence(like, items)


def _is_differentiable(value: Any) -> bool:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def _was_broadcast(tensor: Tensor, output: Any, gradient: Tensor) -> bool:
    if not isinstance(output, Tensor) or gradient.shape != output.shape or tensor.dim() > output.dim():
        return False
    sizes = zip(reversed(tensor.shape), reversed(output.shape), strict=False)
    return all(size in (1, wanted) for size, wanted in sizes)


def _kind(value: Any) -> str:
    return f"a tensor of shape {_shape(value)}" if isinstance(value, Tensor) else type(value).__name__


def _shape(tensor: Tensor) -> str:
    return str(tuple(tensor.shape))


def _shape_of(value: Any) -> str:
    if isinstance(value, Tensor):
        return _shape(value)
    return _shapes(value) if isinstance(value, tuple | list) else type(value).__name__


def _shapes(values: Sequence) -> str:
    shown = (_shape(value) if isinstance(value, Tensor) else str(value) for value in values)
    return f"({', '.join(shown)})"
