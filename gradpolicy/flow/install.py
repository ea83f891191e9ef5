"""``install``: flow policies on a model."""

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from gradpolicy.display import Displayed
from gradpolicy.errors import PolicyError, shown, unknown
from gradpolicy.flow.arguments import Argument, Signature
from gradpolicy.flow.bound_rule import RuleState
from gradpolicy.flow.boundary import Boundary, Through, ThroughRule
from gradpolicy.flow.locations import Locations, RulePlacement, describe_location, find_locations, place_at
from gradpolicy.flow.operation_rule import DispatchTable, rules_for
from gradpolicy.flow.operations import name_of
from gradpolicy.flow.parameters import ParameterRules
from gradpolicy.flow.policy_checks import check_cuts, check_policies, is_cut
from gradpolicy.flow.policy_report import (
    GradientNorms,
    Outcome,
    Place,
    Report,
    ReportRow,
    report_unmet,
    warn_or_raise,
)
from gradpolicy.flow.recomputation import InstallSession
from gradpolicy.flow.wrapped_forward import CallScope, WrappedForward
from gradpolicy.what_trains import what_trains
from gradpolicy.where import BOUNDARIES, PLACES, STEP_OPERATIONS, named_parameters, plain_name

if TYPE_CHECKING:
    from rich.console import RenderableType

EntryPoints = Mapping[str, Sequence[str]]


def install(
    model: nn.Module,
    policies: Iterable[RulePlacement] | Mapping[str, RulePlacement],
    *,
    strict: bool = False,
    entry_points: EntryPoints | None = None,
) -> "Installed":
    """Install flow policies on a model.

    All policies are active, independent of their ``when``, until the first :meth:`Installed.update`.

    When the policies are removed, there is a warning for each policy that did not act as specified: an
    operation never ran, or only where no gradient is recorded (the warning names operations that did run); a
    module's forward never ran; no gradient reached a place. Calls within which a policy cannot act give a
    warning when they run. There is no warning while an exception propagates, nor if the model never ran and
    :meth:`Installed.report` was called.

    Args:
        model: The model.
        policies: The policies, by name or in a list. At a boundary the backward pass applies them in this
            order.
        strict: Raise an error instead of giving warnings when the policies are removed.
        entry_points: For modules that are called through other methods than ``forward``: their names (``""``
            for the model) and the methods.

    Returns:
        A context manager that removes the policies at its end.

    Raises:
        PolicyError: If a pattern matches nothing, an operation does not exist, two policies contradict each
            other, a policy is not a flow policy, a rule is meaningless at its location, or the model is in
            ``nn.DataParallel`` on several devices.

    Example:
        >>> import torch, gradpolicy as gp
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1))
        >>> with install(model, {"guide": gp.Guided(), "slow": gp.Scale(0.1, modules="2")}) as installed:
        ...     model(torch.ones(1, 2)).sum().backward()
        >>> "forward" in model[1].__dict__
        False
    """
    if torch.compiler.is_compiling():
        # Without fullgraph, the compiler then runs this in eager mode, where it works.
        raise PolicyError("policies cannot be installed within compiled code: install them before the call")
    return Installed(model, _named(policies), entry_points or {}, strict=strict)


