"""One call of an operation with a rule: native forward, then the rule's gradient.

A rule that *changes* the operation's own gradients lies between its inputs and their nodes. One that filters
the incoming gradient is called by a hook on the native node; that costs a tenth of an autograd Function in
Python. Every other rule *replaces* the gradient by an autograd Function, and so do filters under
``torch.compile`` and ``torch.func``, where hooks on nodes do not run.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gradpolicy.errors import PolicyError, unknown
from gradpolicy.flow.arguments import arguments_of, in_order_of_parameters
from gradpolicy.flow.autograd_functions import (
    change_own_gradients,
    hand_over,
    insert_rule,
    replace_gradient,
)
from gradpolicy.flow.bound_rule import BoundRule
from gradpolicy.flow.containers import map_tensors, rebuilt_sequence, tensors_in
from gradpolicy.flow.gradient_path import GradientPath, Origin, is_discrete, set_path, start_path
from gradpolicy.flow.operation_tables import OPAQUE_CALLS, Function
from gradpolicy.flow.operations import Operation
from gradpolicy.flow.rule_state import GradientNorms, RuleState
from gradpolicy.flow.sampling import OF_LOGITS, replace_samplers, scores_of_argmax, scores_of_draw
from gradpolicy.flow.tracing import in_transform
from gradpolicy.rules.rectifiers import positive_part
from gradpolicy.rules.registry import Call

# Operations whose result is an index into categories: the scores that it was chosen by.
_SCORES: dict[str, Callable[..., Tensor]] = {
    "argmax_one_hot": scores_of_argmax,
    "categorical": scores_of_draw,
}


class OperationRule:
    """A rule for the calls of one operation.

    Args:
        operation: The operation.
        state: The rule, and whether it is active.
    """

    def __init__(self, operation: Operation, state: RuleState) -> None:
        self.operation = operation
        self.state = state
        self.name = operation.name
        # The numbers of the calls that it is for; none means all. The key is that of the count.
        self.calls = state.calls
        self.key = f"{state.name}: {operation.name}"
        self.functions = operation.functions
        self.decides = operation.decides
        self.bound_rule = BoundRule(state, f"operation {operation.name!r}", sums_broadcast=True)
        self.filters = state.filters and not state.detaches
        # Where one argument is named, a policy that cuts the graph leaves the others as they are.
        self.changes_own = state.rule.own and (not state.detaches or state.argument is not None)
        # The derivative of a ReLU is 0 or 1, so behind its node the positive part can be taken in place.
        self.hooks_behind = operation.name == "relu" and state.rule.gradient_filter is positive_part
        self.hook = (
            _positive_part_in_place(state.norms) if self.hooks_behind else _filter_before(self.bound_rule)
        )

    def __reduce__(self) -> tuple:
        # The rest follows from these two.
        return (OperationRule, (self.operation, self.state))

    def covers(self, function: Function, args: tuple, kwargs: Mapping[str, Any]) -> bool:
        """Return True if the rule is active, and the call is its operation."""
        if not self.state.active:
            return False
        return self.decides is None or self.decides(function, args, kwargs)

    def allows_plain_recomputation(self) -> bool:
        """Return True if a checkpoint may rerun the operation without the rule."""
        keeps_nothing = self.filters or (self.changes_own and not self.bound_rule.reads)
        return keeps_nothing and torch.is_grad_enabled()

    def call(self, function: Function, args: tuple, kwargs: Mapping[str, Any], module: str | None) -> Any:
        """Make the call. Its gradient is the rule's.

        Args:
            function: The torch function.
            args: Its arguments.
            kwargs: Its keyword arguments.
            module: The module in whose forward it runs, for messages.
        """
        spelling = self.operation.spellings[function]
        kwargs = in_order_of_parameters(function, self.name, args, kwargs)
        inputs = spelling.inputs(args, kwargs)
        if self.state.argument is not None:
            inputs = self._named_inputs(function, args, kwargs, inputs)
        if not _need_gradient(inputs):
            self.state.note("without_gradient", self.name)
            return function(*args, **kwargs)
        # An outer override of the same operation must not act on it too.
        with torch._C.DisableTorchFunction():
            if self.changes_own:
                return self._changed(function, args, kwargs, inputs, module)
            if spelling.is_in_place(kwargs):
                return self._in_place(function, args, kwargs, inputs, module)
            if self.name in _SCORES:
                return self._index(function(*args, **kwargs), args, kwargs, module)
            if self.filters:
                return self.filtered(function(*args, **kwargs), inputs)
            args, kwargs = map_tensors(Tensor.detach, (args, dict(kwargs)))
            if self.state.detaches:
                self.state.note("matched", self.name)
                result = function(*args, **kwargs)
                self.state.note_cut(self.name, inputs, result)
                return result
            with torch.no_grad():
                values = function(*args, **kwargs)
            return self.replaced(values, inputs, module, self._bound_to(function, args, kwargs))

    def filtered(self, result: Any, inputs: Sequence[Tensor] = ()) -> Any:
        """Return the result of the native operation, with the rule's filter before its node."""
        if not _has_gradient(result):
            self.state.note("without_gradient", self.name)
            return result
        self.state.note("matched", self.name)
        if (
            not isinstance(result, Tensor)
            or in_transform()
            or result.grad_fn is None
            or result._is_view()
            # The operation returned an input as it was, and the node is another operation's.
            or any(result is tensor for tensor in inputs)
        ):
            return insert_rule(self.bound_rule, result)
        self.hook_on(result.grad_fn)
        return result

    def hook_on(self, node: Any) -> None:
        """Register the rule's filter, with its numbers as they are now, as a hook on a node."""
        hook = _filter_before(self.bound_rule.with_current_numbers()) if self.state.changing else self.hook
        (node.register_hook if self.hooks_behind else node.register_prehook)(hook)

    def _named_inputs(
        self, function: Function, args: tuple, kwargs: Mapping[str, Any], inputs: Sequence[Tensor]
    ) -> list[Tensor]:
        """Return the inputs within the one argument that the policy names.

        Raises:
            PolicyError: If the operation has no such argument, or is given its tensor twice.
        """
        named, wanted = arguments_of(function, self.name, args, kwargs), self.state.argument
        names = list(named)
        key = f"policy {self.state.name!r}: operation {self.name!r}"
        if isinstance(wanted, int) and wanted < len(names):
            wanted = names[wanted]
        if wanted not in named:
            raise unknown("argument", str(wanted), names, key=key)
        chosen = tensors_in(named[wanted])
        found = [tensor for tensor in inputs if any(tensor is one for one in chosen)]
        if len(found) > len(chosen):
            raise PolicyError(f"{key}: argument {wanted!r} and another one are given the same tensor")
        return found

    def _changed(
        self, function: Function, args: tuple, kwargs: Mapping[str, Any], inputs: list, module: str | None
    ) -> Any:
        """Make the native call with inputs that get its gradients as the rule changes them."""
        target = None
        if self.operation.spellings[function].is_in_place(kwargs):
            target, args, kwargs = _target_first(args, kwargs)
            before = target.clone()
            args = (target, *args)
            args, kwargs, inputs = map_tensors(
                lambda tensor: before if tensor is target else tensor, (args, dict(kwargs), list(inputs))
            )
        outputs: list = []
        bound_rule = self.bound_rule
        if bound_rule.takes_call:
            bound_rule = self._bound_to(function, *map_tensors(Tensor.detach, (args, dict(kwargs))))
        if self.state.detaches:
            changed = [tensor.detach() for tensor in inputs]
        else:
            changed = change_own_gradients(bound_rule, inputs, outputs, module)
        left = list(zip(inputs, changed, strict=True))

        def replacement(tensor: Tensor) -> Tensor:
            # In order, so that of a tensor that is given twice each place gets its own gradient.
            for place, (given, found) in enumerate(left):
                if given is tensor:
                    del left[place]
                    return found
            return tensor

        args, kwargs = map_tensors(replacement, (args, dict(kwargs)))
        if target is None:
            result = function(*args, **kwargs)
        else:
            # It writes to a copy, so that the rule gets the values from before.
            result = function(args[0].clone(), *args[1:], **kwargs)
        if result is None:
            raise PolicyError(f"operation {self.name!r} gives no result, and a rule cannot be put on it")
        if self.state.detaches:
            self.state.note("matched", self.name)
            self.state.note_cut(self.name, inputs, result)
        elif not _has_gradient(result):
            self.state.note("without_gradient", self.name)
        else:
            self.state.note("matched", self.name)
            if "output" in bound_rule.reads:
                result = hand_over(outputs, result)
        return result if target is None else target.copy_(result)

    def _in_place(
        self, function: Function, args: tuple, kwargs: Mapping[str, Any], inputs: list, module: str | None
    ) -> Any:
        target, args, kwargs = _target_first(args, kwargs)
        if self.filters and not in_transform() and not target._is_view():
            return self.filtered(function(target, *args, **kwargs))
        # The rule's gradient goes to the values before the call. Then copy_ makes the new values the
        # tensor's own, and autograd takes care of views and leaves.
        before = target.clone()
        if self.filters:
            self.state.note("matched", self.name)
            return target.copy_(insert_rule(self.bound_rule, function(before, *args, **kwargs)))
        args, kwargs = map_tensors(Tensor.detach, (args, kwargs))
        with torch.no_grad():
            values = function(target.clone(), *args, **kwargs)
        if self.state.detaches:
            self.state.note("matched", self.name)
            self.state.note_cut(self.name, inputs)
            return target.copy_(values)
        bound_rule = self._bound_to(function, (before.detach(), *args), kwargs)
        inputs = [before if tensor is target else tensor for tensor in inputs]
        if is_discrete(target):
            return self.replaced(target.copy_(values), inputs, module, bound_rule)
        return target.copy_(self.replaced(values, inputs, module, bound_rule))

    def replaced(
        self, values: Any, inputs: Sequence[Tensor], module: str | None, bound_rule: BoundRule | None = None
    ) -> Any:
        """Values with the rule's gradient. A discrete tensor stays what it is, and gets a gradient path."""
        bound_rule = bound_rule or self.bound_rule
        if is_discrete(values):
            return start_path(bound_rule, self.name, values, inputs, module)
        self.state.note("matched", self.name)
        result = replace_gradient(bound_rule, values, inputs, module)
        if isinstance(result, tuple):
            # The indices of topk and sort: a warning says so where they become numbers.
            lost = GradientPath(None, (Origin(self.state, self.name),), is_index=True)
            # Of an alias the compiler keeps what is set, not of the members of a call's result.
            items = [set_path(item.detach(), lost) if is_discrete(item) else item for item in result]
            return rebuilt_sequence(result, items)
        return result

    def _bound_to(self, function: Function, args: tuple, kwargs: Mapping[str, Any]) -> BoundRule:
        """Return the rule with the call that it is for, if it asks for that; the arguments are detached."""
        if not self.bound_rule.takes_call:
            return self.bound_rule
        return self.bound_rule.for_call(Call(self.name, arguments_of(function, self.name, args, kwargs)))

    def _index(self, index: Tensor, args: tuple, kwargs: Mapping[str, Any], module: str | None) -> Tensor:
        """Return an index into categories; its rule compares one-hot codes with the scores chosen by."""
        if self.state.detaches:
            self.state.note("matched", self.name)
            return index
        scores = _SCORES[self.name](index, *args, **kwargs)
        if self.name == "categorical" and self.state.rule.name in OF_LOGITS:
            scores = scores.clamp_min(torch.finfo(scores.dtype).tiny).log()
        return start_path(self.bound_rule, self.name, index, [scores], module, classes=scores.shape[-1])


