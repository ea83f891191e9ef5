"""Operation override: a rule for every call of an operation within a block."""

from collections.abc import Iterable, Mapping
from contextlib import ContextDecorator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from gradpolicy.errors import PolicyError, unknown
from gradpolicy.flow.binding import Binding
from gradpolicy.flow.calls import OperationRule
from gradpolicy.flow.operations import (
    Function,
    Operation,
    is_operation,
    operation_names,
    resolve_operation,
)
from gradpolicy.flow.recomputation import checkpoints_above, has_graph, may_be_recomputed, refusal
from gradpolicy.flow.unseen import UnseenCall, unseen_calls
from gradpolicy.rules.registry import Rule, RuleFunction, get_rule, rule_names

CallRule = OperationRule | UnseenCall
Table = dict[Function, tuple[CallRule, ...]]


class OperationMode(TorchFunctionMode):
    """Sees every torch function, and puts the rules of a table on those that it names."""

    def __init__(self, table: Table) -> None:
        super().__init__()
        self.table = table

    def check_recomputation(self, operation: str) -> None:
        """Refuses an operation that a checkpoint would run again outside of this mode."""

    def missed(self, function: Function) -> None:
        """Is told of a function that no rule was for."""

    def __torch_function__(
        self, func: Function, types: Iterable[type], args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Does the call, with the first rule that is for it and holds now."""
        kwargs = kwargs or {}
        for operation_rule in self.table.get(func, ()):
            if operation_rule.covers(func, args, kwargs):
                if may_be_recomputed() and not operation_rule.keeps_what_plain_keeps():
                    self.check_recomputation(operation_rule.name)
                return operation_rule.call(func, args, kwargs)
        if not torch.compiler.is_compiling():
            self.missed(func)
        return func(*args, **kwargs)


class BlockMode(OperationMode):
    """The mode of a block: knows whether checkpoints began around it or within."""

    def __init__(self, table: Table) -> None:
        super().__init__(table)
        self.checkpoints = 0 if torch.compiler.is_compiling() else checkpoints_above()
        self.has_graph = has_graph()

    def check_recomputation(self, operation: str) -> None:
        """Refuses an operation that a checkpoint would run again outside of this block."""
        if self.has_graph and checkpoints_above() > self.checkpoints:
            raise refusal(operation)


class gradient_override(ContextDecorator):  # noqa: N801 - a context manager and decorator, named as one
    """Gives operations another gradient while a block or function runs; forward values stay as they are.

    It holds for operations *created* in the block, whatever their spelling, wherever backward runs. Blocks
    nest: the inner one wins, and what it does not name falls to the outer.

    Args:
        overrides: For each operation (a name or a torch function, see
            :func:`~gradpolicy.flow.operations.resolve_operation`) what takes the place of its gradient: a
            rule's name, a :class:`~gradpolicy.rules.Rule`, a function ``(grad, inputs, output)``, or another
            operation, whose derivative at the same inputs is used. A name that is both a rule and an
            operation (``"tanh"``) means the rule; ``torch.tanh`` means the operation.

    Raises:
        PolicyError: For an unknown operation or rule, or one operation named twice.

    Example:
        >>> x = torch.tensor([0.2, 1.7], requires_grad=True)
        >>> with gradient_override({"round": "identity", torch.sign: torch.tanh}):
        ...     y = x.round() + torch.sign(x)
        >>> y.sum().backward()
        >>> x.grad
        tensor([1.9610, 1.1250])
    """

    def __init__(self, overrides: Mapping[str | Function, str | Rule | RuleFunction | Function]) -> None:
        if torch.compiler.is_compiling():
            # Without fullgraph the compiler then leaves the block to eager mode, where it holds.
            raise PolicyError(
                "a gradient_override block cannot be made within compiled code: call the compiled function "
                "within the block, or install policies on the model"
            )
        self._table = _table_of(overrides)
        self._entered: list[OperationMode] = []

    def __enter__(self) -> "gradient_override":
        mode = BlockMode(self._table)
        mode.__enter__()
        self._entered.append(mode)
        return self

    def __exit__(self, *exception: Any) -> None:
        self._entered.pop().__exit__(*exception)


def _table_of(overrides: Mapping) -> Table:
    if not isinstance(overrides, Mapping):
        raise PolicyError(f"gradient_override takes a dict of operation: rule, got {overrides!r}")
    pairs: list[tuple[Operation, Binding]] = []
    for key, value in overrides.items():
        operation = resolve_operation(key)
        if any(operation.name == known.name for known, _ in pairs):
            raise PolicyError(f"gradient_override: operation {operation.name!r} is named twice")
        pairs.append((operation, Binding(operation.name, as_rule(value))))
    rules: list[CallRule] = [OperationRule(operation, binding) for operation, binding in pairs]
    for operation, binding in pairs:
        rules += unseen_calls([operation], binding)
    return make_table(rules)


def make_table(rules: Iterable[CallRule]) -> Table:
    """Sorts rules under every function that their operations arrive as, in order."""
    table: Table = {}
    for operation_rule in rules:
        for function in operation_rule.functions:
            table[function] = (*table.get(function, ()), operation_rule)
    return table


def as_rule(specification: str | Rule | RuleFunction | Function) -> Rule:
    """The rule that a name, a rule, a function, or another operation means.

    Raises:
        PolicyError: If it is none of them.
    """
    if isinstance(specification, Rule):
        rule = specification
    elif isinstance(specification, str) and specification not in rule_names() and "." not in specification:
        if not is_operation(specification):
            raise unknown("rule or operation", specification, {*rule_names(), *operation_names()})
        rule = derivative_of(resolve_operation(specification))
    elif callable(specification) and is_operation(specification):
        rule = derivative_of(resolve_operation(specification))
    else:
        rule = get_rule(specification)
    missing = rule.missing_parameters()
    if missing:
        raise PolicyError(
            f"rule {rule.name!r} needs a value for {', '.join(missing)}: "
            f"get_rule({rule.name!r}, {missing[0]}=…)"
        )
    return rule


def derivative_of(operation: Operation) -> Rule:
    """The rule that is another operation's own gradient at the same inputs."""
    return Rule(f"derivative of {operation.name}", OwnDerivative(operation), reads=("inputs",))


class OwnDerivative:
    """``grad · f'(inputs)`` of an operation f; one that takes fewer tensors is given the first ones."""

    def __init__(self, operation: Operation) -> None:
        self.operation = operation

    def __call__(self, grad: Tensor, inputs: tuple[Tensor, ...], output: Tensor) -> tuple:
        """The gradients of the operation's inputs."""
        function = self.operation.functional
        taken = self._accepted(inputs)
        pulled: Any = torch.func.vjp(function, *inputs[:taken])
        value, pull_back = pulled
        if value.shape != grad.shape:
            raise PolicyError(
                f"operation {self.operation.name!r} gives shape {tuple(value.shape)} at the inputs of an "
                f"operation that gives {tuple(grad.shape)}: its gradient cannot be used there"
            )
        return (*pull_back(grad.to(value.dtype)), *[None] * (len(inputs) - taken))

    def _accepted(self, inputs: tuple[Tensor, ...]) -> int:
        if len(inputs) == 1:
            return 1
        meta = [torch.empty_like(tensor, device="meta") for tensor in inputs]
        for count in range(len(inputs), 0, -1):
            try:
                self.operation.functional(*meta[:count])
            except (TypeError, RuntimeError):
                continue
            return count
        raise PolicyError(
            f"operation {self.operation.name!r} takes none of the inputs {[tuple(t.shape) for t in inputs]}"
        )
