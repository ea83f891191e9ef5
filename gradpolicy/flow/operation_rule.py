"""Calls of operations with a rule, which gives their results its gradient.

There are three kinds of rules. One with ``own`` modifies the operation's own gradients: it becomes a node
between the inputs and the operation. One with a gradient filter becomes a hook on the result, which costs
less than an autograd Function in Python; a node after it where hooks do not run. All others replace the
gradient.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import unserializable_hook

from gradpolicy.errors import PolicyError, unknown
from gradpolicy.flow import carrying, operations, tracing
from gradpolicy.flow.arguments import arguments_of, in_order_of_parameters
from gradpolicy.flow.bound_rule import BoundRule, RuleState
from gradpolicy.flow.containers import map_tensors, tensors_in
from gradpolicy.flow.edges import insert_rule, may_have_gradient, replace, tap
from gradpolicy.flow.operations import SHARED, Operation, name_of, name_of_call
from gradpolicy.flow.policy_report import ACROSS, Outcome
from gradpolicy.flow.tracing import Function, in_transform, is_traced, without_modes


class OperationRule:
    """A rule for the calls of an operation.

    Args:
        operation: The operation.
        state: The rule.
    """

    def __init__(self, operation: Operation, state: RuleState) -> None:
        self.operation, self.state, self.name = operation, state, operation.name
        self.decides = operations.DECIDED_BY_ARGUMENTS.get(operation.name)
        self.derivative = operations.derivative_of(operation).function if state.rule.takes_call else None
        self.bound_rule = BoundRule(state, f"operation {operation.name!r}", sums_broadcast=True)
        # True if the operation itself saves the same tensors with the rule as without it. A checkpoint that
        # records gradients may then recompute it without the rule.
        keeps_backward = state.filters or (state.rule.own and not state.rule.reads)
        self.keeps_nothing = keeps_backward and not state.policy.detaches

    def __reduce__(self) -> tuple:
        # The other attributes are computed from these two.
        return (OperationRule, (self.operation, self.state))

    def covers(self, function: Function, args: tuple, kwargs: Mapping[str, Any]) -> bool:
        """Return True if the rule is active and applies to the call."""
        state = self.state
        if not state.active or (self.decides is not None and not self.decides(function, args, kwargs)):
            return False
        return not state.policy.calls or state.count_call(self.name)

    def call(self, native: "NativeCall") -> Any:
        """Make a call, with the gradient of the rule."""
        native.kwargs = in_order_of_parameters(native.function, self.name, native.args, native.kwargs)
        native.inputs = self.operation.inputs(native.function, native.args, native.kwargs)
        if self.state.policy.argument:
            native.inputs = self._named_inputs(native)
        if not (torch.is_grad_enabled() and any(map(may_have_gradient, native.inputs))):
            self.state.note(self.name, Outcome.WITHOUT_GRADIENT)
            return native.run()
        # An outer override of the same operation must not act on this call too.
        with without_modes():
            is_in_place = self.operation.is_in_place(native.function, native.kwargs)
            result = self._in_place(native) if is_in_place else self._result(native)
            if carrying.path_of(result) is not None:
                outcome = Outcome.DISCRETE
            else:
                acts = self.state.policy.detaches or any(map(may_have_gradient, tensors_in(result)))
                outcome = Outcome.ACTED if acts else Outcome.WITHOUT_GRADIENT
            self.state.note(self.name, outcome)
        return result

    def _in_place(self, native: "NativeCall") -> Any:
        """Make a call that modifies its first argument in place.

        It is computed from a clone of the argument, and ``copy_`` writes the result into the argument, so
        that autograd handles views and leaves.
        """
        if not native.args:
            native.args = (native.kwargs["input"],)
            native.kwargs = {key: native.kwargs[key] for key in native.kwargs if key != "input"}
        target = native.args[0]
        if self.state.filters and not in_transform() and not target._is_view():
            return self._filtered(native.run(), ())
        before = target.clone()
        inputs = [before if tensor is target else tensor for tensor in native.inputs]
        native = native.mapped(lambda tensor: before if tensor is target else tensor)
        native.inputs, native.target = inputs, target
        result = self._result(native)
        return target if result is target else target.copy_(result)

    def _result(self, native: "NativeCall") -> Any:
        """Return the result of a call with the rule's gradient."""
        if self.state.rule.own:
            return self._changed(native)
        if self.name in _SCORES:
            return self._index(native)
        if self.state.filters:
            return self._filtered(native.run(), native.inputs)
        detached, target = native.mapped(Tensor.detach), native.target
        with torch.no_grad():
            values = detached.run()
        if target is not None and carrying.is_discrete(target):
            values = target.copy_(values)
        if carrying.is_discrete(values):
            return carrying.start_path(self._bound_to(native), self.name, values, native.inputs)
        return replace(self._bound_to(native), values, native.inputs)

    def _filtered(self, result: Any, inputs: Sequence[Tensor]) -> Any:
        """Return the result of the native operation with the rule's filter on its gradient."""
        takes_hook = isinstance(result, Tensor) and not in_transform() and not result._is_view()
        # If the operation returned its input, the hook would act on other uses of that too.
        if not takes_hook or any(one is result for one in inputs):
            return insert_rule(self.bound_rule, result)
        if not result.requires_grad:
            return result
        bound_rule = self.bound_rule.with_current_numbers()
        # Saving the result saves its values, without a warning of torch about the hook.
        result.register_hook(
            unserializable_hook(lambda grad: bound_rule.gradients(grad, (grad,), grad, (True,))[0])
        )
        return result

    def _named_inputs(self, native: "NativeCall") -> list[Tensor]:
        """Return the inputs in the arguments that the policy names.

        Raises:
            PolicyError: If the operation has no such argument, or its tensor is also another argument.
        """
        named = arguments_of(native.function, self.name, native.args, native.kwargs)
        names = list(named)
        key = f"policy {self.state.name!r}: operation {self.name!r}"
        chosen: list[Tensor] = []
        for wanted in self.state.policy.argument:
            argument = names[wanted] if isinstance(wanted, int) and wanted < len(names) else wanted
            if argument not in named:
                raise unknown("argument", str(wanted), names, key=key)
            chosen += tensors_in(named[argument])
        found = [tensor for tensor in native.inputs if any(tensor is one for one in chosen)]
        if len(found) > len(chosen):
            listed = " or ".join(map(repr, self.state.policy.argument))
            raise PolicyError(f"{key}: argument {listed} and another one are given the same tensor")
        return found

    def _changed(self, native: "NativeCall") -> Any:
        """Make the native call, with its own gradients modified by the rule."""
        outputs: list = []
        bound_rule = self._bound_to(native)
        left = list(zip(native.inputs, tap(bound_rule, native.inputs, outputs), strict=True))

        def replacement(tensor: Tensor) -> Tensor:
            # In order, since a tensor that is passed twice has a gradient for each argument.
            for position, (given, found) in enumerate(left):
                if given is tensor:
                    del left[position]
                    return found
            return tensor

        result = native.mapped(replacement).run()
        if result is None:
            raise PolicyError(f"operation {self.name!r} gives no result, and a rule cannot be put on it")
        if "output" in bound_rule.reads:
            outputs += [map_tensors(Tensor.detach, result), result._version]
        return result

    def _bound_to(self, native: "NativeCall") -> BoundRule:
        """Return the rule with the module's name in its location, and with the call if it needs that."""
        bound_rule = self.bound_rule.in_module(native.module)
        if not self.state.rule.takes_call:
            return bound_rule
        args, kwargs = map_tensors(Tensor.detach, (native.args, dict(native.kwargs)))
        arguments = arguments_of(native.function, self.name, args, kwargs)
        return bound_rule.for_call(self.name, arguments, self.derivative)

    def _index(self, native: "NativeCall") -> Tensor:
        """Return an index into categories. Its rule gets the one-hot code, and the scores as the input."""
        index: Tensor = native.run()
        scores = _SCORES[self.name](index, *native.args, **native.kwargs)
        if self.name == "categorical" and self.state.rule.name in OF_LOGITS:
            scores = scores.clamp_min(torch.finfo(scores.dtype).tiny).log()
        if self.name == "argmin_one_hot" and self.state.rule.name in OF_LOGITS:
            scores = -scores
        bound_rule = self._bound_to(native)
        return carrying.start_path(bound_rule, self.name, index, [scores], classes=scores.shape[-1])


