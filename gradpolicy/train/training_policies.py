"""Installs, updates, measures and removes policies in a training run, independently of the training library.

It is called by :class:`~gradpolicy.GradientPolicies` under Lightning,
``gradpolicy.integrations.transformers.GradientPoliciesCallback`` under Hugging Face's Trainer, and
:func:`gradpolicy.training` in a plain loop.
"""

import inspect
import io
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from gradpolicy.checks import check_integer
from gradpolicy.display import wide_console
from gradpolicy.errors import PolicyError, check_named, shortened
from gradpolicy.factors import divided_factors
from gradpolicy.flow import install
from gradpolicy.flow.install import Installed
from gradpolicy.flow.locations import check_cuts, remarks
from gradpolicy.flow.policy_report import check_operations
from gradpolicy.freezing import Freezer
from gradpolicy.freezing.moving_parts import copy_buffers, moving_parts, moving_warnings
from gradpolicy.freezing.requires_grad import is_turned_off
from gradpolicy.optim import MaskedOptimizer
from gradpolicy.optim.masked_optimizer import as_masked, wrapper_of
from gradpolicy.optim.optimizers import plain_optimizers
from gradpolicy.policies import FlowPolicy, Freeze, Policy
from gradpolicy.rates import Rates
from gradpolicy.tensors.checkpoint_file import load_file
from gradpolicy.tensors.packed_mask import pack_masks, unpack_masks
from gradpolicy.train.measurements import Measured, Measurements, summary
from gradpolicy.train.ranks import Ranks
from gradpolicy.what_trains import what_trains
from gradpolicy.where import named_parameters, once_each, pick_each

Kind = TypeVar("Kind")

STATE = "gradient_policies"
"""The key of the policies' state in the first param group of a saved optimizer."""


