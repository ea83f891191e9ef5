"""One training under policies: installs them, begins and ends each update, saves their state."""

from collections.abc import Callable, Collection, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn

from gradpolicy.checks import check_flag, check_integer
from gradpolicy.errors import PolicyError, check_named
from gradpolicy.flow import install
from gradpolicy.flow.install import name_policies
from gradpolicy.freezing import Freezer
from gradpolicy.optim import MaskedOptimizer
from gradpolicy.optim.masked_optimizer import as_masked, keep_master_weights, wrapper_of
from gradpolicy.policies import FlowPolicy, Freeze, Policy
from gradpolicy.rates import Rates
from gradpolicy.tensors.mask import pack_masks, unpack_masks
from gradpolicy.train.measurements import Measured, Measurements, summary
from gradpolicy.train.notices import Notices
from gradpolicy.train.optimizer_steps import STATE, Steps, parameters_of
from gradpolicy.train.ranks import Ranks
from gradpolicy.train.step_in_backward import refused, update_in_backward
from gradpolicy.where import named_parameters, once_each, pick_each


class Run:
    """Trains a model under policies, whichever library drives the loop.

    An update begins in :meth:`begin`, which sets its masks, and ends as soon as all optimizers have stepped.
    Between them masks stay, so that after a step they are still those of the step. What a call has done is
    not done again: a driver may call :meth:`begin` before each batch.

    Args:
        policies: The policies by name. Those that are None (``null`` in YAML) are left out.
        seed: The seed of mask sources without a seed of their own.
        agreement_every: With several processes, the number of updates between comparisons of the checksums of
            masks, ages and weights; None for no comparisons.
        layers: Print what trains, layer by layer, before the first update; None: if the output is a terminal.
        step_in_backward: Update each parameter in the backward pass as soon as its gradient is complete.
        master_weights: Update bfloat16 and float16 parameters as float32.

    Attributes:
        installed: The flow policies on the model.
        freezer: The freezer of the freeze policies.
        steps: The optimizers, and which of them have stepped.
        updates: The number of updates so far.
        epoch: The number of completed epochs.
        steps_per_epoch: The number of updates in an epoch, if no driver tells the epoch.
        measures: True if the current update is measured.
        has_gradients: False if gradients are partitioned, or are freed before the step.
        idle: The names of parameters without a gradient in the plan's step, which make no layer.
        sinks: Called with each measurement: the updates so far, and the quantities of each policy.

    Raises:
        PolicyError: If an entry is not a policy.
    """

    def __init__(
        self,
        policies: Mapping[str, Policy | None] | None = None,
        *,
        seed: int = 0,
        agreement_every: int | None = 100,
        layers: bool | None = True,
        step_in_backward: bool = False,
        master_weights: bool = False,
    ) -> None:
        policies = {} if policies is None else policies
        check_named(policies)
        self.policies: dict[str, Policy] = {
            name: policy for name, policy in name_policies(policies).items() if policy is not None
        }
        for name, policy in self.policies.items():
            if not isinstance(policy, Policy):
                raise PolicyError(f"policy.{name}: must be a gradient policy, got {type(policy).__name__}")
        if agreement_every is not None:
            check_integer("agreement_every", agreement_every, least=1)
        self.seed, self.agreement_every = check_integer("seed", seed), agreement_every
        self.in_backward = check_flag("step_in_backward", step_in_backward)
        self.master_weights = check_flag("master_weights", master_weights)
        self.notices = Notices(self.policies, layers)
        self.sinks: list[Callable[[int, Measured], None]] = []
        self.steps_per_epoch: int | None = None
        self.installed = install(nn.Module(), {})
        self.idle: Collection[str] = ()
        self._reset()

    def _reset(self) -> None:
        self.freezer = Freezer(nn.Module(), [], {})
        # The updates and the sources of an earlier training.
        self._former: tuple[int, dict[str, Any]] = (0, {})
        self.steps = Steps(self, [], self.freezer, {})
        self.ranks: Ranks | None = None
        self.epoch = self.updates = 0
        self.has_begun = self.measures = False
        self.measurements: Measurements | None = None
        self._is_measured: Callable[[int], bool] | None = None
        self._numbers: dict[str, float] = {}
        self.has_gradients = True
        self._scaler: Any = None

    # ---- installing and removing

    def install(
        self,
        model: nn.Module,
        optimizers: Sequence[Any],
        *,
        wrapped: nn.Module | None = None,
        scaler: Any = None,
        entry_points: Mapping[str, Sequence[str]] | None = None,
        toggle_requires_grad: bool = True,
        driven: bool = True,
    ) -> list[Any]:
        """Install all policies.

        Args:
            model: The model.
            optimizers: The optimizers of its parameters. With an engine, another one takes their place.
            wrapped: The DistributedDataParallel module or the DeepSpeed engine, if there is one.
            scaler: The loss scaler, if there is one. An engine has its own.
            entry_points: As for ``gradpolicy.flow.install``.
            toggle_requires_grad: As for :class:`~gradpolicy.freezing.Freezer`.
            driven: True if a driver calls :meth:`begin` before the batches of each update, and
                :meth:`gradients` before it clips gradients; False: optimizers do in their steps. Then each is
                wrapped, also without a parameter of a freeze policy, and goes on from the count of an earlier
                run.

        Returns:
            The optimizers to train with; those of an engine as they are.
        """
        given, masks_all = list(optimizers), not driven or self.master_weights or self.in_backward
        former = (self.updates, self.freezer.state_dict())
        self._reset()
        self._former, self._scaler = former, scaler
        is_engine = type(wrapped).__name__ == "DeepSpeedEngine"
        if self.in_backward and (is_engine or scaler is not None):
            found = "DeepSpeed, whose engine steps" if is_engine else "GradScaler"
            raise refused(found, "bfloat16 or float32, without an engine")
        if is_engine:
            optimizers = _of_engine(wrapped, given, self.policies)
            zero = getattr(wrapped, "optimizer", None)
            self._scaler = SimpleNamespace(get_scale=lambda: getattr(zero, "loss_scale", 1.0))
            toggle_requires_grad &= all(each.allows_unused_parameters for each in optimizers)
        self.install_flow(model, entry_points)
        # A plain optimizer that has loaded a state with masks keeps it in its param groups.
        loaded = [each.state_dict() if STATE in each.param_groups[0] else None for each in optimizers]
        guarded = _matched(model, self.policies)
        wanted = set(guarded.values())
        wrapping = [
            _masked(each, again=masks_all)
            if masks_all or not wanted.isdisjoint(parameters_of(each))
            else each
            for each in optimizers
        ]
        masked = [each for each in wrapping if isinstance(each, MaskedOptimizer)]
        self.updates = max((each.effective_steps for each in masked), default=0)
        for each in masked if self.master_weights else ():
            keep_master_weights(each)
        freezes = {name: each for name, each in self.policies.items() if isinstance(each, Freeze)}
        rates = {name: each for name, each in self.policies.items() if isinstance(each, Rates)}
        self.freezer = Freezer(
            model,
            masked,
            freezes,
            rates=rates,
            seed=self.seed,
            toggle_requires_grad=toggle_requires_grad,
            idle=self.idle,
        )
        if masks_all:
            trained = {parameter for each in masked for parameter in parameters_of(each)}
            guarded |= {name: p for name, p in named_parameters(model).items() if p in trained}
        self.steps = Steps(self, wrapping, self.freezer, guarded, driven=driven)
        self.has_gradients = not self.steps.partitioned
        self.notices.attach(self.freezer, wrapping, partitioned=not self.has_gradients)
        named = once_each(named_parameters(model))
        self.ranks = Ranks(wrapped, named, self.freezer, masked, agreement_every=self.agreement_every)
        self.steps.hooks.append(self.ranks)
        if self.in_backward:
            # A driver's closure is called once.
            self.steps.hooks += update_in_backward(masked, self.policies, allow_closures=driven)
            self.has_gradients = False
        for each, state in zip(wrapping, loaded, strict=True):
            if state is not None:
                each.load_state_dict(state)
        return given if is_engine else wrapping

    def install_flow(self, model: nn.Module, entry_points: Mapping[str, Sequence[str]] | None = None) -> None:
        """Install the flow policies alone, for an evaluation."""
        flow = {name: each for name, each in self.policies.items() if isinstance(each, FlowPolicy)}
        if flow and not self.installed.policies:
            self.installed = install(model, flow, entry_points=entry_points)
        self.notices.follow(model, self.installed)

    def remove(self, *, quiet: bool = True, clear_masks: bool = False) -> None:
        """Remove everything from the model and the optimizers, masks only with ``clear_masks``."""
        self.installed.remove(quiet=quiet or self.notices.warned_of_operations)
        self.installed = install(nn.Module(), {})
        self.freezer.restore()
        self.steps.remove()
        masked = set(self.freezer.parameters.values()) if clear_masks else set()
        for each in self.steps.masked:
            each.set_masks({parameter: None for parameter in parameters_of(each) if parameter in masked})
        self.notices.missing.finish()
        self.measurements = self.ranks = None
        self.has_begun = self.measures = False

    # ---- an update

    def begin(self, epoch: int | None = None, *, late: bool = False) -> None:
        """Begin the update unless it has begun, and prepare a batch.

        Args:
            epoch: The number of completed epochs; None: by ``steps_per_epoch``.
            late: True if the forward pass is over, so that tensors which thaw now get no gradient in it.
        """
        if not self.has_begun:
            self.has_begun = True
            if late:
                self.notices.late(self.freezer)
            self.epoch = (
                self.updates // (self.steps_per_epoch or self.updates + 1) if epoch is None else epoch
            )
            self._begin()
        self.installed.measure_norms(self.measures)
        if self._scaler is not None and not late:
            # The batch may be one more attempt after an overflow.
            self.installed.set_loss_scale(float(self._scaler.get_scale()))

    def _begin(self) -> None:
        now = (self.updates, self.epoch)
        self.installed.update(phase="fit", step=self.updates, epoch=self.epoch)
        changed = self.freezer.begin_step(*now)
        self.steps.hook_gradients()
        if self.ranks is not None:
            self.ranks.begin_step(self.updates, cut=any(_cuts(each, *now) for each in self.policies.values()))
        self.measures = self._is_measured is not None and self._is_measured(self.updates)
        if self.measures and self.measurements is not None:
            self.measurements.begin()
        self.notices.begin(masks_changed=changed, has_gradients=self.has_gradients)

    def gradients(self, optimizer: Any) -> None:
        """Show the unscaled gradients of an optimizer to sources, before clipping if the driver can."""
        # A mask of rows may leave none of a small tensor active.
        masked, parameters = getattr(optimizer, "masked", {}), parameters_of(optimizer)
        trained = (each for each in parameters if each not in masked or not masked[each].frozen_everywhere)
        self.notices.missing.update(trained)
        if optimizer not in self.steps.masked:
            return
        if self.measures and self.measurements is not None:
            self.measurements.take_gradients(optimizer, "gradient_norm_before")
        self.freezer.observe(optimizer)
        if self.reads_gradients:
            for parameter in optimizer.masked:
                optimizer.mask_gradient(parameter)
        if self.measures and self.measurements is not None:
            self.measurements.take_gradients(optimizer, "gradient_norm_after")

    @property
    def reads_gradients(self) -> bool:
        """True if :meth:`gradients` shows full gradients in this update to sources or measurements."""
        return self.measures or bool(self.steps.wanted)

    def end(self) -> None:
        """End the update. Masks change only as the next one begins."""
        self.updates += 1
        self.steps.stepped.clear()
        try:
            self.notices.end()
        except PolicyError:
            self.remove()  # not every library tells its driver that a training has failed
            raise
        if self.measures and self.measurements is not None:
            found = self.measurements.measure()
            measured = {name: each for name, each in found.items() if _trains(self.policies[name])}
            self._numbers = summary(measured)
            for name in () if self.has_gradients else self.freezer.policies:
                self._numbers[f"policy/{name}/active_share"] = self.freezer.active_share(name)
            for sink in self.sinks:
                sink(self.updates, measured)
        self.has_begun = self.measures = False
        # No hook runs if the next forward pass is compiled.
        epoch = self.epoch if self.steps_per_epoch is None else self.updates // self.steps_per_epoch
        self.installed.update(phase="fit", step=self.updates, epoch=epoch)

    def count_from(self, steps: int) -> None:
        """Count steps that these optimizers did not take; sources go on from those of their last training."""
        updates, sources = self._former
        if steps and steps == updates and not self.updates:
            self.freezer.load_state_dict(sources)
        self.updates = max(self.updates, steps)
        for each in self.steps.masked:
            each.effective_steps = each.effective_steps or steps

    # ---- evaluation and measurements

    def evaluate(self, phase: str, epoch: int) -> None:
        """Switch flow policies to an evaluation, or back to ``"fit"``."""
        self.installed.update(phase=phase, step=self.updates, epoch=epoch)
        self.installed.measure_norms(False)

    def measure(self, when: Callable[[int], bool]) -> None:
        """Measure each update before which this function returns True for the number of updates so far."""
        self._is_measured = when
        # Without gradients only the active shares are known.
        freezer = self.freezer if self.has_gradients else Freezer(nn.Module(), [], {})
        self.measurements = Measurements(freezer, self.installed)
        self.steps.hooks.append(self.measurements)

    def take_measured(self) -> dict[str, float]:
        """Return the numbers of the last update that was measured, once."""
        numbers, self._numbers = self._numbers, {}
        return numbers

    # ---- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the mask sources, and the policies of the run."""
        return {
            "policies": {name: repr(policy) for name, policy in self.policies.items()},
            "freezer": pack_masks(self.freezer.state_dict()),
            "measured": self.measurements.state() if self.measurements is not None else {},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state that was saved with an optimizer's; :meth:`begin` sets its masks."""
        self.updates, self.has_begun = state["updates"], False
        # Loading has replaced the masks that were set.
        self.freezer.set_again()
        if "policies" not in state:
            return
        saved, declared = state["policies"], {name: repr(policy) for name, policy in self.policies.items()}
        if saved != declared:
            changed = sorted(name for name in {*saved, *declared} if saved.get(name) != declared.get(name))
            self.notices.warn(
                f"the checkpoint was written under other policies; changed: {', '.join(changed)}"
            )
        self.freezer.load_state_dict(unpack_masks(state["freezer"]))
        if self.measurements is not None:
            self.measurements.load_state(state["measured"])


class Driven:
    """A callback of a library, which drives a run.

    Args:
        policies: As of the run, like other arguments that are not named here.
        log: Log values of each policy.

    Attributes:
        run: The run.
        policies: The policies by name.
        sinks: Functions that receive the measurements.
    """

    def __init__(
        self,
        policies: Mapping[str, Policy | None] | None = None,
        *,
        seed: int = 0,
        log: bool = True,
        agreement_every: int | None = 100,
        layers: bool | None = True,
        step_in_backward: bool = False,
        master_weights: bool = False,
    ) -> None:
        self.run = Run(
            policies,
            seed=seed,
            agreement_every=agreement_every,
            layers=layers,
            step_in_backward=step_in_backward,
            master_weights=master_weights,
        )
        self.policies, self.sinks, self.log_policies = self.run.policies, self.run.sinks, log


def check_evaluates(policies: Mapping[str, Policy], evaluates: bool, expected: str) -> None:
    """Check that a trainer evaluates if a mask source, such as a phase that ends by a metric, needs it.

    Raises:
        PolicyError: If it does not; ``expected`` says how it would.
    """
    for name, policy in policies.items():
        if isinstance(policy, Freeze) and policy.mask.metrics and not evaluates:
            raise PolicyError(
                f"policy.{name}: needs the metric {policy.mask.metrics[0]!r} of an evaluation, and found "
                f"none in this training; expected {expected}"
            )


def flat_parameters_refused() -> PolicyError:
    """Return the error that says why there are no policies under version 1 of FSDP, and what to use."""
    return PolicyError(
        "FSDP: policies are refused under version 1 (FullyShardedDataParallel), which flattens the "
        "parameters of a block into one, in which names, rows and entries are lost; use version 2: "
        "fully_shard, fsdp_version: 2 in accelerate's config, or trainer=fsdp2"
    )


def _matched(model: nn.Module, policies: Mapping[str, Policy]) -> dict[str, Tensor]:
    """Return the parameters that freeze policies and ``Rates`` concern, by name.

    Raises:
        PolicyError: If a pattern matches nothing, or version 1 of FSDP has flattened the parameters.
    """
    params = {
        name: policy.restricts if isinstance(policy, Freeze) else policy.params
        for name, policy in policies.items()
        if isinstance(policy, Freeze | Rates)
    }
    if params and any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
        raise flat_parameters_refused()
    matched = pick_each(named_parameters(model), params)
    return {name: p for parameters in matched.values() for name, p in parameters.items()}


def _of_engine(engine: Any, given: list[Any], policies: Mapping[str, Policy]) -> list[Any]:
    """Return the optimizer of an engine's partitions, if there is one or a policy acts in it."""
    if any(isinstance(each, MaskedOptimizer) for each in given):
        return given
    if not any(isinstance(policy, Freeze | Rates) for policy in policies.values()):
        return []
    from gradpolicy.train.partitioned_optimizer import PartitionedOptimizer  # takes seconds

    return [PartitionedOptimizer(engine, policies)]


def _masked(optimizer: Any, *, again: bool) -> MaskedOptimizer:
    """Return an optimizer with masks; ``again``: as an earlier run has left it, without its masks."""
    former = wrapper_of(optimizer)
    if former is not None and not again:
        former.set_masks(dict.fromkeys(parameters_of(former)))
        former.effective_steps = 0
    return former or as_masked(optimizer)


def _trains(policy: Policy) -> bool:
    """Return True if a policy acts in training."""
    return isinstance(policy, Freeze) or "fit" in policy.when.phases


def _cuts(policy: Policy, step: int, epoch: int) -> bool:
    """Return True if a policy cuts the graph in an update, so that parameters may get no gradient."""
    if not isinstance(policy, FlowPolicy) or not _trains(policy):
        return False
    cuts = policy.detaches or (policy.at == "through" and policy.inside == "none")
    return cuts and policy.when.contains(step, epoch)
