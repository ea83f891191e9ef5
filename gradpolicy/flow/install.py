"""Puts flow policies on a model, and takes them off again."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradpolicy.errors import PolicyError, shown, unknown
from gradpolicy.flow.bound_rule import Binding
from gradpolicy.flow.boundary import Boundary
from gradpolicy.flow.cuts import check_cuts, is_cut
from gradpolicy.flow.idle import check_rules
from gradpolicy.flow.known import calls_of
from gradpolicy.flow.locations import find_places, place_of
from gradpolicy.flow.operation_rule import OperationRule
from gradpolicy.flow.operations import name_of
from gradpolicy.flow.override import CallRule
from gradpolicy.flow.parameters import ParameterRules
from gradpolicy.flow.policy_checks import check_boundaries, check_operations, check_parameters
from gradpolicy.flow.report import Report, ReportRow
from gradpolicy.flow.session import Owner
from gradpolicy.flow.shortcuts import WrappedReLU, WrappedSequence
from gradpolicy.flow.unmet import Met, tell
from gradpolicy.flow.unseen import note_script_modules, unseen_calls
from gradpolicy.flow.wrapped_forward import Scope, WrappedForward
from gradpolicy.policies import BOUNDARIES, STEP_OPERATIONS, FlowPolicy, Freeze, Policy, Stop
from gradpolicy.where import plain_name

EntryPoints = Mapping[str, Sequence[str]]


def install(
    model: nn.Module,
    policies: Iterable[Policy] | Mapping[str, Policy],
    *,
    strict: bool = False,
    entry_points: EntryPoints | None = None,
) -> "Installed":
    """Puts flow policies on a model.

    Each policy holds from now on, whatever its time, until :meth:`Installed.update` tells the time.

    An operation that a policy names and never met gives a warning when the policies are removed, with those
    near it that did run; so does one that ran only where no gradient is recorded. Nothing is said where the
    model never ran, or an exception is on its way.

    Args:
        model: The model.
        policies: The policies, by name or in a list. At one boundary the gradient meets them in this order.
        strict: An operation that was not met is an error when the policies are removed.
        entry_points: For modules that are not entered through ``forward``: their names (``""`` for the model)
            and the methods through which they are.

    Returns:
        The handle: a context manager that takes everything off at its end.

    Raises:
        PolicyError: If a pattern matches nothing, an operation does not exist, two policies contradict each
            other, a policy is none of flow, a rule makes no sense where it is put, or the model is in
            ``nn.DataParallel`` on many devices.

    Example:
        >>> import torch, gradpolicy as gp
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1))
        >>> with install(model, {"guide": gp.Guided(), "slow": gp.Scale(0.1, modules="2")}) as installed:
        ...     model(torch.ones(1, 2)).sum().backward()
        >>> "forward" in model[1].__dict__
        False
    """
    if torch.compiler.is_compiling():
        # Without fullgraph the compiler then leaves this to eager mode, where it works.
        raise PolicyError("policies cannot be installed within compiled code: install them before the call")
    return Installed(model, _named(policies), entry_points or {}, strict=strict)


class Installed:
    """Policies on a model, as :func:`install` put them there."""

    def __init__(
        self,
        model: nn.Module,
        policies: Mapping[str, FlowPolicy],
        entry_points: EntryPoints,
        *,
        strict: bool = False,
    ) -> None:
        _refuse_copies(model)
        self.model = model
        self.strict = strict
        self.policies = dict(policies)
        self.bindings = {
            name: Binding(
                name,
                policy.rule,
                detaches=isinstance(policy, Stop) and policy.mode == "detach",
                when=policy.when,
                written=repr(policy),
            )
            for name, policy in self.policies.items()
        }
        self._places = {name: find_places(model, name, policy) for name, policy in self.policies.items()}
        check_operations(self.policies, self._places)
        check_boundaries(self.policies, self._places)
        check_parameters(self.policies, self._places)
        check_rules(self.policies)
        self._at_boundaries = frozenset().union(*(places.at for places in self._places.values()))
        self._has_operations = any(places.operations for places in self._places.values())
        # Which policies act on a parameter, in the order in which its gradient is to meet them.
        self._parameter_ids: dict[int, list[str]] = {}
        for name, places in self._places.items():
            for parameter in places.parameters.values():
                self._parameter_ids.setdefault(id(parameter), []).append(name)
        self.owner = Owner(self.bindings.values())
        self._scopes: dict[tuple[str, ...], Scope] = {}
        self._wraps: list[WrappedForward] = []
        self._parameter_rules: list[ParameterRules] = []
        try:
            self._put_on(entry_points)
        except BaseException:
            self.remove(quiet=True)
            raise

    def __enter__(self) -> "Installed":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: Any) -> None:
        told = kind is None and self.owner.installed
        self.remove(quiet=True)
        if told:
            self._tell_unmet()
        if isinstance(error, RuntimeError) and is_cut(error):
            acted = {name: self.policies[name] for name, binding in self.bindings.items() if binding.counts()}
            check_cuts(acted)

    def remove(self, *, quiet: bool = False) -> None:
        """Takes everything off in reverse; the model is then as it was found. Again does nothing.

        Args:
            quiet: Say nothing of operations that were not met.

        Raises:
            PolicyError: For an operation that was not met, where the installation is strict.
        """
        was_installed, self.owner.installed = self.owner.installed, False
        while self._parameter_rules:
            self._parameter_rules.pop().take_off()
        while self._wraps:
            self._wraps.pop().take_off()
        if was_installed and not quiet:
            self._tell_unmet()

    def update(self, phase: str = "fit", step: int = 0, epoch: int = 0) -> None:
        """Tells the time: switches each policy on or off, and sets scheduled numbers.

        Args:
            phase: The phase that runs: ``fit``, ``validate``, ``test`` or ``predict``.
            step: Effective optimizer steps taken so far.
            epoch: Epochs completed so far.
        """
        for binding in self.bindings.values():
            binding.update(phase, step, epoch)

    def set_active(self, name: str, active: bool) -> None:
        """Switches a policy on or off.

        Raises:
            PolicyError: If there is no such policy.
        """
        if name not in self.bindings:
            raise unknown("policy", name, self.bindings)
        self.bindings[name].active = active

    def set_loss_scale(self, scale: float | Tensor) -> None:
        """Tells what the loss is multiplied by (fp16), so that absolute clip thresholds follow."""
        for binding in self.bindings.values():
            binding.set_loss_scale(scale)

    def measure_norms(self, on: bool) -> None:
        """Measures the gradient's norm before and after each policy from now on; off as a rule.

        Switching on forgets what was measured. Nothing is measured in compiled code.
        """
        for binding in self.bindings.values():
            if on:
                binding.meter.clear()
            binding.meter.on = on

    @property
    def gradient_norms(self) -> dict[str, tuple[Tensor, Tensor]]:
        """The gradient's norm before and after each policy, over all its places; where it was measured."""
        measured = {name: binding.meter.read() for name, binding in self.bindings.items()}
        return {name: norms for name, norms in measured.items() if norms is not None}

    def report(self) -> Report:
        """What each policy matched and met so far."""
        return Report(tuple(self._row(name) for name in self.policies))

    def _row(self, name: str) -> ReportRow:
        policy, places, binding = self.policies[name], self._places[name], self.bindings[name]
        counts = binding.counts()
        scopes = [scope for names, scope in self._scopes.items() if name in names]
        ran = {name_of(function) for scope in scopes for function in scope.seen}
        return ReportRow(
            name=name,
            kind=type(policy).__name__,
            where=place_of(policy),
            active=binding.active,
            modules=tuple(places.matched),
            operations=tuple(operation.name for operation in places.operations),
            met=Met(
                operations=tuple(operation.name for operation in places.operations),
                matched=frozenset(counts),
                ran=frozenset(ran | set(counts) | binding.without_gradient),
                without_gradient=frozenset(binding.without_gradient),
                taken=frozenset(self.owner.taken),
                hiding=tuple(binding.unseen),
                excused=frozenset(ran if binding.has_rested else ()),
                any_of=policy.ops == STEP_OPERATIONS,
            ),
            matched=counts,
            parameters=tuple(places.parameters),
            unseen=dict(binding.unseen),
            compiled=binding.compiled,
        )

    def _tell_unmet(self) -> None:
        """Says which operations were not met; it stands two frames below who is told."""
        for name, binding in self.bindings.items():
            if not (binding.has_held or binding.without_gradient):
                continue
            met = self._row(name).met
            if len(self.policies[name].when.phases) > 1:
                # In another phase, such as for attributions in testing, gradients may be recorded.
                met = replace(met, excused={*met.excused, *met.without_gradient})
            tell(f"policy {name!r}", met, strict=self.strict, stacklevel=3)

    def _put_on(self, entry_points: EntryPoints) -> None:
        done: set[int] = set()
        scripts: list[tuple[str, nn.Module]] = []
        for raw_name, module in self.model.named_modules(remove_duplicate=False):
            if isinstance(module, torch.jit.ScriptModule):
                scripts.append((raw_name, module))
            # A compiled module only passes its calls on; what it compiles is wrapped.
            if id(module) in done or "_orig_mod" in module._modules:
                continue
            done.add(id(module))
            self._wrap(plain_name(raw_name), module, entry_points)
        for name, places in self._places.items():
            note_script_modules(scripts, places.within, self.bindings[name])
        self.owner.acts_on_parameters = bool(self._parameter_rules)
        for rules in self._parameter_rules:
            rules.put_on()
        # The model itself looks at all of them: modules use one another's parameters.
        for wrap in self._wraps:
            if wrap.module is self.model:
                wrap.parameter_rules = tuple(self._parameter_rules)

    def _wrap(self, name: str, module: nn.Module, entry_points: EntryPoints) -> None:
        scope = self._scope(module)
        entering = leaving = None
        if id(module) in self._at_boundaries:
            entering, leaving = (self._boundary(name, module, side) for side in BOUNDARIES)
        parameter_rules = self._rules_on_parameters(module) if self._parameter_ids else []
        calls = calls_of(module)
        if scope is not None and calls is not None and not any(call in scope.table for call in calls):
            scope.seen.update(calls)
            scope = None
        # The model itself is wrapped in any case: it watches over what its parts note.
        if name and scope is None and entering is None and leaving is None and not parameter_rules:
            return
        self._parameter_rules += parameter_rules
        for method in entry_points.get(name, ("forward",)):
            wrap = None if entering or leaving else _wrapped_relu(name, module, self.owner, scope)
            kind = (
                WrappedSequence if type(module) is nn.Sequential and method == "forward" else WrappedForward
            )
            wrap = wrap or kind(
                module,
                method,
                self.owner,
                name=name,
                scope=scope,
                entering=entering,
                leaving=leaving,
                parameter_rules=parameter_rules,
            )
            wrap.put_on()
            self._wraps.append(wrap)

    def _scope(self, module: nn.Module) -> Scope | None:
        if not self._has_operations:
            return None
        names = tuple(name for name, places in self._places.items() if id(module) in places.within)
        if names not in self._scopes:
            rules: list[CallRule] = [
                OperationRule(operation, self.bindings[name])
                for name in names
                for operation in self._places[name].operations
            ]
            for name in names:
                rules += unseen_calls(self._places[name].operations, self.bindings[name])
            self._scopes[names] = Scope(self.owner, rules)
        return self._scopes[names]

    def _rules_on_parameters(self, module: nn.Module) -> list[ParameterRules]:
        """The rules on the parameters that a module holds; a shared one's come with its first module."""
        found = []
        for attribute, parameter in module._parameters.items():
            names = self._parameter_ids.pop(id(parameter), ())
            if names:
                matched = self._places[names[0]].parameters
                full_name = next(key for key, value in matched.items() if value is parameter)
                bindings = [self.bindings[name] for name in names]
                found.append(ParameterRules(full_name, module, attribute, bindings))
        return found

    def _boundary(self, name: str, module: nn.Module, side: str) -> Boundary | None:
        found = [
            self.bindings[policy_name]
            for policy_name, places in self._places.items()
            if places.side == side and id(module) in places.at
        ]
        return Boundary(f"{side} of module {name!r}", found) if found else None