class Installed(Displayed):
    """Policies that :func:`install` installed on a model. Displayed as their report, with what trains."""

    def __init__(
        self,
        model: nn.Module,
        policies: Mapping[str, RulePlacement],
        entry_points: EntryPoints,
        *,
        strict: bool = False,
    ) -> None:
        _refuse_replicas(model)
        self.model = model
        self.strict = strict
        self.policies = dict(policies)
        self._placed = {name: Placed.of(model, name, policy) for name, policy in self.policies.items()}
        check_policies(self.policies, {name: placed.locations for name, placed in self._placed.items()})
        self._session = InstallSession(self._states)
        # The rules on each parameter, with its name, in the order in which the backward pass applies them.
        self._on_parameters: dict[int, list[tuple[str, RuleState]]] = {}
        for placed in self._placed.values():
            for name, parameter in placed.locations.parameters.items():
                self._on_parameters.setdefault(id(parameter), []).append((name, placed.state))
        # Modules with the same policies inside share a table; by the names of the policies.
        self._tables: dict[tuple[str, ...], DispatchTable] = {}
        self._wraps: list[WrappedForward] = []
        self._was_reported = False
        self._parameter_rules: list[ParameterRules] = []
        try:
            self._put_on(entry_points)
        except BaseException:
            self.remove(quiet=True)
            raise

    def __enter__(self) -> "Installed":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: Any) -> None:
        warns = kind is None and self._session.is_installed
        self.remove(quiet=True)
        if warns:
            self._report_unmet()
        if isinstance(error, RuntimeError) and is_cut(error):
            acted = [state.name for state in self._states if state.row.matched]
            check_cuts({name: self.policies[name] for name in acted})

    def remove(self, *, quiet: bool = False) -> None:
        """Remove the policies and restore the model. A second call does nothing.

        Args:
            quiet: Give no warnings, and raise no errors.

        Raises:
            PolicyError: If the installation is strict and a policy did not act as specified.
        """
        was_installed, self._session.is_installed = self._session.is_installed, False
        while self._parameter_rules:
            self._parameter_rules.pop().take_off()
        while self._wraps:
            self._wraps.pop().take_off()
        if was_installed and not quiet:
            self._report_unmet()

    def update(self, phase: str = "fit", step: int = 0, epoch: int = 0) -> None:
        """Switch the policies on or off for a step, and set their scheduled parameters.

        Args:
            phase: ``fit``, ``validate``, ``test`` or ``predict``.
            step: The number of effective optimizer steps so far.
            epoch: The number of completed epochs.
        """
        for state in self._states:
            state.update(phase, step, epoch)

    def is_active(self, name: str) -> bool:
        """Return True if a policy is active.

        Raises:
            PolicyError: If there is no such policy.
        """
        return self._state(name).active

    def set_active(self, name: str, active: bool) -> None:
        """Switch a policy on or off, independent of its ``when``.

        Raises:
            PolicyError: If there is no such policy.
        """
        self._state(name).active = active

    def set_loss_scale(self, scale: float | Tensor) -> None:
        """Set the loss scale (fp16), by which absolute thresholds are multiplied."""
        for state in self._states:
            state.set_loss_scale(scale)

    def measure_norms(self, on: bool) -> None:
        """Start or stop measuring the gradients before and after each policy, in eager mode.

        Each call discards earlier measurements.
        """
        for state in self._states:
            state.row.norms = GradientNorms() if on else None

    @property
    def gradient_norms(self) -> dict[str, GradientNorms]:
        """The gradients before and after each measured policy that passed some, over all locations."""
        measured = {state.name: state.row.norms for state in self._states}
        return {name: norms for name, norms in measured.items() if norms is not None and norms.entries}

    @property
    def operation_counts(self) -> dict[str, int]:
        """The number of times that each policy's rule was applied."""
        return {state.name: state.row.operations_matched for state in self._states}

    def __rich__(self) -> "RenderableType":
        """Render the report, and what trains, layer by layer."""
        from rich.console import Group

        named = named_parameters(self.model)
        shares = {name: 1.0 for name, parameter in named.items() if parameter.requires_grad}
        return Group(self.report().__rich__(), what_trains(named, shares))

    def report(self) -> Report:
        """Return a table of the matches of each policy and the use of its rule."""
        self._was_reported = True
        return Report(tuple(self._row(name) for name in self.policies))

    @property
    def _states(self) -> list[RuleState]:
        return [placed.state for placed in self._placed.values()]

    def _state(self, name: str) -> RuleState:
        if name not in self._placed:
            raise unknown("policy", name, self._placed)
        return self._placed[name].state

    def _row(self, name: str) -> ReportRow:
        """Return a policy's row, with what the tables and the session have noted since."""
        state = self._placed[name].state
        row = state.row
        row.active = state.active
        row.entered |= self._session.entered
        for names, table in self._tables.items():
            if name in names:
                row.note_all(Outcome.PLAIN, map(name_of, table.seen))
        row.note_all(Outcome.TAKEN, self._session.taken)
        return row

    def _report_unmet(self) -> None:
        strict, session = self.strict, self._session
        rows = [state.row for state in self._states]
        has_run = session.has_run or any(row.ran_on or row.ran_off or row.matched for row in rows)
        if not has_run and (strict or not self._was_reported):
            names = [repr(state.name) for state in self._states if state.active]
            message = (
                "the model never ran while the policies were on it, so that they changed nothing; they act "
                "on what its forward and those of its modules do within the block"
            )
            warn_or_raise(f"policy {', '.join(names)}", message if names else "", strict=strict)
        for state in self._states:
            row = self._row(state.name)
            ran = row.ran_on or (strict and not row.ran_off)
            if has_run and (ran or row.places_with(Outcome.WITHOUT_GRADIENT)):
                # In another phase, such as for attributions in testing, gradients may be recorded.
                may_come = len(state.when.phases) > 1
                ignored = (Outcome.WITHOUT_GRADIENT,) if may_come else ()
                report_unmet(f"policy {state.name!r}", row, strict=strict, ignored=ignored)

    def _put_on(self, entry_points: EntryPoints) -> None:
        done: set[int] = set()
        for raw_name, module in self.model.named_modules(remove_duplicate=False):
            # A compiled module only calls the original module, which is wrapped.
            if id(module) not in done and "_orig_mod" not in module._modules:
                done.add(id(module))
                self._put_on_module(plain_name(raw_name), module, entry_points)
        for placed in self._placed.values():
            _note_script_modules(self.model, placed.locations, placed.state)
        self._session.acts_on_parameters = bool(self._parameter_rules)
        for rules in self._parameter_rules:
            rules.put_on()
        # The model itself has all of them, since modules may use each other's parameters.
        for wrap in self._wraps:
            if wrap.module is self.model:
                wrap.parameter_rules = tuple(self._parameter_rules)
                wrap.adds_nothing &= not self._parameter_rules

    def _put_on_module(self, name: str, module: nn.Module, entry_points: EntryPoints) -> None:
        table = self._table(module)
        at_module = [placed for placed in self._placed.values() if id(module) in placed.locations.boundaries]
        # Shared parameters have their rules in the first module.
        on_parameters = {
            attribute: self._on_parameters.pop(id(parameter), ())
            for attribute, parameter in module._parameters.items()
        }
        parameter_rules = [
            ParameterRules(rules[0][0], module, attribute, [state for _, state in rules])
            for attribute, rules in on_parameters.items()
            if rules
        ]
        # The model itself is always wrapped, to track its forward passes.
        if name and table is None and not at_module and not parameter_rules:
            return
        self._parameter_rules += parameter_rules
        for placed in self._placed.values():
            placed.note_module(name, module)
        for method in entry_points.get(name, ("forward",)):
            forward = getattr(module, method)
            rules = {
                side: [rule for placed in at_module for rule in placed.rules_at(side, name, forward)]
                for side in PLACES
            }
            entering, leaving = (
                Boundary(side, name, rules[side]) if rules[side] else None for side in BOUNDARIES
            )
            through = [ThroughRule(state, name, chosen, forward) for state, chosen in rules["through"]]
            needs_call = any(placed.state.rule.takes_call for placed in at_module)
            wrap = WrappedForward(
                module,
                method,
                self._session,
                name=name,
                table=table,
                entering=entering,
                leaving=leaving,
                through=Through(through) if through else None,
                scope=_scope(self._placed.values(), name, module),
                parameter_rules=parameter_rules,
                signature=Signature.of(forward) if needs_call else None,
            )
            wrap.put_on()
            self._wraps.append(wrap)

    def _table(self, module: nn.Module) -> DispatchTable | None:
        """Return the table of rules on operations inside a module; None without policies on operations."""
        if not any(placed.locations.operations for placed in self._placed.values()):
            return None
        inside = [placed for placed in self._placed.values() if id(module) in placed.locations.inside]
        names = tuple(placed.state.name for placed in inside)
        if names not in self._tables:
            rules = [rules_for(placed.locations.operations, placed.state) for placed in inside]
            self._tables[names] = DispatchTable(list(itertools.chain(*rules)))
        return self._tables[names]


