"""Checks that what activation checkpointing recomputes has the same rules.

A checkpointed function is recomputed in the backward pass. A rule acts there only if its mode is entered
*within* the function, by a module's forward or a block. If the mode is entered outside of the checkpoint, the
recomputation would have the plain gradient, so the operation raises an error in the forward pass.
"""

import functools
import sys
import traceback
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from gradpolicy.errors import PolicyError
from gradpolicy.flow.bound_rule import RuleState
from gradpolicy.flow.containers import tensors_in
from gradpolicy.flow.tracing import graph_task, hooks_on_saved_tensors, is_traced

# For each rule, whether it is active and the versions of its changing parameters.
Snapshot = tuple[tuple[bool, tuple[int, ...]], ...]

# The module and the name of the function that checkpoints.
CHECKPOINT = (checkpoint.__module__, checkpoint.__qualname__)


def checkpoints_above(entered_by: Callable | None = None) -> int:
    """Return the number of checkpointed functions on the stack.

    Args:
        entered_by: If given, the search ends at the innermost call of this function.
    """
    last = (entered_by.__module__, entered_by.__qualname__) if entered_by is not None else None
    count = 0
    for frame, _ in traceback.walk_stack(sys._getframe(1)):
        running = (frame.f_globals.get("__name__"), frame.f_code.co_qualname)
        if running == last:
            break
        count += running == CHECKPOINT
    return count


def may_be_recomputed() -> bool:
    """Return True if a checkpoint may be running: gradients are disabled, or saved tensors have hooks."""
    if is_traced():
        return False
    return not torch.is_grad_enabled() or hooks_on_saved_tensors(True) is not None


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


class InstallSession:
    """The state of an installation, which checks that rules do not change between forward and backward.

    Activation checkpointing recomputes modules in the backward pass. If policies were installed, removed or
    switched before, the recomputation would use other rules than the forward pass, so this is an error. Rules
    on parameters act when gradients arrive, so for them only a removal is an error.

    Args:
        states: The rules of the installation.
    """

    def __init__(self, states: Iterable[RuleState] = ()) -> None:
        self.states = tuple(states)
        self.is_installed = True
        self.acts_on_parameters = False
        # True while the outermost module runs with gradients, and once any module ran.
        self.in_forward = False
        self.has_run = False
        # True if modules of the current forward pass will be recomputed in the backward pass.
        self._runs_again = False
        # The names of operations on which an inner override or policy acted instead.
        self.taken: set[str] = set()

    def start_forward(self) -> None:
        """Start the forward pass of the outermost module, with gradients.

        Raises:
            PolicyError: If it is a recomputation, and the policies were installed after the forward pass.
        """
        if not self.has_run and graph_task() != -1:
            raise _changed("put on")
        self.has_run = self.in_forward = True
        for state in self.states:
            state.note_forward()

    def note_checkpoint(self) -> None:
        """Record if a checkpoint will recompute the running module in the backward pass.

        A non-reentrant checkpoint, where gradients are enabled, only recomputes saved tensors. Rules that
        read no tensors save none, so a recomputation without them gives the same tensors, or torch raises an
        error for another number of them.
        """
        has_gradients = torch.is_grad_enabled()
        if not self.in_forward and not has_gradients:
            # There may be a reentrant checkpoint around the outermost module.
            self.has_run = True
        elif not self._runs_again:
            reads = any(state.rule.reads and not state.filters for state in self.states)
            self._runs_again = (reads or not has_gradients) and checkpoints_above() > 0

    def end_forward(self, result: Any) -> None:
        """End the forward pass of the outermost module, and check the rules in the backward pass."""
        runs_again, self._runs_again, self.in_forward = self._runs_again, False, False
        if not (runs_again or self.acts_on_parameters):
            return
        check = functools.partial(self._check, self._snapshot() if runs_again else None)
        for tensor in tensors_in(result):
            if tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(check)

    def _snapshot(self) -> Snapshot:
        return tuple(
            (state.active, tuple(state.rule.parameters[key]._version for key in state.changing))
            for state in self.states
        )

    def _check(self, snapshot: Snapshot | None, grads: tuple[torch.Tensor, ...]) -> None:
        if snapshot is None:
            if not self.is_installed:
                raise PolicyError(
                    "the policies were removed between forward and backward, and rules on parameters "
                    "(params=) act when the gradients arrive; remove the policies after the backward pass"
                )
        elif not self.is_installed:
            raise _changed("removed")
        elif snapshot != self._snapshot():
            raise _changed("switched, or their schedules went on,")


def _changed(how: str) -> PolicyError:
    return PolicyError(
        f"the policies were {how} between forward and backward, and modules under activation checkpointing "
        "run again in the backward pass, then with other rules than before; change policies between steps"
    )
