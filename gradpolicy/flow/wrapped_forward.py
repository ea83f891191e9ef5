"""The callables that replace the ``forward`` of modules, and the session that they share."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn

from gradpolicy.errors import PolicyError, warn_user
from gradpolicy.flow import tracing
from gradpolicy.flow.bound_rule import RuleState
from gradpolicy.flow.boundary import ModuleRules
from gradpolicy.flow.containers import tensors_in
from gradpolicy.flow.operation_rule import DispatchMode, DispatchTable, OperationRule, note_taken
from gradpolicy.flow.parameters import ParameterRules, run_with_rules
from gradpolicy.flow.tracing import in_transform, is_traced, may_be_recomputed, mode_at, mode_count

# For each rule, whether it is active and the versions of its changing parameters.
Snapshot = tuple[tuple[bool, tuple[int, ...]], ...]


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
        self.acts_on_parameters = any(state.policy.params for state in self.states)
        # True while the outermost module runs with gradients, and once any module ran.
        self.in_forward = False
        self.has_run = False
        # True if modules of the current forward pass will be recomputed in the backward pass.
        self._runs_again = False

    def start_forward(self) -> None:
        """Start the forward pass of the outermost module, with gradients.

        Raises:
            PolicyError: If it is a recomputation, and the policies were installed after the forward pass.
        """
        if not self.has_run and tracing.graph_task() != -1:
            raise _changed("put on")
        self.has_run = self.in_forward = True
        self.note_forward()

    def note_forward(self) -> None:
        """Record for each rule a forward pass."""
        for state in self.states:
            state.row.note_forward(state.active, tracing.is_compiling())

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
            reads = any(state.rule.reads for state in self.states)
            self._runs_again = (reads or not has_gradients) and tracing.checkpoints_above() > 0

    def end_forward(self, result: Any) -> None:
        """End the forward pass of the outermost module, and check the rules in the backward pass."""
        runs_again, self._runs_again, self.in_forward = self._runs_again, False, False
        if not (runs_again or self.acts_on_parameters):
            return
        check = partial(self._check, self._snapshot() if runs_again else None)
        for tensor in tensors_in(result):
            if tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(check)

    def _snapshot(self) -> Snapshot:
        return tuple(
            (state.active, tuple(state.rule.parameters[key]._version for key in state.changing))
            for state in self.states
        )

    def _check(self, snapshot: Snapshot | None, grads: tuple[Tensor, ...]) -> None:
        if not self.is_installed:
            raise _changed("removed")
        if snapshot is not None and snapshot != self._snapshot():
            raise _changed("switched, or their schedules went on,")


def _changed(how: str) -> PolicyError:
    return PolicyError(
        f"the policies were {how} between forward and backward, where modules under activation checkpointing "
        "run again, and rules on parameters (params=) act; change policies between steps"
    )


@dataclass(eq=False, repr=False)
class WrappedForward:
    """Runs a module's forward with the rules on its operations, boundary and parameters.

    It is an entry of the module's ``__dict__``, and can be pickled and copied: the copy of a module has a
    copy that uses the copy's weights.

    Args:
        module: The module.
        method: The method that is replaced, usually ``"forward"``.
        session: The installation.
        name: The module's name.
        table: The rules on operations inside the module.
        at_module: The rules at the module's input and output, and across it.
        counted: The rules with ``calls=``, whose operations are counted.
        parameter_rules: The rules on the module's parameters; for the root module, on all parameters.
    """

    module: nn.Module
    method: str
    session: InstallSession
    name: str
    table: DispatchTable | None
    at_module: ModuleRules | None
    counted: Sequence[RuleState]
    parameter_rules: Sequence[ParameterRules]

    def __post_init__(self) -> None:
        # The previous entry of the module's __dict__, such as the wrapper of another library.
        self.inner: Callable | None = self.module.__dict__.get(self.method)
        self.is_on = True
        self.adds_nothing = self.table is not None and not (
            self.parameter_rules or self.at_module or self.counted
        )

    @property
    def __wrapped__(self) -> Callable:
        """The forward that is replaced, for ``inspect.signature`` and Lightning."""
        if self.inner is not None:
            return self.inner
        return getattr(type(self.module), self.method).__get__(self.module)

    @property
    def __code__(self) -> CodeType:
        """The code of the forward, from which torch.export takes the names of its inputs."""
        return self.__wrapped__.__code__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward."""
        mode = mode_at(mode_count() - 1) if self.is_on and self.adds_nothing and mode_count() else None
        if mode is not None and getattr(mode, "table", None) is self.table and not may_be_recomputed():
            # The rules are already active, in the module around this one.
            if not is_traced():
                return self._run_in_mode(mode, args, kwargs)
        elif self.is_on and not tracing.is_exporting():
            if self.parameter_rules:
                return run_with_rules(self.parameter_rules, self._run_in_session, args, kwargs)
            return self._run_in_session(args, kwargs)
        # Also an exported program, which cannot have rules.
        return self._unwrapped()(*args, **kwargs)

    def take_off(self) -> None:
        """Restore the forward, also below the wrappers of later installations."""
        self.is_on = False
        methods, key = self.module.__dict__, self.method
        holder = methods
        while isinstance(holder.get(key), WrappedForward):
            if holder[key] is self:
                if self.inner is None and holder is methods:
                    del methods[key]
                else:
                    holder[key] = self.inner
                return
            holder, key = holder[key].__dict__, "inner"
        # Another library has a reference to this wrapper, which can only be off.
        warn_user(
            f"{type(self.module).__name__}.{self.method} was replaced while policies were installed; "
            "they are off, but what replaced it still runs through them"
        )

    def _run_in_session(self, args: tuple, kwargs: dict) -> Any:
        session, at_module = self.session, self.at_module
        run = self._run_under_table if at_module is None else partial(at_module.run, self._run_under_table)
        if in_transform():
            session.note_forward()
            return run(args, kwargs)
        is_outermost = torch.is_grad_enabled() and not session.in_forward
        if is_outermost:
            session.start_forward()
        elif may_be_recomputed():
            session.note_checkpoint()
        result = None
        try:
            result = run(args, kwargs)
            return result
        finally:
            if is_outermost:
                session.end_forward(result)

    @tracing.eager_if_unknown
    def _run_under_table(self, args: tuple, kwargs: dict) -> Any:
        table, session = self.table, self.session
        if table is None:
            return self._unwrapped()(*args, **kwargs)
        # The mode of this installation on this thread.
        mode = next((mode for mode in tracing.active_modes() if mode.owner is session), None)
        if mode is None:
            with DispatchMode(table, session, _checkpoints_within) as mode:
                result = self._run_in_mode(mode, args, kwargs)
            if not in_transform():
                note_taken([name for state in session.states for name in state.row.matched])
            return result
        outer_table, mode.table = mode.table, table
        try:
            return self._run_in_mode(mode, args, kwargs)
        finally:
            mode.table = outer_table

    def _run_in_mode(self, mode: DispatchMode, args: tuple, kwargs: dict) -> Any:
        run = self._run_counted if self.counted else self._unwrapped()
        # Compiled code must not depend on the name, so that all modules of a class share it.
        if is_traced():
            return run(*args, **kwargs)
        outer_module, mode.module = mode.module, self.name
        try:
            return run(*args, **kwargs)
        finally:
            mode.module = outer_module

    def _run_counted(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward, counting calls from 0; if such forwards are nested, for the innermost one.

        Raises:
            PolicyError: If an operation ran less often than ``calls=`` requires.
        """
        outer = [state.call_counts for state in self.counted]
        for state in self.counted:
            state.call_counts = {}
        try:
            result = self._unwrapped()(*args, **kwargs)
            for state, operation in [(each, name) for each in self.counted for name in each.row.operations]:
                count, last = (state.call_counts or {}).get(operation, 0), max(state.policy.calls)
                if state.active and count <= last:
                    times = "once" if count == 1 else f"{count} times"
                    where = f"module {self.name!r}" if self.name else "the model"
                    raise PolicyError(
                        f"policy {state.name!r}: operation {operation!r} ran {times} in the forward of "
                        f"{where}, so there is no call {last} (calls= counts from 0)"
                    )
            return result
        finally:
            for state, before in zip(self.counted, outer, strict=True):
                state.call_counts = before

    def _unwrapped(self) -> Callable:
        """Return the replaced forward. The caller calls it, so that compiled calls are nested less deeply."""
        if self.inner is not None:
            return self.inner
        # Not a bound method, which torch 2.11 does not trace.
        return partial(getattr(type(self.module), self.method), self.module)


def _checkpoints_within(rule: OperationRule) -> int:
    """Return the number of checkpointed functions in the running forward, or in that which counts calls."""
    counts = rule.state.policy.calls
    return tracing.checkpoints_above(WrappedForward._run_counted if counts else WrappedForward.__call__)
