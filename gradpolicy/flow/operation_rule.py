"""One call of an operation with a rule on it: the native forward, then the rule's gradient.

Three ways lead to the same numbers. A rule that only filters what comes in hangs a hook on the node that
the native operation made (about a tenth of a Python Function's cost). Everything else, and all of it under
``torch.compile`` and ``torch.func``, where node hooks do not hold, goes through an autograd Function.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gradpolicy.flow.autograd_functions import BackwardRule, filter_gradient, in_transform, replace_gradient
from gradpolicy.flow.bound_rule import Binding
from gradpolicy.flow.forward_mode import forward_mode_at_work
from gradpolicy.flow.operations import Function, Operation
from gradpolicy.rules.rectifiers import positive_part

Hook = Callable[..., Any]

# By these names, since each look-up of torch._C._… counts in what runs at every layer.
_is_compiling = torch.compiler.is_compiling
_modes = torch._C._len_torch_function_stack
_grad_enabled = torch.is_grad_enabled
_in_functorch = torch._C._are_functorch_transforms_active


class OperationRule:
    """A rule for the calls of one operation.

    Args:
        operation: The operation.
        binding: The rule, and whether it holds now.
    """

    def __init__(self, operation: Operation, binding: Binding) -> None:
        self.operation = operation
        self.name = operation.name
        self.binding = binding
        self.functions = operation.functions
        self.spellings = operation.spellings
        self.decides = operation.decides
        self.makes_one_hot = operation.name == "argmax_one_hot"
        self.filters = binding.rule.gradient_filter is not None and not binding.detaches
        self.rule = binding.at(f"operation {operation.name!r}", sums_broadcast=True)
        # Behind a ReLU, whose derivative is 0 or 1, the positive part may as well be taken in place.
        self.rectifies = operation.name == "relu" and binding.rule.gradient_filter is positive_part
        self.hook = positive_part_behind(self.rule) if self.rectifies else filter_before(self.rule)

    def __reduce__(self) -> tuple:
        # The rest follows from these two.
        return (OperationRule, (self.operation, self.binding))

    def covers(self, function: Function, args: tuple, kwargs: Mapping[str, Any]) -> bool:
        """Whether the rule is for this call, and holds now."""
        if not self.binding.active:
            return False
        decides = self.decides
        return decides is None or decides(function, args, kwargs)

    def keeps_what_plain_keeps(self) -> bool:
        """Whether a checkpoint's second run may be plain: a hook on the first run's node is all there is."""
        return self.filters and torch.is_grad_enabled()

    def call(self, function: Function, args: tuple, kwargs: Mapping[str, Any]) -> Any:
        """Does the call; its gradient is the rule's."""
        if self.makes_one_hot:
            return self._argmax_one_hot(function, args, kwargs)
        spelling = self.spellings[function]
        if self.filters and args and may_hook(args[0]) and not spelling.is_in_place(args, kwargs):
            return self.hooked(function, args, kwargs)
        inputs = spelling.inputs(args, kwargs)
        if not _needs_gradient(inputs):
            self.binding.meet(self.operation.name)
            return function(*args, **kwargs)
        # An outer override of the same operation must not act on it too.
        with torch._C.DisableTorchFunction():
            return self._with_rule(function, args, kwargs, inputs)

    def hooked(self, function: Function, args: tuple, kwargs: Mapping[str, Any]) -> Any:
        """Does an out-of-place call, and hangs the rule's filter before the node that it made."""
        result = function(*args, **kwargs)
        if not isinstance(result, Tensor) or result is args[0] or result._is_view():
            return self._filtered(result, list(args[:1]), in_place=False)
        node = result.grad_fn
        if node is not None:
            self.binding.matched[self.name] += 1
            self.hang_hook(node)
        return result

    def hang_hook(self, node: Any) -> None:
        """Hangs the rule's filter on the node of an operation."""
        (node.register_hook if self.rectifies else node.register_prehook)(self.hook)

    def _with_rule(self, function: Function, args: tuple, kwargs: Mapping[str, Any], inputs: list) -> Any:
        in_place = self.spellings[function].is_in_place(args, kwargs)
        if self.filters and not (in_place and (in_transform() or args[0]._is_view())):
            return self._filtered(function(*args, **kwargs), inputs, in_place)
        self.binding.count(self.operation.name)
        if not in_place:
            return self._replaced(function, args, kwargs, inputs)
        # The rule's gradient goes to the values before the call; copy_ then makes them the tensor's own,
        # with autograd's care for views and leaves.
        target, rest = (args[0], args[1:]) if args else (kwargs["input"], ())
        before = target.clone()
        others = {key: value for key, value in kwargs.items() if args or key != "input"}
        work = target.detach().clone() if not self.filters else before
        sources = [before if tensor is target else tensor for tensor in inputs]
        if self.filters:
            result = filter_gradient(self.rule, function(work, *rest, **others))
        else:
            result = self._attached(_without_graph(function, (work, *rest), others), sources)
        return target.copy_(result)

    def _filtered(self, result: Any, inputs: list[Tensor], in_place: bool) -> Any:
        """The native result with the rule's filter before its node."""
        if not _has_gradient(result):
            self.binding.meet(self.operation.name)
            return result
        self.binding.count(self.operation.name)
        single = isinstance(result, Tensor)
        if not single or in_transform() or result._is_view() or _is_passed_on(result, inputs, in_place):
            return filter_gradient(self.rule, result)
        self.hang_hook(result.grad_fn)
        return result

    def _replaced(self, function: Function, args: tuple, kwargs: Mapping[str, Any], inputs: list) -> Any:
        if self.binding.detaches:
            return function(*_detached(args), **_detached(kwargs))
        return self._attached(_without_graph(function, args, kwargs), inputs)

    def _attached(self, values: Any, inputs: Sequence[Tensor]) -> Any:
        if self.binding.detaches:
            return values
        return replace_gradient(self.rule, differentiable(values, inputs), inputs)

    def _argmax_one_hot(self, function: Function, args: tuple, kwargs: Mapping[str, Any]) -> Any:
        """Remembers where an argmax came from; its one-hot code then is a function of that.

        ``one_hot(argmax(x, dim), classes)`` is whole numbers without a gradient; here it comes in x's dtype.
        """
        with torch._C.DisableTorchFunction():
            result = function(*args, **kwargs)
            if self.spellings[function].name == "argmax":
                return _remember_source(result, *args, **kwargs)
            source = getattr(args[0] if args else kwargs.get("tensor"), "_argmax_of", None)
            if source is None or not _needs_gradient([source]):
                self.binding.meet(self.operation.name)
                return result
            self.binding.count(self.operation.name)
            if self.binding.detaches:
                return result
            return replace_gradient(self.rule, result.to(source.dtype), [source])


