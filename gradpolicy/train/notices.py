"""Prints and warnings of a run: what trains, what moves, policies without effect."""

import sys
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from gradpolicy.display import wide_console
from gradpolicy.errors import PolicyError
from gradpolicy.factors import divided_factors
from gradpolicy.flow.install import Installed
from gradpolicy.flow.locations import remarks
from gradpolicy.flow.policy_report import check_operations
from gradpolicy.freezing import Freezer
from gradpolicy.freezing.moving_parts import copy_buffers, moving_parts, moving_warnings
from gradpolicy.freezing.requires_grad import is_turned_off
from gradpolicy.optim.lost_updates import losing_updates, lost_updates_warning
from gradpolicy.optim.optimizers import plain_optimizers
from gradpolicy.planning.plan_table import Plan
from gradpolicy.policies import FlowPolicy, Freeze, Policy
from gradpolicy.train.missing_gradients import MissingGradients
from gradpolicy.train.ranks import is_first_rank
from gradpolicy.where import named_parameters, once_each


class Notices:
    """Prints and warns of what the policies of a run do, and raises for those that cannot act.

    Args:
        policies: The policies by name.
        layers: Print what trains before the first update; None: if the output is a terminal.

    Attributes:
        shown: Warnings that the plan of the run has already shown.
        shown_missing: The parameters without a gradient that it has named.
        warned_of_operations: True if an operation was reported that has not been executed so far.
        missing: Warns of tensors that train without a gradient.
    """

    def __init__(self, policies: Mapping[str, Policy], layers: bool | None) -> None:
        self.policies, self.layers = policies, layers
        self.shown: frozenset[str] = frozenset()
        self.shown_missing: Collection[str] = ()
        self.warned_of_operations = False
        self._checked_phases: set[str] = set()
        # The optimizers, the parameters that they train, and copies of buffers while the first update runs.
        self._is_first = True
        self._optimizers: Sequence[Any] = ()
        self._buffers: dict[str, Tensor] | None = None
        self._trainable: dict[str, Tensor] = {}
        self.missing = MissingGradients({}, {}, {})

    def do_not_repeat(self, plan: Plan) -> None:
        """Leave out what a plan has shown."""
        self.shown, self.layers = frozenset(plan.warnings), False
        self.shown_missing = {*plan.without_gradient, *plan.zero_gradient}

    def follow(self, model: nn.Module, installed: Installed) -> None:
        """Set the model, and the flow policies on it."""
        self._model, self._installed = model, installed

    def attach(self, freezer: Freezer, optimizers: Sequence[Any], *, partitioned: bool) -> None:
        """Check that every policy is installed, and warn of what is known before training.

        Args:
            freezer: The freezer.
            optimizers: The optimizers.
            partitioned: True if an engine distributes parameters to the optimizers.

        Raises:
            PolicyError: If a policy is not installed.
        """
        self._freezer, model = freezer, self._model
        known = {row.name for row in self._installed.report().rows} | freezer.all_policies
        if missing := sorted(set(self.policies) - known):
            raise PolicyError(f"declared but not installed: policy {', '.join(missing)}")
        flow = {name: each for name, each in self.policies.items() if isinstance(each, FlowPolicy)}
        self._warn_of(remarks(flow))
        optimized = {id(p) for each in optimizers for group in each.param_groups for p in group["params"]}
        named = named_parameters(model)
        self._trainable = {
            n: p
            for n, p in once_each(named).items()
            if p.requires_grad and (partitioned or id(p) in optimized)
        }
        # An engine updates its own float32 weights.
        self._optimizers = () if partitioned else optimizers
        self._warn_of(divided_factors(self.policies, named, plain_optimizers(optimizers)))
        self._is_first = True

    def begin(self, *, masks_changed: bool, has_gradients: bool) -> None:
        """Tell, as the first update begins, what trains.

        Args:
            masks_changed: True if masks have changed.
            has_gradients: False if only gradients of freeze policies' parameters are known.
        """
        freezer = self._freezer
        if self._is_first and self.policies:
            self._what_trains(self._trainable)
            policies, frozen = freezer.policy_of, freezer.frozen()
            known = {n: p for n, p in self._trainable.items() if has_gradients or n in policies}
            self.missing = MissingGradients(known, policies, freezer.counted_layers(), self.shown_missing)
            active = {n: p for n, p in self._trainable.items() if n not in frozen}
            losing = losing_updates(active, self._optimizers)
            if losing and (line := lost_updates_warning(losing)) not in self.shown:
                self.warn(line)
        if self._is_first and freezer.policies:
            self._buffers = copy_buffers(self._model)
        if self._is_first or masks_changed:
            self.missing.follow(freezer.frozen())
        self._is_first = False

    def late(self, freezer: Freezer) -> None:
        """Compute all gradients from now on, since an update has begun without a call of the model.

        Raises:
            PolicyError: If a policy had to change modules before the forward pass.
        """
        if any(isinstance(each, Freeze) and each.buffers != "move" for each in self.policies.values()):
            raise PolicyError(
                "gradpolicy.training: modules can be kept still (Freeze.buffers) only if the model itself is "
                "called before the backward pass"
            )
        if freezer.compute_all():
            self.warn(
                "gradpolicy.training: the model was not called before a backward pass, so that tensors "
                "that thaw get no gradient in this update; call the model itself, not its parts or other "
                "methods"
            )

    def end(self) -> None:
        """Check, after the first update, that policies act, and warn of what moves in frozen modules.

        Raises:
            PolicyError: If none of a policy's operations was executed.
        """
        before, self._buffers = self._buffers, None
        if before is not None:
            self._what_moves(before)
        self.operations("fit")

    def _what_trains(self, trainable: Collection[str]) -> None:
        """Print what trains, layer by layer, on one process.

        Raises:
            PolicyError: If nothing ever trains.
        """
        layers = self._freezer.what_trains(trainable)
        if not self._freezer.may_change:
            layers.check()
        shown = sys.stdout.isatty() if self.layers is None else self.layers
        # Of stage 3 of DeepSpeed without freeze policies nothing is known here.
        if shown and layers.entries and is_first_rank():
            wide_console().print(layers)

    def _what_moves(self, before: dict[str, Tensor]) -> None:
        named = named_parameters(self._model)
        names = [name for name, p in named.items() if p.requires_grad or is_turned_off(p)]
        buffers = {name: each.buffers for name, each in self.policies.items() if isinstance(each, Freeze)}
        moving = moving_parts(before, self._model)
        self._warn_of(moving_warnings(self._freezer.frozen_tensors(), moving, names, buffers))

    def operations(self, phase: str) -> None:
        """Check, after the first batch of a phase, that the operations of policies were executed.

        Raises:
            PolicyError: If none of a policy's operations was. If only some were, a warning is given.
        """
        if phase in self._checked_phases:
            return
        self._checked_phases.add(phase)
        # Parameters that are frozen in this batch may train in later ones. In a test gradients are recorded
        # only where a callback enables them.
        thaws = phase != "fit" or any(not p.requires_grad for p in self._model.parameters())
        # Operations behind frozen layers may run later; if not, there is a warning at the end of training.
        warns = phase == "fit" and not any(map(is_turned_off, self._model.parameters()))
        for row in self._installed.report().rows:
            if row.active and self.policies[row.name].when.active(phase=phase):
                message = check_operations(row, may_get_gradient=thaws)
                if message and warns and f"{row.name}: {message}" not in self.shown:
                    self.warn(f"policy {row.name!r}: {message}")
                    self.warned_of_operations = True

    def warn(self, line: str) -> None:
        """Give a warning, on one process only."""
        if is_first_rank():
            warnings.warn(line, stacklevel=2)

    def _warn_of(self, lines: Iterable[str]) -> None:
        """Give warnings, except those that the plan has shown."""
        for line in lines:
            if line not in self.shown:
                self.warn(f"policy {line}")