def deactivate(model: nn.Module, policies: Collection[RulePlacement]) -> None:
    """Deactivate policies that are already installed on a model.

    Used on the copy of a model on which a plan installs its policies. Other policies remain active.

    Args:
        model: The model.
        policies: The policies, which are compared by their ``repr``.
    """
    written = {repr(policy) for policy in policies}
    for module in model.modules():
        for wrap in list(module.__dict__.values()):
            while isinstance(wrap, WrappedForward):
                for state in wrap.session.states:
                    if repr(state.policy) in written:
                        state.active = False
                wrap = wrap.inner


def _refuse_replicas(model: nn.Module) -> None:
    """Raise an error for DataParallel on several devices, whose replicas would run the original's forward."""
    for name, module in model.named_modules():
        if isinstance(module, nn.DataParallel) and len(module.device_ids) > 1:
            raise PolicyError(
                f"{name or 'the model'}: flow policies do not work under nn.DataParallel on"
                f" {len(module.device_ids)} devices; use DistributedDataParallel"
            )


@dataclass(frozen=True)
class Placed:
    """A policy on a model.

    Args:
        state: The rule, with the policy's row of the report.
        locations: The locations.
    """

    state: RuleState
    locations: Locations

    @classmethod
    def of(cls, model: nn.Module, name: str, policy: RulePlacement) -> "Placed":
        """Return a policy with its locations in a model."""
        locations = find_locations(model, name, policy)
        row = ReportRow(
            name,
            kind=type(policy).__name__,
            where=describe_location(policy),
            modules=tuple(locations.modules),
            operations=tuple(operation.name for operation in locations.operations),
            parameters=tuple(locations.parameters),
            any_of=policy.ops == STEP_OPERATIONS,
            places={f"parameter {key!r}": Place(None, key in policy.params) for key in locations.parameters},
        )
        return cls(RuleState(name, policy.rule, policy, row=row), locations)

    def note_module(self, name: str, module: nn.Module) -> None:
        """Add a module to the places of the row, if the policy acts at it, or acts in it and names it."""
        locations, places = self.locations, self.state.row.places
        patterns = cast(RulePlacement, self.state.policy).modules
        is_named = any(each is module and key in patterns for key, each in locations.modules.items())
        if id(module) in locations.boundaries:
            has_forward = getattr(type(module), "forward", None) is not nn.Module.forward
            places[place_at(locations.side, name)] = Place(name, is_named, has_forward)
        elif is_named and id(module) in locations.inside:
            places[f"module {name!r}"] = Place(name, is_named, is_around=True)

    def rules_at(
        self, side: str, module: str, forward: Callable[..., Any]
    ) -> Iterator[tuple[RuleState, list[Argument]]]:
        """Yield the rule with the arguments on which it acts, if it acts at this place of a module."""
        if self.locations.side == side:
            wanted = cast(RulePlacement, self.state.policy).argument
            owner = f"policy {self.state.name!r} at module {module!r}"
            yield self.state, Signature.of(forward).arguments(wanted, owner) if wanted else []