def may_hook(tensor: Any) -> bool:
    """Whether the short way is open: a tensor that wants a gradient, and nobody else looks on."""
    return (
        not _is_compiling()
        and _modes() == 0
        and _grad_enabled()
        and not _in_functorch()
        and not forward_mode_at_work()
        and isinstance(tensor, Tensor)
        and tensor.requires_grad
    )


def filter_before(rule: BackwardRule) -> Hook:
    """A rule's gradient filter as a hook before an autograd node."""

    def hook(grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        return tuple([None if grad is None else rule.filtered(grad) for grad in grads])

    return hook


def positive_part_behind(rule: BackwardRule) -> Hook:
    """Guided backpropagation as a hook behind a ReLU's node.

    ``1[x > 0] · max(grad, 0) = max(1[x > 0] · grad, 0)``, and what the node gives is nobody else's yet:
    taking the positive part in place saves a tensor, and half of the time.
    """
    meter = rule.meter
    assert meter is not None

    def hook(grad_inputs: tuple[Tensor | None, ...], grad_outputs: tuple) -> None:
        grad = grad_inputs[0]
        if grad is None:
            return
        if meter.on or _modes():
            carefully(grad, grad_outputs[0])
        else:
            grad.relu_()

    def carefully(grad: Tensor, grad_output: Tensor | None) -> None:
        with torch._C.DisableTorchFunction():
            if grad_output is not None:
                meter.measure(grad_output, [torch.relu(grad_output)])
            grad.relu_()

    return hook


def differentiable(values: Any, inputs: Sequence[Tensor]) -> Any:
    """A lone result in whole numbers or truth values, in the dtype of the first floating-point input.

    Only so can it have a gradient at all.
    """
    if not isinstance(values, Tensor) or values.is_floating_point() or values.is_complex():
        return values
    dtype = next((tensor.dtype for tensor in inputs if tensor.is_floating_point()), torch.get_default_dtype())
    return values.to(dtype)


def _needs_gradient(inputs: Sequence[Tensor]) -> bool:
    if not torch.is_grad_enabled():
        return False
    for tensor in inputs:
        if tensor.requires_grad:
            return True
    return in_transform() and any(tensor.is_floating_point() for tensor in inputs)


def _has_gradient(result: Any) -> bool:
    if isinstance(result, Tensor):
        return result.requires_grad or in_transform()
    return isinstance(result, tuple | list) and any(_has_gradient(item) for item in result)


def _is_passed_on(result: Tensor, inputs: Sequence[Tensor], in_place: bool) -> bool:
    """Whether the operation gave an input back as it was, so that the node behind it is another's."""
    return result.grad_fn is None or (not in_place and any(result is tensor for tensor in inputs))


def _without_graph(function: Function, args: tuple, kwargs: Mapping[str, Any]) -> Any:
    with torch.no_grad():
        return function(*_detached(args), **_detached(kwargs))


def _detached(arguments: Any) -> Any:
    if isinstance(arguments, Tensor):
        return arguments.detach()
    if isinstance(arguments, dict):
        return {key: _detached(value) for key, value in arguments.items()}
    if type(arguments) in (tuple, list):
        return type(arguments)(_detached(value) for value in arguments)
    return arguments


def _remember_source(indices: Tensor, input: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    if dim is None:
        source = input.reshape(-1)
    else:
        source = input.movedim(dim, -1)
        source = source.unsqueeze(dim if dim >= 0 else dim - 1) if keepdim else source
    indices._argmax_of = source  # type: ignore[attr-defined]
    return indices