class OpaqueCall:
    """Notes calls that run operations of a rule inside torch, where it cannot act on them.

    Args:
        function: The function called.
        hidden: Names of the rule's operations that it may run.
        state: The rule.
    """

    # It is for all calls.
    calls: tuple[int, ...] = ()
    key = ""

    def __init__(self, function: Function, hidden: frozenset[str], state: RuleState) -> None:
        self.name = function.__name__
        self.functions: tuple[Function, ...] = (function,)
        self.reason = f"it runs {', '.join(sorted(hidden))} within torch, with the plain gradient"
        self.state = state

    def covers(self, function: Function, args: tuple, kwargs: Mapping[str, Any]) -> bool:
        """Return True if the rule is active."""
        return self.state.active

    def allows_plain_recomputation(self) -> bool:
        """Return True: a checkpoint may rerun the call, since nothing is changed."""
        return True

    def call(self, function: Function, args: tuple, kwargs: Mapping[str, Any], module: str | None) -> Any:
        """Make the call, and note it if a gradient is recorded."""
        if torch.is_grad_enabled():
            self.state.note_opaque(self.name, self.reason)
        return function(*args, **kwargs)


# What stands in a dispatch table: makes some calls of some torch functions in their place.
TableRule = OperationRule | OpaqueCall

# A draw or an argmax, and its one-hot code.
_OF_SEVERAL_CALLS = frozenset({"argmax_one_hot", "categorical"})


