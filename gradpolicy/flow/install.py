"""``install``: flow policies on a model."""

import contextlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gradpolicy.display import Displayed
from gradpolicy.errors import PolicyError, shown, unknown
from gradpolicy.flow import policy_report
from gradpolicy.flow.arguments import Signature
from gradpolicy.flow.bound_rule import RuleState
from gradpolicy.flow.boundary import ModuleRules
from gradpolicy.flow.locations import (
    Locations,
    RulePlacement,
    check_policies,
    describe_location,
    find_locations,
    is_below,
)
from gradpolicy.flow.operation_rule import DispatchTable, OperationRule
from gradpolicy.flow.parameters import ParameterRules
from gradpolicy.flow.policy_report import Outcome, Report, ReportRow
from gradpolicy.flow.wrapped_forward import InstallSession, WrappedForward
from gradpolicy.what_trains import what_trains
from gradpolicy.where import named_parameters, plain_name

if TYPE_CHECKING:
    from rich.console import RenderableType

EntryPoints = Mapping[str, Sequence[str]]
# Rules by the id of the parameter, each with the parameter's name.
OnParameters = dict[int, list[tuple[str, RuleState]]]


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
    module's forward never ran; no gradient reached a location. Calls within which a policy cannot act give a
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
    hint = (
        ". Freeze acts on the optimizer, not on the model: use gradpolicy.training, or the callback "
        "gradpolicy.GradientPolicies"
    )
    named = checked_policies("install", policies, RulePlacement, "flow policy", hint)
    return Installed(model, named, entry_points or {}, strict)


