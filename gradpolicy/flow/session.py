"""The state that wrapped modules and parameters of one installation share."""

import functools
import itertools
from collections.abc import Iterable
from typing import Any

import torch

from gradpolicy.errors import PolicyError
from gradpolicy.flow.containers import tensors_in
from gradpolicy.flow.dispatch import checkpoints_above
from gradpolicy.flow.rule_state import CallScope, RuleState
from gradpolicy.flow.tracing import in_transform

# Whether each rule is active, and the versions of its changing numbers.
Snapshot = tuple[tuple[bool, tuple[int, ...]], ...]


class InstallSession:
    """One installation, and whether its rules are in backward as they were in forward.

    Activation checkpointing runs modules again in the backward pass. If policies were installed, removed or
    switched meanwhile, that run would silently follow other rules than the first, so the backward pass is
    refused. Rules on parameters act when gradients arrive, so for them a removal alone is refused.

    Args:
        states: The rules of the installation.
    """

    def __init__(self, states: Iterable[RuleState] = ()) -> None:
        self.states = tuple(states)
        # Counts the calls of modules within the outermost forward.
        self.scope = CallScope("the outermost forward", ())
        self.is_installed = True
        self.acts_on_parameters = False
        # Whether the outermost module runs with gradients now, and whether any module ever ran.
        self.in_forward = False
        self.has_run = False
        # Whether modules of the running forward pass will run again in its backward pass.
        self._runs_again = False
        # Names of operations that an inner override or policy took.
        self.taken: set[str] = set()
        # The modules that ran with rules on operations inside, but in compiled code.
        self.entered: set[str] = set()
        self._activity = autograd_activity()

    def matched_operations(self) -> set[str]:
        """Return the names of all operations that a rule of the installation was put on."""
        return {name for state in self.states for name in state.seen.matched}

    def autograd_worked(self) -> bool:
        """Return True if autograd has done anything on this thread since the installation."""
        return autograd_activity() != self._activity

    def ran_backward(self) -> bool:
        """Return True if a backward pass has run since the installation."""
        return autograd_activity()[1] != self._activity[1]

    def begin_forward(self) -> None:
        """Note that the outermost module starts to run with gradients.

        Raises:
            PolicyError: If it runs for a backward pass whose forward pass ran before the installation.
        """
        if not self.has_run and torch._C._current_graph_task_id() != -1:
            raise _changed("put on")
        self.has_run = self.in_forward = True
        for state in self.states:
            state.note_forward()

    def note_run_without_gradients(self) -> None:
        """Note in a module that runs without gradients whether a reentrant checkpoint will run it again."""
        if not self.in_forward:
            # A reentrant checkpoint may stand around the outermost module.
            self.has_run = True
        elif not self._runs_again:
            self._runs_again = checkpoints_above() > 0

    def note_saved_tensor_hooks(self) -> None:
        """Note in a module that runs with gradients whether a non-reentrant checkpoint will run it again.

        That second run only restores saved tensors. Rules that read nothing save none, so a second run
        without them gives the same, or torch finds another number of tensors and says so.
        """
        if not self._runs_again:
            reads = any(state.rule.reads and not state.filters for state in self.states)
            self._runs_again = reads and checkpoints_above() > 0

    def end_forward(self, result: Any) -> None:
        """Note that the outermost module has run; the backward pass of its result checks the rules."""
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


# How often the function below looked: each time it makes a node and runs a backward pass itself.
_looks = itertools.count(1)


def autograd_activity() -> tuple[int, int]:
    """Return how many nodes autograd has made on this thread, and how many backward passes it has begun.

    Torch gives the latter within a backward pass only, so this runs a small one.
    """
    if in_transform():
        return 0, 0
    nodes, passes = torch._C._autograd._get_sequence_nr(), [0]
    with torch._C.DisableTorchFunction(), torch.inference_mode(False), torch.enable_grad():
        tensor = torch.zeros((), device="cpu", requires_grad=True)
        probe = tensor.neg()
        probe.register_hook(lambda _: passes.append(torch._C._current_graph_task_id()))
        torch.autograd.grad(probe, tensor)
    look = next(_looks)
    return nodes - look, passes[-1] - look


def _changed(how: str) -> PolicyError:
    return PolicyError(
        f"the policies were {how} between forward and backward, and modules under activation checkpointing "
        "run again in the backward pass, then with other rules than before; change policies between steps"
    )
