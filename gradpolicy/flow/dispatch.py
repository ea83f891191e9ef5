"""The mode that looks up the rule of each torch function that is called.

A checkpointed function runs a second time in the backward pass. A rule acts there if its mode was entered
*within* the function: by a module's forward, or by a block inside. If the mode was entered only around the
checkpoint, the second run would have the plain gradient. Such operations are refused in the forward pass.
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
from gradpolicy.flow.carrying import carry, has_paths, paths_in
from gradpolicy.flow.operation_rule import OpaqueCall, TableRule
from gradpolicy.flow.operation_tables import Function
from gradpolicy.flow.tracing import active_modes, as_in_tables, is_compiling, show_to_compiler, skip_alone

# Local names: the attribute look-up takes time at every layer.
_is_traced = torch.compiler.is_dynamo_compiling
_hooks_on_saved_tensors = torch._C._autograd._top_saved_tensors_default_hooks
_CHECKPOINT: CodeType = inspect.unwrap(checkpoint).__code__


class DispatchTable:
    """Rules by the torch functions under which their operations arrive.

    Args:
        rules: The rules. The first that covers a call makes it; opaque calls come last.
    """

    def __init__(self, rules: Sequence[TableRule]) -> None:
        self.rules = tuple(sorted(rules, key=lambda rule: isinstance(rule, OpaqueCall)))
        self.by_function: dict[Function, tuple[TableRule, ...]] = {}
        for rule in self.rules:
            for function in rule.functions:
                self.by_function[function] = (*self.by_function.get(function, ()), rule)
        show_to_compiler(self.by_function)
        # The functions that ran without a rule, for reports.
        self.seen: set[Function] = set()

    def __reduce__(self) -> tuple:
        # Some torch functions cannot be pickled; the rules can.
        return (DispatchTable, (self.rules,))


class DispatchMode(TorchFunctionMode):
    """A mode that has the rules of a table make the calls of torch functions that they cover.

    Args:
        table: The table. An installation changes it from module to module.
        taken: Collects the names of operations that an inner mode took.
    """

    def __init__(self, table: DispatchTable, taken: set[str]) -> None:
        super().__init__()
        self.table = table
        self.taken = taken
        # The module in whose forward the calls are made, for messages.
        self.module: str | None = None

    def check_recomputation(self, rule: TableRule) -> None:
        """Refuse an operation that a checkpoint would run again outside of this mode."""

    def __torch_function__(
        self, func: Function, types: Iterable[type], args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Make the call by the first rule that covers it; paths of discrete arguments follow."""
        kwargs = kwargs or {}
        if _is_traced():
            func = as_in_tables(func)
        if has_paths() and (paths := paths_in(args, kwargs)):
            return carry(self._call, func, args, kwargs, paths)
        return self._call(func, args, kwargs)

    def _call(self, func: Function, args: tuple, kwargs: Mapping[str, Any]) -> Any:
        table = self.table
        rules = table.by_function.get(func)
        # All of them are asked, since those for some calls only count.
        covering = [rule for rule in rules if rule.covers(func, args, kwargs)] if rules else ()
        if covering:
            rule = covering[0]
            if not rule.allows_plain_recomputation() and may_be_recomputed():
                self.check_recomputation(rule)
            return rule.call(func, args, kwargs, self.module)
        if not _is_traced():
            table.seen.add(func)
        return func(*args, **kwargs)


skip_alone(DispatchMode.__torch_function__)


def note_taken(operations: Iterable[str]) -> None:
    """Note at the modes around the caller the operations that an inner mode took."""
    for mode in active_modes():
        mode.taken.update(operations)


def checkpoints_above(entered_by: CodeType | None = None) -> int:
    """Count the checkpointed functions that the caller runs in.

    Args:
        entered_by: If given, the count ends at the nearest frame of this code.
    """
    frame: FrameType | None = sys._getframe(1)
    count = 0
    while frame is not None and frame.f_code is not entered_by:
        count += frame.f_code is _CHECKPOINT
        frame = frame.f_back
    return count


def may_be_recomputed() -> bool:
    """Return True if a checkpoint may be running: gradients are off, or saved tensors have hooks."""
    if is_compiling():
        return False
    return not torch.is_grad_enabled() or _hooks_on_saved_tensors(True) is not None


def has_graph() -> bool:
    """Return True if a backward pass may follow: gradients are on, or off only because a checkpoint runs."""
    return torch.is_grad_enabled() or (not is_compiling() and checkpoints_above() > 0)


def refusal(operation: str) -> PolicyError:
    """Return the error for an operation that would be recomputed outside its policy."""
    return PolicyError(
        f"operation {operation!r} runs in a checkpointed function, and its policy was entered outside of "
        "that: in the backward pass the operation would run again without the policy. Checkpoint a module "
        "that the policy matches (its forward enters the policy again), or enter gradient_override within "
        "the function"
    )