def rules_for(operations: Iterable[Operation], state: RuleState) -> list[TableRule]:
    """Return the entries of a rule in a dispatch table: its operations, and the calls that may hide some.

    Raises:
        PolicyError: If the rule is for some calls of an operation that is made of several.
    """
    operations = list(operations)
    names = {operation.name for operation in operations}
    several = sorted(names & _OF_SEVERAL_CALLS) if state.calls else []
    if several:
        raise PolicyError(
            f"policy {state.name!r}: calls= cannot count operation {several[0]!r}, which may be made of "
            "several calls"
        )
    if names & {"bernoulli", "categorical"}:
        replace_samplers()
    own = {function for operation in operations for function in operation.functions}
    rules = [OperationRule(operation, state) for operation in operations]
    return [
        *rules,
        *(
            OpaqueCall(function, hidden & names, state)
            for function, hidden in OPAQUE_CALLS.items()
            if hidden & names and function not in own
        ),
    ]


def as_floating_point(values: Any, inputs: Sequence[Tensor]) -> Any:
    """Return a single integer or boolean result in the dtype of the first floating-point input.

    Otherwise it could have no gradient. Everything else is returned as it is.
    """
    if not isinstance(values, Tensor) or values.is_floating_point() or values.is_complex():
        return values
    dtype = next((tensor.dtype for tensor in inputs if tensor.is_floating_point()), torch.get_default_dtype())
    return values.to(dtype)