class TrainingPolicies:
    """Installs policies on a model and its optimizers, prepares each update, and removes them.

    Args:
        policies: The policies by name. Those that are None (``null`` in YAML) are left out.
        seed: The seed of mask sources without a seed of their own.
        log: Log measurements of the policies.
        agreement_every: With several processes, the number of updates between comparisons of the checksums of
            masks, ages and weights; None for no comparisons.
        layers: Print what trains, layer by layer, before the first update; None: if the output is a terminal.

    Raises:
        PolicyError: If an entry is not a policy.
    """

    def __init__(
        self,
        policies: Mapping[str, Policy | None] | None = None,
        *,
        seed: int = 0,
        log: bool = True,
        agreement_every: int | None = 100,
        layers: bool | None = True,
    ) -> None:
        policies = {} if policies is None else policies
        check_named(policies)
        self.policies: dict[str, Policy] = {
            name: policy for name, policy in policies.items() if policy is not None
        }
        for name, policy in self.policies.items():
            if not isinstance(policy, Policy):
                raise PolicyError(f"policy.{name}: must be a gradient policy, got {type(policy).__name__}")
        if agreement_every is not None:
            check_integer(f"{type(self).__name__}.agreement_every", agreement_every, least=1)
        self.seed = seed
        self.log_policies = log
        self.agreement_every = agreement_every
        self.layers = layers
        self.ranks: Ranks | None = None
        self.installed: Installed | None = None
        self.freezer: Freezer | None = None
        self.masked_optimizers: list[MaskedOptimizer] = []
        # Called with each measurement: the phase, the updates so far, and the quantities of each policy.
        self.sinks: list[Callable[[str, int, Measured], None]] = []
        self._measurements: Measurements | None = None
        self._hooks: list[RemovableHandle] = []
        # The number of updates when the policies were last updated. It does not change within a window of
        # accumulated batches, or after a step that fp16 skipped.
        self._updates_seen = -1
        self._checked_phases: set[str] = set()
        self._warned_of_unmet = False
        # The model, and copies of its buffers, from the first update until its step is taken.
        self._buffers: tuple[nn.Module, dict[str, Tensor]] | None = None
        # The model and the names of the parameters that optimizers hold, until the first masks are set.
        self._untold: tuple[nn.Module, set[str]] | None = None
        # Warnings that the plan of the run has already shown.
        self.shown_warnings: frozenset[str] = frozenset()
        # The state of the policies in a state_dict that an optimizer is loading.
        self._loaded: dict[MaskedOptimizer, dict[str, Any]] = {}
        # Under DeepSpeed: the optimizer of the model's parameters, of which a rank has partitions.
        self._partitioned: Any = None

    @property
    def flow_policies(self) -> dict[str, FlowPolicy]:
        """The flow policies."""
        return {name: policy for name, policy in self.policies.items() if isinstance(policy, FlowPolicy)}

    @property
    def freeze_policies(self) -> dict[str, Freeze]:
        """The freeze policies."""
        return {name: policy for name, policy in self.policies.items() if isinstance(policy, Freeze)}

    @property
    def rates(self) -> dict[str, Rates]:
        """The policies that set learning rates of parameters."""
        return {name: policy for name, policy in self.policies.items() if isinstance(policy, Rates)}

    @property
    def optimizer_policies(self) -> dict[str, Freeze | Rates]:
        """The policies that act in the optimizer, or beside it."""
        return {**self.freeze_policies, **self.rates}

    # ---- installing and removing

    def _install_flow(
        self, model: nn.Module, entry_points: Mapping[str, Sequence[str]] | None = None
    ) -> None:
        if self.installed is None and self.flow_policies:
            self.installed = install(model, self.flow_policies, entry_points=entry_points)

    def _install_freeze(
        self,
        model: nn.Module,
        optimizers: Iterable[torch.optim.Optimizer],
        *,
        toggle_requires_grad: bool = True,
    ) -> list[torch.optim.Optimizer]:
        """Wrap the optimizers of parameters of freeze policies and `Rates`; return all optimizers."""
        if not self.optimizer_policies:
            return list(optimizers)
        if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
            raise flat_parameters_refused()
        wrapped = self._wrap(model, optimizers)
        self.freezer = Freezer(
            model,
            self.masked_optimizers,
            self.freeze_policies,
            rates=self.rates,
            seed=self.seed,
            toggle_requires_grad=toggle_requires_grad,
        )
        self._hook_steps()
        return wrapped

    def _install_in_engine(
        self, model: nn.Module, optimizer: Any, *, toggle_requires_grad: bool = True
    ) -> None:
        """Install freeze policies in DeepSpeed's engine, which clips and steps by itself.

        Args:
            model: The model in the engine.
            optimizer: The engine's ``gradpolicy.integrations.deepspeed.PartitionedOptimizer``.
            toggle_requires_grad: As Freezer's; the engine must allow it too.
        """
        self._partitioned = optimizer
        toggles = toggle_requires_grad and optimizer.allows_unused_parameters
        with optimizer.whole_parameters(values=True):
            self._install_freeze(model, [optimizer], toggle_requires_grad=toggles)
        freezer = self.freezer
        assert freezer is not None
        for name, parameter in freezer.parameters.items():
            if parameter.requires_grad:
                self._hooks.append(parameter.register_hook(partial(freezer.note_gradient, name)))
        optimizer.hook_gradients()
        self._hooks.append(optimizer.register_step_pre_hook(lambda *_: freezer.observe(optimizer)))

    def _wrap(
        self, model: nn.Module, optimizers: Iterable[torch.optim.Optimizer]
    ) -> list[torch.optim.Optimizer]:
        params = {
            name: policy.restricts if isinstance(policy, Freeze) else policy.params
            for name, policy in self.optimizer_policies.items()
        }
        matched = pick_each(named_parameters(model), params)
        wanted = {id(p) for parameters in matched.values() for p in parameters.values()}
        wrapped = [_masked_if_needed(optimizer, wanted) for optimizer in optimizers]
        self.masked_optimizers[:] = [each for each in wrapped if isinstance(each, MaskedOptimizer)]
        return wrapped

    def _hook_steps(self) -> None:
        # Right after the update, before other code saves, averages or uses the weights.
        for optimizer in self.masked_optimizers:
            self._hooks.append(optimizer.register_step_post_hook(self._finish_step))
        self._hooks.append(register_optimizer_step_pre_hook(self._refuse_other_step))

    def _refuse_other_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Check, before a step of any optimizer, that it does not update masked parameters without masks.

        Raises:
            PolicyError: If it does.
        """
        if any(optimizer is each or each.steps_inner for each in self.masked_optimizers):
            return
        stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        held = [name for name, parameter in self._held_parameters().items() if id(parameter) in stepped]
        if held:
            raise PolicyError(
                f"{type(optimizer).__name__}.step would update {shortened(held)} past the policies: call "
                "step() of the optimizer that was wrapped for them (gradpolicy.training returns it), and do "
                "not create another one for these parameters while they train"
            )

    def _held_parameters(self) -> Mapping[str, Tensor]:
        """Return the parameters that only the wrapped optimizers may update."""
        return self.freezer.held if self.freezer is not None else {}

    def _check_installed(self, model: nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        flow = {row.name for row in self.installed.report().rows} if self.installed else set()
        others = self.freezer.all_policies if self.freezer else set()
        missing = set(self.policies) - flow - others
        if missing:
            raise PolicyError(f"declared but not installed: policy {', '.join(sorted(missing))}")
        self._warn_of(remarks(self.flow_policies))
        held = {id(p) for each in optimizers for group in each.param_groups for p in group["params"]}
        named = named_parameters(model)
        # DeepSpeed's optimizers hold partitions.
        trainable = {
            name for name, p in named.items() if p.requires_grad and (self._partitioned or id(p) in held)
        }
        self._untold = (model, trainable) if self.policies else None
        plain = plain_optimizers(optimizers)
        self._warn_of(divided_factors(self.policies, named, plain))
        self._buffers = None if self.freezer is None else (model, copy_buffers(model))

    def _join_ranks(self, model: nn.Module, wrapped: nn.Module | None) -> None:
        """Prepare training with several processes; ``wrapped`` is the DistributedDataParallel module."""
        self.ranks = Ranks(
            wrapped,
            once_each(named_parameters(model)),
            self.freezer,
            self.masked_optimizers,
            agreement_every=self.agreement_every,
        )

    def _finish_step(self, *_: Any) -> None:
        if self.freezer is not None:
            self._warn_of_what_moves(self.freezer)

    def _warn_of_what_moves(self, freezer: Freezer) -> None:
        """Warn, after the first step, of what moves in modules with frozen parameters."""
        if self._buffers is None:
            return
        (model, before), self._buffers = self._buffers, None
        moving = moving_parts(before, model)
        names = [name for name, p in named_parameters(model).items() if p.requires_grad or is_turned_off(p)]
        buffers = {
            name: policy.buffers for name, policy in self.policies.items() if isinstance(policy, Freeze)
        }
        self._warn_of(moving_warnings(freezer.frozen_tensors(), moving, names, buffers))

    def _remove(self, *, quiet: bool = True) -> None:
        if self.installed is not None:
            self.installed.remove(quiet=quiet or self._warned_of_unmet)
            self.installed = None
        self._remove_hooks()
        if self.freezer is not None:
            self.freezer.restore()
        if self._measurements is not None:
            self._measurements.detach()
            self._measurements = None
        if self._partitioned is not None:
            self._partitioned.release()
            self._partitioned = None
        if self.ranks is not None:
            self.ranks.release()
            self.ranks = None
        self._updates_seen = -1

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    # ---- an update

    def _begin_update(self, updates: int, epoch: int) -> bool:
        """Prepare the policies for an update; return False if that was done before."""
        if updates == self._updates_seen:
            return False
        if self.installed is not None:
            self.installed.update(phase="fit", step=updates, epoch=epoch)
        if self.freezer is not None:
            self.freezer.begin_step(updates, epoch)
        if self.ranks is not None:
            cut = any(
                _cuts(policy) and policy.when.contains(updates, epoch) for policy in self.policies.values()
            )
            self.ranks.begin_step(updates, cut=cut)
        self._updates_seen = updates
        self._tell_what_trains()
        return True

    def _tell_what_trains(self) -> None:
        """Print what trains, layer by layer, before the first update, on one process.

        Raises:
            PolicyError: If nothing ever trains.
        """
        if self._untold is None:
            return
        (model, trainable), self._untold, freezer = self._untold, None, self.freezer
        layers = what_trains(named_parameters(model), dict.fromkeys(trainable, 1.0))
        layers = layers if freezer is None else freezer.what_trains(trainable)
        if freezer is None or not freezer.may_change:
            layers.check()
        shown = sys.stdout.isatty() if self.layers is None else self.layers
        # Of stage 3 of DeepSpeed without freeze policies nothing is known here.
        if shown and layers.entries and is_first_rank():
            wide_console().print(layers)

    def _wanted_gradients(self) -> set[str]:
        """Return the parameters whose whole gradients mask sources need."""
        return self.freezer.wanted_gradients() if self.freezer is not None else set()

    def _check_operations_met(self, phase: str, *, thaws: bool) -> None:
        """Check, after the first batch of a phase, that the operations of policies were executed.

        Args:
            phase: The phase.
            thaws: True if parameters that are frozen in this batch may train in later ones.

        Raises:
            PolicyError: If none of a policy's operations was. If only some were, a warning is given.
        """
        if self.installed is None or phase in self._checked_phases:
            return
        self._checked_phases.add(phase)
        # Operations behind frozen layers may run later; if not, there is a warning at the end of training.
        frozen = self.freezer.parameters.values() if self.freezer is not None else ()
        warns = phase == "fit" and not any(map(is_turned_off, frozen))
        for row in self.installed.report().rows:
            policy = self.flow_policies[row.name]
            if row.active and policy.when.active(phase=phase):
                message = check_operations(row, may_get_gradient=thaws)
                # In a test gradients are recorded only where a callback enables them.
                if message and warns and f"{row.name}: {message}" not in self.shown_warnings:
                    self._warn(f"policy {row.name!r}: {message}")
                    self._warned_of_unmet = True

    def _check_cuts(self) -> None:
        """Check that no policy cuts the loss off from all parameters; torch's own error is less clear.

        Raises:
            PolicyError: If there is such a policy.
        """
        rows = self.installed.report().rows if self.installed is not None else ()
        check_cuts({row.name: self.flow_policies[row.name] for row in rows if row.active and row.matched})

    # ---- measurements

    def _start_measuring(self, state: Mapping[str, Any] | None = None) -> Measurements:
        """Prepare measurements, with the counts of a checkpoint; of partitions there are none."""
        if self._measurements is None:
            self._measurements = Measurements(
                self.freezer if self._partitioned is None else None, self.installed
            )
            self._measurements.load_state(state or {})
        return self._measurements

    def _measure(self, phase: str, updates: int) -> Measured:
        """Return the measurements of the last update or evaluation, and pass them to the sinks."""
        measured = self._start_measuring().measure(phase)
        measured = {name: each for name, each in measured.items() if _acts_in(self.policies[name], phase)}
        for sink in self.sinks:
            sink(phase, updates, measured)
        return measured

    def _summary(self, measured: Measured) -> dict[str, float]:
        """Return one number for each quantity; under DeepSpeed with the active shares, which need no ages."""
        numbers = summary(measured)
        if self._partitioned is not None and self.freezer is not None:
            for name in self.freezer.policies:
                numbers[f"policy/{name}/active_share"] = self.freezer.active_share(name)
        return numbers

    # ---- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the mask sources, and the policies of the run."""
        return {
            "policies": {name: repr(policy) for name, policy in self.policies.items()},
            "freezer": pack_masks(self.freezer.state_dict()) if self.freezer is not None else {},
            "measured": self._measurements.state() if self._measurements is not None else {},
            # An optimizer without a mask does not save its own.
            "updates": [each.effective_steps for each in self.masked_optimizers],
        }

    def _apply_restored(self, state: dict[str, Any]) -> None:
        saved, declared = state["policies"], {name: repr(policy) for name, policy in self.policies.items()}
        if saved != declared:
            changed = sorted(name for name in {*saved, *declared} if saved.get(name) != declared.get(name))
            self._warn(f"the checkpoint was written under other policies; changed: {', '.join(changed)}")
        for optimizer, updates in zip(self.masked_optimizers, state.get("updates", ()), strict=False):
            optimizer.effective_steps = optimizer.effective_steps or updates
        if self.freezer is not None and state["freezer"]:
            self.freezer.load_state_dict(unpack_masks(state["freezer"]))

    def _put_state(self, optimizer: MaskedOptimizer, saved: dict[str, Any], state: dict[str, Any]) -> None:
        """Add the state of the policies to an optimizer's state_dict.

        It may go through ``torch.distributed.checkpoint``, which loads tensors only in the sizes that they
        have in the loading run, but bytes of any length.
        """
        torch.save(state, written := io.BytesIO())
        saved["param_groups"][0][STATE] = written.getvalue()

    def _take_state(self, optimizer: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Take the state of the policies out of a state_dict that an optimizer is about to load."""
        first, *others = state_dict["param_groups"]
        state = first.get(STATE, {})
        self._loaded[optimizer] = load_file(io.BytesIO(state)) if isinstance(state, bytes) else state
        first = {key: value for key, value in first.items() if key != STATE}
        return {**state_dict, "param_groups": [first, *others]}

    def _add_former_steps(self, steps: int) -> None:
        """Count the steps that were taken without masks, in an earlier fit or before a checkpoint."""
        for optimizer in self.masked_optimizers:
            if not optimizer.effective_steps:
                optimizer.effective_steps = steps

    def _warn_of(self, lines: Iterable[str]) -> None:
        """Give warnings, except those that the plan has shown."""
        for line in lines:
            if line not in self.shown_warnings:
                self._warn(f"policy {line}")

    def _warn(self, line: str) -> None:
        """Give a warning, on one process only."""
        if is_first_rank():
            warnings.warn(line, stacklevel=2)


def calling(kind: type[Kind]) -> Kind | None:
    """Return the object of a class whose method is running, from the nearest caller.

    Args:
        kind: The class, such as ``torch.amp.GradScaler`` during ``optimizer.step()``.
    """
    frame = inspect.currentframe()
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, kind):
            return caller
        frame = frame.f_back
    return None


def is_first_rank() -> bool:
    """Return True in the process that prints and warns for all."""
    return not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0


def flat_parameters_refused() -> PolicyError:
    """Return the error that says why there are no policies under version 1 of FSDP, and what to use."""
    return PolicyError(
        "FSDP: policies are refused under version 1 (FullyShardedDataParallel), which flattens the "
        "parameters of a block into one, in which names, rows and entries are lost; use version 2: "
        "fully_shard, fsdp_version: 2 in accelerate's config, or trainer=fsdp2"
    )


def _acts_in(policy: Policy, phase: str) -> bool:
    return isinstance(policy, Freeze) or phase in policy.when.phases


def _cuts(policy: Policy) -> bool:
    if not isinstance(policy, FlowPolicy) or "fit" not in policy.when.phases:
        return False
    return policy.detaches or (policy.at == "through" and policy.inside == "none")


def _masked_if_needed(optimizer: torch.optim.Optimizer, wanted: set[int]) -> torch.optim.Optimizer:
    """Return an optimizer, wrapped if it holds any of the wanted parameters."""
    optimized = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if wanted.isdisjoint(map(id, optimized)):
        return optimizer
    present = wrapper_of(optimizer)
    if present is None:
        return as_masked(optimizer)
    # The optimizer was used in an earlier fit, whose masks are no longer valid.
    present.set_masks(dict.fromkeys(optimized))
    present.effective_steps = 0
    return present