@dataclass(eq=False)
class NativeCall:
    """A call of a torch function.

    Args:
        function: The function.
        args: Its arguments.
        kwargs: Its keyword arguments.
        module: The name of the running module, for messages.
        others: Other rules for the call, on other arguments.
        inputs: The tensors among its arguments to which the rule applies.
        target: The tensor that an in-place call modifies, if the first argument is a clone of it.
    """

    function: Function
    args: tuple
    kwargs: Mapping[str, Any]
    module: str | None
    others: Sequence["OperationRule"] = ()
    inputs: list[Tensor] = field(default_factory=list)
    target: Tensor | None = None

    def run(self) -> Any:
        """Call the function; an in-place function on a clone of its first argument."""
        args = self.args if self.target is None else (self.args[0].clone(), *self.args[1:])
        if not self.others:
            return self.function(*args, **self.kwargs)
        first, *others = self.others
        return first.call(NativeCall(self.function, args, self.kwargs, self.module, others))

    def mapped(self, change: Callable[[Tensor], Tensor]) -> "NativeCall":
        """Return the call with each tensor of its arguments replaced."""
        args, kwargs = map_tensors(change, (self.args, dict(self.kwargs)))
        return dataclasses.replace(self, args=args, kwargs=kwargs)


# Rules that take logits where the operation takes probabilities.
OF_LOGITS = ("gumbel", "reinmax")


