"""``gradient_override``: a rule for every call of an operation within a block or function."""

import copy
import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeVar, cast

import torch
from torch.overrides import TorchFunctionMode

from gradpolicy.errors import PolicyError
from gradpolicy.flow.bound_rule import RuleState
from gradpolicy.flow.locations import Locations
from gradpolicy.flow.operation_rule import DispatchMode, DispatchTable, OperationRule, note_taken
from gradpolicy.flow.operations import as_rule, resolve_operation
from gradpolicy.flow.policy_report import Outcome, ReportRow, report_unmet
from gradpolicy.flow.tracing import Function, checkpoints_above, mode_at, mode_count
from gradpolicy.rules.registry import Rule, RuleFunction

AnyFunction = TypeVar("AnyFunction", bound=Callable[..., Any])


def gradient_override(
    overrides: Mapping[str | Function, str | Rule | RuleFunction | Function], *, strict: bool = False
) -> "Block":
    """Override the gradient of operations while a block or function runs; forward values do not change.

    It acts on operations that are *called* in the block, in all spellings; the backward pass may run outside
    of the block. Of nested blocks the innermost with a rule for the operation acts. Under ``torch.compile`` a
    block can be around the compiled function, or decorate a function that is compiled. A function that enters
    a block runs in eager mode.

    At the end of the block a warning names operations that never ran in it, or only where no gradient is
    recorded, together with operations that did run. There is no warning if gradients were disabled around the
    block.

    Args:
        overrides: For each operation (a name or a torch function, see
            :func:`~gradpolicy.flow.operations.resolve_operation`) the replacement of its gradient: a rule's
            name, a :class:`~gradpolicy.rules.Rule`, a function ``(grad, inputs, output)``, or another
            operation, whose derivative at the same inputs is used. A name that is both a rule and an
            operation (``"tanh"``) denotes the rule; ``torch.tanh`` denotes the operation.
        strict: Raise an error instead of giving a warning at the end of the block.

    Returns:
        A context manager, which is also a decorator.

    Raises:
        PolicyError: For an unknown operation or rule, or an operation that is named twice; at the end, if
            ``strict``, for an operation that never ran, or ran where the rule cannot act.

    Example:
        >>> x = torch.tensor([0.2, 1.7], requires_grad=True)
        >>> with gradient_override({"round": "identity", torch.sign: torch.tanh}):
        ...     y = x.round() + torch.sign(x)
        >>> y.sum().backward()
        >>> x.grad
        tensor([1.9610, 1.1250])
    """
    if not isinstance(overrides, Mapping):
        raise PolicyError(f"gradient_override takes a dict of operation: rule, got {overrides!r}")
    if torch.compiler.is_compiling():
        # Without fullgraph, the compiler then runs this in eager mode, where it works.
        raise PolicyError(
            "a gradient_override cannot be made within compiled code: make it before, as a decorator"
        )
    # One row for all operations.
    rules, row = dict[str, OperationRule](), ReportRow(Block.subject)
    for key, value in overrides.items():
        operation = resolve_operation(key)
        if operation.name in rules:
            raise PolicyError(f"gradient_override: operation {operation.name!r} is named twice")
        rules[operation.name] = OperationRule(operation, RuleState(operation.name, as_rule(value), row=row))
    return Block(rules.values(), row, strict=strict)


class Block:
    """The context manager and decorator that :func:`gradient_override` returns.

    Each entry has a mode of its own, so that a block can be nested in itself and entered on several threads.

    Args:
        rules: The rules.
        row: The row in which they count.
        strict: True if an operation that never runs raises an error instead of giving a warning.
    """

    # The name of the block in messages.
    subject = "gradient_override"

    def __init__(self, rules: Iterable[OperationRule], row: ReportRow, *, strict: bool = False) -> None:
        self.table, self.row, self.strict = DispatchTable(list(rules)), row, strict
        self.states = tuple(rule.state for rule in self.table.rules)
        self._has_warned = False

    def __enter__(self) -> "Block":
        entered = checkpoints_above()
        DispatchMode(self.table, self, lambda rule: checkpoints_above() - entered).__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: Any) -> None:
        mode = mode_at(mode_count() - 1)
        mode.__exit__(kind, error, traceback)
        note_taken(self.row.matched)
        # A reentrant checkpoint runs the block again with gradients. Warnings are given then.
        if error is None and mode.checkpoints is not None and torch.is_grad_enabled():
            self.report_unmet()

    def report_unmet(self) -> None:
        """Warn once of operations that never ran, and of lost gradients.

        Raises:
            PolicyError: If the block is strict.
        """
        row, names = self.row, {state.name for state in self.states}
        if self._has_warned or not (names - row.matched.keys() or row.opaque_calls or row.lost):
            return
        row.note_all(Outcome.PLAIN, self.table.names_seen)
        left = {state.name: True for state in self.states if not state.acted_in_compiled_code}
        row = replace(row, name=self.subject, locations=Locations(expected=left))
        self._has_warned = bool(row.unmet()) and not self.strict
        report_unmet(self.subject, row, strict=self.strict)

    def __call__(self, function: AnyFunction) -> AnyFunction:
        """Return a function that runs in the block."""
        block = copy.copy(self)
        block.subject = f"gradient_override of {getattr(function, '__name__', repr(function))!r}"

        # The compiler can only trace modes that exist before.
        traced = DispatchMode(block.table, block)

        @functools.wraps(function)
        def overridden(*args: Any, **kwargs: Any) -> Any:
            with Traced(traced) if torch.compiler.is_compiling() else block:
                return function(*args, **kwargs)

        return cast(AnyFunction, overridden)


class Traced:
    """A mode in compiled code. If there is a graph break in it, all of it runs in eager mode."""

    def __init__(self, mode: DispatchMode) -> None:
        self.mode = mode

    def __enter__(self) -> None:
        TorchFunctionMode.__enter__(self.mode)

    def __exit__(self, *exception: Any) -> None:
        TorchFunctionMode.__exit__(self.mode, *exception)