class Installed(Displayed):
    """Policies that :func:`install` installed on a model. Displayed as their report."""

    def __init__(
        self, model: nn.Module, policies: Mapping[str, RulePlacement], entry_points: EntryPoints, strict: bool
    ) -> None:
        _refuse_replicas(model)
        self.model = model
        self.strict = strict
        self.policies = dict(policies)
        found = {name: find_locations(model, name, policy) for name, policy in self.policies.items()}
        check_policies(self.policies, found)
        self._states = {name: _state(name, self.policies[name], at) for name, at in found.items()}
        self._session = InstallSession(self._states.values())
        # Modules with the same policies inside share a table; by the names of the policies.
        self._tables: dict[tuple[str, ...], DispatchTable] = {}
        self._was_reported = False
        # Takes off what is put on.
        self._removal = contextlib.ExitStack()
        try:
            self._put_on(entry_points)
        except BaseException:
            self.remove(quiet=True)
            raise

    def __enter__(self) -> "Installed":
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        self.remove(quiet=kind is not None)

    def remove(self, *, quiet: bool = False) -> None:
        """Remove the policies and restore the model. A second call does nothing.

        Args:
            quiet: Give no warnings, and raise no errors.

        Raises:
            PolicyError: If the installation is strict and a policy did not act as specified.
        """
        was_installed, self._session.is_installed = self._session.is_installed, False
        self._removal.close()
        if was_installed and not quiet:
            self._report_unmet()

    def update(self, phase: str = "fit", step: int = 0, epoch: int = 0) -> None:
        """Switch the policies on or off for a step, as :meth:`set_active`, and set scheduled parameters.

        Args:
            phase: ``fit``, ``validate``, ``test`` or ``predict``.
            step: The number of effective optimizer steps so far.
            epoch: The number of completed epochs.
        """
        for state in self._states.values():
            state.update(phase, step, epoch)

    def is_active(self, name: str) -> bool:
        """Return True if a policy is active.

        Raises:
            PolicyError: If there is no such policy.
        """
        return self._state(name).active

    def set_active(self, name: str, active: bool) -> None:
        """Switch a policy on or off, independent of its ``when``, from the next forward pass on.

        Rules are bound in the forward pass, so switching between it and its backward pass has no effect on
        that; except for rules on parameters (``params=``), which act when their gradients arrive.

        Raises:
            PolicyError: If there is no such policy.
        """
        self._state(name).active = active

    def set_loss_scale(self, scale: float | Tensor) -> None:
        """Set the loss scale (fp16), so that rules act on gradients without it."""
        for state in self._states.values():
            state.set_loss_scale(scale)

    def measure_norms(self, on: bool) -> None:
        """Start or stop measuring the gradients before and after each policy, in eager mode.

        Each call discards earlier measurements.
        """
        for state in self._states.values():
            state.row.norms = policy_report.GradientNorms() if on else None

    @property
    def gradient_norms(self) -> dict[str, policy_report.GradientNorms]:
        """The gradients before and after each measured policy that passed some, over all locations."""
        measured = {state.name: state.row.norms for state in self._states.values()}
        return {name: norms for name, norms in measured.items() if norms is not None and norms.entries}

    @property
    def operation_counts(self) -> dict[str, int]:
        """The number of times that each policy's rule was applied."""
        return {state.name: state.row.operations_matched for state in self._states.values()}

    def __rich__(self) -> "RenderableType":
        """Render the report, and what trains in each layer."""
        from rich.console import Group

        named = named_parameters(self.model)
        shares = {name: 1.0 for name, parameter in named.items() if parameter.requires_grad}
        return Group(self.report().__rich__(), what_trains(named, shares))

    def report(self) -> Report:
        """Return a table of the matches of each policy and the use of its rule."""
        self._was_reported = True
        for name, state in self._states.items():
            state.row.active = state.active
            for names, table in self._tables.items():
                if name in names:
                    state.row.note_all(Outcome.PLAIN, table.names_seen)
        return Report(tuple(state.row for state in self._states.values()))

    def _state(self, name: str) -> RuleState:
        if name not in self._states:
            raise unknown("policy", name, self._states)
        return self._states[name]

    def _report_unmet(self) -> None:
        strict, was_reported, rows = self.strict, self._was_reported, self.report().rows
        has_run = self._session.has_run or any(row.ran_on or row.ran_off or row.matched for row in rows)
        if not has_run and (strict or not was_reported):
            names = [repr(row.name) for row in rows if row.active]
            message = (
                "the model never ran while the policies were on it, so that they changed nothing; they act "
                "on what its forward and those of its modules do within the block"
            )
            policy_report.warn_or_raise(f"policy {', '.join(names)}", message if names else "", strict=strict)
        for row in rows:
            ran = row.ran_on or (strict and not row.ran_off)
            if has_run and (ran or row.locations_with(Outcome.WITHOUT_GRADIENT)):
                # In another phase, such as for attributions in testing, gradients may be recorded.
                may_come = len(self.policies[row.name].when.phases) > 1
                ignored = (Outcome.WITHOUT_GRADIENT,) if may_come else ()
                policy_report.report_unmet(f"policy {row.name!r}", row, strict=strict, ignored=ignored)

    def _put_on(self, entry_points: EntryPoints) -> None:
        # The rules on each parameter, with its name, in the order in which the backward pass applies them.
        on_parameters: OnParameters = {}
        for state in self._states.values():
            for name, parameter in state.row.locations.parameters.items():
                on_parameters.setdefault(parameter, []).append((name, state))
        # A compiled module only calls the original module, which is wrapped.
        named = [item for item in self.model.named_modules() if "_orig_mod" not in item[1]._modules]
        on_modules = [_rules_on_parameters(module, on_parameters) for _, module in named]
        all_rules = [rules for on_module in on_modules for rules in on_module]
        for each in all_rules:
            self._removal.callback(each.take_off)
            each.put_on()
        scripted: list[str] = []
        for (raw_name, module), on_module in zip(named, on_modules, strict=True):
            name = plain_name(raw_name)
            if not isinstance(module, torch.jit.ScriptModule):
                # The root module runs every parameter rule: weights may be shared across modules.
                rules = all_rules if module is self.model else on_module
                self._put_on_module(name, module, rules, entry_points.get(name, ("forward",)))
                continue
            if not is_below(name, scripted):
                scripted.append(name)
            for row in [state.row for state in self._states.values()]:
                if id(module) in row.locations.inside or id(module) in row.locations.boundaries:
                    row.note_opaque(f"ScriptModule {scripted[-1]!r}", "what is in it runs outside Python")

    def _put_on_module(
        self, name: str, module: nn.Module, rules: list[ParameterRules], methods: Sequence[str]
    ) -> None:
        table = self._table(module)
        all_states = self._states.values()
        states = [state for state in all_states if id(module) in state.row.locations.boundaries]
        # The model itself is always wrapped, to track its forward passes.
        if name and table is None and not states and not rules:
            return
        matched = [state for state in all_states if id(module) in state.row.locations.modules.values()]
        for method in methods:
            signature = Signature(getattr(module, method))
            wrap = WrappedForward(
                module,
                method,
                self._session,
                name=name,
                table=table,
                at_module=ModuleRules(name, signature, states) if states else None,
                counted=[state for state in matched if state.policy.calls],
                parameter_rules=tuple(rules),
            )
            module.__dict__[method] = wrap
            self._removal.callback(wrap.take_off)

    def _table(self, module: nn.Module) -> DispatchTable | None:
        """Return the table of rules on operations inside a module; None without policies on operations."""
        if not any(state.policy.ops for state in self._states.values()):
            return None
        inside = [state for state in self._states.values() if id(module) in state.row.locations.inside]
        names = tuple(state.name for state in inside)
        if names not in self._tables:
            rules = [
                OperationRule(each, state) for state in inside for each in state.row.locations.operations
            ]
            self._tables[names] = DispatchTable(rules)
        return self._tables[names]


