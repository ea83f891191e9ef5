"""The ``TorchFunctionMode`` that applies rules to calls of torch functions.

A checkpointed function is recomputed in the backward pass. A rule acts there only if its mode is entered
*within* the function, by a module's forward or a block. If the mode is entered outside of the checkpoint, the
recomputation would have the plain gradient, so the operation raises an error in the forward pass.
"""

import inspect
import sys
from collections.abc import Iterable, Mapping, Sequence
from types import CodeType, FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from gradpolicy.errors import PolicyError
from gradpolicy.flow.carrying import any_path, carry, paths_in
from gradpolicy.flow.operation_rule import OpaqueCall, TableRule
from gradpolicy.flow.operation_tables import Function
from gradpolicy.flow.tracing import active_modes, as_in_tables, is_traced, show_to_compiler, skip_alone

# A local name saves the attribute lookup at every call.
_hooks_on_saved_tensors = torch._C._autograd._top_saved_tensors_default_hooks
_CHECKPOINT: CodeType = inspect.unwrap(checkpoint).__code__


class DispatchTable:
    """A table of rules by torch function.

    Args:
        rules: The rules. The first that covers a call makes the call; opaque calls come last.
    """

    def __init__(self, rules: Sequence[TableRule]) -> None:
        self.rules = tuple(sorted(rules, key=lambda rule: isinstance(rule, OpaqueCall)))
        self.by_function: dict[Function, tuple[TableRule, ...]] = {}
        for rule in self.rules:
            for function in rule.functions:
                self.by_function[function] = (*self.by_function.get(function, ()), rule)
        show_to_compiler(self.by_function)
        # The functions that were called without a rule, for reports.
        self.seen: set[Function] = set()

    def __reduce__(self) -> tuple:
        # Some torch functions cannot be pickled; the rules can.
        return (DispatchTable, (self.rules,))


class DispatchMode(TorchFunctionMode):
    """A mode that passes calls of torch functions to the rules of a table.

    Args:
        table: The table. In an installation it depends on the running module.
        taken: A set to which the names of operations with a rule in an inner mode are added.
    """

    def __init__(self, table: DispatchTable, taken: set[str]) -> None:
        super().__init__()
        self.table = table
        self.taken = taken
        # The name of the running module, for messages.
        self.module: str | None = None

    def check_recomputation(self, rule: TableRule) -> None:
        """Raise an error if a checkpoint would recompute an operation outside of this mode."""

    def __torch_function__(
        self, func: Function, types: Iterable[type], args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Call a function, by a rule if one covers the call, and propagate gradient paths."""
        kwargs = kwargs or {}
        if is_traced():
            func = as_in_tables(func)
        # In compiled code the search is free.
        if (is_traced() or any_path[0]) and (paths := paths_in(args, kwargs)):
            return carry(self._call, func, args, kwargs, paths)
        return self._call(func, args, kwargs)

    def _call(self, func: Function, args: tuple, kwargs: Mapping[str, Any]) -> Any:
        table = self.table
        rules = table.by_function.get(func)
        # All rules are checked, since those with `calls=` count.
        covering = [rule for rule in rules if rule.covers(func, args, kwargs)] if rules else ()
        if covering:
            rule = covering[0]
            if not rule.allows_plain_recomputation() and may_be_recomputed():
                self.check_recomputation(rule)
            return rule.call(func, args, kwargs, self.module)
        if not is_traced():
            table.seen.add(func)
        return func(*args, **kwargs)


skip_alone(DispatchMode.__torch_function__)


def note_taken(operations: Iterable[str]) -> None:
    """Record in the active modes the operations on which an inner mode acted."""
    for mode in active_modes():
        mode.taken.update(operations)


def checkpoints_above(entered_by: CodeType | None = None) -> int:
    """Return the number of checkpointed functions on the stack.

    Args:
        entered_by: If given, the search ends at the innermost frame of this code.
    """
    frame: FrameType | None = sys._getframe(1)
    count = 0
    while frame is not None and frame.f_code is not entered_by:
        count += frame.f_code is _CHECKPOINT
        frame = frame.f_back
    return count


def may_be_recomputed() -> bool:
    """Return True if a checkpoint may be running: gradients are disabled, or saved tensors have hooks."""
    if is_traced():
        return False
    return not torch.is_grad_enabled() or _hooks_on_saved_tensors(True) is not None


def has_graph() -> bool:
    """Return True if a backward pass may follow: gradients are enabled, or a checkpoint disabled them."""
    return torch.is_grad_enabled() or (not is_traced() and checkpoints_above() > 0)


def refusal(operation: str) -> PolicyError:
    """Return the error for an operation that would be recomputed outside of its policy."""
    return PolicyError(
        f"operation {operation!r} runs in a checkpointed function, and its policy was entered outside of "
        "that: in the backward pass the operation would run again without the policy. Checkpoint a module "
        "that the policy matches (its forward enters the policy again), or enter gradient_override within "
        "the function"
    )
