"""The callables that replace the ``forward`` of modules, and their shared state."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn

from gradpolicy.errors import PolicyError, warn_user
from gradpolicy.flow.arguments import Signature
from gradpolicy.flow.bound_rule import RuleState
from gradpolicy.flow.boundary import Boundary, Crossed, ThroughRule, adopt_writes, run_through, versions_of
from gradpolicy.flow.containers import map_tensors
from gradpolicy.flow.operation_rule import DispatchMode, DispatchTable, OperationRule, note_taken
from gradpolicy.flow.parameters import ParameterRules, run_with_rules
from gradpolicy.flow.recomputation import (
    InstallSession,
    checkpoints_above,
    has_graph,
    may_be_recomputed,
    refusal,
)
from gradpolicy.flow.tracing import (
    active_modes,
    eager_if_unknown,
    in_transform,
    is_exporting,
    is_traced,
    mode_at,
    mode_count,
)


class CallScope:
    """A forward within which calls are counted, for policies with ``calls=``.

    If such forwards are nested, a call counts for the innermost one.

    Args:
        where: The forward, for messages.
        counted: The rules, each with the name of the operation whose calls are counted.
    """

    def __init__(self, where: str, counted: Iterable[tuple[RuleState, str]]) -> None:
        self.where = where
        self.counted = tuple(counted)

    def run(self, forward: Callable[[tuple, dict], Any], args: tuple, kwargs: dict) -> Any:
        """Run the forward, counting from 0.

        Raises:
            PolicyError: If an operation ran less often than ``calls=`` requires.
        """
        outer = [state.call_counts.get(operation) for state, operation in self.counted]
        for state, operation in self.counted:
            state.call_counts[operation] = 0
        try:
            result = forward(args, kwargs)
            for state, operation in self.counted:
                count = state.call_counts[operation] or 0
                if state.active and count <= max(state.calls):
                    times = "once" if count == 1 else f"{count} times"
                    raise PolicyError(
                        f"policy {state.name!r}: operation {operation!r} ran {times} in {self.where}, so "
                        f"there is no call {max(state.calls)} (calls= counts from 0)"
                    )
            return result
        finally:
            for (state, operation), before in zip(self.counted, outer, strict=True):
                state.call_counts[operation] = before


class InstallMode(DispatchMode):
    """The mode of an installation on a thread. Its table is that of the running module."""

    def __init__(self, session: InstallSession, table: DispatchTable) -> None:
        super().__init__(table, session.taken)
        self.session = session
        self.has_graph = has_graph()

    def check_recomputation(self, rule: OperationRule) -> None:
        """Raise an error if a checkpoint would recompute an operation outside of the wrapped forward.

        With ``calls=`` it would have to recompute the full forward in which calls are counted.
        """
        entered = CallScope.run if rule.state.calls else WrappedForward._forward
        if self.has_graph and checkpoints_above(entered):
            raise refusal(rule.name)


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
        entering: The rules at the module's input.
        leaving: The rules at the module's output.
        through: The rules across the module, for different outputs.
        scope: The counts of calls of operations inside the module, for policies with ``calls=``.
        parameter_rules: The rules on the module's parameters; for the root module, on all parameters.
        signature: The signature of the forward, if a rule at the module has a keyword ``call``.
    """

    module: nn.Module
    method: str
    session: InstallSession
    name: str
    table: DispatchTable | None
    entering: Boundary | None
    leaving: Boundary | None
    through: Sequence[ThroughRule]
    scope: CallScope | None
    parameter_rules: Sequence[ParameterRules]
    signature: Signature | None

    def __post_init__(self) -> None:
        module, method = self.module, self.method
        # The previous entry of the module's __dict__, such as the wrapper of another library.
        self.inner: Callable | None = module.__dict__.get(method)
        acts_at_module = self.parameter_rules or self.entering or self.leaving or self.through or self.scope
        self.adds_nothing = self.table is not None and not acts_at_module

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
        mode = mode_at(mode_count() - 1) if self.adds_nothing and mode_count() else None
        if mode is not None and getattr(mode, "table", None) is self.table and not may_be_recomputed():
            # The rules are already active, in the module around this one.
            if not is_traced():
                return self._run_in_mode(mode, args, kwargs)
        elif not is_exporting():
            if self.parameter_rules:
                return run_with_rules(self.parameter_rules, self._run_in_session, args, kwargs)
            return self._run_in_session(args, kwargs)
        # An exported program cannot have rules, so it gets the plain forward, without a call of _forward,
        # since the compiler limits the depth of nested calls.
        if self.inner is not None:
            return self.inner(*args, **kwargs)
        return getattr(type(self.module), self.method)(self.module, *args, **kwargs)

    def _mode(self) -> InstallMode | None:
        """Return the mode of this installation on this thread."""
        own = (mode for mode in active_modes() if isinstance(mode, InstallMode))
        return next((mode for mode in own if mode.session is self.session), None)

    def put_on(self) -> None:
        """Replace the forward."""
        self.module.__dict__[self.method] = self

    def take_off(self) -> None:
        """Restore the forward, also if other installations wrapped it later."""
        outer = self.module.__dict__.get(self.method)
        if outer is self:
            if self.inner is None:
                del self.module.__dict__[self.method]
            else:
                self.module.__dict__[self.method] = self.inner
            return
        while isinstance(outer, WrappedForward):
            if outer.inner is self:
                outer.inner = self.inner
                return
            outer = outer.inner
        # Another library has a reference to this wrapper, which can only be disabled.
        self.table = self.entering = self.leaving = None
        self.through = ()
        self.adds_nothing = False
        warn_user(
            f"{type(self.module).__name__}.{self.method} was replaced while policies were installed; "
            "they are off, but what replaced it still runs through them"
        )

    def _run_in_session(self, args: tuple, kwargs: dict) -> Any:
        session = self.session
        if in_transform():
            for state in session.states:
                state.note_forward()
            return self._run_within_boundaries(args, kwargs)
        is_outermost = torch.is_grad_enabled() and not session.in_forward
        if is_outermost:
            session.start_forward()
        elif may_be_recomputed():
            session.note_checkpoint()
        result = None
        try:
            result = self._run_within_boundaries(args, kwargs)
            return result
        finally:
            if is_outermost:
                session.end_forward(result)

    def _run_within_boundaries(self, args: tuple, kwargs: dict) -> Any:
        arguments = None
        if self.signature is not None:
            arguments = self.signature.by_name(*map_tensors(Tensor.detach, (args, kwargs)))
        crossed: Crossed = []
        if self.entering is not None:
            values = self.entering.cross({**dict(enumerate(args)), **kwargs}, crossed, arguments)
            args = tuple([values.pop(position) for position in range(len(args))])
            kwargs = values
        versions = versions_of(crossed)
        if self.through:
            result = run_through(self.through, self._run_under_table, args, kwargs, arguments)
        else:
            result = self._run_under_table(args, kwargs)
        adopt_writes(crossed, versions)
        return result if self.leaving is None else self.leaving.cross({0: result}, [], arguments)[0]

    @eager_if_unknown
    def _run_under_table(self, args: tuple, kwargs: dict) -> Any:
        table, session = self.table, self.session
        if table is None:
            return self._forward(args, kwargs)
        mode = self._mode()
        if mode is None:
            with InstallMode(session, table) as mode:
                result = self._run_in_mode(mode, args, kwargs)
            if not in_transform():
                note_taken({name for state in session.states for name in state.row.matched})
            return result
        outer_table, mode.table = mode.table, table
        try:
            return self._run_in_mode(mode, args, kwargs)
        finally:
            mode.table = outer_table

    def _run_in_mode(self, mode: DispatchMode, args: tuple, kwargs: dict) -> Any:
        # Compiled code must not depend on the name, so that all modules of a class share it.
        if is_traced():
            return self._run_in_scope(args, kwargs)
        outer_module, mode.module = mode.module, self.name
        try:
            return self._run_in_scope(args, kwargs)
        finally:
            mode.module = outer_module

    def _run_in_scope(self, args: tuple, kwargs: dict) -> Any:
        if self.scope is None:
            return self._forward(args, kwargs)
        return self.scope.run(self._forward, args, kwargs)

    def _forward(self, args: tuple, kwargs: dict) -> Any:
        if self.inner is not None:
            return self.inner(*args, **kwargs)
        return getattr(type(self.module), self.method)(self.module, *args, **kwargs)
