"""What the wrapped modules of one installation share."""

import functools
from collections.abc import Iterable
from typing import Any

import torch

from gradpolicy.errors import PolicyError
from gradpolicy.flow.bound_rule import Binding
from gradpolicy.flow.checkpointing import checkpoints_above
from gradpolicy.flow.containers import tensors_in

State = tuple[tuple[bool, tuple[int, ...]], ...]


class Owner:
    """Tells one installation from another, and whether it is as it was when modules run again.

    Checkpointing runs modules a second time in the backward pass. If policies were put on, taken off or
    switched meanwhile, that run would silently follow other rules than the first: then the backward pass is
    refused. So it is after a removal where rules act on parameters, since these act when gradients arrive.

    Args:
        bindings: The rules of the installation.
    """

    def __init__(self, bindings: Iterable[Binding] = ()) -> None:
        self.bindings = tuple(bindings)
        self.installed = True
        self.acts_on_parameters = False
        self.builds_graph = False
        self.has_run = False
        self._runs_again = False
        self._keeps_other_tensors = False
        # Operations that an override or policy further in took.
        self.taken: set[str] = set()

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys of the bindings, by which they are known while the compiler traces."""
        return tuple([binding.key for binding in self.bindings])

    def operations_met(self) -> set[str]:
        """The names of all operations that a rule of the installation was put on."""
        return {name for binding in self.bindings for name in binding.counts()}

    def begin(self) -> None:
        """At the start of the outermost module that builds a graph.

        Raises:
            PolicyError: If it runs for a backward pass whose forward pass ran before the installation.
        """
        if not self.has_run and torch._C._current_graph_task_id() != -1:
            raise _changed("put on")
        self.has_run = self.builds_graph = True
        for binding in self.bindings:
            binding.note_forward()

    def note_checkpoint(self) -> None:
        """Notes, in a module that runs without gradients, whether it will run again for them."""
        if not self.builds_graph:
            # A reentrant checkpoint may stand around the outermost module.
            self.has_run = True
        elif not self._runs_again:
            self._runs_again = checkpoints_above() > 0

    def note_other_checkpoint(self) -> None:
        """The same in a module that builds a graph, whose second run only gives what was kept for backward.

        Rules that read nothing keep nothing: there a second run without them gives the same, or torch finds
        another number of tensors, and says so.
        """
        if not self._keeps_other_tensors:
            reads = any(b.rule.reads and b.rule.gradient_filter is None for b in self.bindings)
            self._keeps_other_tensors = reads and checkpoints_above() > 0

    def finish(self, result: Any) -> None:
        """At the end of the outermost module: has the backward pass check that all is as it was."""
        self.builds_graph = False
        runs_again = self._runs_again or self._keeps_other_tensors
        self._runs_again = self._keeps_other_tensors = False
        if not (runs_again or self.acts_on_parameters):
            return
        check = functools.partial(self._check, self._state() if runs_again else None)
        for tensor in tensors_in(result):
            if tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(check)

    def _state(self) -> State:
        return tuple(
            (
                binding.active,
                tuple(binding.rule.parameters[key]._version for key in binding.schedules),
            )
            for binding in self.bindings
        )

    def _check(self, state: State | None, grads: tuple[torch.Tensor, ...]) -> None:
        if state is None:
            if not self.installed:
                raise PolicyError(
                    "the policies were removed between forward and backward, and rules on parameters "
                    "(params=) act when the gradients arrive; remove the policies after the backward pass"
                )
        elif not self.installed:
            raise _changed("removed")
        elif state != self._state():
            raise _changed("switched, or their schedules went on,")


def _changed(how: str) -> PolicyError:
    return PolicyError(
        f"the policies were {how} between forward and backward, and modules under activation checkpointing "
        "run again in the backward pass, then with other rules than before; change policies between steps"
    )