def _refuse_copies(model: nn.Module) -> None:
    """Refuses DataParallel on many devices: its copies of a module would run the original's forward."""
    for name, module in model.named_modules():
        if isinstance(module, nn.DataParallel) and len(module.device_ids) > 1:
            raise PolicyError(
                f"{name or 'the model'}: flow policies do not hold under nn.DataParallel on"
                f" {len(module.device_ids)} devices; use DistributedDataParallel"
            )


def _wrapped_relu(name: str, module: nn.Module, owner: Owner, scope: Scope | None) -> WrappedForward | None:
    """The short way for a ReLU with one rule for what it calls, where that rule is a filter."""
    if scope is None or type(module) is not nn.ReLU or "forward" in module.__dict__:
        return None
    rules = scope.table.get(F.relu, ())
    if len(rules) != 1 or not isinstance(rules[0], OperationRule) or not rules[0].filters:
        return None
    return WrappedReLU(module, owner, scope, rules[0], name=name)


def _named(policies: Iterable[Policy] | Mapping[str, Policy]) -> dict[str, FlowPolicy]:
    if isinstance(policies, Policy):
        raise PolicyError("install takes a list or dict of policies, not one policy")
    if isinstance(policies, Mapping):
        named = dict(policies)
    else:
        listed = list(policies)
        kinds = [type(policy).__name__.lower() for policy in listed]
        named = {
            kind if kinds.count(kind) == 1 else f"{kind}_{kinds[:number].count(kind) + 1}": policy
            for number, (kind, policy) in enumerate(zip(kinds, listed, strict=True))
        }
    for name, policy in named.items():
        if isinstance(policy, Freeze):
            raise PolicyError(
                f"policy {shown(name)}: Freeze acts on the optimizer, not on the model; use "
                "gradpolicy.MaskedOptimizer with gradpolicy.Freezer, or the callback "
                "gradpolicy.GradientPolicies"
            )
        if not isinstance(policy, FlowPolicy):
            raise PolicyError(f"policy {shown(name)}: must be a flow policy, got {shown(policy)}")
    return named