def _target_first(args: tuple, kwargs: Mapping[str, Any]) -> tuple[Tensor, tuple, dict[str, Any]]:
    """Return the tensor that a call in place writes to, and the other arguments."""
    if args:
        return args[0], args[1:], dict(kwargs)
    return kwargs["input"], (), {key: kwargs[key] for key in kwargs if key != "input"}


def _filter_before(bound_rule: BoundRule) -> Callable:
    """Return a rule's gradient filter as a hook before an autograd node."""

    def hook(grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        return tuple(
            None if grad is None else bound_rule.gradients(grad, (grad,), grad, (True,))[0] for grad in grads
        )

    return hook


def _positive_part_in_place(norms: GradientNorms) -> Callable:
    """Guided backpropagation as a hook behind the node of a ReLU.

    ``1[x > 0] · max(grad, 0) = max(1[x > 0] · grad, 0)``, and nobody else has what the node returns yet.
    Taking the positive part in place saves a tensor, and half of the time.
    """

    def hook(grad_inputs: tuple[Tensor | None, ...], grad_outputs: tuple) -> None:
        grad = grad_inputs[0]
        if grad is None:
            return
        with torch._C.DisableTorchFunction():
            if norms.on:
                norms.measure(grad_outputs[0], [torch.relu(grad_outputs[0])])
            grad.relu_()

    return hook


def _need_gradient(inputs: Sequence[Tensor]) -> bool:
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