def _scores_of_argmax(result: Tensor, input: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    """Return the scores of an argmax or argmin in the shape of its one-hot code, with the categories last."""
    if dim is None:
        return input.reshape(*result.shape, -1)
    scores = input.movedim(dim, -1)
    return scores.unsqueeze(dim if dim >= 0 else dim - 1) if keepdim else scores


def _scores_of_draw(result: Tensor, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Return the probabilities of a ``torch.multinomial`` in the shape of its one-hot code."""
    probabilities = input / input.sum(-1, keepdim=True)
    return probabilities.unsqueeze(-2).expand(*result.shape, -1)


# The scores of operations whose result is an index into categories.
_SCORES: dict[str, Callable[..., Tensor]] = {
    "argmax_one_hot": _scores_of_argmax,
    "argmin_one_hot": _scores_of_argmax,
    "categorical": _scores_of_draw,
}


_ATTENTION = frozenset({"softmax", "dropout", "matmul", "bmm", "scaled_dot_product_attention"})
# Control flow, whose branches and bodies torch traces without modes.
_CONTROL_FLOW = (
    *("associative_scan", "cond", "flex_attention", "foreach_map", "map_impl", "scan", "while_loop"),
)
_TRACED = [getattr(torch.ops.higher_order, name, None) for name in _CONTROL_FLOW]

# Functions that run these operations inside torch, where modes do not get the calls; None: any operation.
OPAQUE_CALLS: dict[Function, frozenset[str] | None] = {
    F.gaussian_nll_loss: frozenset({"log"}),
    F.gumbel_softmax: frozenset({"log", "softmax", "argmax_one_hot"}),
    F.multi_head_attention_forward: _ATTENTION | {"linear", "baddbmm"},
    F.scaled_dot_product_attention: _ATTENTION,
    **dict.fromkeys((F.batch_norm, F.group_norm, F.instance_norm), frozenset({"rsqrt"})),
    **dict.fromkeys((torch.std_mean, torch.batch_norm, torch.group_norm), frozenset({"rsqrt", "std"})),
    F.softmin: frozenset({"softmax"}),
    F.tanhshrink: frozenset({"tanh"}),
    **dict.fromkeys((F.l1_loss, F.softsign), frozenset({"abs"})),
    **dict.fromkeys((F.lp_pool1d, F.lp_pool2d, F.lp_pool3d), frozenset({"relu", "sign", "abs"})),
    **dict.fromkeys((torch.gru, torch.gru_cell, torch.lstm, torch.lstm_cell), frozenset({"sigmoid", "tanh"})),
    **dict.fromkeys((torch.rnn_relu, torch.rnn_relu_cell), frozenset({"relu"})),
    **dict.fromkeys((torch.rnn_tanh, torch.rnn_tanh_cell), frozenset({"tanh"})),
    # Torch 2.11 does not have it.
    **({F.linear_cross_entropy: frozenset({"linear"})} if hasattr(F, "linear_cross_entropy") else {}),
    **{function: None for function in _TRACED if function is not None},
}


class DispatchTable:
    """A table of rules by torch function.

    Args:
        rules: The rules. Of those that cover a call the first acts last in the backward pass.
    """

    def __init__(self, rules: Sequence[OperationRule]) -> None:
        self.rules = tuple(rules)
        self.by_function: dict[Function, tuple[OperationRule, ...]] = {}
        for rule in self.rules:
            for function in rule.operation.functions:
                self.by_function[function] = (*self.by_function.get(function, ()), rule)
        # A rule on clamp has clamp(min=0), which is relu for others.
        for function in SHARED.keys() & self.by_function:
            rules = self.by_function[function]
            self.by_function[function] = tuple(one for one in rules if one.decides is None) or rules
        # What hides nothing here, the compiler may trace into; control flow it knows.
        names = {rule.name for rule in self.rules}
        hiding = [function for function, within in OPAQUE_CALLS.items() if within and within & names]
        tracing.show_to_compiler([*self.by_function, *hiding])
        # The functions or operations that were called without a rule, for reports.
        self.seen: set[Function | str] = set()

    @property
    def names_seen(self) -> set[str]:
        """The names of the operations that were called without a rule."""
        return {each if isinstance(each, str) else name_of(each) for each in self.seen}

    @tracing.runs_while_tracing
    def note_hidden(self, function: Function) -> None:
        """Record the active rules on operations that a function runs within torch."""
        if function not in OPAQUE_CALLS:
            return
        within, hidden = OPAQUE_CALLS[function], dict[RuleState, list[str]]()
        acting = {rule.state for rule in self.by_function.get(function, ())}
        for rule in self.rules:
            if rule.state.active and rule.state not in acting and (within is None or rule.name in within):
                hidden.setdefault(rule.state, []).append(rule.name)
        for state, names in hidden.items():
            runs = f"it {'may run' if within is None else 'runs'} {', '.join(sorted(names))}"
            reason = f"{runs} within torch, with the plain gradient; {ACROSS}"
            state.row.note_opaque(function.__name__.removesuffix("_impl"), reason)

    def __reduce__(self) -> tuple:
        # Some torch functions cannot be pickled; the rules can.
        return (DispatchTable, (self.rules,))


class DispatchMode(TorchFunctionMode):
    """A mode that passes calls of torch functions to the rules of a table.

    Args:
        table: The table. In an installation it depends on the running module.
        owner: The block or session of an installation, with the ``states`` of all its rules.
        checkpoints: Returns how many checkpointed functions were entered since the policy of a rule; None in
            compiled code. The attribute is None, too, if no backward pass will follow.
    """

    def __init__(
        self, table: DispatchTable, owner: Any, checkpoints: Callable[[OperationRule], int] | None = None
    ) -> None:
        super().__init__()
        self.table, self.owner = table, owner
        self.checkpoints = checkpoints if tracing.has_graph() else None
        # The name of the running module, for messages.
        self.module: str | None = None

    @tracing.eager_if_unknown
    def __torch_function__(
        self, func: Function, types: Iterable[type], args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Call a function, by a rule if one covers the call, and propagate gradient paths."""
        kwargs = kwargs or {}
        if is_traced():
            func = tracing.as_in_tables(func)
        # In compiled code the search is free.
        if (is_traced() or carrying.GradientPath.exists) and (paths := carrying.paths_in(args, kwargs)):
            return carrying.carry(self._call, func, args, kwargs, paths)
        return self._call(func, args, kwargs)

    def _call(self, func: Function, args: tuple, kwargs: Mapping[str, Any]) -> Any:
        table = self.table
        if (is_traced() or func in OPAQUE_CALLS) and torch.is_grad_enabled():
            table.note_hidden(func)
        rules = table.by_function.get(func)
        # All rules are checked, since those with `calls=` count.
        covering = [rule for rule in rules if rule.covers(func, args, kwargs)] if rules else ()
        if covering:
            for rule in covering:
                is_free = rule.keeps_nothing and torch.is_grad_enabled()
                if not is_free and tracing.may_be_recomputed():
                    self._check_callers(rule)
                if not is_traced() and self.module is not None:
                    rule.state.row.ran_in.add(self.module)
            return covering[0].call(NativeCall(func, args, kwargs, self.module, covering[1:]))
        if not is_traced():
            table.seen.add(name_of_call(func, args, kwargs) if func in SHARED else func)
        return func(*args, **kwargs)

    def _check_callers(self, rule: OperationRule) -> None:
        """Check what calls an operation that may be recomputed, or whose gradient another function makes.

        Raises:
            PolicyError: If it runs in a checkpointed function that its policy is outside of.
        """
        if self.checkpoints is None:
            return
        if self.checkpoints(rule) > 0:
            raise PolicyError(
                f"operation {rule.name!r} runs in a checkpointed function, and its policy was entered "
                "outside of that: in the backward pass the operation would run again without the policy. "
                "Checkpoint a module that the policy matches (its forward enters the policy again), or enter "
                "gradient_override within the function"
            )
        if not torch.is_grad_enabled() and (forward := tracing.custom_forward_above()):
            reason = f"it runs {rule.name}, and makes the gradient in its own backward; {ACROSS}"
            rule.state.row.note_opaque(f"the autograd.Function of {forward}", reason)


tracing.skip_alone(DispatchMode.__torch_function__)


def note_taken(operations: Iterable[str]) -> None:
    """Record for the rules of the active modes the operations on which an inner mode acted instead."""
    names = set(operations)
    for state in [state for mode in tracing.active_modes() for state in mode.owner.states]:
        state.row.note_all(Outcome.TAKEN, names)