def _rules_on_parameters(module: nn.Module, on_parameters: OnParameters) -> list[ParameterRules]:
    """Take the rules on a module's parameters; those on shared ones are the first module's."""
    found = []
    for attribute, parameter in module._parameters.items():
        if rules := on_parameters.pop(id(parameter), None):
            found.append(ParameterRules(rules[0][0], module, attribute, [state for _, state in rules]))
    return found


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


def _state(name: str, policy: RulePlacement, locations: Locations) -> RuleState:
    """Return the rule of a policy, with the policy's row of the report."""
    row = ReportRow(name, locations, type(policy).__name__, describe_location(policy))
    return RuleState(name, policy.rule, policy, row=row)


def name_policies(policies: Iterable[Any] | Mapping[str, Any]) -> dict[str, Any]:
    """Return policies by name. Policies in a list are named after their classes, numbered if necessary.

    Example:
        >>> import gradpolicy as gp
        >>> list(name_policies([gp.Guided(), gp.Scale(0.1, modules="2"), gp.Scale(0.5, modules="4")]))
        ['guided', 'scale_1', 'scale_2']
    """
    if isinstance(policies, Mapping):
        return {key: each for name, given in policies.items() for key, each in _parts(name, given)}
    listed = list(policies)
    kinds = [type(policy).__name__.lower() for policy in listed]
    named = {
        kind if kinds.count(kind) == 1 else f"{kind}_{kinds[:number].count(kind) + 1}": policy
        for number, (kind, policy) in enumerate(zip(kinds, listed, strict=True))
    }
    return name_policies(named)


def _parts(name: str, given: Any) -> list[tuple[str, Any]]:
    """Return a policy with its name, or those of a preset with names of their own."""
    if not isinstance(given, Mapping) or not given:
        return [(name, given)]
    return [(name if len(given) == 1 else f"{name}.{key}", each) for key, each in given.items()]


def checked_policies(caller: str, policies: Any, kind: type, what: str, hint: str = "") -> dict[str, Any]:
    """Return policies by name.

    Args:
        caller: The function that takes them, for messages.
        policies: The policies, by name or in a list.
        kind: Their class.
        what: The name of this class in messages.
        hint: What to do with an entry of another class.

    Raises:
        PolicyError: If an entry is of another class.
    """
    if isinstance(policies, kind):
        raise PolicyError(f"{caller} takes a list or dict of policies, not one policy")
    named = name_policies(policies)
    for name, policy in named.items():
        if not isinstance(policy, kind):
            raise PolicyError(f"policy {shown(name)}: must be a {what}, got {shown(policy)}{hint}")
    return named