def _note_script_modules(model: nn.Module, locations: Locations, state: RuleState) -> None:
    """Record the outermost ScriptModules in which a rule should act, since they run outside of Python."""
    scripted = [
        (name, module)
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, torch.jit.ScriptModule)
    ]
    within = {id(each) for _, module in scripted for each in module.modules() if each is not module}
    for name, module in scripted:
        parts = {id(each) for each in module.modules() if each is not module}
        if id(module) not in within and (id(module) in locations.inside or parts & locations.boundaries):
            state.row.note_opaque(f"ScriptModule {name!r}", "what is in it runs outside Python")


def _scope(placed: Iterable["Placed"], name: str, module: nn.Module) -> CallScope | None:
    """Return the scope in which calls are counted, if a policy with ``calls=`` matches the module."""
    counted = [
        (each.state, operation.name)
        for each in placed
        if each.state.calls and any(module is one for one in each.locations.modules.values())
        for operation in each.locations.operations
    ]
    if not counted:
        return None
    return CallScope(f"the forward of module {name!r}" if name else "the forward of the model", counted)


def name_policies(policies: Iterable[Any] | Mapping[str, Any]) -> dict[str, Any]:
    """Return policies by name. Policies in a list are named after their classes, numbered if necessary.

    Example:
        >>> import gradpolicy as gp
        >>> list(name_policies([gp.Guided(), gp.Scale(0.1, modules="2"), gp.Scale(0.5, modules="4")]))
        ['guided', 'scale_1', 'scale_2']
    """
    if isinstance(policies, Mapping):
        return dict(policies)
    listed = list(policies)
    kinds = [type(policy).__name__.lower() for policy in listed]
    return {
        kind if kinds.count(kind) == 1 else f"{kind}_{kinds[:number].count(kind) + 1}": policy
        for number, (kind, policy) in enumerate(zip(kinds, listed, strict=True))
    }


def _named(policies: Iterable[RulePlacement] | Mapping[str, RulePlacement]) -> dict[str, RulePlacement]:
    if isinstance(policies, RulePlacement):
        raise PolicyError("install takes a list or dict of policies, not one policy")
    named = name_policies(policies)
    for name, policy in named.items():
        if not isinstance(policy, RulePlacement):
            raise PolicyError(
                f"policy {shown(name)}: must be a flow policy, got {shown(policy)}. Freeze acts on the "
                "optimizer, not on the model: use gradpolicy.training, or the callback "
                "gradpolicy.GradientPolicies"
            )
    return named
